"""Run a command and turn errors into exit codes: 2 wrong arguments, 1 bad data, 130 Ctrl-C.

With ``--json`` a failure is one object on stdout with the member ``error`` and the results so far;
otherwise it is a message on stderr. Only a bug in tokenmill shows a traceback.
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from typing import Any

import typer

from tokenmill.cli.help import RootGroup
from tokenmill.cli.output import Output
from tokenmill.errors import TokenmillError, UsageError

app = typer.Typer(
    name="tokenmill",
    cls=RootGroup,
    help="Turn post-training data into exact tokens and proven loss masks.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

INTERRUPTED = 130  # 128 + SIGINT, as in a shell
COMPLETION = "_TOKENMILL_COMPLETE"  # set by a shell that completes a line

# Typer contains its own click since 0.26 and imports the installed one before. Typer's own names
# lead to the right one.
_ClickUsageError: type[Exception] = typer.BadParameter.__bases__[0]
_ClickException: type[Exception] = _ClickUsageError.__bases__[0]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from tokenmill import __version__

        typer.echo(f"tokenmill {__version__}")
        raise typer.Exit
    require_command(context)


def require_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with redirect_stdout(sys.stderr):  # Typer prints the help itself.
            context.get_help()
        raise UsageError("No command given. Choose one of the commands above")


def run(arguments: list[str]) -> int:
    from tokenmill.cli import commands  # noqa: F401 - registers the commands

    if COMPLETION in os.environ:
        app(arguments, prog_name="tokenmill")  # prints the completions and exits
    output = Output(as_json="--json" in arguments)
    try:
        return _invoke(arguments, output)
    except KeyboardInterrupt:
        output.failure({"type": "KeyboardInterrupt", "message": "interrupted"})
        output.message("interrupted; run the same command again to continue from finished work")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`tokenmill … | head`), and the interpreter flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        output.failure({"type": type(error).__name__, "message": str(error)})
        raise


def _invoke(arguments: list[str], output: Output) -> int:
    command: Any = typer.main.get_command(app)
    context: Any = None
    try:
        # Typer's own `main` would turn interrupts and broken pipes into exits.
        with command.make_context("tokenmill", arguments, obj=output) as context:
            command.invoke(context)
        sys.stdout.flush()  # raises here, not at interpreter exit, if the pipe is closed
        return 0
    except typer.Exit as exit_request:
        return exit_request.exit_code
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except _ClickException as error:
        return _report_parse_error(error, output)
    except TokenmillError as error:
        if context is not None:
            subcommand = command.commands.get(context.invoked_subcommand)
            parameters = getattr(subcommand, "params", ())
            error.message = error.render({it.name: it.opts[0] for it in parameters})
        output.failure(error.as_dict())
        output.message(f"tokenmill: {error}")
        return 2 if isinstance(error, UsageError) else 1


def _report_parse_error(error: Any, output: Output) -> int:
    # "Value error" is a phrase of pydantic, which typer uses.
    usage_error = UsageError(error.format_message().replace(": Value error, ", ": "))
    output.failure(usage_error.as_dict())
    context = getattr(error, "ctx", None)
    if context is not None:
        output.message(context.get_usage())
    output.message(f"tokenmill: {usage_error}")
    return 2

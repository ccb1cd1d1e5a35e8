"""Run a command and turn errors into exit codes: 2 a wrong call, 1 bad data, 130 Ctrl-C.

With ``--json`` a failure is an object with the member ``error`` on stdout, beside what the command
knew by then; for people it is a sentence on stderr. Only a defect of our own shows a traceback.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from tokenmill.cli.output import Output
from tokenmill.errors import TokenmillError, UsageError

app = typer.Typer(
    name="tokenmill",
    help="Post-training data to exact tokens and proven loss masks.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

INTERRUPTED = 130  # 128 + SIGINT, what a shell expects
COMPLETION = "_TOKENMILL_COMPLETE"  # set by a shell that completes a line

# Typer brings a click of its own since 0.26 and used the installed one before: its own names
# are the only way to both.
_WrongCall: type[Exception] = typer.BadParameter.__bases__[0]
_ClickProblem: type[Exception] = _WrongCall.__bases__[0]


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
        typer.echo(context.get_help(), err=True)
        raise UsageError("name a command")


def run(arguments: list[str]) -> int:
    from tokenmill.cli import commands  # noqa: F401 - registers the commands

    if COMPLETION in os.environ:
        app(arguments, prog_name="tokenmill")  # answers the shell and exits
    output = Output(as_json="--json" in arguments)
    try:
        return _invoke(arguments, output)
    except KeyboardInterrupt:
        output.failure({"type": "KeyboardInterrupt", "message": "interrupted"})
        output.say("interrupted; finished work is kept: run the same command again to continue")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`tokenmill … | head`); nothing more can be said on stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        output.failure({"type": type(error).__name__, "message": str(error)})
        raise


def _invoke(arguments: list[str], output: Output) -> int:
    command: Any = typer.main.get_command(app)
    context: Any = None
    try:
        # Typer's own `main` would turn interrupts and broken pipes into exits before we see them.
        with command.make_context("tokenmill", arguments, obj=output) as context:
            command.invoke(context)
        sys.stdout.flush()  # a reader that went away shows here, not at interpreter exit
        return 0
    except typer.Exit as exit_request:
        return exit_request.exit_code
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except _ClickProblem as error:  # the parser of arguments does not understand the call
        return _refuse(error, output)
    except TokenmillError as error:
        if isinstance(error, UsageError) and context is not None:
            called = command.commands.get(context.invoked_subcommand)
            error.message = error.worded({item.name for item in getattr(called, "params", ())})
        output.failure(error.as_dict())
        output.say(f"tokenmill: {error}")
        return 2 if isinstance(error, UsageError) else 1


def _refuse(error: Any, output: Output) -> int:
    wrong = UsageError(error.format_message().replace(": Value error, ", ": "))
    output.failure(wrong.as_dict())
    context = getattr(error, "ctx", None)
    if context is not None:
        output.say(context.get_usage())
    output.say(f"tokenmill: {wrong}")
    return 2

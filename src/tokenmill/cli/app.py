"""The commands by name, and the one place where an error becomes an exit code.

Typer declares the commands; `run` calls it so that every failure passes here: a wrong call exits
with 2, bad data or a bad cache with 1, Ctrl-C with 130. With ``--json`` a failure is an object with
the member ``error`` on stdout; for people it is a sentence on stderr, never a traceback.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click
import typer

from tokenmill.cli.output import Output, print_json
from tokenmill.errors import TokenmillError, UsageError

app = typer.Typer(
    name="tokenmill",
    help="Post-training data to exact tokens and proven loss masks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

INTERRUPTED = 130  # 128 + SIGINT, what a shell expects


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from tokenmill import __version__

        typer.echo(f"tokenmill {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise click.UsageError("name a command; `tokenmill --help` lists them")


def run(arguments: list[str]) -> int:
    """Run one command and say what went wrong, if anything did."""
    from tokenmill.cli import commands  # noqa: F401 - registers the commands

    as_json = "--json" in arguments
    known: dict[str, Any] = {}
    try:
        outcome = app(arguments, prog_name="tokenmill", standalone_mode=False, obj=known)
        if outcome == INTERRUPTED:  # what typer makes of Ctrl-C
            return _interrupted()
        return outcome if isinstance(outcome, int) else 0
    except click.exceptions.Exit as exit_request:
        return exit_request.exit_code
    except click.ClickException as error:
        wrong = UsageError(error.format_message())
        if not as_json and isinstance(error, click.UsageError) and error.ctx is not None:
            click.echo(error.ctx.get_usage(), err=True)
        return _fail(wrong, as_json, known)
    except TokenmillError as error:
        return _fail(error, as_json, known)
    except (KeyboardInterrupt, click.Abort):
        return _interrupted()
    except BrokenPipeError:
        # The reader went away (`tokenmill … | head`); nothing more can be said on stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _interrupted() -> int:
    Output().say("interrupted; every finished slice stays usable, run the same command again")
    return INTERRUPTED


def _fail(error: TokenmillError, as_json: bool, known: dict[str, Any]) -> int:
    if as_json:
        print_json({**known, "error": error.as_dict()})
    Output().say(f"tokenmill: {error}")
    return 2 if isinstance(error, UsageError) else 1

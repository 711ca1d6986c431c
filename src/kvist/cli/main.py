"""The command ``kvist``: which commands there are, and how each of them may end.

A command is one line in COMMANDS: module ``kvist.cli.<name>`` has a function ``command`` with typer options and a
docstring. Such a module imports nothing slow at its top (no torch, no transformers), so that help answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from kvist.base.errors import KvistError

COMMANDS = (
    "run",
    "plan",
    "verify",
    "bench",
    "learn",
    "info",
)

# Exit codes; that of a reader who went away is typer's, which notices it first while a command prints.
USAGE, INTERRUPTED, BROKEN_PIPE = 2, 130, 1

app = typer.Typer(
    name="kvist",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"kvist {version('kvist')}")
        except PackageNotFoundError:
            print("kvist (not installed: run from its source)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """KV caches you can size, prove and reuse: run language models on an exact cache.

    For example:

      kvist run smollm2 "Why is the sky blue?"    an answer
      kvist run smollm2                           a chat
      kvist info                                  this machine, and the models
    """


for _name in COMMANDS:
    app.command(_name)(import_module(f"kvist.cli.{_name}").command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in ``arguments`` (default: the process's) and leave with its exit code.

    0 when all went well; 2 for input that cannot be used, with one line on stderr; 130 after Ctrl-C; 1 when the reader
    of stdout went away.
    """
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the command in ``arguments``."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a terminal without a character shows ? and the run goes on
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(args=arguments or ["--help"], prog_name="kvist", standalone_mode=False)
        sys.stdout.flush()
    except KvistError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        print("kvist: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads any more. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        explain = getattr(error, "format_message", None)  # how typer words a wrong option, in any of its versions
        if explain is None:
            raise
        command = next((name for name in COMMANDS if name in arguments[:1]), None)
        where = f"kvist {command} --help" if command else "kvist --help"
        return _complain(f"{explain().rstrip('.')}; {where} lists what there is")
    return code if isinstance(code, int) else 0


def _complain(message: str) -> int:
    print(f"kvist: {message}", file=sys.stderr)
    return USAGE

# SPDX-License-Identifier: Apache-2.0
"""The command ``tvm-fusion``: the table of its commands, their errors and exit codes.

Results go to standard output, progress and errors to standard error; with ``--json`` an error is
JSON on standard output. Exit codes: 0, 1 for an error that the message explains, 2 for wrong usage,
130 after Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import click

from ..errors import TVMFusionError
from ..machine.host import launched_rank
from ..plugin import hide_torch
from ..version import __version__
from . import progress
from .output import json_text

COMMANDS = {
    "compile": "compile",
    "run": "run",
    "inspect": "compile",
    "bench": "bench",
    "compare": "bench",
    "explain": "compile",
    "predict": "predict",
    "shard": "predict",
    "simulate": "predict",
    "calibrate": "calibrate",
    "tune": "tune",
    "serve": "tune",
    "records": "records",
}
"""Commands in the order of the help, and the modules of ``commands`` that hold them."""

_MEASURING = ("run", "bench", "calibrate", "tune", "serve")
"""Commands that measure most of the time, which a moving clock would disturb."""

DEBUG = "TVM_FUSION_DEBUG"
"""Environment variable that makes errors show their traceback."""


class Commands(click.Group):
    """The commands of ``COMMANDS``; a module is imported when its command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, or None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".commands.{COMMANDS[cmd_name]}", __package__)
        return getattr(module, f"{cmd_name}_command")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is asked for; that it runs is shown before it is imported."""
        if args[0] in COMMANDS and not {"-h", "--help"} & set(args) and launched_rank() == 0:
            progress.begin(f"tvm-fusion {args[0]}", clock=args[0] not in _MEASURING)
        return super().resolve_command(ctx, args)


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
)
@click.version_option(__version__, prog_name="tvm-fusion")
def cli() -> None:
    """Compile ONNX models for CPUs and GPUs, with convolutions and reductions fused.

    With - as a model's file it is read from standard input.
    """


def program() -> int:
    """Run the command line in a process of its own, without PyTorch; warnings are sentences."""
    hide_torch()
    warnings.showwarning = _show_warning
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; nothing but ``SystemExit`` leaves it."""
    as_json = "--json" in (sys.argv[1:] if arguments is None else arguments)
    try:
        result = cli.main(arguments, prog_name="tvm-fusion", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        progress.end()
        if launched_rank() > 0:  # all ranks of a job find it
            return error.exit_code
        if not as_json:
            error.show()
            return error.exit_code
        return _fail(error.format_message(), error, error.exit_code, True)
    except (click.Abort, KeyboardInterrupt):
        return _fail("Interrupted.", KeyboardInterrupt(), 130, as_json)
    except BrokenPipeError:
        # The reader of our output, such as `head`, is done; click and rich exit likewise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get(DEBUG):
            raise
        text = _error_text(error)
        return _fail(text if as_json else f"Error: {text}", error, 1, as_json)
    finally:
        progress.end()


def _fail(text: str, error: BaseException, code: int, as_json: bool) -> int:
    """Tell an error, as JSON on standard output or else on standard error; return the exit code."""
    progress.end()
    if as_json:
        about = {"type": type(error).__name__, "message": text, "exit_code": code}
        click.echo(json_text({"error": about}))
    else:
        click.echo(text, err=True)
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Show a warning without the line of our code that gives it."""
    progress.end()
    click.echo(f"Warning: {message}", err=True)


def _error_text(error: Exception) -> str:
    """One line for the user: our own errors as they are, others with their class."""
    if isinstance(error, TVMFusionError):
        return " ".join(str(error).split())
    first = (str(error).strip().splitlines() or [""])[0]
    return f"unexpected {type(error).__name__}: {first} (set {DEBUG}=1 to see where)"

# SPDX-License-Identifier: Apache-2.0
"""Common parts of both benchmarks on a GPU: options, choice of engines, checks of the device."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tvm_fusion.cli.output import FILE_WIDTH, json_text
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import TargetError

from .. import machine
from ..compare import presence
from ..engine import Engine

NO_GPU = 2
"""Exit code where no GPU was found, no case matches, or the architecture does not exist."""


def add_options(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options of both; ``what`` is raced: "case" or "model"."""
    parser.add_argument("--engines", nargs="+", metavar="WORD", help="parts of engine titles")
    parser.add_argument("--samples", type=int, help="timings of each engine (default: 50)")
    parser.add_argument("--minutes", type=float, help=f"start no {what} after so many")
    parser.add_argument("--resume", action="store_true", help="keep what the file already has")
    parser.add_argument("--dry-run", action="store_true", help="compile to CUDA text, run nothing")
    parser.add_argument("--arch", default="sm_90", help="of --dry-run (default: sm_90)")


def chosen(engines: Sequence[Engine], words: Sequence[str] | None) -> list[Engine]:
    """Those whose title holds one of the words of ``--engines``; all where there are none."""
    return [
        engine
        for engine in engines
        if not words or any(word.lower() in engine.title.lower() for word in words)
    ]


def lacks_gpu() -> bool:
    """Return whether nothing can be measured here, with the reason on the standard error output."""
    missing = machine.find_gpu()
    if missing:
        print(f"bench-gpu: {missing}; --dry-run needs none", file=sys.stderr)
    return bool(missing)


def refuses(arch: str) -> bool:
    """Return whether nothing can be compiled for an architecture; prints the reason, too."""
    try:
        resolve({"kind": "cuda", "arch": arch})
    except TargetError as error:
        print(f"bench-gpu: {error}", file=sys.stderr)
        return True
    return False


def show_presence(engines: Sequence[Engine], console: Console) -> None:
    """Print a line for each engine that tells whether it could race here."""
    for engine in engines:
        missing = presence(engine)
        console.print(f"{engine.title}: {f'absent: {missing}' if missing else 'present'}")


def make_console() -> Console:
    """A console that does not fold tables in files."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def stored_results(path: Path, settings: dict[str, Any]) -> Any:
    """The results in a file, if they were taken with the same settings; else None."""
    if not path.exists():
        return None
    stored = json.loads(path.read_text())
    same = _comparable(stored["settings"]) == _comparable(json.loads(json_text(settings)))
    return stored["results"] if same else None


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that must be equal between runs: without clocks and measured limits."""
    gpu = dict(settings["machine"], gpu=settings["machine"]["gpu"].get("name"))
    return {"machine": gpu, "plan": settings["plan"]}

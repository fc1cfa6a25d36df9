# SPDX-License-Identifier: Apache-2.0
"""One blur on a CPU and a GPU at once, rows cut between them.

    python examples/cooperative_blur.py                          # the first OpenCL device
    python examples/cooperative_blur.py --device cuda            # this machine's GPU
    python examples/cooperative_blur.py --split 600 400          # rows by hand
    python examples/cooperative_blur.py --device "cuda -arch=sm_90" --compile-only

The CPU blurs the first rows. Meanwhile the device blurs the others, in chunks: while it computes
one, the next is copied to it, and the one before is copied back.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.stencils import blur  # noqa: E402
from tvm_fusion import distributed  # noqa: E402
from tvm_fusion.distributed import Device  # noqa: E402
from tvm_fusion.errors import TargetError  # noqa: E402

ROWS, COLS = 1000, 512


def run(program: distributed.Program) -> float:
    """Run the blur, and return its largest error against numpy."""
    local = program.alone()
    whole = np.random.default_rng(0).random((ROWS + 2, COLS + 2), np.float32)
    local.input("A").owned[...] = whole
    found = local()
    exact = whole.astype(np.float64)
    along = (exact[:, :-2] + exact[:, 1:-1] + exact[:, 2:]) / 3
    return float(np.abs(found - (along[:-2] + along[1:-1] + along[2:]) / 3).max())


def main(arguments: list[str] | None = None) -> int:
    """Compile, tell who computes what, run, and compare with numpy."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="opencl", help="opencl, opencl:1, cuda, cuda:1, ...")
    options.add_argument("--chunks", type=int, help="chunks of the device's rows")
    options.add_argument("--split", type=int, nargs=2, help="rows of the CPU and of the device")
    options.add_argument("--measure", action="store_true", help="split by measured times")
    options.add_argument("--compile-only", action="store_true", help="do not run")
    chosen = options.parse_args(arguments)
    func = blur(ROWS, COLS)
    devices: list[str | Device] = [chosen.device]
    if chosen.chunks:
        devices = [Device(chosen.device, chunks=chosen.chunks)]
    try:
        split: Any = chosen.split or "auto"
        if chosen.measure:
            split = distributed.measure_split(func, devices)
        program = distributed.compile(func, devices=devices, split=split)
        print(program.explain())
        if chosen.compile_only:
            return 0
        largest = run(program)
    except TargetError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"largest error: {largest:.1e}")
    return 0 if largest < 1e-6 else 1


if __name__ == "__main__":
    raise SystemExit(main())

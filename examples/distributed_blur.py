# SPDX-License-Identifier: Apache-2.0
"""One blur: on a CPU, for a GPU, over ranks, and cut between CPU and GPU.

    python examples/distributed_blur.py                     # four ranks, as threads
    mpiexec -n 4 python examples/distributed_blur.py --mpi  # four ranks, as processes

The four parts are those of Figures 1-6 to 1-9 of Denniston's thesis on distributed Tiramisu. That
for the GPU is shown as CUDA text, which needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import tvm
from tvm import s_tir, te, tirx
from tvm.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from schedules.distribute.localize import Piece, separate_at  # noqa: E402
from tvm_fusion import distributed  # noqa: E402
from tvm_fusion.distributed import run_ranks  # noqa: E402
from tvm_fusion.distributed.local_program import Ranks  # noqa: E402

ROWS, COLS = 1000, 512
CUDA = Target({"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 1024}, host="llvm")
KERNEL = 'extern "C" __global__'


def blur() -> tirx.PrimFunc:
    """The algorithm (Figure 1-6)."""
    image = te.placeholder((ROWS + 2, COLS + 2), "float32", "input")
    bx = te.compute(
        (ROWS + 2, COLS),
        lambda r, c: (image[r, c] + image[r, c + 1] + image[r, c + 2]) / 3.0,
        "bx",
    )
    by = te.compute((ROWS, COLS), lambda r, c: (bx[r, c] + bx[r + 1, c] + bx[r + 2, c]) / 3.0, "by")
    return te.create_prim_func([image, by], index_dtype_override="int64")


def on_cpu(schedule: s_tir.Schedule) -> None:
    """Rows in parallel, columns in vectors (Figure 1-7)."""
    for name in ("bx", "by"):
        rows, columns = schedule.get_loops(schedule.get_sblock(name))
        _, lane = schedule.split(columns, [None, 8])
        schedule.vectorize(lane)
        schedule.parallel(rows)


def on_gpu(schedule: s_tir.Schedule) -> None:
    """Rows and columns to blocks and threads (Figure 1-8)."""
    for name in ("bx", "by"):
        rows, columns = schedule.get_loops(schedule.get_sblock(name))
        block, thread = schedule.split(columns, [None, 32])
        schedule.bind(rows, "blockIdx.y")
        schedule.bind(block, "blockIdx.x")
        schedule.bind(thread, "threadIdx.x")


def over_ranks(ranks: int) -> distributed.Program:
    """The blur over ranks, rows in equal parts (Figure 1-9, lines 2 and 3)."""
    return distributed.compile(blur(), ranks, loop="r", schedule=on_cpu)


def cooperative(cpu_rows: int) -> tuple[Piece, Piece]:
    """The first rows for the CPU, the others for the GPU (Figure 1-9, line 5)."""
    host, device = separate_at(blur(), "r", [cpu_rows])
    return host, device


def cuda_text(piece: Piece) -> str:
    """The CUDA kernels of a part of the blur, without the declarations before them."""
    schedule = s_tir.Schedule(piece.function.func)
    on_gpu(schedule)
    kernel = schedule.mod["main"].with_attr("global_symbol", "blur")
    text = str(tirx.build(tvm.IRModule({"blur": kernel}), target=CUDA).imports[0].inspect_source())
    return text[text.index(KERNEL) :]


def run(program: distributed.Program, world: Ranks) -> float:
    """Run the blur on one rank, and return its largest error against numpy."""
    local = program.on(world)
    whole = np.random.default_rng(0).random((ROWS + 2, COLS + 2), np.float32)
    image = local.input("input")
    (begin, end), _ = image.region
    image.owned[...] = whole[begin:end]  # what other ranks own arrives by messages
    rows = local()
    (begin, end), _ = local.output.region
    exact = whole[begin : end + 2].astype(np.float64)
    along = (exact[:, :-2] + exact[:, 1:-1] + exact[:, 2:]) / 3
    expected = (along[:-2] + along[1:-1] + along[2:]) / 3
    return float(np.abs(rows - expected).max(initial=0.0))


def main(arguments: list[str] | None = None) -> int:
    """Run the blur over ranks; the first rank prints what each does, and the GPU's kernels."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--mpi", action="store_true", help="be one rank of a job of MPI")
    options.add_argument("--ranks", type=int, default=4, help="ranks without MPI")
    chosen = options.parse_args(arguments)
    if chosen.mpi:
        with distributed.session() as world:
            program = over_ranks(world.size)
            errors = world.all_gather(np.array([run(program, world)])).ravel().tolist()
            is_first = world.rank == 0
    else:
        program = over_ranks(chosen.ranks)
        errors = run_ranks(program.ranks, lambda world: run(program, world))
        is_first = True
    if is_first:
        print(program.explain())
        print(f"largest error of {len(errors)} ranks: {max(errors):.1e}")
        host, device = cooperative(cpu_rows=ROWS // 8)
        print(f"rows {host.rows} on the CPU, {device.rows} on the GPU:")
        print(cuda_text(device))
    return 0 if max(errors) < 1e-6 else 1


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""Program whose rank 1 fails in a way that the first argument names, after or in exchange 3."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import numpy as np

from examples.stencils import blur
from schedules.distribute.exchange import Exchange, LocalBuffer, Message
from tvm_fusion import distributed
from tvm_fusion.cli.commands.run import save_outputs

MODE = sys.argv[1]
FOREVER = 600


def fail_early() -> None:
    """Fail before MPI has started."""
    if MODE == "late start":
        time.sleep(FOREVER)
    if MODE == "no start":
        sys.exit(1)


def fail() -> None:
    """Fail between two exchanges."""
    if MODE == "exception":
        raise ValueError("a wrong\nvalue")
    if MODE == "exit":
        sys.exit(3)
    if MODE == "exit without a code":
        sys.exit()
    if MODE == "immediate exit":
        os._exit(0)
    if MODE == "kill":
        os.kill(os.getpid(), 9)
    if MODE == "crash":
        ctypes.string_at(0)
    if MODE == "hang":
        time.sleep(FOREVER)
    if MODE == "output":
        time.sleep(0.2)
        os.kill(os.getpid(), 15)


def halo(rows: int) -> Exchange:
    return Exchange(3, (Message(0, 1, "A", ((0, rows),)), Message(1, 0, "A", ((4, 4 + rows),))))


class Slow(dict):
    """Outputs of which one is there, and the next one never comes."""

    def items(self):
        yield from super().items()
        time.sleep(FOREVER)


def write_slowly(world: distributed.World) -> None:
    """Write a file as all of ours are, aside first; the job ends in between."""
    if MODE == "output" and world.rank == 0:
        save_outputs(Path(sys.argv[2]), Slow(y=np.zeros(3)))


def main() -> None:
    is_one = "1" == os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    if is_one:
        fail_early()
    is_wrong = MODE == "ranks" or (MODE == "ranks of one" and is_one)
    with distributed.session(4 if is_wrong else None, timeout=1) as world:
        buffers = {"A": LocalBuffer(np.zeros(8), (0,))}
        world.start(halo(2), buffers)
        world.finish(halo(2))
        if is_one:
            fail()
        write_slowly(world)
        if MODE == "barrier" and world.rank != 1:
            world.barrier()
        if MODE == "argument":  # All ranks fail.
            distributed.compile(blur(4, 4), sizes=[1])
        if MODE == "plans":
            world.agree(f"rows {3 + is_one}", "plans")
        if MODE == "second hangs":
            if world.rank == 2:
                time.sleep(FOREVER)
            messages = (Message(1, 0, "A", ((0, 1),)), Message(2, 0, "A", ((1, 2),)))
            world.start(Exchange(4, messages), buffers)
            world.finish(Exchange(4, messages))
            time.sleep(0.5)  # it ends later than the one that waits
        rows = {"short message": 1, "long message": 3}.get(MODE, 2) if is_one else 2
        if world.rank < 2:
            world.start(halo(rows), buffers)
            if MODE == "kill in the exchange" and is_one:
                os.kill(os.getpid(), 9)
            world.finish(halo(rows))
    print("ended well")


main()

# SPDX-License-Identifier: Apache-2.0
"""A network over ranks: compiled once, saved as one file, run by four ranks.

    python examples/distributed_network.py                     # four ranks, as threads
    mpiexec -n 4 python examples/distributed_network.py --mpi  # four ranks, as processes

Each rank computes some rows of every image. It compares the result with that of one rank, prints
what the ranks exchange, and how the time is predicted to scale.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import tvm_fusion  # noqa: E402
from examples.onnx_builder import random_inputs  # noqa: E402
from examples.zoo import ZOO, read_sizes  # noqa: E402
from tvm_fusion import distributed  # noqa: E402
from tvm_fusion.distributed import run_ranks  # noqa: E402
from tvm_fusion.distributed.build_network import read_network, resolve_ranks  # noqa: E402
from tvm_fusion.distributed.local_program import Ranks  # noqa: E402
from tvm_fusion.distributed.simulate import simulate_network  # noqa: E402


def compile_and_load(model: Any, ranks: int, exchange: str) -> distributed.DistributedModel:
    """Compile a model for some ranks, and read it back from its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.so"
        distributed.compile_network(model, ranks, threads=1, exchange=exchange).save(path)
        return distributed.load(path)


def run(compiled: distributed.DistributedModel, world: Ranks, feed: Any) -> Any:
    """Run on one rank; the outputs are on the first."""
    return compiled.on(world)(**feed)


def main(arguments: list[str] | None = None) -> int:
    """Run a network over ranks; the first one compares and prints."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model", nargs="?", default="unet", choices=sorted(ZOO))
    options.add_argument("sizes", nargs="*", metavar="NAME=NUMBER", help="such as image_size=64")
    options.add_argument("--mpi", action="store_true", help="be one rank of a job of MPI")
    options.add_argument("--ranks", type=int, default=4, help="ranks without MPI")
    options.add_argument("--exchange", default="auto", choices=["auto", "always", "once"])
    chosen = options.parse_intermixed_args(arguments)
    sizes: Any = read_sizes(chosen.model, chosen.sizes)
    model = ZOO[chosen.model](**sizes)
    feed = random_inputs(model)
    if chosen.mpi:
        with distributed.session() as world:
            compiled = compile_and_load(model, world.size, chosen.exchange)
            result = run(compiled, world, feed)
            if world.rank:
                return 0
    else:
        compiled = compile_and_load(model, chosen.ranks, chosen.exchange)
        result, *_ = run_ranks(chosen.ranks, lambda world: run(compiled, world, feed))
    print(compiled.explain())
    alone = tvm_fusion.compile(model, threads=1)(**feed)
    same = np.array_equal(result, alone)
    print(f"{compiled.ranks} ranks and one rank have {'the same' if same else 'different'} bits")
    target = resolve_ranks(1, "native", 1)
    stages, processor = read_network(model, target), distributed.estimated_processor(target)
    print(simulate_network(stages, processor, [1, 2, 4, 16, 64]).table())
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())

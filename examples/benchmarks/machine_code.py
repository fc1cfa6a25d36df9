# SPDX-License-Identifier: Apache-2.0
"""Distance of convolutions' inner loops from their multiply-add bound, on CPUs not at hand.

    python examples/benchmarks/machine_code.py [--cpu znver5 neoverse-v2] [--json]

The dense layers of five networks are compiled for each CPU with their default knobs. For each
register tile, the loop with the most multiply-adds is given to llvm-mca, which models the cycles
that the units of a CPU take for its instructions. A model is not the machine: that of znver5 is
that of znver4, and that of sapphirerapids has one unit for 512-bit multiply-adds instead of two.

The exit code is 2 where llvm-mca is not installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import tvm
from rich.console import Console
from rich.table import Table
from tvm.target import Target

from schedules.cpu.conv2d.conv2d import conv2d_template
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.conv2d_knobs import Conv2DKnobs
from schedules.cpu.cost.cost_model import default_conv2d_knobs
from schedules.workload.conv2d import Conv2DKernel
from tvm_fusion.cli.output import FILE_WIDTH, json_text
from tvm_fusion.cli.progress import progress_bar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.assembly import Loop, loops  # noqa: E402
from examples.benchmarks.knobs import packed_function  # noqa: E402
from examples.benchmarks.mca import ModelError, Prediction, find_mca, predict  # noqa: E402
from examples.benchmarks.network_layers import conv_kernels  # noqa: E402
from examples.models import MODELS  # noqa: E402

CPUS = {
    "x86-64-v3": "x86_64",
    "znver4": "x86_64",
    "znver5": "x86_64",
    "skylake-avx512": "x86_64",
    "sapphirerapids": "x86_64",
    "cortex-a76": "aarch64",
    "neoverse-v2": "aarch64",
}


@dataclass(frozen=True)
class Tile:
    """A register tile of a layer, and the quality of its multiply-add loop.

    Parameters
    ----------
    cpu, layer : str
        The CPU, and the first layer that has the tile.
    pixels, vectors, layers : int
        The tile, and the number of layers that have it.
    fmas, loads, stores, spills : int
        Multiply-adds, loads and stores of vectors in an iteration; stores to the stack.
    bound, block, simulated : float
        Cycles, as :class:`examples.benchmarks.mca.Prediction` explains.
    share : float
        Bound over block.
    """

    cpu: str
    layer: str
    pixels: int
    vectors: int
    layers: int
    fmas: int
    loads: int
    stores: int
    spills: int
    bound: float
    block: float
    simulated: float
    share: float


def tiles(cpu: str, program: str) -> Iterator[Tile]:
    """One result for each register tile of the dense layers."""
    target = Target({"kind": "llvm", "mtriple": f"{CPUS[cpu]}-linux-gnu", "mcpu": cpu,
                     "num-cores": 2})  # fmt: skip
    info = CPUInfo.from_target(target)
    groups: dict[Hashable, list[tuple[Conv2DKernel, Conv2DKnobs]]] = {}
    models = [build() for build in MODELS.values()]
    for kernel in conv_kernels(models, info.lanes("float32")):
        layer, knobs = kernel.layers[0], default_conv2d_knobs(kernel, info)
        if not layer.is_depthwise:
            alike = layer.kernel, layer.strides, knobs.pixels, knobs.blocks
            groups.setdefault(alike, []).append((kernel, knobs))
    for group in groups.values():
        kernel, knobs = max(group, key=lambda pair: pair[0].layers[0].in_channels)
        loop = _hottest(kernel, knobs, target)
        found = predict(program, loop, cpu, CPUS[cpu])
        yield _result(cpu, kernel, knobs, len(group), loop, found)


def _hottest(kernel: Conv2DKernel, knobs: Conv2DKnobs, target: Target) -> Loop:
    func = conv2d_template(packed_function(kernel), kernel, knobs).mod["main"]
    library = tvm.compile(tvm.IRModule({"main": func}), target=target)
    found = [loop for loop in loops(str(library.mod.inspect_source("asm"))) if loop.innermost]
    tile = knobs.pixels * knobs.blocks
    return max(found, key=lambda loop: (loop.fmas % tile == 0, loop.fmas))


def _result(
    cpu: str,
    kernel: Conv2DKernel,
    knobs: Conv2DKnobs,
    layers: int,
    loop: Loop,
    prediction: Prediction,
) -> Tile:
    return Tile(
        cpu=cpu,
        layer=f"{kernel.layers[0]} @{kernel.height}",
        pixels=knobs.pixels,
        vectors=knobs.blocks,
        layers=layers,
        fmas=loop.fmas,
        loads=loop.loads,
        stores=loop.stores,
        spills=loop.stack_stores,
        bound=prediction.bound,
        block=prediction.block,
        simulated=prediction.simulated,
        share=prediction.share,
    )


def table(cpu: str, rows: list[Tile]) -> Table:
    """One row for each register tile."""
    result = Table(title=f"{cpu}: inner loops of dense layers, cycles an iteration by llvm-mca")
    result.add_column("layer")
    for title in ("tile", "layers", "multiply-adds", "loads", "stores", "spills", "bound",
                  "block", "simulated", "of bound"):  # fmt: skip
        result.add_column(title, justify="right")
    for tile in sorted(rows, key=lambda tile: tile.share):
        result.add_row(
            tile.layer,
            f"{tile.pixels}x{tile.vectors}",
            *map(str, (tile.layers, tile.fmas, tile.loads, tile.stores, tile.spills)),
            *(f"{cycles:.1f}" for cycles in (tile.bound, tile.block, tile.simulated)),
            f"{tile.share:.0%}",
        )
    return result


def main() -> int:
    """Print a table for each CPU."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--cpu", nargs="+", choices=CPUS, default=list(CPUS), metavar="NAME")
    options.add_argument("--llvm-mca", metavar="PATH", help="default: the newest installed")
    options.add_argument("--json", action="store_true", help="print JSON instead of tables")
    chosen = options.parse_args()
    try:
        program = find_mca(chosen.llvm_mca)
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console()
    console = console if console.is_terminal else Console(width=FILE_WIDTH)
    results: dict[str, list[Tile]] = {}
    with progress_bar() as progress:
        for done, cpu in enumerate(chosen.cpu):
            progress(cpu, done, len(chosen.cpu))
            try:
                results[cpu] = list(tiles(cpu, program))
            except ModelError as error:
                print(error, file=sys.stderr)
    if chosen.json:
        text = {cpu: [asdict(tile) for tile in found] for cpu, found in results.items()}
        print(json_text(text))
        return 0
    for cpu, found in results.items():
        console.print(table(cpu, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

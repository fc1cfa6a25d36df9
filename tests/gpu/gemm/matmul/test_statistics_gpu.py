# SPDX-License-Identifier: Apache-2.0
"""Products with statistics of their rows: numbers in OpenCL, and machine code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cuda_text import cuda_source, ptxas
from norm_layers import NormLayer
from relax_on_opencl import RelaxOnOpenCL
from tensor_core_emulation import emulate_tensor_cores
from tvm import tirx
from tvm.target import Target

from relay_passes import FuseLayerNorm
from schedules import attributes
from schedules.gpu.gemm.matmul import matmul_tile_sizes, tensor_core_tile
from schedules.gpu.gemm.matmul.matmul import Matmul
from schedules.gpu.gemm.matmul.matmul_tile_sizes import TileConfig
from schedules.gpu.gemm.matmul.tensor_core_tile import TensorTile
from schedules.gpu.gemm.matmul.tiled_matmul import holds_moments
from tests.selection import in_turns
from tvm_fusion.compiler.launches import kernel_uses
from tvm_fusion.compiler.phases import gpu_phases
from tvm_fusion.compiler.pipeline import run_phases

OPENCL = Target({"kind": "opencl", "max_shared_memory_per_block": 49152}, host="llvm")


def run(layer: NormLayer, precision: str = "fp32", fuse: bool = True) -> np.ndarray:
    """The result of a layer, whose kernels write to poisoned memory."""
    phases = gpu_phases(OPENCL, precision=precision)
    if not fuse:
        steps = phases["simplify"]
        phases["simplify"] = [s for s in steps if str(s.info.name) != "FuseLayerNorm"]
    mod = run_phases(layer.module(), OPENCL, phases)
    products, norms = (2, 1) if layer.is_short else (4, 2)
    assert sum(use.launches for use in kernel_uses(mod)) == products + (0 if fuse else norms)
    [found] = RelaxOnOpenCL(mod, OPENCL)(layer.x)
    return found


def error(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(found - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize(
    "layer",
    [
        NormLayer((2, 19)),
        pytest.param(NormLayer((37,), 32, 200, scale=False), marks=pytest.mark.slow),
        pytest.param(NormLayer((1, 2, 16), 160, 48, center=False), marks=pytest.mark.slow),
    ],
    ids=["batch", "one segment", "no beta"],
)
def test_numbers(layer: NormLayer) -> None:
    assert error(run(layer), layer.exact()) < 3e-6


def each_tile(tiles: Sequence[Any], quick: int) -> list[Any]:
    """Tiles as parameters; a short layer of one of them, and slow ones of all."""
    slow = [pytest.param(tile, False, marks=pytest.mark.slow, id=str(tile)) for tile in tiles]
    return [pytest.param(tiles[quick], True, id="short"), *slow]


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "is_short"), each_tile(matmul_tile_sizes._TILES, 1))
def test_numbers_of_each_tile(
    tile: tuple[int, int, int, int], is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows and columns that no tile divides."""
    monkeypatch.setattr(matmul_tile_sizes, "_TILES", (tile,))
    layer = NormLayer((tile[0] + 5,), hidden=72, is_short=is_short)
    assert error(run(layer), layer.exact()) < 3e-6


@pytest.mark.slow
def test_large_means_lose_no_more_than_in_a_norm_of_its_own() -> None:
    """Sums of squares would lose all digits of a variance a millionth of the mean's square."""
    layer = NormLayer((40,), spread=1e-4, is_short=True)
    layer.b[0][:] = 100 + 0.1 * np.random.default_rng().standard_normal(layer.width)
    exact = layer.exact()
    assert error(run(layer), exact) < 4 * error(run(layer, fuse=False), exact) < 1e-2


@pytest.mark.parametrize(("tile", "is_short"), each_tile(tensor_core_tile.TILES, -1))
def test_numbers_of_tf32(tile: TensorTile, is_short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Centred before they are rounded: rounding a mean of 100 would leave two digits."""
    emulate_tensor_cores(monkeypatch)
    monkeypatch.setattr(tensor_core_tile, "TILES", (tile,))
    layer = NormLayer((tile.rows + 3,), hidden=40, spread=0.1, is_short=is_short)
    layer.b[0][:] += 100
    assert error(run(layer, "tf32"), layer.exact()) < 3e-3


def test_tiles_that_hold_no_whole_segment_or_not_all_of_them() -> None:
    assert holds_moments(TileConfig(128, 128, 8, 8, groups=1))
    assert holds_moments(TileConfig(32, 32, 4, 4, groups=4))
    assert not holds_moments(TileConfig(16, 16, 4, 4, groups=1))
    assert not holds_moments(TileConfig(64, 128, 8, 4, groups=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "arch"), in_turns(("fp32", "tf32"), ("sm_90", "sm_80"), every=3)
)
def test_machine_code_has_no_spills(precision: str, arch: str) -> None:
    """Of the largest tiles, for the longest rows: a norm as left factor, and as residual."""
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    mod = FuseLayerNorm(target)(NormLayer((2048,), 2048, hidden=1024).module())
    functions = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    wanted = [func for func in functions if "row_mean" in func.script()]
    assert len(functions) == 4 and len(wanted) == 3
    for func in wanted[:2]:
        named = func.with_attr("global_symbol", "main").with_attr(
            attributes.TF32, precision == "tf32"
        )
        kernel = Matmul().apply(named, target, False).mod["main"]
        source = cuda_source(kernel, arch)
        assert ("mma.sync" in source) == (precision == "tf32")
        [found] = ptxas(source, arch).values()
        assert found.spill_stores == found.stack_frame == 0

# SPDX-License-Identifier: Apache-2.0
"""Products of warpgroups of sm_90a: numbers by emulation, machine code, and their choice."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from cuda_text import count, cuda_source, loops, opcodes, ptxas, sass
from gemm.matmul.test_tensor_cores import rounded_to_tf32
from graph_cases import CUDA, run, scheduled
from opencl import compile_opencl
from tvm import relax, te, tirx
from tvm.relax import op
from tvm.target import Target
from warpgroup_emulation import check_protocol, emulate_warpgroups

from relay_passes import AllowTF32, MarkConstants
from schedules import attributes
from schedules.gpu.core import machine
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.gemm.matmul import warpgroup_tile
from schedules.gpu.gemm.matmul.matmul import Matmul
from schedules.gpu.gemm.matmul.warpgroup_tile import TILES, WarpgroupTile
from schedules.tir.index_math import i64
from tvm_fusion.codegen.nvrtc import compile_cuda

F16, BF16, F32 = "float16", "bfloat16", "float32"
OPENCL = Target({"kind": "opencl"}, host="llvm")
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm")

Build = Callable[..., relax.Expr]


def product(left: str, right: str, m: int, n: int, k: int) -> tirx.PrimFunc:
    """A product of factors of float16 that lie as they are (``n``) or transposed (``t``)."""
    m, n, k = map(i64, (m, n, k))
    x = te.placeholder((k, m) if left == "t" else (m, k), F16, "x")
    w = te.placeholder((n, k) if right == "t" else (k, n), F16, "w")
    inner = te.reduce_axis((i64(0), k), "k")

    def term(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        rows = x[inner, i] if left == "t" else x[i, inner]
        columns = w[j, inner] if right == "t" else w[inner, j]
        return te.sum(rows.astype(F32) * columns.astype(F32), inner)

    return te.create_prim_func([x, w, te.compute((m, n), term, "y")])


def dense(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return op.matmul(x, op.permute_dims(w))


def biased(x: relax.Expr, w: relax.Expr, b: relax.Expr, r: relax.Expr) -> relax.Expr:
    layer = op.add(op.matmul(x, w, out_dtype=F32), b)
    return op.astype(op.add(op.nn.relu(layer), r), F16)


def values(*each: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng()
    return [rng.standard_normal(shape).astype(F16) for shape in each]


def assert_close(found: np.ndarray, exact: np.ndarray, terms: int, rtol: float = 0.0) -> None:
    """Compare with a sum of products of standard normal numbers."""
    np.testing.assert_allclose(found, exact, rtol=rtol, atol=1e-6 * terms + 1e-5)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    emulate_warpgroups(monkeypatch)
    monkeypatch.setattr(machine, "_OPENCL_MULTIPROCESSORS", 3)  # fewer blocks than tiles
    return monkeypatch


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("left", "right", "tile"),
    [
        pytest.param("n", "n", WarpgroupTile(128), marks=pytest.mark.slow),
        ("n", "t", WarpgroupTile(64)),
        ("n", "n", WarpgroupTile(128, 2)),
        pytest.param("t", "t", WarpgroupTile(128, 2), marks=pytest.mark.slow),
        ("t", "n", WarpgroupTile(64)),
        pytest.param("t", "t", WarpgroupTile(256), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_numbers(left: str, right: str, tile: WarpgroupTile, emulated: pytest.MonkeyPatch) -> None:
    """Edges of tiles along all three axes, and blocks with several tiles."""
    emulated.setattr(warpgroup_tile, "TILES", (tile,))
    m, n, k = 2 * tile.cluster * tile.rows - 120, tile.columns + 8, 104
    x, w = values((k, m) if left == "t" else (m, k), (n, k) if right == "t" else (k, n))
    func = Matmul().apply(product(left, right, m, n, k), OPENCL, False).mod["main"]
    assert func.attrs[attributes.RULE] == "Matmul (warpgroups)"
    found = np.empty((m, n), F32)
    compile_opencl(func.with_attr("global_symbol", "main"), OPENCL).run(x, w, found)
    factors = x.T if left == "t" else x, w.T if right == "t" else w
    assert_close(found, factors[0].astype("float64") @ factors[1].astype("float64"), k)


@pytest.mark.slow
@pytest.mark.parametrize("batched", ["left", "both"])
def test_numbers_of_an_epilogue_and_a_batch(batched: str, emulated: pytest.MonkeyPatch) -> None:
    """An odd number of rows, and a right factor for all or one for each of the batch."""
    emulated.setattr(warpgroup_tile, "TILES", (WarpgroupTile(64),))
    w_shape = (40, 72) if batched == "left" else (3, 40, 72)
    x, w, b, r = values((3, 33, 40), w_shape, (72,), (3, 33, 72))
    b, r = b.astype(F32), r.astype(F32)
    [found] = run(biased, [x, w, b, r], target=OPENCL)
    exact = np.maximum(x.astype("float64") @ w.astype("float64") + b, 0) + r
    assert_close(found.astype(F32), exact, 40, rtol=1e-3)


@pytest.mark.slow
def test_numbers_of_an_open_number_of_rows(emulated: pytest.MonkeyPatch) -> None:
    emulated.setattr(warpgroup_tile, "TILES", (WarpgroupTile(64),))
    rows = tirx.Var("rows", "int64")
    for m in (1, 130):
        x, w = values((m, 72), (72, 64))
        shapes = [(rows, 72), (72, 64)]
        [found] = run(lambda x, w: op.matmul(x, w, out_dtype=F32), [x, w], shapes, target=OPENCL)
        assert_close(found, x.astype("float64") @ w.astype("float64"), 72)


def requantized(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    """Bytes by bytes, their bias, and bytes again."""
    layer = op.add(op.matmul(x, op.permute_dims(w), out_dtype="int32"), b)
    scaled = op.round(op.multiply(op.astype(layer, F32), relax.const(2.0**-9, F32)))
    return op.astype(op.clip(scaled, -128, 127), "int8")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("types", "tile"),
    [
        (("uint8", "int8"), WarpgroupTile(64)),
        (("int8", "int8"), WarpgroupTile(128, 2)),
        (("int8", "uint8"), WarpgroupTile(256)),
    ],
    ids=str,
)
def test_numbers_of_bytes(
    types: tuple[str, str], tile: WarpgroupTile, emulated: pytest.MonkeyPatch
) -> None:
    """Bit for bit, extremes included, with edges of tiles along all axes."""
    emulated.setattr(warpgroup_tile, "TILES", (tile,))
    m, n, k = tile.cluster * tile.rows + 9, tile.columns + 8, 144
    rng = np.random.default_rng()
    x, w = (
        rng.integers(np.iinfo(each).min, np.iinfo(each).max, shape, each, endpoint=True)
        for each, shape in zip(types, ((m, k), (n, k)), strict=True)
    )
    x[0], w[0] = np.iinfo(types[0]).max, np.iinfo(types[1]).min
    b = rng.integers(-(2**15), 2**15, n, "int32")
    [found] = run(requantized, [x, w, b], target=OPENCL)
    exact = x.astype("int64") @ w.T.astype("int64") + b
    np.testing.assert_array_equal(found, np.clip(np.rint(exact * 2.0**-9), -128, 127))


def by_constant(w: np.ndarray, dtype: str) -> Build:
    """A product by a constant ``[K, N]``, summed in ``dtype``."""
    return lambda x: op.matmul(x, relax.const(w), out_dtype=dtype)


CONSTANTS = [AllowTF32(), MarkConstants()]


def test_numbers_of_constants_in_rows(emulated: pytest.MonkeyPatch) -> None:
    """Of bytes and of TF32 they are turned, and those of float32 rounded, before."""
    emulated.setattr(warpgroup_tile, "TILES", (WarpgroupTile(64, 2),))
    rng = np.random.default_rng()
    x, w = (rng.standard_normal(shape).astype(F32) for shape in ((140, 44), (44, 72)))
    x[3, 5], x[4, 7], w[9, 11] = np.nan, np.inf, -np.inf
    [found] = run(by_constant(w, F32), [x], target=OPENCL, more=CONSTANTS)
    factors = rounded_to_tf32(x), rounded_to_tf32(w)
    with np.errstate(invalid="ignore"):
        exact = factors[0] @ factors[1]
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4)
    x, w = (rng.integers(-128, 128, shape, "int8") for shape in ((140, 48), (48, 72)))
    [found] = run(by_constant(w, "int32"), [x], target=OPENCL, more=CONSTANTS)
    np.testing.assert_array_equal(found, x.astype("int32") @ w.astype("int32"))


WAYS = ("dec", "inc")
NARROW = {
    "int8": ("int8", "int32", "IGMMA.64x128x32.S8.S8", 8),
    "uint8": ("uint8", "int32", "IGMMA.64x128x32.U8.U8", 8),
    "tf32": (F32, F32, "HGMMA.64x256x8.F32.TF32", 4),
}


@pytest.mark.quick_cases("int8", "tf32")
@pytest.mark.parametrize("name", NARROW)
def test_machine_code_of_bytes_and_tf32(name: str) -> None:
    """A stage of 128 bytes is four products deep; TF32's left factor is rounded on its way.

    It stays in registers beside 128 sums. Two warpgroups take what the producers give up: all of a
    multiprocessor, but for 1024 registers.
    """
    dtype, sums, instruction, products = NARROW[name]
    build = by_constant(np.ones((4096, 4096), dtype), sums)
    [func] = scheduled(build, ((4096, 4096), dtype), target=HOPPER, more=CONSTANTS).values()
    assert func.attrs[attributes.RULE] == "Matmul (warpgroups)"
    source = cuda_source(func, "sm_90a")
    [used], [code] = ptxas(source, "sm_90a").values(), sass(source, "sm_90a").values()
    assert "wgmma" not in compile_cuda(source, "sm_90a").log.lower(), "ptxas serializes products"
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names = opcodes(code)
    main = min((each for each in loops(code) if count(each, instruction)), key=len)
    assert count(names, instruction) == count(main, instruction) == products
    assert len(main) <= 125 and count(main, "WARPGROUP.DEPBAR") == 1
    moved = [each for each in names if each.startswith("USETMAXREG")]
    assert moved == ["USETMAXREG.DEALLOC.CTAPOOL", "USETMAXREG.TRY_ALLOC.CTAPOOL"]
    assert used.registers == 168 and count(main, "LDSM") == 4 * (name == "tf32")
    dec, inc = (int(re.search(f"setmaxnreg.{way}.* ([0-9]+);", source)[1]) for way in WAYS)
    assert 128 * dec + 256 * inc == 384 * used.registers <= 65536
    for slow in ("BAR", "MEMBAR", "STL", "LDL"):
        assert not count(main, slow)
    assert count(names, "UTMALDG") == 2 and not count(names, "MMA.16")
    assert count(names, "STG.E") == count(names, "STG.E.128") > 0


def test_others_of_bytes_and_tf32_stay_where_they_were() -> None:
    """Factors along the rows that are no constants, and float32 that none has rounded."""
    types = [((2048, 2048), "int8")] * 2
    build = lambda x, w: op.matmul(x, w, out_dtype="int32")  # noqa: E731
    assert rule_of(build, *types) == "Matmul"
    [func] = scheduled(dense, *[((2048, 2048), F32)] * 2, target=HOPPER, more=CONSTANTS).values()
    assert func.attrs[attributes.RULE] == "Matmul"


CASES: dict[str, tuple[Build, list[tuple[tuple[int, ...], str]], int]] = {
    "large": (op.matmul, [((4096, 4096), F16), ((4096, 4096), F16)], 256),
    "large_nt": (dense, [((4096, 4096), BF16), ((4096, 4096), BF16)], 256),
    "epilogue": (
        biased,
        [((1001, 1000), F16), ((1000, 1024), F16), ((1024,), F32), ((1001, 1024), F32)],
        128,
    ),
    "large_epilogue": (
        biased,
        [((4096, 4096), F16), ((4096, 4096), F16), ((4096,), F32), ((4096, 4096), F32)],
        256,
    ),
}


@pytest.mark.quick_cases("epilogue")
@pytest.mark.parametrize("name", CASES)
def test_machine_code(name: str) -> None:
    """Four products of a warpgroup a step, which nothing but the next step's waits for."""
    build, types, columns = CASES[name]
    [func] = scheduled(build, *types, target=HOPPER).values()
    source = cuda_source(func, "sm_90a")
    [used], [code] = ptxas(source, "sm_90a").values(), sass(source, "sm_90a").values()
    assert "wgmma" not in compile_cuda(source, "sm_90a").log.lower(), "ptxas serializes products"
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert used.registers <= 168  # of nine warps, three in a partition; of twelve it is all
    names = opcodes(code)
    products = f"HGMMA.64x{columns}x16.F32"
    main = min((each for each in loops(code) if count(each, "HGMMA")), key=len)
    assert count(names, products) == count(main, products) == count(main, "HGMMA") == 4
    assert len(main) <= 80 and count(main, "WARPGROUP.DEPBAR") == 1
    for slow in ("LDSM", "BAR", "MEMBAR", "STL", "LDL"):
        assert not count(main, slow)
    shared = 1 if name == "large_nt" else columns // 2 // 64  # half of the right factor
    assert count(names, "UTMALDG.2D.MULTICAST") == shared
    assert count(names, "UTMALDG") == 1 + shared and not count(names, "HMMA")
    assert count(names, "STG.E") == count(names, "STG.E.128") > 0


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("tile", [WarpgroupTile(64), WarpgroupTile(128, 2)], ids=str)
def test_each_side_waits_for_the_other(
    tile: WarpgroupTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warpgroup_tile, "TILES", (tile,))
    [func] = scheduled(op.matmul, *[((1024, 1024), F16)] * 2, target=HOPPER).values()
    source = cuda_source(func, "sm_90a")
    kernel = source[source.rindex('extern "C"') :]
    check_protocol(kernel, tile.cluster)
    broken = ["tvm_builtin_cuda_mbarrier_wait", "tvm_fusion_settle"]
    for name in broken + ["tvm_fusion_cluster_wait"] * (tile.cluster > 1):
        with pytest.raises(AssertionError):
            check_protocol(re.sub(rf"{name}\w*\(", "nothing(", kernel), tile.cluster)


def rule_of(build: Build, *types: tuple[tuple[int, ...], str], target: Target = HOPPER) -> str:
    [func] = scheduled(build, *types, target=target).values()
    return str(func.attrs[attributes.RULE])


def test_only_sm_90a_has_them() -> None:
    factors = [((2048, 2048), F16)] * 2
    assert rule_of(op.matmul, *factors) == "Matmul (warpgroups)"
    for arch in ("sm_80", "sm_90", "sm_100a", "sm_120a"):
        target = Target({"kind": "cuda", "arch": arch}, host="llvm")
        assert rule_of(op.matmul, *factors, target=target) == "Matmul"


@pytest.mark.parametrize(
    "types",
    [
        [((64, 64), F16), ((64, 64), F16)],
        [((2048, 2044), F16), ((2044, 2048), F16)],
        [((2048, 2048), F16), ((2048, 2044), F16)],
        [((2048, 2048), F32), ((2048, 2048), F32)],
        [((8, 2048), F16), ((2048, 2048), F16)],
    ],
    ids=["small", "no_multiple_of_16_bytes", "columns_in_no_chunks", "float32", "few_rows"],
)
def test_others_stay_where_they_were(types: list[tuple[tuple[int, ...], str]]) -> None:
    assert rule_of(op.matmul, *types) == rule_of(op.matmul, *types, target=CUDA) == "Matmul"


@pytest.mark.slow
def test_a_factor_that_is_computed_stays_with_single_warps() -> None:
    types = [((2048, 2048), F32), ((2048, 2048), F16)]
    build = lambda x, w: op.matmul(op.astype(x, F16), w)  # noqa: E731
    for func in scheduled(build, *types, target=HOPPER).values():
        source = cuda_source(func, "sm_90a")
        assert ("wgmma" in source) == (func.attrs[attributes.RULE] == "Matmul (warpgroups)")


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_stages_fit(tile: WarpgroupTile) -> None:
    assert tile.stages >= 4
    assert tile.stages * tile.stage_bytes < 227 * 1024
    assert tile.sums + 40 <= 224


def test_predicted_cycles_grow_with_each_extent() -> None:
    gpu = GPUInfo.from_target(HOPPER)
    for tile in TILES:
        least = tile.cycles(1, 4096, 4096, 4096, gpu)
        for extents in ((2, 4096, 4096, 4096), (1, 8192, 4096, 4096), (1, 4096, 4096, 8192)):
            assert 1.5 * least < tile.cycles(*extents, gpu) < 2.5 * least

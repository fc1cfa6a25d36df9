# SPDX-License-Identifier: Apache-2.0
"""Products on tensor cores: numbers by emulation, machine code, banks of shared memory."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
from cuda_text import count, cuda_source, loops, opcodes, ptxas, sass
from graph_cases import CUDA, run, scheduled
from tensor_core_emulation import emulate_tensor_cores
from tvm import relax
from tvm.relax import op
from tvm.target import Target

from relay_passes import AllowTF32
from schedules.gpu.gemm.matmul import tensor_core_tile
from schedules.gpu.gemm.matmul.tensor_core_tile import SharedTile, TensorTile
from tests.selection import in_turns, one_test

F16, BF16, F32, INT8 = "float16", "bfloat16", "float32", "int8"
OPENCL = Target({"kind": "opencl", "max_shared_memory_per_block": 49152}, host="llvm")
A100 = Target({"kind": "cuda", "arch": "sm_80"}, host="llvm")
T4 = Target({"kind": "cuda", "arch": "sm_75"}, host="llvm")

Build = Callable[..., relax.Expr]
Shapes = tuple[tuple[int, ...], tuple[int, ...]]


def product(left: str, right: str, dtype: str = F32) -> Build:
    """A product of factors that lie as they are (``n``) or transposed (``t``), in ``dtype``."""

    def build(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        factors = [op.permute_dims(x) if left == "t" else x, op.permute_dims(w)]
        return op.matmul(factors[0], factors[1] if right == "t" else w, out_dtype=dtype)

    return build


def shapes(left: str, right: str, m: int, n: int, k: int) -> Shapes:
    return (k, m) if left == "t" else (m, k), (n, k) if right == "t" else (k, n)


def values(*each: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng()
    return [rng.standard_normal(shape).astype(F16) for shape in each]


def assert_close(found: np.ndarray, exact: np.ndarray, terms: int, rtol: float = 0.0) -> None:
    """Compare with a sum of products of standard normal numbers."""
    np.testing.assert_allclose(found, exact, rtol=rtol, atol=1e-6 * terms + 1e-5)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    emulate_tensor_cores(monkeypatch)
    return monkeypatch


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("left", "right"),
    [*(pytest.param(*each, marks=pytest.mark.slow) for each in ("nn", "tt")), "nt", "tn"],
)
def test_numbers(left: str, right: str) -> None:
    m, n, k = 40, 72, 104
    x, w = values(*shapes(left, right, m, n, k))
    [found] = run(product(left, right), [x, w], target=OPENCL)
    factors = x.T if left == "t" else x, w.T if right == "t" else w
    assert_close(found, factors[0].astype("float64") @ factors[1].astype("float64"), k)


LARGE = TensorTile(128, 128, 64, 64)


@pytest.mark.slow
@pytest.mark.parametrize("tile", in_turns([*tensor_core_tile.TILES, LARGE]), ids=str)
def test_numbers_of_each_tile(tile: TensorTile, emulated: pytest.MonkeyPatch) -> None:
    emulated.setattr(tensor_core_tile, "TILES", (tile,))
    m, n, k = tile.rows + 3, tile.columns + 8, 48
    x, w = values((m, k), (k, n))
    [found] = run(product("n", "n"), [x, w], target=OPENCL)
    assert_close(found, x.astype("float64") @ w.astype("float64"), k)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_numbers_of_an_epilogue_and_a_batch() -> None:
    x, w, b, r = values((2, 33, 40), (2, 40, 48), (48,), (2, 33, 48))
    b, r = b.astype(F32), r.astype(F32)

    def build(*each: relax.Expr) -> relax.Expr:
        dense = op.add(op.matmul(each[0], each[1], out_dtype=F32), each[2])
        return op.astype(op.add(op.nn.relu(dense), each[3]), F16)

    [found] = run(build, [x, w, b, r], target=OPENCL)
    exact = np.maximum(x.astype("float64") @ w.astype("float64") + b, 0) + r
    assert_close(found.astype(F32), exact, 40, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_numbers_of_columns_that_are_no_vectors() -> None:
    """Columns of the result in any number, where the right factor lies along the reduced axis."""
    x, w = values((37, 64), (45, 64))
    [found] = run(product("n", "t"), [x, w], target=OPENCL)
    assert_close(found, x.astype("float64") @ w.T.astype("float64"), 64)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("left", "right"), ["nn", "tt"])
def test_numbers_of_extents_that_are_no_vectors(left: str, right: str) -> None:
    m, n, k = 35, 37, 41
    x, w = values(*shapes(left, right, m, n, k))
    [found] = run(product(left, right), [x, w], target=OPENCL)
    factors = x.T if left == "t" else x, w.T if right == "t" else w
    assert_close(found, factors[0].astype("float64") @ factors[1].astype("float64"), k)


def rounded_to_tf32(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of 10 bits behind the point, in float64; ties away from zero."""
    bits = (x.astype(F32).view("uint32") + 0x1000) & 0xFFFFE000
    return bits.view(F32).astype("float64")


@pytest.mark.quick_cases(1)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("left", "right", "extents"),
    [
        pytest.param("n", "n", (40, 72, 52), marks=pytest.mark.slow),
        ("n", "t", (40, 72, 52)),
        ("t", "n", (35, 37, 41)),
    ],
    ids=str,
)
def test_numbers_of_tf32(left: str, right: str, extents: tuple[int, int, int]) -> None:
    rng = np.random.default_rng()
    x, w = (rng.standard_normal(s).astype(F32) for s in shapes(left, right, *extents))
    [found] = run(product(left, right), [x, w], target=OPENCL, more=[AllowTF32()])
    factors = x.T if left == "t" else x, w.T if right == "t" else w
    assert_close(found, rounded_to_tf32(factors[0]) @ rounded_to_tf32(factors[1]), extents[2])
    exact = factors[0].astype("float64") @ factors[1].astype("float64")
    assert np.abs(found - exact).max() > 1e-4, "nothing was rounded"


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("left", "right", "extents", "dtype"),
    [
        ("n", "n", (40, 72, 112), INT8),
        pytest.param("n", "t", (40, 72, 112), INT8, marks=pytest.mark.slow),
        ("t", "t", (35, 37, 41), INT8),
        ("n", "t", (33, 40, 96), "uint8"),
    ],
    ids=str,
)
def test_numbers_of_bytes(left: str, right: str, extents: tuple[int, int, int], dtype: str) -> None:
    """The sums are exact; those of equal extremes are the largest that there are."""
    rng = np.random.default_rng()
    least, greatest = np.iinfo(dtype).min, np.iinfo(dtype).max
    x, w = (
        rng.integers(least, greatest, shape, dtype, endpoint=True)
        for shape in shapes(left, right, *extents)
    )
    x[...] = least if dtype == INT8 and left == "t" else x
    [found] = run(product(left, right, "int32"), [x, w], target=OPENCL)
    factors = x.T if left == "t" else x, w.T if right == "t" else w
    np.testing.assert_array_equal(found, factors[0].astype("int64") @ factors[1].astype("int64"))


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_numbers_of_a_convolution_of_bytes() -> None:
    rng = np.random.default_rng()
    data, weight = (rng.integers(-128, 128, shape, INT8) for shape in ((2, 9, 5, 8), (20, 9, 3, 3)))

    def build(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.nn.relu(op.nn.conv2d(x, w, padding=1, out_dtype="int32"))

    [found] = run(build, [data, weight], target=OPENCL)
    padded = np.pad(data.astype("int64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    exact = np.einsum("nchwkl,ockl->nohw", windows, weight.astype("int64"))
    np.testing.assert_array_equal(found, np.maximum(exact, 0))


@one_test(
    [
        SharedTile(rows, 32, rows_first, is_left)
        for rows in (32, 64, 128)
        for rows_first in (False, True)
        for is_left in (False, True)
    ]
    + [
        SharedTile(rows, 4 * chunk, False, is_left, chunk, turned)
        for rows in (32, 128)
        for is_left in (False, True)
        for chunk in (4, 16)
        for turned in (False, True)
    ]
    + [  # queries, keys and values of attention
        tile
        for head in (16, 32, 64, 128, 192)
        for rows_first in (False, True)
        for tile in (
            *(SharedTile(queries, head, rows_first, True) for queries in (16, 32, 64)),
            *(SharedTile(keys, head, rows_first, False) for keys in (32, 64)),
            *(SharedTile(max(head, 32), keys, rows_first, False) for keys in (32, 64)),
        )
    ],
)
def test_no_bank_conflicts(shared: SharedTile) -> None:
    """Each phase of eight lanes, which moves 128 bytes, touches each bank once."""
    steps = range(0, shared.depth, 2 * shared.chunk)
    for row, depth in itertools.product(range(0, shared.rows, 16), steps):
        places = [shared.fragment(lane, row, depth) for lane in range(32)]
        assert all(place % 16 == 0 and place < shared.nbytes for place in places)
        for phase in range(0, 32, 8):
            assert len({place // 16 % 8 for place in places[phase : phase + 8]}) == 8
    copied = [shared.copied(number)[2] for number in range(shared.lines * shared.chunks)]
    assert sorted(copied) == list(range(0, shared.nbytes, 16))
    for phase in range(0, len(copied), 8):
        assert len({place // 16 % 8 for place in copied[phase : phase + 8]}) == 8


def gelu_layer(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
    return op.nn.gelu(op.add(op.matmul(x, w), b))


CASES: dict[str, tuple[Build, list[tuple[tuple[int, ...], str]]]] = {
    "large": (op.matmul, [((4096, 4096), F16), ((4096, 4096), F16)]),
    "large_nt": (product("n", "t"), [((4096, 4096), BF16), ((4096, 4096), BF16)]),
    "bert_odd_rows": (gelu_layer, [((1, 127, 768), F16), ((768, 3072), F16), ((3072,), F16)]),
    "bert_projection": (product("n", "n"), [((384, 768), F16), ((768, 768), F16)]),
    "scores": (op.matmul, [((1, 12, 128, 64), F16), ((1, 12, 64, 128), F16)]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), in_turns(CASES, [A100, CUDA], every=3), ids=str)
def test_machine_code(name: str, target: Target) -> None:
    build, types = CASES[name]
    [func] = scheduled(build, *types, target=target).values()
    arch = str(target.attrs["arch"])
    source = cuda_source(func, arch)
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    names = opcodes(code)
    assert count(names, "HMMA") and count(names, "LDSM") and count(names, "LDGSTS.E.BYPASS.128")
    assert not count(names, "HMMA.1688") and not count(names, "FMUL.FTZ.RZ")
    assert count(names, "STG.E") == count(names, "STG.E.128") > 0


BYTES: dict[str, tuple[Build, str, str, str]] = {
    "tf32": (op.matmul, F32, "HMMA.1688.F32.TF32", ""),
    "tf32_nt": (product("n", "t"), F32, "HMMA.1688.F32.TF32", "LDGSTS.E.BYPASS.128"),
    "int8": (product("n", "n", "int32"), INT8, "IMMA.16832.S8.S8", ""),
    "int8_nt": (product("n", "t", "int32"), INT8, "IMMA.16832.S8.S8", "LDGSTS.E.BYPASS.128"),
    "uint8_nt": (product("n", "t", "int32"), "uint8", "IMMA.16832.U8.U8", "LDGSTS.E.BYPASS.128"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), in_turns(BYTES, [A100, CUDA], every=4), ids=str)
def test_machine_code_of_other_types(name: str, target: Target) -> None:
    """Two blocks of 256 threads a multiprocessor; chunks go to shared memory as they lie."""
    build, dtype, opcode, copies = BYTES[name]
    types = [((1536, 1536), dtype)] * 2
    [func] = scheduled(build, *types, target=target, more=[AllowTF32()]).values()
    arch = str(target.attrs["arch"])
    source = cuda_source(func, arch)
    [used], [code] = ptxas(source, arch).values(), sass(source, arch).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert "__launch_bounds__(256, 2)" in source and used.registers <= 128
    names = opcodes(code)
    assert count(names, opcode) >= 32 and not count(names, "FFMA") and not count(names, "IMAD.S8")
    assert count(names, "LDSM") and count(names, "STS") == count(names, "STS.128")
    if copies:
        assert count(names, copies) and not count(names, "STS")


@pytest.mark.slow
def test_float32_is_rounded_only_on_request() -> None:
    [func] = scheduled(op.matmul, *[((512, 512), F32)] * 2, target=CUDA).values()
    assert "mma.sync" not in cuda_source(func)


@pytest.mark.slow
def test_the_main_loop_and_occupancy_of_a_large_product() -> None:
    """Two blocks a multiprocessor, and for each product a fourth of a load from shared memory."""
    build, types = CASES["large"]
    [func] = scheduled(build, *types, target=CUDA).values()
    source = cuda_source(func)
    [used], [code] = ptxas(source).values(), sass(source).values()
    assert "__launch_bounds__(128, 2)" in source
    assert used.registers <= 255 and not used.spill_stores
    assert 2 * used.shared <= 2 * 48 * 1024
    main = max(loops(code), key=lambda names: count(names, "HMMA"))
    assert len(main) <= 2.25 * count(main, "HMMA") == 9 * count(main, "LDSM")
    assert re.search(r"cp\.async\.wait_group 1;", source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("left", "right", "m", "warps"),
    [
        ("n", "n", 4096, 4),
        ("n", "n", 2048, 8),  # too few blocks for two a multiprocessor
        ("n", "t", 4096, 4),
    ],
)
def test_warps_are_large_where_the_grid_is(left: str, right: str, m: int, warps: int) -> None:
    [func] = scheduled(
        product(left, right), *((s, F16) for s in shapes(left, right, m, 2048, 64)), target=CUDA
    ).values()
    assert f"__launch_bounds__({32 * warps}, 2)" in cuda_source(func)


@pytest.mark.slow
def test_warps_are_small_where_a_factor_is_gathered() -> None:
    """Bytes that lie along the columns are turned by the threads, in registers."""
    [func] = scheduled(
        product("n", "n", "int32"), *[((4096, 4096), INT8)] * 2, target=CUDA
    ).values()
    assert "__launch_bounds__(256, 2)" in cuda_source(func)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "types"),
    [
        (T4, [((64, 64), F16), ((64, 64), F16)]),
        (CUDA, [((64, 64), F32), ((64, 64), F32)]),
        (CUDA, [((8, 64), F16), ((64, 64), F16)]),
    ],
    ids=["sm_75", "float32", "few_rows"],
)
def test_other_products_stay_on_the_ordinary_cores(
    target: Target, types: list[tuple[tuple[int, ...], str]]
) -> None:
    [func] = scheduled(op.matmul, *types, target=target).values()
    arch = str(target.attrs["arch"])
    source = cuda_source(func, arch)
    assert "mma.sync" not in source
    [code] = sass(source, arch).values()
    assert count(opcodes(code), "FFMA") > 0

# SPDX-License-Identifier: Apache-2.0
"""Products of two matrices of bytes: numbers of every form, and machine code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tvm
from cpu.conv_cases import TARGET, assembly
from cpu.quantized_cases import portable_products, product_of_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.target import Target

from examples.benchmarks.assembly import loops
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.matmul import byte_matmul as module
from schedules.cpu.loops.matmul.byte_matmul import byte_matmul
from schedules.cpu.loops.matmul.byte_product import ByteFactor, ByteProduct, ByteResult, Tiles

NEON = {"vector_bits": 128, "num_vector_registers": 32, "word_channels": 4}
FORMS = {
    "pairs": {"word_channels": 2, "byte_dots": "maddubs"},
    "usdot": NEON | {"byte_dots": "usdot"},
    "sdot": NEON | {"byte_dots": "sdot"},
    "vpdpbusd": {"vector_bits": 512, "word_channels": 4, "byte_dots": "vpdpbusd"},
}


def product_of_pairs(total, factor, vector, lanes, word, *_):
    """What ``vpmaddwd`` and an addition do; other words as the instructions of AArch64."""
    if word == 4:
        return portable_products(total, factor, vector, lanes, word, *_)
    for part in (16, 0):
        up, down = (tvm.tirx.Broadcast(tvm.tirx.const(n, "int32"), lanes) for n in (part, 16))
        total = total + ((factor << up) >> down) * ((vector << up) >> down)
    return total


def arrays_of(product: ByteProduct, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)

    def integers(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        ends = np.iinfo(dtype)
        extreme = random.choice([ends.min, ends.max], shape)
        drawn = random.integers(ends.min, ends.max, shape, dtype, endpoint=True)
        return np.where(random.random(shape) < 0.3, extreme, drawn).astype(dtype)

    factors = product.left, product.right
    found = [integers(each.dtype, each.shape) for each in factors]
    found += [integers(each.dtype, ()) for each in factors if each.has_zero]
    if product.result.has_factor:
        found.append(np.array(random.random(), "float32"))
    if product.result.added is not None:
        found.append(random.standard_normal(product.result.added).astype("float32"))
    return found


def exact(product: ByteProduct, arrays: list[np.ndarray]) -> np.ndarray:
    given_ = iter(arrays[2:])
    numbers = [
        array.astype("int64") + factor.offset - (int(next(given_)) if factor.has_zero else 0)
        for array, factor in zip(arrays, (product.left, product.right), strict=False)
    ]
    left, right = (
        array.transpose(factor.axes)
        for array, factor in zip(numbers, (product.left, product.right), strict=True)
    )
    sums, result = left @ right, product.result
    if result.dtype == "int32":
        return sums.transpose(result.axes)
    scale = np.float32(result.scale) * (next(given_) if result.has_factor else np.float32(1))
    value = sums.astype("float32") * scale
    if result.bounds is not None:
        value = np.clip(np.round(value), *result.bounds)
    if result.dtype == "float32":
        added = next(given_, 0)
        return (value * np.float32(result.rescale) + added).transpose(result.axes)
    moved = value - result.bounds[0] - 128 * (result.dtype == "int8")
    return moved.transpose(result.axes)


def check(products: list[ByteProduct], cpu: CPUInfo, seed: int) -> None:
    kernels = {
        f"product_{n}": byte_matmul(each, cpu).with_attr("global_symbol", f"product_{n}")
        for n, each in enumerate(products)
    }
    compiled = tvm.compile(tvm.IRModule(kernels), TARGET)
    for name, product in zip(kernels, products, strict=True):
        arrays = arrays_of(product, seed)
        wanted = exact(product, arrays)
        out = np.full(wanted.shape, 99, product.result.dtype)
        tensors = [tvm.runtime.tensor(array) for array in (*arrays, out)]
        compiled[name](*tensors)
        if product.result.dtype == "float32":
            np.testing.assert_allclose(tensors[-1].numpy(), wanted, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(tensors[-1].numpy(), wanted, str(product))


@st.composite
def products(draw) -> ByteProduct:
    rows, depth, columns = (draw(st.integers(1, most)) for most in (20, 70, 40))
    batch = draw(st.lists(st.integers(1, 2), max_size=2))
    rank = 2 + len(batch)
    factors = []
    for matrix in ((rows, depth), (depth, columns)):
        own = [draw(st.sampled_from([1, extent])) for extent in batch]
        own = own[draw(st.integers(0, len(own))) :]
        axes = draw(st.permutations(range(2 + len(own))))
        extents = [*own, *matrix]
        shape = [extents[axes.index(axis)] for axis in range(len(axes))]
        has_zero = draw(st.booleans())
        offset = 0 if has_zero else draw(st.integers(-255, 127))
        dtype = draw(st.sampled_from(["uint8", "int8"]))
        factors.append(ByteFactor(tuple(shape), tuple(axes), dtype, offset, has_zero))
    axes = (*draw(st.permutations(range(rank - 1))), rank - 1)
    low = float(draw(st.integers(-255, 0)))
    kind = draw(st.sampled_from(["int32", "float32", "uint8", "int8"]))
    if kind == "int32":
        return ByteProduct(*factors, ByteResult(axes, kind))
    if kind != "float32":
        bounds = (low, low + 255)
        return ByteProduct(*factors, ByteResult(axes, kind, 2.0**-11, bounds=bounds))
    whole = ByteProduct(*factors, ByteResult(axes)).extents
    added = tuple(draw(st.sampled_from([1, extent])) for extent in whole)
    bounds = draw(st.sampled_from([None, (low, low + 255)]))
    added = draw(st.sampled_from([None, added]))
    result = ByteResult(axes, kind, 2.0**-11, bounds is None, bounds, 0.25, added)
    return ByteProduct(*factors, result)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=max(1, settings.default.max_examples // 20))
@given(data=st.data())
def test_numbers_by_loops_in_place_of_instructions(form, data):
    """Transposed and broadcast matrices of all types, zero points, and every end of a product."""
    drawn = data.draw(st.lists(products(), min_size=3, max_size=3))
    if form == "vpdpbusd":  # whose bytes are packed by instructions
        drawn = [replace(each, result=ByteResult(each.result.axes, "int32")) for each in drawn]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "add_word_products", product_of_pairs)
        patch.setattr(module, "add_block_products", product_of_blocks)
        if form == "pairs":
            patch.setattr(
                module,
                "packed_bytes",
                lambda values, bounds: tvm.tirx.Shuffle(
                    [module.activate_to_bytes(each, bounds, "float32") for each in values],
                    [*range(8 * len(values))],
                ),
            )
        cpu = replace(CPUInfo.from_target(TARGET), **({"vector_bits": 256} | FORMS[form]))
        check(drawn, cpu, data.draw(st.integers(0, 99)))


def test_two_rows_by_two_columns_at_a_time(monkeypatch):
    """Rows and columns of odd numbers, and one row, whose words are multiplied one by one."""
    monkeypatch.setattr(module, "add_word_products", product_of_pairs)
    monkeypatch.setattr(module, "add_block_products", product_of_blocks)
    cpu = replace(CPUInfo.from_target(TARGET), **FORMS["usdot"])
    drawn = []
    for rows, columns, depth in ((9, 23, 37), (2, 5, 8), (1, 7, 13), (16, 40, 64)):
        left = ByteFactor((rows, depth), (0, 1), "uint8", -3)
        right = ByteFactor((depth, columns), (0, 1), "int8", 0, True)
        drawn.append(ByteProduct(left, right, ByteResult((0, 1), "int32")))
        left = ByteFactor((depth, rows), (1, 0), "int8", 0, True)
        right = ByteFactor((columns, depth), (1, 0), "uint8", -7)
        drawn.append(ByteProduct(left, right, ByteResult((0, 1), "float32", 0.01)))
    assert [Tiles(each, cpu).in_blocks for each in drawn] == [True] * 4 + [False] * 2 + [True] * 2
    check(drawn, cpu, 3)


def test_tasks_by_panels_and_by_rows():
    """Columns that fill a cache several times, and one matrix for several cores."""
    plain = ByteResult((0, 1), "int32")
    wide = ByteProduct(
        ByteFactor((9, 40), (0, 1), "uint8"), ByteFactor((40, 150), (0, 1), "int8"), plain
    )
    high = ByteProduct(
        ByteFactor((90, 40), (0, 1), "int8"), ByteFactor((24, 40), (1, 0), "uint8"), plain
    )
    cpu = replace(CPUInfo.from_target(TARGET), num_cores=3, l2_bytes=8192)
    if not cpu.word_channels:
        pytest.skip("this CPU multiplies no bytes")
    check([wide, high], cpu, 5)


@pytest.mark.parametrize(
    ("mcpu", "triple", "name", "count", "most"),
    [
        ("znver3", "x86_64-linux-gnu", "vpmaddwd", 48, 40),
        ("znver4", "x86_64-linux-gnu", "vpdpbusd", 96, 57),
        ("alderlake", "x86_64-linux-gnu", "vpdpbusd", 48, 32),
        ("neoverse-n1", "aarch64-linux-gnu", "sdot", 64, 16),
        ("neoverse-v1", "aarch64-linux-gnu", "usmmla", 128, 66),
    ],
)
def test_machine_code(mcpu, triple, name, count, most):
    """The innermost loop of a product of BERT's: no more loads than the tile promises."""
    target = Target({"kind": "llvm", "mcpu": mcpu, "mtriple": triple, "num-cores": 2})
    scores = ByteProduct(
        ByteFactor((1, 128, 12, 64), (0, 2, 1, 3), "uint8", -128),
        ByteFactor((1, 128, 12, 64), (0, 2, 3, 1), "uint8", -120),
        ByteResult((0, 1, 2, 3), "uint8", 0.004, False, (-127.0, 128.0)),
    )
    func = byte_matmul(scores, CPUInfo.from_target(target)).with_attr("global_symbol", "main")
    (loop,) = (each for each in loops(assembly(func, target)) if each.fmas == count)
    assert loop.innermost
    assert {each.name for each in loop.instructions if each.is_fma} == {name}
    assert loop.loads <= most

# SPDX-License-Identifier: Apache-2.0
"""Images with interleaved channels, rows that share loads, and stores past the caches."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cpu.machine_cases import loops_of, target_of
from cpu.rule_cases import HOST, compiled, draw, function, loops, run, schedule, tensor
from tvm import te, tirx
from tvm.target import Target

from examples.stencils import STENCILS, image
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.fallback import Elementwise
from schedules.cpu.nests import streaming_stores
from schedules.cpu.nests.stencil_rows import ROWS
from schedules.distribute.distribute import distribute
from schedules.distribute.localize import localize
from tests.selection import in_turns
from tvm_fusion import distributed
from tvm_fusion.distributed import run_ranks

SCALAR = ("imul", "mul", "idiv", "div", "vpgather", "vgather", "vpinsr", "vinsertps", "vpextr")
LANES = CPUInfo.from_target(HOST).lanes("float32")


@pytest.fixture
def streamed(monkeypatch):
    """Every output bypasses the caches, however small."""
    monkeypatch.setattr(streaming_stores, "_LEAST_CACHES", 0)


def part_of(func: tirx.PrimFunc, ranks: int = 2) -> tirx.PrimFunc:
    """The function of the first of some ranks, whose rows begin at a scalar."""
    plan = distribute(func, 0, ranks)
    part = plan.parts[0]
    return localize(plan.nest, part.rows, part.windows).func


def filtered(rows: int, cols: int, channels: int, taps: tuple[float, ...]) -> tirx.PrimFunc:
    """A filter along the columns, then one along the rows."""
    a = image(rows + len(taps) - 1, cols + len(taps) - 1, channels)
    x = te.compute(
        (rows + len(taps) - 1, cols, channels),
        lambda i, j, c: sum(
            (a[i, j + k, c] * w for k, w in enumerate(taps[1:], 1)), a[i, j, c] * taps[0]
        ),
        "x",
    )
    y = te.compute(
        (rows, cols, channels),
        lambda i, j, c: sum(
            (x[i + k, j, c] * w for k, w in enumerate(taps[1:], 1)), x[i, j, c] * taps[0]
        ),
        "y",
    )
    return te.create_prim_func([a, y], index_dtype_override="int64")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["znver4", "x86-64-v3"])
@pytest.mark.parametrize("name", ["pipeline", "gaussian", "convolution"])
@pytest.mark.parametrize("cols", [512, 331])
def test_vectors_of_interleaved_channels_have_plain_addresses(cpu, name, cols):
    func = part_of(STENCILS[name](64, cols))
    scheduled = schedule(Elementwise(), func, target_of(cpu))
    found = loops_of({name: scheduled}, cpu)[name]
    hot = [loop for loop in found if loop.innermost and loop.stores]
    assert hot
    for loop in hot:
        assert not [i for i in loop.instructions if i.name.startswith(SCALAR)], str(loop)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("size", [(32, 128), (30, 331)])
def test_merged_channels_have_plain_addresses_without_an_offset(size, dtype):
    """Vectors that cross pixels of three channels need no division by 3 of each lane."""
    scheduled = schedule(Elementwise(), STENCILS["pipeline"](*size, dtype), target_of("znver4"))
    [loop] = [
        loop for loop in loops_of({"p": scheduled}, "znver4")["p"] if loop.innermost and loop.stores
    ]
    assert not [i for i in loop.instructions if i.name.startswith(SCALAR)], str(loop)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("cols", "name", "stream"),
    in_turns(
        [64, 77],
        ["pipeline", "cvt_color", "gaussian", "sobel", "convolution"],
        [False, True],
    ),
)
def test_pixels_of_8_bits(monkeypatch, name, cols, stream):
    if stream:
        monkeypatch.setattr(streaming_stores, "_LEAST_CACHES", 0)
    small, wide = STENCILS[name](29, cols, "uint8"), STENCILS[name](29, cols)
    first, *others = [[int(n) for n in param.shape] for param in small.params[:-1]]
    pixels, weights = draw(first, 0, "uint8"), [draw(shape) / 4 for shape in others]
    scheduled = schedule(Elementwise(), small)
    # Only whole registers of pixels: parts of one would go to memory one by one.
    has_whole = name == "pipeline" and CPUInfo.from_target(HOST).vector_bits < 512
    assert ("stream" in scheduled.script()) == (stream and has_whole)
    levels = run(schedule(Elementwise(), wide), pixels.astype("float32"), *weights)[0]
    found = run(scheduled, pixels, *weights)[0]
    assert found.dtype == np.uint8
    rounded = np.clip(levels + np.float32(0.5), 0, 255)
    # A level that is rounded may lie on either side of a half.
    assert (np.abs(found - rounded + 0.5) <= 0.501).all()


@pytest.mark.parametrize(("cpu", "streaming"), [("znver4", []), ("x86-64-v3", ["pipeline"])])
def test_only_whole_registers_of_pixels_are_streamed(streamed, cpu, streaming):
    """Parts of a register would go to memory one by one."""
    scheduled = {
        name: schedule(Elementwise(), STENCILS[name](29, 64, "uint8"), target_of(cpu))
        for name in ("pipeline", "cvt_color")
    }
    assert [name for name, func in scheduled.items() if "stream" in func.script()] == streaming


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("cpu", ["znver4", "x86-64-v3"])
def test_rows_share_their_loads(cpu, dtype):
    func = part_of(STENCILS["gaussian"](64, 512, dtype))
    scheduled = schedule(Elementwise(), func, target_of(cpu))
    found = loops_of({"g": scheduled}, cpu)["g"]
    loop = max((loop for loop in found if loop.innermost), key=lambda loop: loop.fmas)
    # Each row of 5 loads is filtered once: (4 + 4) x 5 loads for 4 rows, not 4 x 25.
    rows = 2 * ROWS if (cpu, dtype) == ("znver4", "uint8") else ROWS
    assert loop.stores == rows and loop.loads - loop.stack_loads <= (rows + 4) * 5 + 3


@pytest.mark.slow
def test_few_rows_have_the_bits_of_many():
    taps = (0.11, 0.23, 0.37, 0.23, 0.11)  # products of equal weights are shared by two rows
    func = filtered(37, 21, 3, taps)
    whole = np.random.default_rng(0).random((41, 25, 3), np.float32)

    def work(world):
        local = program.on(world)
        held = local.input("A")
        held.owned[...] = whole[tuple(slice(*ends) for ends in held.region)]
        return local().copy()

    program = distributed.compile(func, 1)
    (alone,) = run_ranks(1, work)
    program = distributed.compile(func, sizes=[1, 3, 19, 2, 12])
    np.testing.assert_array_equal(np.concatenate(run_ranks(5, work)), alone)
    w = np.array(taps)
    x = sum(whole[:, k : k + 21].astype("float64") * w[k] for k in range(5))
    np.testing.assert_allclose(alone, sum(x[k : k + 37] * w[k] for k in range(5)), rtol=1e-5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_turns(
        [(9, 70), (33, 64), (4, 131), (1, 5)],
        ["float32", "uint8", "float64", "int16"],
    ),
)
def test_streamed_numbers(streamed, shape, dtype):
    x, y = tensor("x", *shape, dtype=dtype), tensor("y", shape[1], dtype=dtype)
    out = te.compute(shape, lambda i, j: x[i, j] + y[j] + y[j])
    a, b = draw(shape, 0, dtype), draw(shape[1:], 1, dtype)
    found = run(schedule(Elementwise(), function([x, y], out)), a, b)[0]
    np.testing.assert_allclose(found, a + b + b, rtol=1e-6, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "cols"), in_turns(["blur", "heat2d", "gaussian", "cvt_color"], [64, 77])
)
def test_streamed_stencils_have_the_numbers_of_cached_ones(monkeypatch, name, cols):
    func = STENCILS[name](29, cols)
    inputs = [draw([int(n) for n in func.params[0].shape])]
    cached = run(schedule(Elementwise(), func), *inputs)[0]
    monkeypatch.setattr(streaming_stores, "_LEAST_CACHES", 0)
    scheduled = schedule(Elementwise(), func)
    assert "stream" in scheduled.script()
    np.testing.assert_array_equal(run(scheduled, *inputs)[0], cached)


@pytest.mark.slow
@pytest.mark.parametrize("cpu", ["znver4", "x86-64-v3"])
def test_streamed_vectors_are_not_on_the_stack(streamed, cpu):
    for name in ("pipeline", "blur", "heat2d"):
        scheduled = schedule(Elementwise(), part_of(STENCILS[name](64, 512)), target_of(cpu))
        named = scheduled.with_attr("global_symbol", name)
        text = tvm.compile(tvm.IRModule({name: named}), target_of(cpu)).mod.inspect_source("asm")
        assert "vmovnt" in text and "sfence" in text and "call\ttvm_fusion" not in text
        hot = [loop for loop in loops_of({name: scheduled}, cpu)[name] if loop.innermost]
        assert not any(loop.stack_stores or loop.stack_loads for loop in hot)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["znver4", "x86-64-v3"])
def test_vectors_that_llvm_knows_to_be_aligned_are_streamed(streamed, cpu):
    """LLVM merges branches that do the same, and forgets what only one of them says."""
    func = part_of(STENCILS["heat3d"](64, 256))
    target = Target(dict(target_of(cpu).attrs) | {"kind": "llvm", "num-cores": 1})
    scheduled = schedule(Elementwise(), func, target)
    named = scheduled.with_attr("global_symbol", "heat3d")
    text = tvm.compile(tvm.IRModule({"heat3d": named}), target).mod.inspect_source("asm")
    assert text.count("vmovnt") >= ROWS


def test_small_outputs_stay_in_the_caches():
    x = tensor("x", 64, 64)
    func = schedule(Elementwise(), function([x], te.compute((64, 64), lambda i, j: x[i, j] * 2.0)))
    assert "stream" not in func.script()
    assert "vmovnt" not in compiled(func).mod.inspect_source("asm")


def test_other_machines_have_no_streaming_stores(streamed):
    target = target_of("neoverse-v2")
    func = schedule(Elementwise(), part_of(STENCILS["pipeline"](64, 512)), target)
    assert "stream" not in func.script()


def test_rows_are_unrolled_and_the_last_step_overlaps():
    func = schedule(Elementwise(), STENCILS["blur"](30, 64))
    assert [int(loop.extent) for loop in loops(func, tirx.ForKind.UNROLLED)] == [ROWS]
    assert all(
        extent in (LANES, ROWS, 8, 64 // LANES)
        for extent in map(lambda loop: int(loop.extent), loops(func))
    )

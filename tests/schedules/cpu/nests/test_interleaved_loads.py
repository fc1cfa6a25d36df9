# SPDX-License-Identifier: Apache-2.0
"""Vectors that take turns in memory are loaded together."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from cpu.machine_cases import loops_of, target_of
from cpu.rule_cases import HOST, draw, function, run, schedule, tensor
from tvm import te, tirx

from examples.stencils import STENCILS
from schedules.cpu.loops.fallback import Elementwise
from schedules.cpu.nests import streaming_stores
from schedules.cpu.nests.vector_loads import opencl_planes
from tests.selection import in_turns
from tests.targets import compile_unchecked


def mixed(count: int, period: int, dtype: str, loaded: int | None = None):
    """Weighted sums of the first elements of each period."""
    a = tensor("a", count, period, dtype=dtype)

    def total(i):
        terms = [a[i, n].astype("float32") * (n + 1.0) for n in range(loaded or period)]
        return sum(terms[1:], terms[0])

    return function([a], te.compute((count,), total, "total"))


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("count", "period", "dtype"),
    in_turns([1, 15, 64, 333], [2, 3, 4], ["uint8", "int16", "float32"], every=3),
)
def test_numbers(count, period, dtype):
    a = draw((count, period), 0, dtype)
    scheduled = schedule(Elementwise(), mixed(count, period, dtype))
    assert ("tvm_fusion_planes" in scheduled.script()) == (count > 1)
    expected = a.astype(np.float64) @ np.arange(1, period + 1)
    np.testing.assert_allclose(run(scheduled, a)[0], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cpu", ["znver4", "x86-64-v3", "neoverse-v2"])
def test_pixels_are_not_loaded_one_by_one(cpu):
    scheduled = schedule(Elementwise(), STENCILS["cvt_color"](64, 512, "uint8"), target_of(cpu))
    found = loops_of({"c": scheduled}, cpu)["c"]
    loop = max((loop for loop in found if loop.innermost), key=lambda loop: loop.loads)
    scalar = ("vpinsrb", "movzbl", "ldrb", "ld1\t{v0.b}[")
    assert not [i for i in loop.instructions if i.name.startswith(scalar)]
    assert loop.stack_loads == 0


def test_what_is_not_loaded_may_not_be_there():
    """The last element of an array is no place to load more from."""
    scheduled = schedule(Elementwise(), mixed(64, 3, "uint8", loaded=2))
    assert "tvm_fusion_planes" not in scheduled.script()


def test_conditional_loads_stay_alone():
    a = tensor("a", 64, 2)
    out = te.compute(
        (96,), lambda i: te.if_then_else(i < 64, a[i, 0] + a[i, 1], te.const(0, "float32")), "o"
    )
    scheduled = schedule(Elementwise(), function([a], out))
    values = draw((64, 2))
    expected = np.concatenate([values.sum(1), np.zeros(32, np.float32)])
    np.testing.assert_allclose(run(scheduled, values)[0], expected, rtol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("least_caches", [0, 2])
def test_beside_a_single_number(monkeypatch, least_caches):
    monkeypatch.setattr(streaming_stores, "_LEAST_CACHES", least_caches)
    a, factor = tensor("a", 64, 2), tensor("factor")
    b = tensor("b", 64)
    out = te.compute((64,), lambda i: (a[i, 0] + a[i, 1]) * factor() + b[i], "o")
    scheduled = schedule(Elementwise(), function([a, factor, b], out))
    assert "tvm_fusion_planes" in scheduled.script()
    values, scale, summand = draw((64, 2)), np.float32(3).reshape(()), draw((64,))
    found = run(scheduled, values, scale, summand)[0]
    np.testing.assert_allclose(found, values.sum(1) * 3 + summand, rtol=1e-5, atol=1e-6)


def test_truth_values_stay_alone():
    a = tensor("a", 64, 2, dtype="bool")
    out = te.compute((64,), lambda i: tirx.all(a[i, 0], a[i, 1]), "o")
    scheduled = schedule(Elementwise(), function([a], out))
    assert "tvm_fusion_planes" not in scheduled.script()
    values = draw((64, 2)) > 0.5
    np.testing.assert_array_equal(run(scheduled, values)[0], values.all(1))


def test_opencl():
    text = opencl_planes("tvm_fusion_planes_3_16_8")
    assert text is not None and "int tvm_fusion_planes_3_16_8(" in text
    assert "n < 3" in text and "lane < 16" in text and "uchar" in text
    assert opencl_planes("tvm_fusion_stream_64_64") is None


def test_a_function_with_stores_past_the_caches_has_both(monkeypatch):
    monkeypatch.setattr(streaming_stores, "_LEAST_CACHES", 0)
    target = target_of("znver4")
    scheduled = schedule(Elementwise(), STENCILS["cvt_color"](64, 512), target)
    text = scheduled.script()
    assert "tvm_fusion_planes_3_16_32" in text and "tvm_fusion_stream_64_64" in text
    named = tvm.IRModule({"c": scheduled.with_attr("global_symbol", "c")})
    assert "vmovnt" in tvm.compile(named, target).mod.inspect_source("asm")


def test_two_kernels_of_a_module():
    """Each brings the function with it."""
    func = mixed(20_000, 3, "uint8")  # enough for threads
    scheduled = schedule(Elementwise(), func).without_attr("tirx.is_scheduled")
    names = ("first", "second")
    module = tvm.IRModule({name: scheduled.with_attr("global_symbol", name) for name in names})
    library = compile_unchecked(module, HOST)
    a = draw((20_000, 3), 0, "uint8")
    for name in names:
        out = tvm.runtime.tensor(np.zeros(20_000, np.float32))
        library[name](tvm.runtime.tensor(a), out)
        np.testing.assert_allclose(out.numpy(), a.astype(np.float64) @ [1, 2, 3], rtol=1e-5)

# SPDX-License-Identifier: Apache-2.0
"""Attention in tile registers: numbers by loops in their place, and machine code."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tvm
from cpu.conv_cases import TARGET, assembly, compile_function
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.target import Target

from examples.benchmarks.assembly import loops
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.matmul.tile_attention import AttentionShape, tile_attention

CPU = replace(CPUInfo.from_target(TARGET), tiles=("bfloat16",), emulates_tiles=True)
HALF = ml_dtypes.bfloat16
BERT = AttentionShape(1, 12, 128, 128, 64, 64, 0.125, (1, 1, 1, 128), "bfloat16")


def operands(shape: AttentionShape, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    sizes = (shape.rows, shape.depth), (shape.keys, shape.depth), (shape.keys, shape.columns)
    found = [
        random.standard_normal((shape.batch, rows, shape.heads, columns)).astype(HALF)
        for rows, columns in sizes
    ]
    if shape.mask is not None:
        mask = random.standard_normal(shape.mask) - 1e4 * (random.random(shape.mask) < 0.3)
        found.append(mask.astype("float32"))
    return found


def run(shape: AttentionShape, arrays: list[np.ndarray], cpu: CPUInfo = CPU) -> np.ndarray:
    dtype = HALF if shape.out_dtype == "bfloat16" else "float32"
    out = np.full((shape.batch, shape.rows, shape.heads, shape.columns), 99, dtype)
    tensors = [tvm.runtime.tensor(array) for array in (*arrays, out)]
    func = tile_attention(shape, cpu).with_attr("global_symbol", "main")
    compile_function(func)["main"](*tensors)
    return tensors[-1].numpy()


def exact(shape: AttentionShape, arrays: list[np.ndarray]) -> np.ndarray:
    query, key, value, *mask = (array.astype("float64") for array in arrays)
    scores = np.einsum("bmhd,bnhd->bhmn", query, key) * shape.scale + sum(mask)
    power = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhmn,bnhc->bmhc", power / power.sum(-1, keepdims=True), value)


@st.composite
def shapes(draw) -> AttentionShape:
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    rows, keys = draw(st.integers(8, 40)), draw(st.integers(1, 70))
    whole = batch, heads, rows, keys
    mask = draw(st.none() | st.tuples(*(st.sampled_from([1, extent]) for extent in whole)))
    depth, columns = 2 * draw(st.integers(1, 40)), 16 * draw(st.integers(1, 6))
    dtype = draw(st.sampled_from(["bfloat16", "float32"]))
    return AttentionShape(*whole, depth, columns, draw(st.sampled_from([1.0, 0.3])), mask, dtype)


@given(shapes(), st.integers(0, 99))
@settings(max_examples=settings.default.max_examples // 4)
def test_numbers(shape, seed):
    """Factors are rounded before; here exponentials are, each by 2**-9 of itself at most."""
    arrays = operands(shape, seed)
    found, wanted = run(shape, arrays).astype("float64"), exact(shape, arrays)
    largest = np.abs(arrays[2].astype("float64")).max()
    assert np.abs(found - wanted).max() <= 2**-8 * largest + 2**-8 * np.abs(wanted).max()


@pytest.mark.slow
def test_keys_that_are_all_masked_but_one_give_its_value():
    shape = AttentionShape(1, 1, 9, 35, 16, 16, 1.0, (1, 1, 1, 35), "bfloat16")
    arrays = operands(shape, 1)
    arrays[3] = np.where(np.arange(35) == 34, 0, -np.inf).reshape(shape.mask).astype("float32")
    np.testing.assert_array_equal(run(shape, arrays), arrays[2][:, 34:].repeat(9, axis=1))


def test_nan_stays_in_its_row():
    shape = AttentionShape(1, 1, 20, 40, 16, 16, 1.0, None, "float32")
    arrays = operands(shape, 2)
    arrays[0][0, 7] = np.nan
    found = run(shape, arrays)
    assert np.isnan(found[0, 7]).all() and np.isfinite(np.delete(found[0], 7, 0)).all()


@pytest.mark.slow
def test_rows_that_only_minus_infinity_is_added_to_are_nan():
    shape = AttentionShape(1, 1, 8, 20, 4, 16, 1.0, (1, 1, 8, 1), "float32")
    arrays = operands(shape, 3)
    arrays[3] = np.where(np.arange(8) == 3, -np.inf, 0).reshape(shape.mask).astype("float32")
    np.testing.assert_array_equal(np.isnan(run(shape, arrays)[0, :, 0, 0]), np.arange(8) == 3)


@pytest.mark.slow
def test_bits_are_the_same_for_any_number_of_threads():
    shape = AttentionShape(1, 3, 50, 40, 24, 32, 0.3, None, "float32")
    arrays = operands(shape, 4)
    one, many = (run(shape, arrays, replace(CPU, num_cores=cores)) for cores in (1, 5))
    np.testing.assert_array_equal(one, many)


def test_what_fits_no_tiles():
    assert BERT.fits_tiles(CPU)
    for change in ({"rows": 7}, {"depth": 63}, {"columns": 72}):
        assert not replace(BERT, **change).fits_tiles(CPU)
    assert not BERT.fits_tiles(replace(CPU, tiles=("uint8",)))


def test_cycles_grow_with_the_work():
    """Scores of twice the keys cost twice as much; of small heads one fork less is the gain."""
    more = replace(BERT, keys=256, mask=None).cycles(CPU) / replace(BERT, mask=None).cycles(CPU)
    assert 1.6 < more < 2.1
    alone = replace(CPU, num_cores=1)
    assert BERT.cycles(alone) == pytest.approx(2 * BERT.cycles(CPU))
    assert BERT.cycles(CPU) < BERT.separate_cycles(CPU)


@pytest.mark.parametrize("cores", [2, 5, 64, 95, 96, 500])
def test_both_forms_wait_for_the_core_with_the_most_tiles_of_rows(cores):
    """Each of the 96 tiles of 12 heads is a task of 64 cores: one core in two has two of them."""
    cpu, alone = (replace(CPU, num_cores=count) for count in (cores, 1))
    rounds, forks = -(-96 // cores), 2 * CPU.costs.fork
    separate = [BERT.separate_cycles(each) - forks for each in (cpu, alone)]
    assert separate[0] == pytest.approx(separate[1] * rounds / 96)
    if cores >= 64:
        one_tile = BERT.cycles(replace(CPU, num_cores=96))
        assert BERT.cycles(cpu) == pytest.approx(one_tile * rounds)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("cpu", ["sapphirerapids", "graniterapids"])
def test_machine_code(cpu):
    """Each four products share the left factor, and no tile is spilled."""
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu, "num-cores": 2})
    func = tile_attention(BERT, CPUInfo.from_target(target)).with_attr("global_symbol", "main")
    text = assembly(func, target)
    counts = {name: 0 for name in ("tdpbf16ps", "tileload", "tilestored")}
    for found in loops(text):
        names = [instruction.name for instruction in found.instructions]
        here = {name: sum(each.startswith(name) for each in names) for name in counts}
        if here["tdpbf16ps"]:
            assert not any(name.startswith("call") for name in names)
            assert found.stack_stores == found.stack_loads == 0
        counts = {name: counts[name] + here[name] for name in counts}
    assert counts["tdpbf16ps"] > 0
    assert counts["tileload"] * 4 == counts["tdpbf16ps"] * 5
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1

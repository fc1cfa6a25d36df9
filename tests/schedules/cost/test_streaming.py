# SPDX-License-Identifier: Apache-2.0
"""Streaming operators and embedding lookups against numbers worked by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.cost.decisions import MODELS, predict
from schedules.cost.elementwise import BY_BYTES, STREAMING, combine
from schedules.cost.embedding import bag_traffic, hit_rate
from schedules.cost.kernel_call import KernelCall, element_bytes
from schedules.cost.machine import Figure, known_machines, load_machine, machine_from_json
from schedules.errors import PredictionError


def toy(kind="gpu", **more):
    values = {
        "peak_flops.float32": 1e12,
        "bandwidth.memory": 1e9,
        "bandwidth.L2": 4e9,
        "capacity.L2": 4096,
        "multiprocessors": 2,
        "launch_floor": 1e-6,
        **{name.replace("__", "."): value for name, value in more.items()},
    }
    figures = {name: {"value": value, "origin": "by hand"} for name, value in values.items()}
    return machine_from_json({"name": "toy", "kind": kind, "title": "Toy", "figures": figures})


FITTED = {
    "time__add__bandwidth": 0.5e9,
    "time__add__harness": 30e-6,
    "time__add__latency": 10e-6,
    "time__elementwise__bandwidth": 0.25e9,
    "time__elementwise__low": 0.9,
    "time__elementwise__high": 1.1,
}


def test_a_sum_of_two_times():
    assert combine(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert combine(4.0, 3.0, 2.0) == pytest.approx(5.0)
    assert combine(0.0, 4.0) == 4.0


def test_an_addition_by_hand():
    call = KernelCall("add", {}, flops=1000, read_bytes=10e3, written_bytes=5e3)
    found = predict(call, toy(**FITTED))
    # 15 kB at 0.5 GB/s and 10 us; the harness of 30 us adds (30 / 40)^12 / 12 of it.
    assert found.seconds == pytest.approx(40e-6 * (1 + 0.75**12) ** (1 / 12))
    assert (found.low, found.high) == (found.seconds * 0.9, found.seconds * 1.1)
    assert found.roofline_seconds == pytest.approx(15e-6)
    assert (found.bound, found.in_range) == ("memory", True)
    # seen = 4 * (40.1 / 30 - 1) > 1: the kernel alone is what exceeds the latency.
    assert found.device_seconds == pytest.approx(found.seconds - 10e-6)


def test_a_short_addition_is_hidden():
    found = predict(KernelCall("add", {}, read_bytes=500), toy(**FITTED))
    assert found.seconds == pytest.approx(30e-6, rel=1e-3)
    assert found.bound == "latency"
    # 0.5 us at the roofline, of which a hidden kernel is taken to reach 0.4.
    assert found.device_seconds == pytest.approx(0.5e-6 / 0.4, rel=1e-2)


def test_arithmetic_of_an_elementwise_operator():
    found = predict(KernelCall("elementwise", {}, flops=1e9, read_bytes=4e3), toy(**FITTED))
    assert found.seconds == pytest.approx(1e-3)
    assert found.bound == "compute"
    # What was fitted to a named operator holds its arithmetic.
    named = predict(KernelCall("gelu", {}, "int64", flops=1e9, read_bytes=4e3), toy(**FITTED))
    assert named.seconds == pytest.approx(4e3 / 0.25e9)


def test_operators_that_were_not_measured():
    known = predict(KernelCall("erf", {}, read_bytes=1e6), toy(**FITTED))
    assert known.seconds == pytest.approx(4e-3)
    assert (known.in_range, known.model) == (True, "streaming, elementwise")
    odd = predict(KernelCall("transpose", {}, read_bytes=1e6), toy(**FITTED))
    assert odd.seconds == pytest.approx(4e-3)
    assert not odd.in_range
    assert odd.low == pytest.approx(odd.seconds * 0.9**2)
    bare = predict(KernelCall("erf", {}, read_bytes=83e6), toy())
    assert bare.seconds == pytest.approx(0.1 + 15e-6)
    assert (bare.in_range, bare.model) == (False, "streaming, never measured")


def test_a_cpu_without_figures_has_the_roofline():
    found = predict(KernelCall("add", {}, read_bytes=1e6), toy("cpu"))
    assert (found.seconds, found.model) == (1e-3, "roofline")


SIZES = st.floats(1, 1e11)


@pytest.mark.parametrize("name", known_machines())
@given(op=st.sampled_from(sorted(STREAMING | BY_BYTES)), one=SIZES, other=SIZES)
def test_more_bytes_are_never_faster(name, op, one, other):
    machine = load_machine(name)
    less, more = sorted((one, other))
    first = predict(KernelCall(op, {}, read_bytes=less), machine)
    second = predict(KernelCall(op, {}, read_bytes=more), machine)
    assert first.seconds <= second.seconds * (1 + 1e-12)
    assert first.low <= first.seconds <= first.high


@given(
    op=st.sampled_from(["add", "erf", "transpose", "copy"]),
    moved=SIZES,
    factor=st.floats(1, 100),
    figures=st.booleans(),
)
def test_a_better_machine_is_never_slower(op, moved, factor, figures):
    machine = toy(**(FITTED if figures else {}))
    better = dataclasses.replace(
        machine,
        figures={
            name: Figure(figure.value * factor, "better")
            if "bandwidth" in name or "peak" in name
            else figure
            for name, figure in machine.figures.items()
        },
    )
    call = KernelCall(op, {}, flops=moved, read_bytes=moved)
    assert predict(call, better).seconds <= predict(call, machine).seconds * (1 + 1e-12)


def test_hits_in_a_cache():
    # Two bags of two lookups in two rows: 2 (1 - (1/2)^4) = 1.875 distinct rows, which all fit.
    assert hit_rate(2, 2, 2, 2) == pytest.approx(1 - 1.875 / 4)
    # One row fits: it misses once, and each of the other three lookups half the time.
    assert hit_rate(2, 2, 2, 1) == pytest.approx(1 - 2.5 / 4)
    assert hit_rate(5, 1, 2, 1) == pytest.approx(0.9)
    assert hit_rate(1, 10**9, 1, 0) == pytest.approx(0)


@given(b=st.integers(1, 4096), e=st.integers(1, 10**8), lookups=st.integers(1, 128))
def test_hit_rates_are_shares(b, e, lookups):
    small, large = (hit_rate(b, e, lookups, rows) for rows in (1000, 100_000))
    assert -1e-9 <= small <= large + 1e-9 <= 1 + 2e-9


def test_traffic_of_a_bag():
    # L = 10 indices: 40 bytes, 2 sectors; D = 5: 20 bytes, 1 sector; 10 rows of 32 bytes.
    assert bag_traffic(10, 20, 0.25, False) == (64 + 32 + 240, 96 + 80)
    # Backward: 8 * 10 * 5 = 400 bytes, 13 sectors.
    assert bag_traffic(10, 20, 0.0, True) == (64 + 32 + 416, 96)


def test_a_lookup_by_hand():
    sizes = {"B": 64, "T": 2, "E": 1, "L": 10, "D": 5}
    found = predict(KernelCall("embedding_bag", sizes), toy())
    # One row: the first of 640 lookups misses. 32 rows a block on 2 multiprocessors: 1 table.
    weights = 10 * 32
    memory, cache = 96 + weights / 640, 96 + weights * 639 / 640
    seconds = 1e-6 + 64 * 2 * (memory / 0.83e9 + cache / 4e9)
    assert found.seconds == pytest.approx(seconds)
    backward = predict(KernelCall("embedding_bag_backward", sizes), toy())
    assert backward.seconds > found.seconds
    gathered = predict(KernelCall("gather", {"E": 1, "L": 64, "D": 5}), toy())
    assert gathered.seconds == pytest.approx(
        1e-6 + 64 * ((32 + 32 + 32 / 64) / 0.83e9 + (96 + 32 * 63 / 64) / 4e9)
    )


@pytest.mark.parametrize(("dtype", "width"), [("uint8", 33), ("int8", 65), ("float16", 17)])
def test_the_last_sector_of_a_row_counts(dtype: str, width: int):
    sectors = -(-width * element_bytes(dtype) // 32)
    narrow, whole = (
        predict(KernelCall("gather", {"E": 10**6, "L": 10**5, "D": d}, kind), load_machine("v100"))
        for d, kind in ((width, dtype), (8 * sectors, "float32"))
    )
    assert narrow.seconds == pytest.approx(whole.seconds, rel=0.01)


def test_fewer_rows_in_use_are_never_slower():
    times = [
        predict(KernelCall("gather", {"E": 10**power, "L": 10**5, "D": 64}), load_machine("v100"))
        for power in range(1, 8)
    ]
    seconds = [found.seconds for found in times]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("op", ["embedding_bag", "gather", "gemm", "bmm", "conv2d", "softmax"])
def test_sizes_that_are_missing(op):
    with pytest.raises(PredictionError, match=rf"{op} 'layer 3': size .* is None; expected"):
        predict(KernelCall(op, {}, name="layer 3"), load_machine("v100"))
    assert op in MODELS


def test_sizes_that_are_not_positive():
    with pytest.raises(PredictionError, match="size 'M' is 0; expected a positive number"):
        predict(KernelCall("gemm", {"M": 0, "N": 1, "K": 1}), load_machine("v100"))

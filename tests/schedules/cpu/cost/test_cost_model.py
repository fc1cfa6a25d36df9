# SPDX-License-Identifier: Apache-2.0
"""The cost model: what must hold for all workloads, and its choices against recorded times."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from cpu.conv_cases import Case, build, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.cost.machine import load_machine
from schedules.cpu.conv2d.conv2d import CONV2D, Conv2DKnobs, conv2d_template
from schedules.cpu.conv2d.fused_conv2d import FusedConv2DKnobs, fused_conv2d_template, unsupported
from schedules.cpu.core.machine import CPUInfo, MeasuredCPU
from schedules.cpu.core.machine_costs import FAMILIES
from schedules.cpu.core.prefetch import lines_a_step
from schedules.cpu.cost import nest_cost
from schedules.cpu.cost.conv2d_knobs import conv2d_space, shares
from schedules.cpu.cost.cost_model import default_conv2d_knobs, default_fused_knobs, estimate
from schedules.cpu.cost.fused_conv2d_knobs import check_knobs, fused_conv2d_space
from schedules.cpu.cost.register_tile import most_pixels
from schedules.errors import OpError
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, from_json

CPUS = st.builds(
    CPUInfo,
    vector_bits=st.sampled_from([256, 512]),
    num_vector_registers=st.sampled_from([16, 32]),
    has_fma=st.just(True),
    num_cores=st.sampled_from([1, 2, 6]),
    l1d_bytes=st.sampled_from([32 << 10, 64 << 10]),
    l2_bytes=st.sampled_from([256 << 10, 2 << 20]),
    l3_bytes=st.sampled_from([8 << 20, 64 << 20]),
    family=st.sampled_from(["", *FAMILIES]),
)
CPU = CPUInfo(256, 16, True, 2, 32 << 10, 512 << 10, 32 << 20, "znver3")
SAME = (1, 1, 1, 1)


def dense(channels: int, outputs: int, size: int, kernel: int = 3, batch: int = 1) -> Case:
    layer = ConvLayer(channels, outputs, (kernel, kernel), padding=(kernel // 2,) * 4)
    return Case((layer,), batch=batch, height=size, width=size)


def separable(channels: int, outputs: int, size: int, kernel: int = 1) -> Case:
    first = ConvLayer(channels, channels, (3, 3), padding=SAME, groups=channels)
    second = ConvLayer(channels, outputs, (kernel, kernel), padding=(kernel // 2,) * 4)
    return Case((first, second), height=size, width=size)


@given(cases(pair=False), CPUS)
@settings(max_examples=settings.default.max_examples // 2)
def test_the_default_is_the_cheapest_legal_setting(case, cpu):
    default = default_conv2d_knobs(case.kernel, cpu)
    space = list(conv2d_space(case.kernel, cpu))
    costs = [estimate(case.kernel, knobs, cpu).cycles for knobs in space]
    assert default in space
    assert min(costs) > 0
    assert estimate(case.kernel, default, cpu).cycles == min(costs)
    assert conv2d_template(build(case), case.kernel, default) is not None


WIDE = CPUInfo(512, 32, True, 2, 32 << 10, 1 << 20, 32 << 20, "znver4")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("channels, outputs, size, kernel", [(128, 128, 28, 3), (960, 160, 7, 1)])
@pytest.mark.parametrize("cpu", [CPU, WIDE])
def test_the_search_of_a_layer_finds_the_first_cheapest(channels, outputs, size, kernel, cpu):
    layer = dense(channels, outputs, size, kernel).kernel
    lanes = f"NCHW{cpu.lanes('float32')}c"
    layer = replace(layer, data_layout=lanes, out_layout=lanes)
    space = list(conv2d_space(layer, cpu))
    costs = [estimate(layer, knobs, cpu).cycles for knobs in space]
    assert default_conv2d_knobs(layer, cpu) == space[costs.index(min(costs))]


def test_the_search_of_a_pair_finds_the_cheapest():
    pair = separable(64, 128, 14).kernel
    costs = {knobs: estimate(pair, knobs, CPU).cycles for knobs in fused_conv2d_space(pair, CPU)}
    assert len(costs) > 100
    assert costs[default_fused_knobs(pair, CPU)] == pytest.approx(min(costs.values()), rel=1e-12)


@given(cases(pair=True), CPUS)
@settings(max_examples=settings.default.max_examples // 3)
def test_the_default_of_a_pair_is_the_cheapest_legal_setting(case, cpu):
    if unsupported(case.layers[1]) is not None:
        return
    default = default_fused_knobs(case.kernel, cpu)
    space = list(fused_conv2d_space(case.kernel, cpu))
    costs = [estimate(case.kernel, knobs, cpu).cycles for knobs in space]
    assert default in space
    assert min(costs) > 0
    assert estimate(case.kernel, default, cpu).cycles == pytest.approx(min(costs), rel=1e-9)
    assert fused_conv2d_template(build(case), case.kernel, default) is not None


@given(st.data(), cases(pair=False), CPUS)
@settings(max_examples=settings.default.max_examples // 3)
def test_every_setting_of_the_space_is_legal(data, case, cpu):
    knobs = data.draw(st.sampled_from(list(conv2d_space(case.kernel, cpu))))
    conv2d_template(build(case), case.kernel, knobs)
    layer = case.layers[0]
    if not layer.is_depthwise:
        assert knobs.pixels * knobs.blocks + knobs.blocks + 1 <= cpu.num_vector_registers


@pytest.mark.parametrize("plain", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("size", [4, 7, 56])
def test_settings_of_plain_pairs_are_legal(plain, size):
    data, out = plain
    kernel = replace(separable(20, 40, size).kernel, plain_data=data, plain_out=out)
    for knobs in fused_conv2d_space(kernel, CPU):
        check_knobs(kernel, knobs)
    assert default_fused_knobs(kernel, CPU) in set(fused_conv2d_space(kernel, CPU))


SINGLE = Conv2DKnobs(6, 2, 2, 1, unit_group=28, blocks_inside=False, prefetch=True)
PAIR = FusedConv2DKnobs(7, 1, 6, 2, h_t=2, h=4, prefetch=True)
KERNELS = [
    (dense(64, 64, 56).kernel, SINGLE),
    (dense(512, 512, 7).kernel, replace(SINGLE, unit_group=4)),
    (dense(16, 96, 112, kernel=1).kernel, replace(SINGLE, unit_group=2000)),
    (separable(64, 128, 56).kernel, PAIR),
    (separable(64, 64, 28, kernel=3).kernel, PAIR),
]


@pytest.mark.parametrize("level", [nest_cost.L2, nest_cost.L3, nest_cost.MEMORY])
@pytest.mark.parametrize(("kernel", "knobs"), KERNELS)
def test_more_bandwidth_is_never_slower(kernel, knobs, level, monkeypatch):
    before = estimate(kernel, knobs, CPU).cycles
    rates = list(CPU.costs.bytes_per_cycle)
    rates[level] *= 2
    faster = replace(CPU.costs, bytes_per_cycle=tuple(rates))
    monkeypatch.setitem(FAMILIES, CPU.family, faster)
    assert estimate(kernel, knobs, CPU).cycles <= before


@pytest.mark.parametrize("field", ["l1d_bytes", "l2_bytes", "l3_bytes"])
@pytest.mark.parametrize(("kernel", "knobs"), KERNELS)
def test_larger_caches_are_never_slower(kernel, knobs, field):
    costs = [
        estimate(kernel, knobs, replace(CPU, **{field: size << 10})).cycles
        for size in (16, 64, 256, 1024, 65536)
    ]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(("kernel", "knobs"), KERNELS)
def test_more_work_costs_more(kernel, knobs):
    costs = [estimate(replace(kernel, batch=batch), knobs, CPU).cycles for batch in (1, 2, 4)]
    assert all(one < other for one, other in pairwise(costs))


def test_recomputed_rows_are_never_cheaper():
    layer = ConvLayer(64, 64, (3, 3), padding=SAME)
    kernel = Case((layer, layer), height=56, width=56).kernel
    knobs = replace(PAIR, pixels1=6, blocks1=2, h_t=1)
    costs = [
        estimate(kernel, replace(knobs, h=h), CPU).nests.multiply_adds for h in (1, 2, 4, 28, 56)
    ]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] == pytest.approx(2 * costs[-1], rel=0.05)  # three rows of layer one for each


def test_a_piece_of_the_channels_computes_all_of_layer_one():
    layer = ConvLayer(64, 64, (3, 3), padding=SAME)
    kernel = Case((layer, layer), height=56, width=56).kernel
    knobs = replace(PAIR, pixels1=6, blocks1=2, h_t=1, h=56)
    half, whole = (
        estimate(kernel, replace(knobs, oc_t=pieces), CPU).nests.multiply_adds for pieces in (2, 1)
    )
    assert half == pytest.approx(0.75 * whole, rel=0.02)


def test_uneven_shares_cost_what_the_largest_costs():
    seven = estimate(dense(64, 64, 7).kernel, replace(SINGLE, unit_group=4), CPU)
    eight = estimate(dense(64, 64, 8).kernel, replace(SINGLE, unit_group=4), CPU)
    assert seven.nests.starts == eight.nests.starts
    one_core = replace(CPU, num_cores=1)
    alone = estimate(dense(64, 64, 7).kernel, replace(SINGLE, unit_chunks=1), one_core)
    assert seven.cycles > 0.5 * alone.cycles


MANY_CORES = (2, 3, 4, 7, 8, 13, 16, 31, 61, 64, 128, 192)
FAR = (
    dense(512, 512, 7),
    dense(2048, 512, 7, kernel=1),
    dense(512, 2048, 7, kernel=1),
    dense(24, 512, 3, batch=2),
    dense(128, 256, 10, batch=3),
    Case((ConvLayer(1024, 1024, (3, 3), padding=SAME, groups=1024),), batch=3, height=10, width=10),
    separable(960, 24, 7),
    separable(256, 96, 28),
)
PLAIN = dense(3, 96, 56)


def assert_idle_cores_cost_little(kernel: Conv2DKernel, cpu: CPUInfo, measured: bool) -> None:
    """A core more is an offer: what fewer compute in some time, more compute in about the same."""
    choose = default_conv2d_knobs if len(kernel.layers) == 1 else default_fused_knobs
    least = float("inf")
    for count in MANY_CORES:
        some = replace(cpu, num_cores=count)
        if measured:
            some = MeasuredCPU.of(some, load_machine(cpu.family))
        cycles = estimate(kernel, choose(kernel, some), some).cycles
        assert cycles <= 1.1 * least + some.costs.fork, (count, cycles, least)
        least = min(least, cycles)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("case", FAR)
def test_many_cores_take_hardly_longer_than_few(case, measured):
    kernel = replace(case.kernel, data_layout="NCHW16c", out_layout="NCHW16c")
    assert_idle_cores_cost_little(kernel, replace(WIDE, family="znver5"), measured)


def test_many_cores_share_the_rows_of_plain_data():
    kernel = replace(PLAIN.kernel, data_layout="NCHW", out_layout="NCHW16c")
    assert_idle_cores_cost_little(kernel, WIDE, measured=False)


@given(st.data(), cases(pair=False), CPUS)
@settings(max_examples=settings.default.max_examples // 4)
def test_any_number_of_cores_takes_hardly_longer_than_one(data, case, cpu):
    few, many = sorted(data.draw(st.sampled_from(MANY_CORES)) for _ in range(2))
    cycles = []
    for count in (few, many):
        some = replace(cpu, num_cores=count)
        cycles.append(estimate(case.kernel, default_conv2d_knobs(case.kernel, some), some).cycles)
    assert cycles[1] <= 1.1 * cycles[0] + cpu.costs.fork


@pytest.mark.parametrize("level", [nest_cost.L3, nest_cost.MEMORY])
def test_cores_that_read_the_same_weights_share_what_the_memory_delivers(level):
    many = replace(CPU, num_cores=64)
    assert nest_cost.bandwidth(level, many, 1) == nest_cost.bandwidth(level, CPU, 2)
    apart, own = nest_cost.bandwidth(level, many, 64), CPU.costs.bytes_per_cycle[level]
    limit = CPU.costs.memory_cores / 64 if level == nest_cost.MEMORY else 1.0
    assert apart == pytest.approx(limit * own)


@given(st.integers(1, 9), st.integers(1, 200), st.integers(1, 60), st.integers(1, 60))
def test_shares_are_pieces_that_a_layer_has(batch, cores, pixels, channels):
    found = shares(batch, cores, (pixels, channels))
    assert found[0] == (1, 1) and len(set(found)) == len(found)
    assert all(one <= pixels and other <= channels for one, other in found)
    assert all(one * other <= cores for one, other in found)
    if batch == 1:  # no piece more of either fits the cores
        whole = [(one, cores // one) for one in range(1, cores + 1) if cores % one == 0]
        assert {pair for pair in whole if pair[0] <= pixels and pair[1] <= channels} <= set(found)
        assert max(one * other for one, other in found) > min(cores, pixels * channels) / 2


# Times of bfloat16 over those of float32, measured on an Emerald Rapids that hides vdpbf16ps.
HALVES = {
    (64, 256, 56, 1): 1.24,
    (256, 64, 56, 1): 1.26,
    (64, 64, 56, 3): 1.13,
    (128, 128, 28, 3): 1.11,
    (256, 256, 14, 3): 1.13,
    (1024, 256, 14, 1): 1.13,
    (256, 1024, 14, 1): 1.15,
    (512, 512, 7, 3): 1.26,
    (512, 2048, 7, 1): 1.09,
    (96, 24, 56, 1): 1.32,
}


@pytest.mark.parametrize("sizes", HALVES)
def test_bfloat16_takes_longer_than_float32_where_floats_are_multiplied(sizes):
    floats = replace(dense(*sizes).kernel, data_layout="NCHW16c", out_layout="NCHW16c")
    halves = {"dtype": "bfloat16", "sums": "float32", "word": 2, "out_dtype": "bfloat16"}
    words = replace(floats, **halves)

    def ratio(cpu: CPUInfo) -> float:
        one, other = (
            CONV2D.cycles(kernel, CONV2D.default(kernel, cpu), cpu) for kernel in (words, floats)
        )
        return one / other

    hidden = CPUInfo(512, 32, True, 2, 48 << 10, 2 << 20, 260 << 20, "emeraldrapids")
    assert ratio(hidden) == pytest.approx(HALVES[sizes], rel=0.12)
    assert 0.45 < ratio(replace(WIDE, half_dots="vdpbf16ps")) < 0.75


def test_small_kernels_stay_on_one_thread():
    knobs = default_conv2d_knobs(dense(8, 8, 4, kernel=1).kernel, CPU)
    assert (knobs.unit_chunks, knobs.block_chunks) == (1, 1)
    large = default_conv2d_knobs(dense(64, 64, 56).kernel, CPU)
    assert large.unit_chunks * large.block_chunks == 2
    many = default_conv2d_knobs(dense(64, 64, 56, batch=4).kernel, CPU)
    assert (many.unit_chunks, many.block_chunks) == (1, 1)


@pytest.mark.parametrize("size", [14, 28, 56, 112])
@pytest.mark.parametrize("stride", [1, 2])
def test_data_and_intermediate_of_a_pair_share_the_l2(size, stride):
    first = ConvLayer(128, 128, (3, 3), strides=(stride, stride), padding=SAME, groups=128)
    kernel = Case((first, ConvLayer(128, 128, (1, 1))), height=size, width=size).kernel
    rows = default_fused_knobs(kernel, CPU).h
    read = (rows - 1) * stride + 3
    assert 4 * 128 * size * (rows // stride + read) <= CPU.l2_bytes


def test_short_sums_that_are_not_clipped_have_no_more_accumulators_than_fill_the_units():
    def accumulators(activation: str) -> int:
        layer = ConvLayer(16, 96, (1, 1), activation=Activation(activation))
        knobs = default_conv2d_knobs(Case((layer,), height=112, width=112).kernel, CPU)
        return knobs.pixels * knobs.blocks

    assert accumulators("relu") == accumulators("none") == 8
    assert accumulators("relu6") > 8


def test_pieces_of_a_row_are_refused():
    with pytest.raises(OpError, match="w_o is 2; expected 1, because the cost model knows whole"):
        estimate(separable(64, 64, 28).kernel, replace(PAIR, w_o=2), CPU)


RESULTS = Path(__file__).parents[4] / "examples/benchmarks/results"
RECORDED = {
    f"{path.parent.name}: {name}": result
    for path in sorted(RESULTS.glob("*/knobs.json"))
    for name, result in json.loads(path.read_text())["results"].items()
}
SAMPLED = ("znver4", "znver5")  # whose spaces are too large to be measured whole
# Zen 5 was recorded when every tile asked for one line of weights in each step. All settings of
# the first now ask for more; of the second, none that does not came into the final rounds.
# On Zen 4 the first pair of MobileNet-V1 has tiles of one pixel and four vectors of weights, which
# another cost of weights would change; networks gain nothing measurable by it.
OTHERWISE = ("znver5: mv2_6_2, 2", "znver5: 1x1 160-960 @7, 2", "znver4: mv1_1, 2")


def settings_of(result: dict) -> tuple[Conv2DKernel, CPUInfo, list, list[float]]:
    """Kernel, CPU, settings and their times; without those whose code is no longer the same."""
    kernel, cpu = from_json(json.dumps(result["kernel"])), CPUInfo(**result["cpu"])
    knobs_type = Conv2DKnobs if len(kernel.layers) == 1 else FusedConv2DKnobs
    rows = [(knobs_type(*map(_tuple, knobs)), seconds) for *knobs, seconds, _ in result["settings"]]
    layer = kernel.layers[-1]
    if not layer.is_depthwise:
        rows = [row for row in rows if is_held(row[0], cpu)]
    if cpu.family == "znver5":
        rows = [row for row in rows if asks_for_one_line(kernel, row[0], cpu)]
    return kernel, cpu, [knobs for knobs, _ in rows], [seconds for _, seconds in rows]


def is_held(knobs: Conv2DKnobs | FusedConv2DKnobs, cpu: CPUInfo) -> bool:
    if isinstance(knobs, Conv2DKnobs):
        return knobs.pixels <= most_pixels(cpu, knobs.blocks)
    return knobs.pixels2 <= most_pixels(cpu, knobs.blocks2)


def asks_for_one_line(
    kernel: Conv2DKernel, knobs: Conv2DKnobs | FusedConv2DKnobs, cpu: CPUInfo
) -> bool:
    with mock.patch.object(nest_cost, "lines_a_step", wraps=lines_a_step) as asked:
        estimate(kernel, knobs, cpu)
    return all(lines_a_step(*call.args) == 1 for call in asked.call_args_list)


def recorded_loss(name: str) -> float:
    """Relative loss of today's choice against the best recorded setting."""
    kernel, cpu, settings, times = settings_of(RECORDED[name])
    if name.startswith(SAMPLED):
        estimates = [estimate(kernel, knobs, cpu).cycles for knobs in settings]
        chosen = settings[estimates.index(min(estimates))]
    else:
        choose = default_conv2d_knobs if len(kernel.layers) == 1 else default_fused_knobs
        chosen = choose(kernel, cpu)
        assert chosen in settings, f"{name}: {chosen} was not measured; run knobs.py again"
    return times[settings.index(chosen)] / min(times) - 1


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("family", "median", "worst"),
    [("znver3", 0.05, 0.15), ("znver4", 0.05, 0.15), ("znver5", 0.03, 0.06)],
)
def test_defaults_are_near_the_best_of_what_was_measured(family, median, worst):
    names = [name for name in RECORDED if name.startswith(family) and name not in OTHERWISE]
    losses = {name: recorded_loss(name) for name in names}
    assert len({name.rpartition(",")[0] for name in losses}) >= 12
    assert statistics.median(losses.values()) <= median, losses
    assert max(losses.values()) <= worst, losses


@pytest.mark.slow
def test_estimates_rank_settings_as_the_clock_does():
    correlations = []
    for result in RECORDED.values():
        kernel, cpu, settings, times = settings_of(result)
        guesses = [estimate(kernel, knobs, cpu).seconds for knobs in settings]
        if len(times) > 10:
            ranks = [np.argsort(np.argsort(values)) for values in (times, guesses)]
            correlations.append(np.corrcoef(*ranks)[0, 1])
    assert statistics.median(correlations) > 0.6


def _tuple(knob: object) -> object:
    return tuple(knob) if isinstance(knob, list) else knob

# SPDX-License-Identifier: Apache-2.0
"""Templates: the default comes first, every setting is legal, and a change raises the version."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from cpu.conv2d.test_tile_pair import build as build_pair
from cpu.conv2d.test_tile_pair import pair
from cpu.quantized_cases import QuantizedCase
from cpu.rule_cases import HOST
from tvm import s_tir, te, tirx, topi
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from schedules import attributes, cpu, gpu
from schedules.compute.coalesced_reduce import coalesced_reduce
from schedules.compute.conv2d import conv2d, fused_conv2d
from schedules.compute.norms import channel_norm
from schedules.compute.pack import pack, unpack
from schedules.compute.winograd_conv2d import winograd_conv2d
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.matmul.dense import DenseWorkload
from schedules.errors import OpError
from schedules.gpu.core.machine import GPUInfo
from schedules.tuning.tunable import decisions_of, read_setting, sample_knobs, without_decisions
from schedules.tuning.tunable_rule import AnyTemplate, TunableRule
from schedules.workload.conv2d import Activation, Conv2DKernel, ConvLayer, to_json
from schedules.workload.reduce import ReduceWorkload
from tests.targets import compile_unchecked

HASHES = Path(__file__).with_name("template_hashes.json")
# Fixed, so that hashes do not depend on where the tests run.
TARGET = Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 2})
TILES = Target({"kind": "llvm", "mcpu": "sapphirerapids", "num-cores": 2})
CUDA = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
CPU = CPUInfo(512, 32, True, 2, 32 << 10, 1 << 20, 32 << 20, "znver4")
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm")
TEMPLATES: dict[str, AnyTemplate] = {**cpu.TEMPLATES, **gpu.TEMPLATES}
SAME = (1, 1, 1, 1)
RELU = Activation("relu")
DENSE = ConvLayer(32, 64, (3, 3), padding=SAME, activation=RELU)
DEPTHWISE = ConvLayer(32, 32, (3, 3), padding=SAME, groups=32, activation=RELU)
POINTWISE = ConvLayer(32, 64, (1, 1), activation=RELU)
LARGE = ConvLayer(128, 256, (3, 3), padding=SAME, activation=RELU)


def kernel(*layers: ConvLayer, size: int = 28, lanes: int = 16, **options: object) -> Conv2DKernel:
    layouts = {"data_layout": f"NCHW{lanes}c", "out_layout": f"NCHW{lanes}c"}
    return Conv2DKernel(layers, 1, size, size, **layouts, **options)


WORKLOADS: dict[str, Any] = {
    "cpu.conv2d": kernel(DENSE),
    "cpu.tile_conv2d": QuantizedCase(DENSE, 1, 28, 28, 64).kernel,
    "cpu.tile_pair": pair(DENSE, 64, "uint8", (1, 28, 28)),
    "cpu.fused_conv2d": kernel(DEPTHWISE, POINTWISE),
    "cpu.planar_conv2d": kernel(DEPTHWISE, POINTWISE, plain_data=True, plain_out=True),
    "cpu.winograd_conv2d": kernel(DENSE, winograd=4),
    "cpu.dense": DenseWorkload("columns", 1, 48, 96, 64, 4),
    "cpu.reduce_rows": ((48, 3, 1000), [1, 2]),
    "cpu.reduce_columns": ((300, 131), [0]),
    "cpu.reduce_stream": ((5000, 3), [0]),
    "cpu.row_chain": (64, 1000),
    "cpu.pooling": (2, 5, 29, 29, 16),
    "cpu.channel_norm": (1, 3, 14, 14, 16),
    "gpu.conv2d": kernel(DENSE, lanes=4),
    "gpu.depthwise_conv2d": kernel(DEPTHWISE, lanes=4),
    "gpu.fused_conv2d": kernel(DEPTHWISE, POINTWISE, lanes=4),
    "gpu.conv2d_warpgroups": kernel(LARGE, size=56, lanes=8, dtype="float16"),
    "gpu.matmul_tiles": ((200, 128), (128, 96)),
    "gpu.matmul_rows": ((4, 512), (512, 96)),
    "gpu.matmul_warpgroups": ((1000, 1024), (1024, 2048)),
    "gpu.reduce": ((5, 3, 20_000), [1, 2]),
    "gpu.reduce_chain": (64, 1000),
}
"""Workloads, or shapes of functions whose workload the rule reads."""


def shaped(name: str, given: tuple) -> tirx.PrimFunc:
    """The function of a template whose workload is read from it."""
    if name.startswith("gpu.matmul"):
        extents = [[tirx.const(extent, "int64") for extent in shape] for shape in given]
        dtype = "float16" if name == "gpu.matmul_warpgroups" else "float32"
        left, right = (te.placeholder(shape, dtype, name="x") for shape in extents)
        return te.create_prim_func([left, right, topi.matmul(left, right)])
    if name == "gpu.reduce_chain":
        return te.create_prim_func(softmax(given))
    if name.startswith(("cpu.reduce", "gpu.reduce")):
        shape, axes = given
        data = te.placeholder(shape, name="data")
        workload = ReduceWorkload.create("sum", axes, len(shape), "float32")
        return te.create_prim_func([data, coalesced_reduce(data, workload)])
    data = te.placeholder(given, name="data")
    if name == "cpu.row_chain":
        return te.create_prim_func([data, topi.nn.softmax(data)])
    if name == "cpu.pooling":
        window = ((3, 3), (2, 2), (1, 1), (1, 1, 1, 1), "max")
        return te.create_prim_func([data, topi.nn.pool2d(data, *window, layout="NCHW16c")])
    gamma, beta = (te.placeholder((given[1], given[4]), name=name) for name in ("g", "b"))
    func = te.create_prim_func([data, gamma, beta, channel_norm(data, gamma, beta, 40, 1e-5)])
    attrs = {"op": "channel_norm", "channels": 40, "epsilon": 1e-5}
    return func.with_attrs({f"tvm_fusion.{key}": value for key, value in attrs.items()})


def softmax(shape: tuple[int, int]) -> list[te.Tensor]:
    """Data and softmax of its rows, by two coalesced reductions."""

    def reduced(operator: str, source: te.Tensor) -> te.Tensor:
        workload = ReduceWorkload.create(operator, [1], 2, "float32", keepdims=True)
        return coalesced_reduce(source, workload)

    data = te.placeholder(shape, name="data")
    largest = reduced("max", data)
    terms = te.compute(shape, lambda i, j: te.exp(data[i, j] - largest[i, 0]), "terms")
    sums = reduced("sum", terms)
    return [data, te.compute(shape, lambda i, j: terms[i, j] / sums[i, 0], "softmax")]


@functools.cache
def workload_of(name: str) -> Any:
    """Workload of a template."""
    given = WORKLOADS[name]
    if not isinstance(given, tuple):
        return given
    func = shaped(name, given)
    return rule_of(name, func).workload(func, target_of(name))


def target_of(name: str) -> Target:
    """The target of a template in these tests."""
    if name.startswith("cpu."):
        return TILES if "tile" in name else TARGET
    return HOPPER if "warpgroup" in name else CUDA


def machine_of(name: str) -> CPUInfo | GPUInfo:
    """Its machine."""
    return CPU if name.startswith("cpu.") else GPUInfo.from_target(target_of(name))


@functools.cache
def function(name: str) -> tirx.PrimFunc:
    """The function of a template's workload as legalization makes it."""
    workload = WORKLOADS[name]
    return shaped(name, workload) if isinstance(workload, tuple) else built(workload)


def built(workload: Conv2DKernel | DenseWorkload) -> tirx.PrimFunc:
    """The function of a workload."""
    if isinstance(workload, DenseWorkload):
        left = te.placeholder((workload.rows, workload.depth), name="left")
        right = te.placeholder((workload.depth, workload.columns), name="right")
        return te.create_prim_func([left, right, topi.matmul(left, right)])
    if workload.mid_layout is not None:
        return build_pair(workload)
    if workload.is_quantized:
        return QuantizedCase(*workload.layers, 1, 28, 28, workload.lanes).build()
    size, lanes = workload.height, workload.lanes
    channels = workload.layers[0].in_channels
    shape = (1, channels // lanes, size, size, lanes)
    plain = workload.plain_data
    dtype = workload.dtype
    data = te.placeholder((1, channels, size, size) if plain else shape, dtype, "data")
    inputs = [data]
    for number, layer in enumerate(workload.layers):
        blocks = layer.out_channels // lanes
        weight: tuple[int, ...] = (blocks, channels // lanes, *layer.kernel, lanes, lanes)
        if layer.is_depthwise:
            weight = (blocks, *layer.kernel, lanes)
        if workload.winograd:
            weight = ((workload.winograd + 2) ** 2, blocks, channels // lanes, lanes, lanes)
        inputs.append(te.placeholder(weight, dtype, f"weight{number}"))
        inputs.append(te.placeholder((blocks, lanes), dtype, f"bias{number}"))
    source = [pack(data, lanes) if plain else data, *inputs[1:]]
    layouts = workload.data_layout, workload.out_layout
    if workload.winograd:
        output = winograd_conv2d(*source, None, workload.layers[0], workload.winograd)
    elif len(workload.layers) == 1:
        output = conv2d(*source, None, *workload.layers, *layouts)
    else:
        output = fused_conv2d(*source, None, *workload.layers, *layouts)
    output = unpack(output, workload.layers[-1].out_channels) if workload.plain_out else output
    # Indices as legalization has them; those of float32 may have any type.
    func = te.create_prim_func([*inputs, output], None if dtype == "float32" else "int64")
    return func.with_attr("tvm_fusion.workload", to_json(workload))


def fingerprint(template: AnyTemplate, workload: Any, func: tirx.PrimFunc) -> str:
    """Hash of the space, and of the code of some of its settings."""
    space = sorted(template.settings(workload, machine_of(template.name)), key=str)
    step = max(1, len(space) // 4)
    texts = [
        template.write(func, workload, knobs, target_of(template.name)).mod.script(show_meta=False)
        for knobs in space[::step]
    ]
    names = [json.dumps(asdict(knobs), sort_keys=True) for knobs in space]
    return hashlib.sha256("\n".join([*names, *texts]).encode()).hexdigest()[:16]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_changed_template_has_another_version(name: str) -> None:
    """If this fails, raise the template's ``version`` and write the new pair to the file."""
    template = TEMPLATES[name]
    code = fingerprint(template, workload_of(name), function(name))
    now = {"version": template.version, "hash": code}
    assert json.loads(HASHES.read_text())[name] == now


def test_a_change_changes_the_hash() -> None:
    template, workload = TEMPLATES["cpu.conv2d"], WORKLOADS["cpu.conv2d"]
    other = replace(workload, layers=(replace(DENSE, activation=Activation("relu6")),))
    prints = [fingerprint(template, one, built(one)) for one in (workload, other)]
    assert prints[0] != prints[1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_default_comes_first_and_each_setting_once(name: str) -> None:
    template, workload = TEMPLATES[name], workload_of(name)
    space = template.space(workload, machine_of(name))
    assert space[0] == template.default(workload, machine_of(name))
    assert len(set(space)) == len(space) > 15
    assert all(template.contains(workload, knobs, machine_of(name)) for knobs in space[1::7])
    texts = [json.loads(json.dumps(asdict(knobs))) for knobs in space[::7]]
    assert [template.read_knobs(text) for text in texts] == space[::7]


@pytest.mark.parametrize("name", TEMPLATES)
def test_defaults_are_members_of_the_space(name: str) -> None:
    template, workload, machine = TEMPLATES[name], workload_of(name), machine_of(name)
    assert template.contains(workload, template.default(workload, machine), machine)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", TEMPLATES)
def test_settings_drawn_from_the_space_can_be_written(name: str) -> None:
    template, workload = TEMPLATES[name], workload_of(name)
    space = template.space(workload, machine_of(name))
    func = function(name)
    for index in np.random.default_rng().choice(len(space), 4, replace=False):
        assert template.write(func, workload, space[index], target_of(name)) is not None


SHAPED = [n for n, given in WORKLOADS.items() if n < "gpu" and type(given) is tuple]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", SHAPED)
def test_settings_drawn_from_the_space_compute_the_same(name: str) -> None:
    """Reductions, beside TVM's own code for the function without a schedule."""
    func, host = function(name), HOST
    rule = rule_of(name, func)
    workload, template = rule.workload(func, host), TEMPLATES[name]
    space = template.space(workload, rule.machine(host))
    numbers = np.random.default_rng().choice(len(space), 6, replace=False)
    written = [template.write(func, workload, space[n], host).mod["main"] for n in numbers]
    named = {f"f{n}": f.with_attr("global_symbol", f"f{n}") for n, f in enumerate([func, *written])}
    library = compile_unchecked(tvm.IRModule(named), host)
    arrays = [np.random.rand(*map(int, param.shape)).astype("float32") for param in func.params]
    found = []
    for key in named:
        tensors = [tvm.runtime.tensor(array) for array in arrays]
        tensors[-1].copyfrom(np.full_like(arrays[-1], np.nan))
        library[key](*tensors)
        found.append(tensors[-1].numpy())
    for number, other in zip(numbers, found[1:], strict=True):
        text = str(space[number])
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-6, err_msg=text)


@pytest.mark.slow
def test_the_wide_space_of_pairs_has_pieces_orders_and_places() -> None:
    template, workload = TEMPLATES["cpu.fused_conv2d"], kernel(DEPTHWISE, POINTWISE, size=7)
    narrow, wide = (template.space(workload, CPU, wide=wide) for wide in (False, True))
    assert wide[0] == narrow[0]
    assert set(narrow) < set(wide)
    assert len(wide) > 20 * len(narrow)
    for knob in ("w_o", "ic_o", "order", "compute_at", "w_t", "prefetch"):
        assert len({getattr(knobs, knob) for knobs in narrow}) == 1
        assert len({getattr(knobs, knob) for knobs in wide}) > 1
    func, names = built(workload), template.features(workload, wide[0], CPU).keys()
    draw = np.random.default_rng().choice
    rare = [[one for one in wide if one.w_t > 1], [one for one in wide if not one.prefetch]]
    drawn = [some[number] for some in (wide, *rare) for number in draw(len(some), 8)]
    for knobs in drawn:
        assert template.contains(workload, knobs, CPU), knobs
        found = template.features(workload, knobs, CPU)
        assert found.keys() == names
        assert np.isfinite(list(found.values())).all()
        assert template.write(func, workload, knobs, TARGET) is not None
    assert not template.contains(workload, replace(wide[0], ic_o=3), CPU)
    same = replace(wide[0], order=("h_o", "ic_o", "w_o", "oc2"))  # loops that run once
    assert not template.contains(workload, same, CPU)
    shared = rare[0][0]
    for other in ({"w_t": 3}, {"w_t": 7}, {"prefetch": False}, {"w_o": 2}):
        assert not template.contains(workload, replace(shared, **other), CPU)


@pytest.mark.parametrize("layer", [DENSE, POINTWISE, DEPTHWISE])
@pytest.mark.parametrize("layout", ["NCHW16c", "NCHW"])
def test_a_space_of_convolutions_contains_its_settings_and_no_others(layer, layout) -> None:
    template, workload = TEMPLATES["cpu.conv2d"], replace(kernel(layer), data_layout=layout)
    space = set(template.settings(workload, CPU))
    assert space and all(template.contains(workload, knobs, CPU) for knobs in space)
    for knobs in list(space)[::5]:
        for name, value in asdict(knobs).items():
            for other in (not value,) if isinstance(value, bool) else (value - 1, 2 * value):
                changed = replace(knobs, **{name: other})
                assert template.contains(workload, changed, CPU) is (changed in space)


@pytest.mark.slow
def test_cores_share_the_only_row_of_an_image() -> None:
    template = TEMPLATES["cpu.fused_conv2d"]
    workload = replace(kernel(DEPTHWISE, POINTWISE), height=1, width=100)
    wide = template.space(workload, CPU, wide=True)
    assert {(knobs.h_t, knobs.w_t) for knobs in wide} == {(1, 1), (1, 2)}
    assert all(template.cycles(workload, knobs, CPU) > 0 for knobs in wide if knobs.w_t > 1)
    plain = replace(workload, height=7, plain_data=True, plain_out=True)
    assert {knobs.w_t for knobs in template.space(plain, CPU, wide=True)} == {1}


@pytest.mark.parametrize("name", TEMPLATES)
def test_features_are_numbers_under_the_same_names(name: str) -> None:
    template, workload = TEMPLATES[name], workload_of(name)
    rows = [
        template.features(workload, knobs, machine_of(name))
        for knobs in template.space(workload, machine_of(name))[::9]
    ]
    assert all(row.keys() == rows[0].keys() for row in rows)
    assert all(np.isfinite(list(row.values())).all() and row["cycles"] > 0 for row in rows)


def rule_of(name: str, func: tirx.PrimFunc) -> TunableRule:
    """The rule that takes the function of a template."""
    every = cpu.RULES if name.startswith("cpu.") else gpu.RULES
    rules = [rule for rule in every if isinstance(rule, TunableRule)]
    return next(rule for rule in rules if rule.workload(func, target_of(name)) is not None)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", TEMPLATES)
def test_closed_with_the_defaults_decisions_an_open_function_is_the_default(name: str) -> None:
    template, func = TEMPLATES[name], function(name)
    rule, target = rule_of(name, func), target_of(name)
    info, workload = rule.machine(target), rule.workload(func, target)
    space, default = template.space(workload, info), template.default(workload, info)
    opened = s_tir.Schedule(func)
    sample_knobs(opened, template, rule.workload_json(workload), space, default)
    assert not tvm_ffi.structural_equal(opened.mod["main"], func)
    again = s_tir.Schedule(func)
    Trace.apply_json_to_schedule(opened.trace.as_json(), again)
    wanted = template.write(func, workload, default, target).mod
    for one in (opened, again):
        closed = rule.apply(one.mod["main"], target, False)
        tvm.ir.assert_structural_equal(closed.mod, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_decisions_are_drawn_from_the_space(name: str) -> None:
    func = function(name)
    rule, target = rule_of(name, func), target_of(name)
    info, workload = rule.machine(target), rule.workload(func, target)
    templates = rule.templates(workload, info)
    drawn = set()
    for _ in range(4):
        opened = rule.apply(func, target, True)
        assert len(opened) == len(templates)
        for sch, template in zip(opened, templates, strict=True):
            drawn_func = sch.mod["main"]
            tvm.ir.assert_structural_equal(without_decisions(drawn_func), func)
            found, values = read_setting(decisions_of(drawn_func), templates)
            assert found is template
            assert template.contains(workload, template.read_knobs(values), info)
            drawn.add(json.dumps(values))
    assert len(drawn) > 1
    assert rule.apply(opened[0].mod["main"], target, False) is not None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cpu.reduce_rows", {"operator": "other"}),
        ("cpu.reduce_rows", {"dtype": "float128"}),
        ("cpu.reduce_columns", {"kinds": "PP"}),
        ("cpu.reduce_columns", {"extents": [300, 0]}),
        ("cpu.reduce_stream", {"extents": [300, None]}),
        ("cpu.reduce_stream", {"kinds": "PR"}),
        ("cpu.row_chain", {"stages": []}),
        ("cpu.row_chain", {"rows": [None]}),
        ("cpu.pooling", {"vector": 9}),
        ("cpu.pooling", {"extents": [0, 1]}),
        ("cpu.channel_norm", {"batch": None}),
    ],
)
def test_workloads_that_describe_nothing_are_refused(name: str, change: dict) -> None:
    values = json.loads(rule_of(name, function(name)).workload_json(workload_of(name)))
    template = TEMPLATES[name]
    assert template.read_workload(json.dumps(values)) == workload_of(name)
    with pytest.raises(ValueError, match="describes no "):
        template.read_workload(json.dumps(values | change))


def test_a_stream_needs_few_columns() -> None:
    loops = replace(workload_of("cpu.reduce_stream"), extents=(5000, 3000))
    with pytest.raises(OpError, match="is not a stream; expected reduced rows of a few columns"):
        TEMPLATES["cpu.reduce_stream"].default(loops, CPU)


def decide(sch: s_tir.Schedule, key: str, value: int) -> None:
    """Put another decision in the place of one."""
    root = sch.get_sblock("root")
    sch.unannotate(root, key)
    sch.annotate(root, key, value)


def test_decisions_that_are_not_in_the_space_are_refused() -> None:
    func = function("cpu.conv2d")
    sch = rule_of("cpu.conv2d", func).apply(func, TARGET, True)[0]
    decide(sch, f"{attributes.KNOB}pixels", 999)
    with pytest.raises(OpError, match="pixels=999.* is not in the space of conv 3x3 32->64"):
        cpu.Conv2D().apply(sch.mod["main"], TARGET, False)
    decide(sch, attributes.VERSION, 999)
    with pytest.raises(OpError, match="for version 999 of 'cpu.conv2d'; expected cpu.conv2d 1"):
        cpu.Conv2D().apply(sch.mod["main"], TARGET, False)
    assert cpu.Pack().apply(func, TARGET, True) is None

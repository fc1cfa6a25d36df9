# SPDX-License-Identifier: Apache-2.0
"""Templates of reductions: settings of their spaces compute what numpy does, and spill nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from chain_cases import CHAINS
from cluster_emulation import clusters, emulated
from cuda_text import cuda_source, ptxas
from group_cases import Group
from opencl import compile_opencl
from reduce.test_reduce_chains import check as check_chain
from reduce.test_reduce_chains import inputs_of, make
from reduce_cases import CUDA, check, numpy_dtype, random_data, reference
from reduction_graphs import data, legal, several, total
from tvm import relax, te, tirx
from tvm.target import Target

from relay_passes import ConfigureReductions
from schedules import attributes, gpu
from schedules.compute.coalesced_reduce import coalesced_reduce
from schedules.errors import OpError
from schedules.gpu.reduce.coalesced_reduce import CHAIN, SISTERS, CoalescedReduce, ReduceTemplate
from schedules.gpu.reduce.plan.config import ReduceConfig
from schedules.gpu.reduce.plan.configure import choose_config
from schedules.schedule_rule import schedule_function
from schedules.tuning.records import Key, Record, Records
from schedules.workload.reduce import ReduceWorkload

# Blocks as large as CUDA's: the settings are those of its spaces.
LARGE = Target(
    {"kind": "opencl", "max_num_threads": 1024, "max_shared_memory_per_block": 49152},
    host="llvm",
)
RULE = CoalescedReduce()
SEED = 20
SLOW = pytest.mark.slow

# Operator, type, shape, axes, finish: odd extents and unit axes of each form.
REDUCTIONS: list[tuple[str, str, tuple[int, ...], list[int], str]] = [
    ("sum", "float32", (300, 1003), [1], "auto"),
    ("sum", "float32", (3, 20_011), [1], "auto"),
    ("max", "float32", (7, 1, 515, 33), [0, 2], "auto"),
    ("sum", "int32", (3, 30_000), [1], "auto"),
    ("argmax", "float32", (5, 2048), [1], "auto"),
    ("argmin", "float16", (2048, 5), [0], "auto"),
    ("mean", "float16", (4, 257, 12), [1], "last_block"),
    ("min", "int8", (64, 40, 40), [1, 2], "auto"),
    ("prod", "float64", (11, 4096), [1], "auto"),
    ("sum_squares", "bfloat16", (9000, 8), [0], "auto"),
    ("or", "bool", (3, 5000), [1], "auto"),
    ("and", "bool", (5000, 3), [0], "one_block"),
    ("sum", "float32", (33, 4096), [0, 1], "atomic"),
    ("max", "uint8", (70_001,), [0], "auto"),
    ("sum", "int64", (40, 700), [0], "auto"),
]
ROWS: list[tuple[str, str, tuple[int, ...], int]] = [
    ("softmax", "float32", (35, 301), 1),
    ("softmax", "float32", (3, 8200), 1),
    ("layer_norm", "float32", (9, 768), 1),
    ("log_softmax", "float32", (3, 21, 40), 1),
    ("residual_layer_norm", "float32", (517, 64), 1),
    ("rms_norm", "bfloat16", (5, 1024), 1),
    ("masked_softmax", "float32", (2, 48, 36), 1),
    ("softmax", "float64", (5, 515), 1),
    ("p_norm", "float16", (7, 264), 1),
    ("variance", "float32", (2, 2048, 4), 1),
]
assert {name for name, *_ in ROWS} <= CHAINS.keys()


def reduction(
    operator: str, dtype: str, shape: tuple[int, ...], axes: list[int], finish: str
) -> tirx.PrimFunc:
    source = te.placeholder(shape, dtype, name="data")
    workload = ReduceWorkload.create(operator, axes, len(shape), dtype, finish=finish)
    return te.create_prim_func([source, coalesced_reduce(source, workload)])


def chain(
    name: str, dtype: str, shape: tuple[int, ...], axis: int, target: Target
) -> tirx.PrimFunc:
    """The function of a chain before its configuration is chosen."""
    return unconfigured(make(name, dtype, shape, axis, target))


def unconfigured(group: Group) -> tirx.PrimFunc:
    """The function of a group before its configuration is chosen."""
    func = group.plain.with_attr("global_symbol", "main")
    if group.config.finish == "last_block":
        func = tirx.PrimFunc(func.params[1:], func.body, func.ret_type, func.attrs)
    return func.without_attr(attributes.REDUCE_CONFIG)


def spaces(func: tirx.PrimFunc, target: Target) -> Iterator[tuple[ReduceTemplate, Any, list]]:
    """Templates of a function with its workload and their settings."""
    workload = RULE.workload(func, target)
    assert workload is not None
    machine = RULE.machine(target)
    for template in RULE.templates(workload, machine):
        yield template, workload, template.space(workload, machine)


def drawn(settings: list[ReduceConfig], count: int) -> list[ReduceConfig]:
    """The default and others, of every finish if there are so many."""
    generator = np.random.default_rng(SEED + count)
    order = [settings[n] for n in generator.permutation(len(settings))]
    firsts = {config.finish: config for config in order}
    return list(dict.fromkeys([settings[0], *firsts.values(), *order]))[: max(count, 2)]


def run(func: tirx.PrimFunc, inputs: list[np.ndarray], target: Target) -> list[np.ndarray]:
    """Outputs of a kernel, which are poisoned before; a workspace comes first."""
    kernels = compile_opencl(emulated(func), target)
    shapes = [tuple(map(int, param.shape)) for param in func.params]
    dtypes = [numpy_dtype(str(param.dtype)) for param in func.params]
    added = int(func.params[0].name == "workspace")
    workspace = [np.zeros(shape, "int32") for shape in shapes[:added]]
    first = added + len(inputs)
    outputs = [
        np.full(s, 77).astype(d) for s, d in zip(shapes[first:], dtypes[first:], strict=True)
    ]
    for _ in range(1 + added):  # the workspace is as it was after a call
        for output in outputs:
            output[...] = np.full(output.shape, 77).astype(output.dtype)
        kernels.run(*workspace, *inputs, *outputs)
    return outputs


def check_reductions(case: tuple, count: int) -> None:
    operator, dtype, shape, axes, _ = case
    func, generator = reduction(*case), np.random.default_rng()
    values = random_data(generator, operator, dtype, shape)
    wanted = reference(operator, values, axes)
    with clusters():
        written = [
            (config, template.write(func, workload, config, LARGE).mod["main"])
            for template, workload, settings in spaces(func, LARGE)
            for config in drawn(settings, count)
        ]
    for config, kernel in written:
        try:
            [got] = run(kernel, [values], LARGE)
            roundings = config.splits if config.finish == "atomic" else 1
            check(operator, got, values, wanted, roundings)
        except Exception as error:
            raise AssertionError(f"{config}: {error}") from error


def check_chains(case: tuple[str, str, tuple[int, ...], int], count: int) -> None:
    name, _, _, axis = case
    group = make(*case, LARGE)
    func, inputs = unconfigured(group), inputs_of(*case, np.random.default_rng())
    arguments = group.arguments(*inputs)
    given = arguments[: -len(group.outputs(arguments))]  # constants, too
    with clusters():
        written = [
            (config, template.write(func, workload, config, LARGE).mod["main"])
            for template, workload, settings in spaces(func, LARGE)
            for config in drawn(settings, count)
        ]
    for config, kernel in written:
        try:
            check_chain(name, axis, inputs, run(kernel, given, LARGE))
        except Exception as error:
            raise AssertionError(f"{config}: {error}") from error


def check_resources(func: tirx.PrimFunc, count: int) -> None:
    for template, workload, settings in spaces(func, CUDA):
        for config in drawn(settings, count):
            written = template.write(func, workload, config, CUDA).mod["main"]
            for kernel, used in ptxas(cuda_source(written)).items():
                # A division of float64 is a call, which may have a stack frame.
                assert (used.spill_stores, used.spill_loads) == (0, 0), (kernel, config)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", REDUCTIONS[:5])
def test_settings_agree_with_numpy(case: tuple) -> None:
    check_reductions(case, 2)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("case", ROWS[:3])
def test_settings_of_chains_agree_with_numpy(case: tuple) -> None:
    check_chains(case, 2)


@SLOW
@pytest.mark.parametrize("case", REDUCTIONS)
def test_many_settings_agree_with_numpy(case: tuple) -> None:
    check_reductions(case, 16)


@SLOW
@pytest.mark.parametrize("case", ROWS)
def test_many_settings_of_chains_agree_with_numpy(case: tuple) -> None:
    check_chains(case, 24)


@SLOW
@pytest.mark.parametrize("case", REDUCTIONS)
def test_settings_spill_nothing(case: tuple) -> None:
    check_resources(reduction(*case), 14)


@SLOW
@pytest.mark.parametrize("case", ROWS)
def test_settings_of_chains_spill_nothing(case: tuple) -> None:
    check_resources(chain(*case, CUDA), 20)


def online_sum() -> tirx.PrimFunc:
    """The logarithm of the sum of exponentials, which two stages or one compute."""

    def build(x: relax.Expr) -> relax.Expr:
        largest = relax.op.max(x, [1], keepdims=True)
        terms = relax.op.exp(relax.op.subtract(x, largest))
        return relax.op.log(relax.op.sum(terms, [1]))

    return unconfigured(Group(build, ("float32", (5, 6000))))


@pytest.mark.slow
def test_a_chain_that_can_be_one_stage_has_both_templates() -> None:
    func = online_sum()
    found = {template: settings for template, _, settings in spaces(func, LARGE)}
    assert found.keys() == {CHAIN, SISTERS}
    assert {config.is_online for config in found[SISTERS]} == {True}
    assert {config.is_online for config in found[CHAIN]} == {False}
    values = np.random.default_rng().standard_normal((5, 6000)).astype("float32")
    wanted = np.log(np.exp(values.astype("float64")).sum(1) / np.exp(values.max(1)))
    workload = RULE.workload(func, LARGE)
    for template, settings in found.items():
        for config in drawn(settings, 3):
            written = template.write(func, workload, config, LARGE).mod["main"]
            [got] = run(written, [values], LARGE)
            np.testing.assert_allclose(got, wanted, rtol=2e-5, err_msg=str(config))


@pytest.mark.slow
@pytest.mark.parametrize("target", [CUDA, LARGE])
def test_the_default_is_what_is_chosen_without_records(target: Target) -> None:
    functions = [reduction(*case) for case in REDUCTIONS]
    functions += [chain(*case, target) for case in ROWS[:5]] + [online_sum()]
    for func in functions:
        machine = RULE.machine(target)
        template, workload, settings = next(spaces(func, target))
        assert settings[0] == choose_config(workload, machine)
        key = RULE.key(workload, machine)
        assert template.read_workload(key.workload) == workload


def test_kernels_of_a_space_keep_the_limits_of_the_device() -> None:
    for func in (reduction(*REDUCTIONS[0]), chain(*ROWS[0], CUDA)):
        for target in (CUDA, Target({"kind": "opencl"}, host="llvm")):
            machine = RULE.machine(target)
            for _, workload, settings in spaces(func, target):
                for config in settings:
                    assert config.threads <= machine.max_threads
                    assert config.cluster <= machine.max_cluster
                    assert config.splits <= -(-int(workload.reduced) // config.stride)
                    assert config.form == workload.form


@pytest.mark.slow
@pytest.mark.parametrize("target", [CUDA, LARGE])
def test_a_space_contains_its_settings_and_no_others(target: Target) -> None:
    """Settings are changed at random; those that are listed, and no others, are contained."""
    generator, machine = np.random.default_rng(), RULE.machine(target)
    functions = [reduction(*REDUCTIONS[n]) for n in (1, 2, 3)] + [chain(*ROWS[0], target)]
    for func in [*functions, online_sum()]:
        for template, workload, settings in spaces(func, target):
            listed = set(settings)
            for number in generator.choice(len(settings), 60):
                config = settings[number]
                assert template.contains(workload, config, machine), config
                name = generator.choice(["lanes", "rows", "vector", "unroll", "splits", "kept"])
                value = int(generator.choice([0, 1, 2, 3, 8, 64, 4096]))
                other = replace(config, **{str(name): value})
                assert template.contains(workload, other, machine) == (other in listed), other
                finish = str(generator.choice(["one_block", "atomic", "last_block", "cluster"]))
                other = replace(config, finish=finish)
                assert template.contains(workload, other, machine) == (other in listed), other
                other = replace(config, is_online=not config.is_online)
                assert not template.contains(workload, other, machine), other


def test_floats_are_combined_in_a_fixed_order_unless_asked_otherwise() -> None:
    def finishes(case: tuple) -> set[str]:
        return {one.finish for _, _, settings in spaces(reduction(*case), CUDA) for one in settings}

    ordered = {"one_block", "cluster", "last_block"}
    assert finishes(("sum", "float32", (3, 30_000), [1], "auto")) == ordered
    assert finishes(("argmax", "int32", (3, 30_000), [1], "auto")) == ordered
    assert finishes(("sum", "int32", (3, 30_000), [1], "auto")) == ordered | {"atomic"}
    assert finishes(("sum", "float32", (3, 30_000), [1], "atomic")) == {"one_block", "atomic"}
    assert finishes(("sum", "int32", (3, 30_000), [1], "one_block")) == {"one_block", "cluster"}
    assert finishes(("max", "int8", (3, 999), [1], "last_block")) == {"one_block", "last_block"}


def record_of(func: tirx.PrimFunc, config: ReduceConfig, target: Target, **changed) -> Record:
    workload = RULE.workload(func, target)
    key = Key(**{**RULE.key(workload, RULE.machine(target))._asdict(), **changed})
    return Record.of_key(key, SISTERS, config, (2e-5, 1e-5), trials=8)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("finish", ["one_block", "cluster", "last_block"])
def test_the_pass_follows_records(finish: str) -> None:
    mod = _module()
    [(_, func)] = _kernels(mod)
    _, _, settings = next(spaces(func, CUDA))
    config = next(one for one in settings[1:] if one.finish == finish)
    records = Records([("mine.jsonl", record_of(func, config, CUDA))])
    done = ConfigureReductions(CUDA, records)(mod)
    [(_, configured)] = _kernels(done)
    assert ReduceConfig(**json.loads(str(configured.attrs[attributes.REDUCE_CONFIG]))) == config
    assert json.loads(str(configured.attrs[attributes.RECORD]))["source"] == "mine.jsonl"
    assert len(configured.params) == len(func.params) + (finish == "last_block")
    written = schedule_function("main", configured, CUDA, gpu.RULES)
    wanted = SISTERS.write(func, RULE.workload(func, CUDA), config, CUDA).mod["main"]
    tvm.ir.assert_structural_equal(written.body, wanted.body, map_free_vars=True)


@pytest.mark.parametrize("changed", [{"cpu": "sm_80"}, {"threads": 114}, {"vector_bits": 32}])
def test_records_of_another_gpu_do_not_count(changed: dict) -> None:
    mod = _module()
    [(_, func)] = _kernels(mod)
    _, _, settings = next(spaces(func, CUDA))
    records = Records([("theirs.jsonl", record_of(func, settings[9], CUDA, **changed))])
    tvm.ir.assert_structural_equal(
        ConfigureReductions(CUDA, records)(mod), ConfigureReductions(CUDA)(mod)
    )


def test_a_rule_alone_takes_no_record_that_needs_a_workspace() -> None:
    func = reduction(*REDUCTIONS[1])
    _, _, settings = next(spaces(func, CUDA))
    config = next(one for one in settings[1:] if one.finish == "last_block")
    rule = CoalescedReduce(Records([("", record_of(func, config, CUDA))]))
    tvm.ir.assert_structural_equal(
        rule.apply(func, CUDA, False).mod, RULE.apply(func, CUDA, False).mod
    )


def _module() -> tvm.IRModule:
    transform = relax.transform
    passes = [transform.FuseOps(), transform.FuseTIR(), transform.DeadCodeElimination()]
    built = several(lambda _, x: [total(x, [1])], data(3, 30_000))
    return tvm.transform.Sequential(passes)(legal(built))


def _kernels(mod: tvm.IRModule) -> list[tuple[Any, tirx.PrimFunc]]:
    return [pair for pair in mod.functions_items() if isinstance(pair[1], tirx.PrimFunc)]


@pytest.mark.parametrize(
    "change",
    [
        {"stages": []},
        {"itemsizes": []},
        {"itemsizes": [0]},
        {"row_inputs": ["x"]},
        {"row_outputs": [99]},
        {"late_outputs": [4], "one_stage": "itself"},
    ],
)
def test_workloads_of_strangers_are_refused(change: dict) -> None:
    func = reduction(*REDUCTIONS[0])
    workload = RULE.workload(func, CUDA)
    values = json.loads(RULE.workload_json(workload))
    assert SISTERS.read_workload(json.dumps(values)) == workload
    if change.get("one_stage"):
        change = change | {"one_stage": values | {"late_outputs": [4]}}
    with pytest.raises(ValueError, match="describes no group of reductions"):
        SISTERS.read_workload(json.dumps(values | change))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("workload", "operator"), "none"),
        (("workload", "dtype"), "float8"),
        (("workload", "finish"), "soon"),
        (("loops", "shape"), [300, 0]),
        (("loops", "axes"), [7]),
    ],
)
def test_reductions_of_strangers_are_refused(path: tuple[str, str], value: Any) -> None:
    values = json.loads(RULE.workload_json(RULE.workload(reduction(*REDUCTIONS[0]), CUDA)))
    values["stages"][0]["reductions"][0][path[0]][path[1]] = value
    with pytest.raises(ValueError, match="describes no group of reductions"):
        SISTERS.read_workload(json.dumps(values))


def test_functions_that_have_a_configuration_are_no_tasks() -> None:
    func = reduction(*REDUCTIONS[1])
    configured = RULE.configure(func, CUDA)
    assert RULE.workload(configured, CUDA) is None
    assert RULE.configure(configured, CUDA).same_as(configured)


def test_a_chain_that_cannot_be_one_stage_has_one_template() -> None:
    func = chain(*ROWS[0], CUDA)
    workload = RULE.workload(func, CUDA)
    assert RULE.templates(workload, RULE.machine(CUDA)) == (CHAIN,)
    with pytest.raises(OpError, match="the chain of reductions cannot be computed in one stage"):
        SISTERS.default(workload, RULE.machine(CUDA))

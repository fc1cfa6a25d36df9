# SPDX-License-Identifier: Apache-2.0
"""Networks over ranks: the bits of one rank, one file for all, refusals before anything is sent."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx_reference import assert_same, run_onnx
from rank_networks import Poisoned, network, two_results
from small_onnx import small_model
from tvm import relax

import tvm_fusion
from examples.onnx_builder import random_inputs
from examples.transformers import bert_base
from examples.unet import unet
from examples.zoo import ZOO
from relay_passes.core.expressions import op_name
from schedules.distribute.cost import Network, Processor
from tvm_fusion import distributed
from tvm_fusion.compiler import pipeline
from tvm_fusion.distributed.world.local_world import LocalWorld, run_ranks
from tvm_fusion.errors import (
    ArtifactError,
    DistributedError,
    InvalidInputError,
    OpError,
    TargetError,
)

MODELS = {
    "network": network,
    "unet": lambda: unet(image_size=32, width=4),
    "small": small_model,
    "two": two_results,
}


ZOO_SIZES = {"resnet_18": 96, "resnet_50": 96, "mobilenet_v2": 96, "vgg_16": 64, "unet": 64}


@functools.cache
def case(name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = MODELS[name]()
    return model, random_inputs(model, 3)


@functools.cache
def alone(name: str, winograd: str) -> np.ndarray:
    """The result of one rank."""
    model, feed = case(name)
    return tvm_fusion.compile(model, winograd=winograd, threads=1)(**feed)


def over_ranks(model: distributed.DistributedModel, feed: dict[str, np.ndarray]) -> Any:
    """The result of the first rank of several; there is none on others."""

    def work(world: LocalWorld) -> Any:
        local = model.on(Poisoned(world))  # type: ignore[arg-type]
        first = local(**feed)
        second = local(feed)
        np.testing.assert_array_equal(first, second)
        return first

    first, *others = run_ranks(model.ranks, work, timeout=30)
    assert others == [None] * (model.ranks - 1)
    return first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "exchange", "winograd"),
    [
        pytest.param("network", 1, "auto", "never", marks=pytest.mark.slow),
        pytest.param("network", 2, "always", "never", marks=pytest.mark.slow),
        pytest.param("network", 3, "once", "never", marks=pytest.mark.slow),
        ("network", 4, "always", "always"),
        pytest.param("network", 7, "always", "never", marks=pytest.mark.slow),
        pytest.param("unet", 2, "once", "auto", marks=pytest.mark.slow),
        pytest.param("unet", 3, "always", "always", marks=pytest.mark.slow),
        ("small", 13, "once", "never"),  # more ranks than rows
        ("two", 2, "always", "never"),
    ],
)
def test_bits_of_one_rank(name: str, ranks: int, exchange: str, winograd: str) -> None:
    model, feed = case(name)
    compiled = distributed.compile_network(
        model, ranks, winograd=winograd, threads=1, exchange=exchange
    )
    result = over_ranks(compiled, feed)
    np.testing.assert_array_equal(result, alone(name, winograd))
    results = list(result) if isinstance(result, tuple) else [result]
    assert_same(results, run_onnx(model, feed), limit=1e-5)


WEIGHTS_LAST = {
    "network": Network(latency=1e-12, bandwidth=1e18),
    "processor": Processor(rate=1e18, bandwidth=1e18, only_read=1.0),
}
"""Figures with which all that matters is to read weights: all channels that can be are split."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "winograd"),
    [
        pytest.param("network", 1, "auto", marks=pytest.mark.slow),
        pytest.param("network", 2, "always", marks=pytest.mark.slow),
        ("network", 3, "never"),  # programs of two ranks that differ in their weights alone
        pytest.param("network", 4, "always", marks=pytest.mark.slow),
        pytest.param("network", 7, "auto", marks=pytest.mark.slow),  # more ranks than blocks
        pytest.param("unet", 3, "always", marks=pytest.mark.slow),
    ],
)
def test_bits_of_one_rank_where_channels_are_split(name: str, ranks: int, winograd: str) -> None:
    model, feed = case(name)
    compiled = distributed.compile_network(
        model, ranks, winograd=winograd, threads=1, **WEIGHTS_LAST
    )
    sent: list[int] = []

    def work(world: LocalWorld) -> Any:
        result = compiled.on(Poisoned(world))(**feed)  # type: ignore[arg-type]
        sent.append(sum(size for _, size in world.sent))
        return result

    result = run_ranks(ranks, work, timeout=30)[0]
    np.testing.assert_array_equal(result, alone(name, winograd))
    segments = compiled.plan.segments
    assert sum(sent) == sum(segment.bytes for segment in segments)
    assert (ranks > 1) == any(segment.split == "channels" for segment in segments)
    assert (ranks > 1) == ("channels 0: " in compiled.explain())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", list(ZOO_SIZES))
def test_networks_of_the_zoo(name: str, ranks: int) -> None:
    """The choices predicted to be fastest are taken, late small layers on one rank included."""
    model = ZOO[name](image_size=ZOO_SIZES[name])
    feed = random_inputs(model, 3)
    compiled = distributed.compile_network(model, ranks, threads=1)
    result = over_ranks(compiled, feed)
    np.testing.assert_array_equal(result, tvm_fusion.compile(model, threads=1)(**feed))
    assert_same([result], run_onnx(model, feed), limit=1e-5)


@pytest.fixture(scope="module")
def of_two() -> distributed.DistributedModel:
    return distributed.compile_network(small_model(), 2, threads=1, exchange="always")


@pytest.fixture(scope="module")
def saved(of_two: distributed.DistributedModel, tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("saved") / "r2.so"
    of_two.save(path)
    return path


@pytest.mark.slow
def test_one_file_for_all_ranks(saved: Path, tmp_path: Path) -> None:
    model, feed = case("small")
    loaded = distributed.load(saved)
    np.testing.assert_array_equal(over_ranks(loaded, feed), alone("small", "auto"))
    loaded.save(tmp_path / "again.so")
    assert distributed.load(tmp_path / "again.so").plan == loaded.plan
    assert "DistributedModel((image: float32[1, 3, 12, 12]) -> (scores" in repr(loaded)


def test_messages_are_those_of_the_plan(of_two: distributed.DistributedModel) -> None:
    _, feed = case("small")

    def work(world: LocalWorld) -> int:
        of_two.on(world)(**feed)
        return sum(size for _, size in world.sent)

    segments = of_two.plan.segments
    assert sum(run_ranks(2, work)) == sum(segment.bytes for segment in segments) > 0
    assert [s.end for s in segments] == ["exchange", "gather"]
    assert "0: 0:6, 1: 6:12" in of_two.explain()


def test_ranks_of_compile() -> None:
    compiled: Any = tvm_fusion.compile(small_model(), ranks=2, threads=1)
    assert isinstance(compiled, distributed.DistributedModel) and compiled.ranks == 2


@pytest.mark.slow
def test_other_ranks_and_other_models(
    of_two: distributed.DistributedModel, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInputError, match="compiled for 2 ranks and there are 3; start it"):
        run_ranks(3, of_two.on)
    other = distributed.compile_network(small_model(seed=1), 2, threads=1, exchange="always")
    models = of_two, other
    with pytest.raises(DistributedError, match="different models"):
        run_ranks(2, lambda world: models[world.rank].on(world))
    with pytest.raises(ArtifactError, match="for 2 ranks; run it by mpiexec -n 2 tvm-fusion run"):
        tvm_fusion.load(saved)
    tvm_fusion.compile(small_model(), threads=1).save(tmp_path / "one.so")
    with pytest.raises(ArtifactError, match="not compiled for ranks; compile it with ranks="):
        distributed.load(tmp_path / "one.so")


def test_wrong_inputs_are_refused_on_every_rank(of_two: distributed.DistributedModel) -> None:
    def work(world: LocalWorld) -> Any:
        with pytest.raises(InvalidInputError, match="'image' has the shape"):
            of_two.on(world)(np.zeros((1, 3, 12, 11), np.float32))

    run_ranks(2, work)


def test_a_rank_that_fails_in_an_exchange(of_two: distributed.DistributedModel) -> None:
    def work(world: LocalWorld) -> Any:
        local = of_two.on(world)
        if world.rank == 0:
            return local(**case("small")[1])
        raise OSError("no rows")

    with pytest.raises(OSError, match="no rows"):
        run_ranks(2, work, timeout=10)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (small_model, {"ranks": 0}, InvalidInputError, "ranks is 0; expected a positive integer"),
        (small_model, {"ranks": True}, InvalidInputError, "ranks is True"),
        (small_model, {"ranks": 2, "threads": 0}, InvalidInputError, "threads is 0; expected a po"),
        (small_model, {"ranks": 2, "network": "n.json"}, InvalidInputError, "network is 'n.json'"),
        (small_model, {"ranks": 2, "processor": 1e9}, InvalidInputError, "expected a Processor"),
        (small_model, {"ranks": 2, "exchange": "no"}, OpError, "exchange is 'no'; expected 'auto'"),
        (small_model, {"ranks": 2, "target": "opencl"}, TargetError, "ranks compute on CPUs"),
        (lambda: small_model("batch"), {"ranks": 2, "shapes": {"batch": "n"}}, OpError, "run time"),
        (
            lambda: bert_base(layers=1, sequence=8, width=16, heads=2, vocabulary=20),
            {"ranks": 2},
            OpError,
            r"cannot be distributed: '\w+' \([\w.]+\) needs all rows",
        ),
    ],
)
def test_refusals(model: Any, options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        distributed.compile_network(model(), **options)


def test_options_for_gpus_have_no_effect() -> None:
    with pytest.raises(TargetError, match="fast_math, reproducible and cuda_graph are"):
        tvm_fusion.compile(small_model(), ranks=2, fast_math=True)
    with pytest.raises(TargetError, match="precision='bf16' has no effect with ranks"):
        tvm_fusion.compile(small_model(), ranks=2, precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "node",
    [
        "a = Gather<axis = 2>(y, i)",
        "a = GatherElements<axis = 2>(y, p)",
        "a = GatherND(y, q)",
        "a = ScatterElements<axis = 2>(y, p, u)",
        "a = ScatterND(y, q, v)",
    ],
)
def test_an_index_out_of_bounds_is_an_error_of_the_call(node: str) -> None:
    inputs = {
        "x": np.ones((1, 4, 16, 8), "float32"),
        "w": np.ones((4, 4, 3, 3), "float32"),
        "i": np.ones(2, "int64"),
        "p": np.ones((1, 1, 1, 1), "int64"),
        "q": np.ones((1, 2), "int64"),
        "u": np.ones((1, 1, 1, 1), "float32"),
        "v": np.ones((1, 16, 8), "float32"),
    }
    inputs["q"][0, 0] = 0
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 18]>
        g (float[1,4,16,8] x, float[4,4,3,3] w, int64[2] i, int64[1,1,1,1] p, int64[1,2] q,
            float[1,1,1,1] u, float[1,16,8] v) => (float o) {{
            y = Conv <pads = [1, 1, 1, 1]> (x, w) {node} o = Relu(a) }}"""
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    compiled = distributed.compile_network(model, 2, threads=1, exchange="always")
    one = tvm_fusion.compile(model, threads=1)
    np.testing.assert_array_equal(over_ranks(compiled, inputs), one(inputs))
    operator = node.split()[2].split("<")[0].split("(")[0]
    for far in (16, -17, 2**40):
        for name in "ipq":
            inputs[name].flat[-1] = far
        with pytest.raises(InvalidInputError, match=rf"\({operator}\) has an index out of bounds"):
            run_ranks(2, lambda world: compiled.on(world)(inputs), timeout=20)


class _Lowered(Exception):
    """Instead of a build."""


def allocated(func: relax.Function) -> int:
    """Bytes that a program allocates."""
    found = []

    def look(expr: relax.Expr) -> None:
        if op_name(expr) == "relax.vm.alloc_storage":
            found.append(int(expr.args[0].values[0]))

    relax.analysis.post_order_visit(func, look)
    return sum(found)


def activation_bytes(
    model: onnx.ModelProto, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Bytes that each rank's program allocates."""
    found: list[int] = []

    def measure(mod: tvm.IRModule, target: tvm.target.Target, functions: tuple[str, ...]) -> None:
        with target:
            lowered = pipeline.lower_to_vm(target)(mod)
        found.extend(allocated(lowered[name]) for name in functions)
        raise _Lowered

    monkeypatch.setattr(pipeline, "build_apart", measure)
    with pytest.raises(_Lowered):
        distributed.compile_network(model, ranks, threads=1)
    return found


@pytest.mark.slow
def test_two_ranks_need_little_more_than_half_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["resnet_18"](image_size=512)
    [one] = activation_bytes(model, 1, monkeypatch)
    assert max(activation_bytes(model, 2, monkeypatch)) <= 0.55 * one

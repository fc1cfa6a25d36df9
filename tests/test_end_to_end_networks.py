# SPDX-License-Identifier: Apache-2.0
"""The five networks, from ONNX to numbers, and no kernel of them left as scalar loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import tvm
from onnx_reference import assert_same, random_feed, run_onnx
from tvm import tirx

import tvm_fusion
from examples.models import MODELS
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.errors import InvalidInputError, InvalidModelError
from tvm_fusion.onnx.frontend import import_onnx


def pairs_fused(compiled: tvm_fusion.CompiledModel) -> int:
    return sum(record["fused"] for record in compiled.fused)


def check(model: onnx.ModelProto, **options: Any) -> tvm_fusion.CompiledModel:
    """Compile a model and compare it with ONNX Runtime for two inputs."""
    compiled = tvm_fusion.compile(model, **options)
    for seed in range(2):
        feed = random_feed(model, seed)
        assert_same(compiled(**feed), run_onnx(model, feed))
    return compiled


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_network(name: str, optimised: list[tvm.IRModule]) -> None:
    """The numbers are right, and no kernel is left serial."""
    compiled = check(MODELS[name](), threads=2)
    assert compiled.outputs[0].shape == (1, 1000)
    assert compiled.fused
    [mod] = optimised
    assert len(list(kernels(mod))) > 10
    assert unscheduled(mod) == []


@pytest.mark.slow
def test_fusing_all_pairs_and_none_gives_the_same_numbers() -> None:
    model = MODELS["mobilenet_v2"]()
    assert pairs_fused(check(model, fuse="all")) == 17
    assert pairs_fused(check(model, fuse="none")) == 0


@pytest.mark.slow
def test_two_images() -> None:
    check(MODELS["mnasnet_a1"](batch=2, image_size=96), fuse="all")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "batch", "image_size", "threads"),
    [
        ("resnet_50", 4, 96, 2),
        ("mnasnet_a1", 4, 160, 1),
        ("mobilenet_v1", 4, 320, 2),
        ("mobilenet_v2", 16, 96, 1),
        ("resnet_18", 16, 160, 2),
        ("mobilenet_v2", 16, 320, 1),
    ],
)
def test_batches_sizes_and_threads(name: str, batch: int, image_size: int, threads: int) -> None:
    model = MODELS[name](batch=batch, image_size=image_size)
    compiled = tvm_fusion.compile(model, threads=threads)
    feed = random_feed(model, 0)
    actual = compiled(**feed)
    assert actual.shape == (batch, 1000)
    assert_same(actual, run_onnx(model, feed))


@pytest.mark.slow
def test_an_open_batch_is_bound_by_shapes() -> None:
    model = MODELS["resnet_18"](batch="N", image_size=96)
    feed = random_feed(model, 3, N=3)
    expected = run_onnx(model, feed)
    compiled = tvm_fusion.compile(model, shapes={"N": 3})
    assert compiled.inputs[0].shape == (3, 3, 96, 96)
    assert_same(compiled(**feed), expected)
    with pytest.raises(InvalidInputError, match="96"):
        compiled(np.zeros((2, 3, 96, 96), "float32"))


def test_a_batch_that_nobody_bound_is_an_error() -> None:
    with pytest.raises(InvalidModelError, match="'N'"):
        tvm_fusion.compile(MODELS["resnet_18"](batch="N", image_size=32))


def kernels(mod: tvm.IRModule) -> Iterator[tuple[str, tirx.PrimFunc]]:
    for var, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc):
            yield var.name_hint, func


def unscheduled(mod: tvm.IRModule) -> list[str]:
    """Kernels that no rule took, or whose loops are too serial for what they write."""
    found = []
    for name, func in kernels(mod):
        text = func.script()
        size = math.prod(int(extent) for extent in func.params[-1].ty.shape)
        vectors = "T.vectorized(" in text or "T.Ramp(" in text
        if not (func.attrs and func.attrs.get("tirx.is_scheduled")):
            found.append(f"{name}: no rule took it")
        if size >= 2**12 and not vectors:
            found.append(f"{name}: {size} elements without vectors")
        if size >= 2**16 and "T.parallel(" not in text:
            found.append(f"{name}: {size} elements on one thread")
    return found


def test_a_kernel_that_is_left_serial_is_seen() -> None:
    target = resolve("native", cores=2)
    steps = pipeline.phases(target, pipeline.Options())
    mod = import_onnx(MODELS["mobilenet_v1"](image_size=128)).mod
    with target:
        for name in ("simplify", "fuse", "pack", "lower"):
            mod = tvm.transform.Sequential(steps[name])(mod)
    found = " ".join(unscheduled(mod))
    for reason in ("no rule took it", "without vectors", "on one thread"):
        assert reason in found

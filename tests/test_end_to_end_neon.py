# SPDX-License-Identifier: Apache-2.0
"""Code for aarch64, also without a machine for it: every kind of kernel works in vectors."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from cpu.rule_cases import assembly
from onnx import helper
from onnx_cases import onnx_model
from tvm import tirx

from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.onnx.frontend import import_onnx

FEWEST = 16
"""Multiply-adds of vectors in a basic block of a main loop, at the least."""


def convolutions(*layers: tuple[int, int, int]) -> onnx.ModelProto:
    """Convolutions one after the other, each (channels, kernel, groups), then ReLU6; 40 pixels."""
    generator = np.random.default_rng(0)
    constants = {"low": np.array(0, np.float32), "high": np.array(6, np.float32)}
    nodes: list[onnx.NodeProto] = []
    channels, x = 32, "x"
    for index, (out_channels, kernel, groups) in enumerate(layers):
        weight, made, out = f"w{index}", f"conv{index}", f"clip{index}"
        shape = (out_channels, channels // groups, kernel, kernel)
        constants[weight] = generator.standard_normal(shape, dtype=np.float32)
        window = {"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4}
        nodes += [
            helper.make_node("Conv", [x, weight], [made], group=groups, **window),
            helper.make_node("Clip", [made, "low", "high"], [out]),
        ]
        channels, x = out_channels, out
    return onnx_model(nodes, {"x": [1, 32, 40, 40]}, [x], constants)


def dense() -> onnx.ModelProto:
    weight = np.random.default_rng(0).standard_normal((256, 128), dtype=np.float32)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    return onnx_model([node], {"x": [24, 128]}, ["y"], {"w": weight})


# Model, what to fuse, and how many layers its one kernel computes.
MODELS = {
    "conv": (convolutions((64, 3, 1)), "none", 1),
    "depthwise": (convolutions((32, 3, 32)), "none", 1),
    "dense": (dense(), "none", 1),
    "fused_depthwise_1x1": (convolutions((32, 3, 32), (64, 1, 1)), "all", 2),
    "fused_3x3_1x1": (convolutions((64, 3, 1), (32, 1, 1)), "all", 2),
}


def kernels(model: onnx.ModelProto, fuse: str) -> list[str]:
    """The assembly of each kernel that multiplies."""
    target = resolve("aarch64", cores=2)
    mod = pipeline.optimize(import_onnx(model).mod, target, pipeline.Options(fuse=fuse))
    found = []
    for func in mod.functions.values():
        if isinstance(func, tirx.PrimFunc):
            text = assembly(func, target)
            if re.search(r"\tf(mla|madd|mul)\t", text):
                found.append(text)
    return found


def is_vector(line: str) -> bool:
    return re.match(r"fmla\tv\d+\.4s", line) is not None


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_main_loops_multiply_and_add_vectors(name: str) -> None:
    model, fuse, convolutions_fused = MODELS[name]
    (text,) = kernels(model, fuse)
    assert not re.search(r"\tf(madd|msub|nmadd|nmsub|mul)\t[sdh]\d", text)
    blocks = [body.split("\n") for body in re.split(r"^\.LBB\w+:", text, flags=re.MULTILINE)]
    busy = [body for body in blocks if sum(is_vector(line.strip()) for line in body) >= FEWEST]
    assert len(busy) >= convolutions_fused

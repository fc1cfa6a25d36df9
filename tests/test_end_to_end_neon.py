# SPDX-License-Identifier: Apache-2.0
"""Code for aarch64, also without a machine for it: every kind of kernel works in vectors."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import tirx

from tvm_fusion import pipeline
from tvm_fusion.frontend import import_onnx
from tvm_fusion.target import resolve

FEWEST = 16
"""Multiply-adds of vectors in a main loop, at the least; whole tiles have twice as many."""


def convolutions(*layers: tuple[int, int, int]) -> onnx.ModelProto:
    """Convolutions one after the other, each (channels, kernel, groups), then ReLU6; 40 pixels."""
    generator = np.random.default_rng(0)
    nodes, constants, channels, x = [], {"low": np.float32(0), "high": np.float32(6)}, 32, "x"
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
    return model_of(nodes, constants, [1, 32, 40, 40], [1, channels, 40, 40], x)


def dense() -> onnx.ModelProto:
    weight = np.random.default_rng(0).standard_normal((256, 128), dtype=np.float32)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)
    return model_of([node], {"w": weight}, [24, 128], [24, 256], "y")


def model_of(nodes, constants, in_shape, out_shape, result) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, in_shape)],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, out_shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_operatorsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


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
            alone = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
            text = tvm.compile(alone, target).mod.inspect_source("asm")
            if re.search(r"\tf(mla|madd|mul)\t", text):
                found.append(text)
    return found


def is_vector(line: str) -> bool:
    return re.match(r"fmla\tv\d+\.4s", line) is not None


def loops(text: str) -> list[list[str]]:
    """The instructions of each block that jumps to its own start."""
    blocks = re.split(r"^(\.LBB\w+):.*$", text, flags=re.MULTILINE)
    return [
        [line.strip() for line in body.splitlines() if line.strip()]
        for label, body in zip(blocks[1::2], blocks[2::2], strict=True)
        if re.search(rf"^\tb\S*\t(?:.*, )?{re.escape(label)}$", body, re.MULTILINE)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_main_loops_multiply_and_add_vectors(name: str) -> None:
    model, fuse, convolutions_fused = MODELS[name]
    (text,) = kernels(model, fuse)
    assert not re.search(r"\tf(madd|msub|nmadd|nmsub|mul)\t[sdh]\d", text)
    main_loops = [body for body in loops(text) if sum(map(is_vector, body)) >= FEWEST]
    assert len(main_loops) >= convolutions_fused

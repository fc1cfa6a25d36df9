# SPDX-License-Identifier: Apache-2.0
"""Attention as one kernel of tile registers: which forms are taken, and their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from onnx_reference import random_feed, relative_error, run_onnx
from tvm.target import Target

import tvm_fusion
from examples.transformers import bert_base
from schedules.cpu.core.machine import CPUInfo, described
from tvm_fusion.bench.profiler import kernel_costs
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.launches import kernel_uses
from tvm_fusion.compiler.pipeline import Options
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.onnx.frontend import import_onnx


@pytest.fixture
def target() -> Iterator[Target]:
    """This CPU with tile registers, in whose place are loops."""
    found = resolve("native", 1)
    tiles = {"tiles": ("bfloat16",), "emulates_tiles": True}
    with described(found, replace(CPUInfo.from_target(found), **tiles)):
        yield found


def model_of(body: str, inputs: str = "float[2,10,64] x", **constants: float) -> onnx.ModelProto:
    """A model whose queries, keys and values are the input in two heads; ``body`` makes ``y``."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g ({inputs}) => (float[?,?,?,?] y) {{
            shape = Constant<value_ints = [2, 10, 2, 32]>()
            heads = Reshape(x, shape)
            q = Transpose<perm = [0, 2, 1, 3]>(heads)
            k = Transpose<perm = [0, 2, 3, 1]>(heads)
            products = MatMul(q, k)
            {body}
        }}"""
    model = onnx.parser.parse_model(text)
    for name, number in constants.items():
        array = np.array(number, "float32")
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def attentions(model: onnx.ModelProto, target: Target) -> list[str]:
    """Kernels of attention, whose products are those of bfloat16 for profiles."""
    mod = pipeline.optimize(import_onnx(model).mod, target, Options(precision="bf16"))
    found = [use.name for use in kernel_uses(mod) if use.rule == "TileAttention"]
    costs = kernel_costs(mod)
    assert all(costs[name].cost.numbers == "bfloat16" for name in found)
    return found


FORMS = {
    "plain": "p = Softmax(products)  y = MatMul(p, q)",
    "scaled": "s = Mul(products, c)  p = Softmax(s)  y = MatMul(p, q)",
    "masked": "s = Div(products, c)  m = Add(mask, s)  p = Softmax(m)  y = MatMul(p, q)",
    "turned": """s = Mul(products, c)  p = Softmax(s)  z = MatMul(p, q)
        y = Transpose<perm = [0, 2, 1, 3]>(z)""",
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_forms_that_become_one_kernel(form, target):
    inputs = "float[2,10,64] x" + (", float[10] mask" if form == "masked" else "")
    model = model_of(FORMS[form], inputs, **({"c": 0.4} if form != "plain" else {}))
    feed = random_feed(model, 5)
    assert len(attentions(model, target)) == 1
    found = tvm_fusion.compile(model, target, precision="bf16")(*feed.values())
    assert 1e-5 < relative_error(found, *run_onnx(model, feed)) < 4e-2


OTHERS = {
    "another reader": """p = Softmax(products)  z = MatMul(p, q)  t = MatMul(p, p)
        y = Concat<axis = 3>(z, t)""",
    "another axis": "p = Softmax<axis = 2>(products)  y = MatMul(p, q)",
    "a scaled mask": "m = Add(products, c)  s = Mul(m, c)  p = Softmax(s)  y = MatMul(p, q)",
    "another function": "s = Tanh(products)  p = Softmax(s)  y = MatMul(p, q)",
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("form", OTHERS)
def test_forms_that_are_left_alone(form, target):
    model = model_of(OTHERS[form], **({"c": 0.4} if "Mul(m, c)" in OTHERS[form] else {}))
    assert not attentions(model, target)


@pytest.mark.slow
def test_bert_has_one_kernel_a_layer_and_no_copies_around_it(target):
    model = bert_base(layers=1, width=128, heads=4, vocabulary=50, sequence=40)
    mod = pipeline.optimize(import_onnx(model).mod, target, Options(precision="bf16"))
    uses = kernel_uses(mod)
    assert sum(use.calls for use in uses if use.rule == "TileAttention") == 1
    assert not any("transpose" in use.name or "reshape" in use.name for use in uses)
    feed = {name: np.ones(array.shape, "int64") for name, array in random_feed(model, 1).items()}
    found = tvm_fusion.compile(model, target, precision="bf16")(*feed.values())
    for actual, wanted in zip(found, run_onnx(model, feed), strict=True):
        assert 1e-5 < relative_error(actual, wanted) < 4e-2

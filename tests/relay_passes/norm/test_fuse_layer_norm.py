# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseLayerNorm``: what it fuses, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from norm_layers import NormLayer
from tvm import IRModule, relax, tirx
from tvm.relax import op
from tvm.target import Target

from relay_passes import FuseLayerNorm
from relay_passes.core.expressions import op_name
from schedules.gpu.gemm.matmul.matmul_pattern import MatmulFunction, read_matmul

GPU = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
NORM, PRODUCT, FUNCTION = "relax.nn.layer_norm", "relax.matmul", "relax.call_tir"


def names(mod: IRModule) -> list[str]:
    """Norms, products and functions, in order."""
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    return [n for n in map(op_name, values) if n in (NORM, PRODUCT, FUNCTION)]


def fused(mod: IRModule, target: Target = GPU) -> IRModule:
    return FuseLayerNorm(target)(mod)


def products(mod: IRModule) -> list[MatmulFunction]:
    """The functions that ``main`` calls, in order."""
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    called = [mod[value.args[0]] for value in values if op_name(value) == FUNCTION]
    return [matmul for matmul in map(read_matmul, called) if matmul is not None]


def test_norms_become_parts_of_four_products() -> None:
    before = NormLayer().module()
    mod = fused(before)
    assert names(before) == [PRODUCT, NORM, PRODUCT, PRODUCT, NORM, PRODUCT]
    assert names(mod) == [FUNCTION] * 4
    found = products(mod)
    assert [matmul.left.shift is not None for matmul in found] == [False, True, False, True]
    assert [matmul.statistics is not None for matmul in found] == [False, True, True, True]
    assert [matmul.moments is not None for matmul in found] == [True, False, True, False]
    tvm.ir.assert_structural_equal(fused(mod), mod)


def test_weights_contain_gamma_and_a_vector_beta() -> None:
    layer = NormLayer()
    mod = fused(layer.module())
    call = next(
        b.value
        for block in mod["main"].body.blocks
        for b in block.bindings
        if op_name(b.value) == FUNCTION and mod[b.value.args[0]].attrs["op_pattern"] == 4
    )
    weight, shift = (field.value.numpy() for field in call.args[1].fields[-2:])
    np.testing.assert_allclose(weight, layer.gamma[0][:, None] * layer.w[1], rtol=1e-6)
    np.testing.assert_allclose(shift, layer.beta[0] @ layer.w[1], rtol=1e-4, atol=1e-5)


def test_a_norm_with_another_reader_stays() -> None:
    """The second one, which only a product reads, does not."""
    assert names(fused(NormLayer(keep=True).module())).count(NORM) == 1


def test_two_norms_of_one_value_share_its_moments() -> None:
    """Layers whose attention and feed-forward network lie beside each other have such norms."""
    layer, builder = NormLayer((37,), width=64), relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((37, 64), "float32"))
    weights = [relax.const(weight) for weight in (*layer.w[:2], *layer.gamma, *layer.beta)]
    with builder.function("main", [x]):
        with builder.dataflow():
            data = builder.emit(op.matmul(x, weights[0]))
            norms = [
                builder.emit(op.nn.layer_norm(data, weights[2 + k], weights[4 + k], [-1]))
                for k in range(2)
            ]
            both = [builder.emit(op.matmul(norm, weights[1])) for norm in norms]
            result = builder.emit_output(op.add(*both))
        builder.emit_func_output(result)
    mod = fused(builder.get())
    assert not relax.analysis.free_vars(mod["main"])
    assert names(mod) == [FUNCTION] * 3


def test_norms_of_another_dataflow_block_stay() -> None:
    layer, builder = NormLayer((37,), width=64), relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((37, 64), "float32"))
    weights = [relax.const(weight) for weight in (*layer.w[:2], layer.gamma[0], layer.beta[0])]
    with builder.function("main", [x]):
        with builder.dataflow():
            data = builder.emit_output(op.matmul(x, weights[0]))
        builder.emit(op.add(data, data))
        with builder.dataflow():
            norm = builder.emit(op.nn.layer_norm(data, *weights[2:], [-1]))
            result = builder.emit_output(op.matmul(norm, weights[1]))
        builder.emit_func_output(result)
    mod = builder.get()
    tvm.ir.assert_structural_equal(fused(mod), mod)


@pytest.mark.parametrize(
    "layer",
    [
        NormLayer(dtype="float16"),
        NormLayer(width=80),
        NormLayer(width=2080, hidden=32),
        NormLayer((1, 8)),
    ],
    ids=["float16", "no whole segments", "long rows", "few rows"],
)
def test_left_alone(layer: NormLayer) -> None:
    mod = layer.module()
    tvm.ir.assert_structural_equal(fused(mod), mod)


def test_a_norm_stays_where_it_costs_less() -> None:
    """The first is read by 24 tiles beside each other, the second by one."""
    mod = fused(NormLayer((32, 128), width=768, hidden=3072).module())
    assert [matmul.moments is None for matmul in products(mod)] == [False, True]
    assert names(mod).count(NORM) == 1


def test_symbolic_rows_and_free_weights_are_left_alone() -> None:
    layer = NormLayer()
    symbolic = layer.module(rows=(tirx.Var("n", "int64"), tirx.const(16, "int64")))
    tvm.ir.assert_structural_equal(fused(symbolic), symbolic)
    assert names(fused(layer.module(free=True))).count(NORM) == 1


def test_other_targets_are_left_alone() -> None:
    mod = NormLayer().module()
    tvm.ir.assert_structural_equal(fused(mod, Target("llvm")), mod)

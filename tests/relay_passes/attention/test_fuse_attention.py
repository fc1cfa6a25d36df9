# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseAttention``: what it fuses, what it combines, what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import IRModule, relax
from tvm.relax import op
from tvm.target import Target

from relay_passes import FuseAttention
from relay_passes.core.expressions import op_name

F32 = "float32"
GPU = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
CPU = Target("llvm")
WIDTH, HEADS, TOKENS = 24, 2, 20


def layer(
    kinds: tuple[bool, bool, bool] = (True, True, True),
    axis: int = -1,
    dtype: str = F32,
    tokens: int = TOKENS,
    keep: str = "",
    widths: tuple[int, int, int] = (WIDTH, WIDTH, WIDTH),
) -> IRModule:
    """Attention of a tensor with itself; of queries, keys, values some have a constant weight.

    ``keep`` names an intermediate value that is also a result.
    """
    rng = np.random.default_rng(0)
    x = relax.Var("x", relax.TensorType((1, tokens, WIDTH), dtype))
    free = relax.Var("w", relax.TensorType((WIDTH, WIDTH), dtype))
    builder = relax.BlockBuilder()
    kept: dict[str, relax.Var] = {}

    def array(*shape: int) -> relax.Expr:
        return relax.const(rng.standard_normal(shape), dtype)

    def project(name: str, is_constant: bool, width: int) -> relax.Expr:
        product = builder.emit(op.matmul(x, array(WIDTH, width) if is_constant else free))
        kept[name] = builder.emit(op.add(array(width), product))
        size = width // HEADS
        return builder.emit(op.reshape(kept[name], (1, tokens, HEADS, size)))

    with builder.function("main", [x, free]):
        with builder.dataflow():
            names = ("query", "key", "value")
            parts = [project(*each) for each in zip(names, kinds, widths, strict=True)]
            query, value = (builder.emit(op.permute_dims(parts[i], [0, 2, 1, 3])) for i in (0, 2))
            key = builder.emit(op.permute_dims(parts[1], [0, 2, 3, 1]))
            kept["scores"] = builder.emit(op.matmul(query, key))
            weights = builder.emit(op.nn.softmax(kept["scores"], axis))
            moved = builder.emit(op.permute_dims(op.matmul(weights, value), [0, 2, 1, 3]))
            result = op.reshape(moved, (1, tokens, widths[2]))
            results = relax.Tuple([builder.emit(result), *([kept[keep]] if keep else [])])
            results = builder.emit_output(results)
        builder.emit_func_output(results)
    return relax.transform.Normalize()(builder.get())


def calls(mod: IRModule) -> list[str]:
    """Names of the ops of ``main``, in order; ``slice`` for those outside of kernels."""
    found = []
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            name = op_name(binding.value)
            if name is not None:
                found.append(name.removeprefix("relax."))
    return found


def fused(mod: IRModule, target: Target = GPU) -> IRModule:
    return FuseAttention(target)(mod)


def test_three_projections_become_one_and_the_rest_one_function() -> None:
    mod = fused(layer())
    assert calls(mod) == ["matmul", "add", "call_tir"]
    product = mod["main"].body.blocks[0].bindings[0].value
    assert tuple(map(int, product.args[1].ty.shape)) == (WIDTH, 3 * WIDTH)
    tvm.ir.assert_structural_equal(fused(mod), mod)


def test_projections_of_different_widths() -> None:
    """The values may be narrower than queries and keys."""
    mod = fused(layer(widths=(WIDTH, WIDTH, WIDTH // 2)))
    assert calls(mod) == ["matmul", "add", "call_tir"]


def test_columns_lie_in_the_order_of_queries_keys_and_values() -> None:
    before, after = layer(), fused(layer())
    bindings = before["main"].body.blocks[0].bindings
    weights = [
        b.value.args[1].value.numpy()
        for b in bindings
        if op_name(b.value) == "relax.matmul" and hasattr(b.value.args[1], "value")
    ]
    whole = after["main"].body.blocks[0].bindings[0].value.args[1].value.numpy()
    np.testing.assert_array_equal(whole, np.concatenate(weights, axis=1))


def test_weights_that_are_inputs_stay_apart() -> None:
    mod = fused(layer((True, False, True)))
    assert sorted(calls(mod)) == ["add", "add", "call_tir", "matmul", "matmul"]


def test_a_projection_with_another_reader_stays_apart() -> None:
    mod = fused(layer(keep="key"))
    assert sorted(calls(mod)) == ["add", "add", "call_tir", "matmul", "matmul"]


def test_equal_layers_share_a_function() -> None:
    x = relax.Var("x", relax.TensorType((2, TOKENS, WIDTH), F32))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y: relax.Expr = x
            for _ in range(2):
                scores = builder.emit(op.matmul(y, builder.emit(op.permute_dims(y, [0, 2, 1]))))
                y = builder.emit(op.matmul(builder.emit(op.nn.softmax(scores)), y))
            result = builder.emit_output(y)
        builder.emit_func_output(result)
    mod = fused(builder.get())
    assert calls(mod) == ["call_tir", "call_tir"]
    assert len(mod.functions) == 2


def attention(queries: int, keys: int, heads: int) -> IRModule:
    """Attention of queries that are no inputs of the keys, with heads of 64."""
    shapes = [(heads, queries, 64), (heads, keys, 64), (heads, keys, 64)]
    params = [relax.Var(f"x{k}", relax.TensorType(shape, F32)) for k, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            transposed = builder.emit(op.permute_dims(params[1], [0, 2, 1]))
            weights = builder.emit(op.nn.softmax(op.matmul(params[0], transposed)))
            result = builder.emit_output(op.matmul(weights, params[2]))
        builder.emit_func_output(result)
    return builder.get()


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "is_one"),
    [(128, 128, 12, True), (1024, 1024, 12, True), (512, 512, 192, True), (32, 16384, 4, False)],
)
def test_the_decision_is_by_cost(queries: int, keys: int, heads: int, is_one: bool) -> None:
    """Few blocks with very many keys would leave most of the device idle."""
    mod = fused(attention(queries, keys, heads))
    assert (calls(mod) == ["call_tir"]) is is_one


UNTOUCHED: dict[str, Callable[[], tuple[IRModule, Target]]] = {
    "CPU": lambda: (layer(), CPU),
    "another axis": lambda: (layer(axis=2), GPU),
    "scores with another reader": lambda: (layer(keep="scores"), GPU),
    "long heads": lambda: (layer(widths=(1200, 1200, 1200)), GPU),
    "float64": lambda: (layer(dtype="float64"), GPU),
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_left_alone(name: str) -> None:
    mod, target = UNTOUCHED[name]()
    tvm.ir.assert_structural_equal(fused(mod, target), mod)

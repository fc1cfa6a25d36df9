# SPDX-License-Identifier: Apache-2.0
"""Rule ``unflatten_matmul``: reshapes around products of matrices go, where nobody needs them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from reduction_checks import run
from simplify_checks import calls, check, check_unchanged, const, dyadic, simplify
from tvm import relax, tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.target import Target

from relay_passes import SimplifyInference

W = dyadic(4, 5)
B = dyadic(5, seed=1)


def test_a_layer_of_three_axes():
    @I.ir_module
    class Flat:
        @R.function
        def main(x: R.Tensor((2, 3, 4), "float32")):
            with R.dataflow():
                lv = R.reshape(x, (6, 4))
                lv1 = R.matmul(lv, const(W))
                lv2 = R.add(lv1, const(B))
                gv = R.reshape(lv2, (2, 3, 5))
                R.output(gv)
            return gv

    @I.ir_module
    class Unflattened:
        @R.function
        def main(x: R.Tensor((2, 3, 4), "float32")):
            with R.dataflow():
                lv = R.matmul(x, const(W))
                gv = R.add(lv, const(B))
                R.output(gv)
            return gv

    check(Flat, Unflattened)
    x = dyadic(2, 3, 4, seed=2)
    np.testing.assert_array_equal(run(simplify(Flat), x), x @ W + B)


def layer(
    shape: tuple = (2, 3, 4),
    flat: tuple = (6, 4),
    last: tuple = (2, 3, 5),
    bias: np.ndarray | None = None,
    reads_twice: bool = False,
    swapped: bool = False,
    columns: int = 5,
) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            flattened = builder.emit(relax.op.reshape(x, flat))
            weight = np.resize(W, (int(flat[-1]), columns))
            product = builder.emit(relax.op.matmul(flattened, const(weight)))
            value = product
            if bias is not None:
                pair = (const(bias), product) if swapped else (product, const(bias))
                value = builder.emit(relax.op.add(*pair))
            result = relax.op.reshape(value, last)
            if reads_twice:
                result = relax.Tuple([builder.emit(result), product])
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    return builder.get()


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("bias", [None, B])
def test_with_and_without_bias(bias: np.ndarray | None, swapped: bool):
    expected = ["matmul"] if bias is None else ["matmul", "add"]
    assert calls(simplify(layer(bias=bias, swapped=swapped))) == expected


def test_vectors():
    assert calls(simplify(layer((4,), (1, 4), (5,)))) == ["matmul"]
    check_unchanged(layer((4,), (1, 4), (), columns=1))


def test_a_symbolic_batch():
    n = tirx.Var("n", "int64")
    mod = layer((n, 3, 4), (n * 3, 4), (n, 3, 5), B)
    assert calls(simplify(mod)) == ["matmul", "add"]


@pytest.mark.parametrize(
    "mod",
    [
        layer(last=(3, 2, 5)),
        layer(last=(2, 15)),
        layer((2, 12), (6, 4), (2, 3, 5)),
        layer((2, 3, 4), (2, 12), (2, 5, 1)),
        layer(bias=dyadic(6, 5)),
        layer(reads_twice=True),
    ],
)
def test_what_stays(mod: tvm.IRModule):
    check_unchanged(mod)


@pytest.mark.parametrize(("batch", "rows", "stays"), [(4, 6, True), (1, 24, False), (3, 7, False)])
def test_products_of_few_rows_stay_one_product(batch: int, rows: int, stays: bool):
    module = layer((batch, rows, 4), (batch * rows, 4), (batch, rows, 5))
    assert ("reshape" in calls(simplify(module))) == stays
    on_gpu = SimplifyInference(Target("opencl"))(module)
    assert "reshape" not in calls(on_gpu)
    with Target("opencl"):
        tvm.ir.assert_structural_equal(SimplifyInference()(module), on_gpu)

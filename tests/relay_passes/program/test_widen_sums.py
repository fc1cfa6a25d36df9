# SPDX-License-Identifier: Apache-2.0
"""Pass ``WidenSums``: before and after."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes import WidenSums


@I.ir_module
class Before:
    """A product and what follows it, a result of two readers, and a pool."""

    @R.function
    def main(
        x: R.Tensor((4, 8), "float16"),
        w: R.Tensor((8, 6), "float16"),
        b: R.Tensor((6,), "float16"),
        p: R.Tensor((1, 2, 9, 9), "bfloat16"),
    ) -> R.Tuple(R.Tensor((4, 6), "float16"), R.Tensor((1, 2, 3, 3), "bfloat16")):
        with R.dataflow():
            product = R.matmul(x, w)
            total = R.add(product, b)
            positive = R.nn.relu(total)
            y = R.multiply(positive, positive)
            z = R.nn.avg_pool2d(p, (3, 3), (3, 3))
            R.output(y, z)
        return y, z


@I.ir_module
class Cast:
    """The operands of the product are cast."""

    @R.function
    def main(
        x: R.Tensor((4, 8), "float16"),
        w: R.Tensor((8, 6), "float16"),
        b: R.Tensor((6,), "float16"),
        p: R.Tensor((1, 2, 9, 9), "bfloat16"),
    ) -> R.Tuple(R.Tensor((4, 6), "float16"), R.Tensor((1, 2, 3, 3), "bfloat16")):
        with R.dataflow():
            wide_x = R.astype(x, "float32")
            wide_w = R.astype(w, "float32")
            product = R.matmul(wide_x, wide_w)
            wide_b = R.astype(b, "float32")
            total = R.add(product, wide_b)
            wide = R.nn.relu(total)
            positive = R.astype(wide, "float16")
            y = R.multiply(positive, positive)
            wide_p = R.astype(p, "float32")
            pool = R.nn.avg_pool2d(wide_p, (3, 3), (3, 3))
            z = R.astype(pool, "bfloat16")
            R.output(y, z)
        return y, z


@I.ir_module
class Named:
    """The product names the type of its sums."""

    @R.function
    def main(
        x: R.Tensor((4, 8), "float16"),
        w: R.Tensor((8, 6), "float16"),
        b: R.Tensor((6,), "float16"),
        p: R.Tensor((1, 2, 9, 9), "bfloat16"),
    ) -> R.Tuple(R.Tensor((4, 6), "float16"), R.Tensor((1, 2, 3, 3), "bfloat16")):
        with R.dataflow():
            product = R.matmul(x, w, out_dtype="float32")
            wide_b = R.astype(b, "float32")
            total = R.add(product, wide_b)
            wide = R.nn.relu(total)
            positive = R.astype(wide, "float16")
            y = R.multiply(positive, positive)
            wide_p = R.astype(p, "float32")
            pool = R.nn.avg_pool2d(wide_p, (3, 3), (3, 3))
            z = R.astype(pool, "bfloat16")
            R.output(y, z)
        return y, z


@I.ir_module
class Left:
    """Sums of a named type, operands of 32 bits, and a scatter that adds nothing."""

    @R.function
    def main(
        x: R.Tensor((4, 8), "float16"),
        w: R.Tensor((8, 6), "float16"),
        v: R.Tensor((6, 2), "float32"),
        i: R.Tensor((4, 8), "int64"),
    ) -> R.Tuple(R.Tensor((4, 2), "float32"), R.Tensor((4, 8), "float16")):
        with R.dataflow():
            product = R.matmul(x, w, out_dtype="float32")
            y = R.matmul(product, v)
            z = R.scatter_elements(x, i, x, axis=0, reduction="update")
            R.output(y, z)
        return y, z


@pytest.mark.parametrize(("products", "expected"), [("cast", Cast), ("name", Named)])
def test_before_and_after(products: str, expected: tvm.IRModule) -> None:
    widen = WidenSums(products=products)
    once = widen(Before)
    tvm.ir.assert_structural_equal(once, expected)
    tvm.ir.assert_structural_equal(widen(once), expected)


def test_convolutions_keep_their_attributes() -> None:
    x, w = (relax.Var(n, relax.TensorType((4, 4, 8, 8), "float16")) for n in "xw")
    builder = relax.BlockBuilder()
    attributes = {"strides": (2, 1), "padding": (1, 2, 3, 4), "dilation": (1, 2)}
    with builder.function("main", [x, w]):
        y = builder.emit(relax.op.nn.conv2d(x, w, **attributes))
        z = relax.op.nn.conv2d_transpose(x, w, **attributes, output_padding=(1, 0))
        builder.emit_func_output(relax.Tuple([y, builder.emit(z)]))
    mod = builder.get()
    block = WidenSums(products="name")(mod)["main"].body.blocks[0]
    found = [each.value for each in block.bindings if hasattr(each.value, "attrs")]
    for before, after in zip(mod["main"].body.blocks[0].bindings, found[::2], strict=False):
        wanted = str(before.value.attrs).replace("out_dtype=None", "out_dtype=float32")
        assert str(after.attrs) == wanted


@pytest.mark.parametrize("reductions", [False, True])
def test_reductions(reductions: bool) -> None:
    x = relax.Var("x", relax.TensorType((4, 8), "float16"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.sum(x)))
    widened = WidenSums(reductions=reductions)(builder.get())
    assert ("float32" in widened.script()) == reductions


def test_what_stays() -> None:
    tvm.ir.assert_structural_equal(WidenSums()(Left), Left)


def test_results_that_are_not_stored_stay_in_float32() -> None:
    """An activation, moves, a pool, and a sum of several readers keep float32; a cast does not."""

    @I.ir_module
    class Network:
        @R.function
        def main(
            x: R.Tensor((1, 4, 6, 6), "float16"), w: R.Tensor((4, 4, 1, 1), "float16")
        ) -> R.Tuple(R.Tensor((1, 4, 6, 6), "float16"), R.Tensor((1, 4, 3, 3), "float32")):
            with R.dataflow():
                first = R.nn.conv2d(x, w)
                bound = R.clip(first, 0, 6)
                left, right = R.split(bound, 2, axis=1)[0], R.split(bound, 2, axis=1)[1]
                joined = R.concat((right, left), axis=1)
                second = R.nn.conv2d(joined, w)
                y = R.add(second, bound)
                z = R.astype(R.nn.max_pool2d(y, (2, 2), (2, 2)), "float32")
                R.output(y, z)
            return y, z

    widened = WidenSums(stored=())(Network)
    tvm.ir.assert_structural_equal(WidenSums(stored=())(widened), widened)
    values = [each.value for each in widened["main"].body.blocks[0].bindings]
    casts = [each for each in values if "R.astype" in str(each)]
    rounded = [str(cast.ty.dtype) for cast in casts if str(cast.args[0].ty.dtype) == "float32"]
    assert rounded == ["float16"] * 2, widened  # a result, and the operand of the model's own cast
    computed = [call for call in values if isinstance(call, relax.Call) and call not in casts]
    assert all("float16" not in str(call.ty) for call in computed), widened


def test_a_stored_type_is_rounded_between_two_products() -> None:
    x, w = (relax.Var(name, relax.TensorType((8, 8), "bfloat16")) for name in "xw")
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        product = builder.emit(relax.op.tanh(builder.emit(relax.op.matmul(x, w))))
        builder.emit_func_output(builder.emit(relax.op.matmul(product, w)))
    mod, rounded = builder.get(), {}
    for stored in ("bfloat16", "float16"):
        text = WidenSums(stored=[stored])(mod).script()
        rounded[stored] = text.count('dtype="bfloat16") = R.astype')
    assert rounded == {"bfloat16": 2, "float16": 1}

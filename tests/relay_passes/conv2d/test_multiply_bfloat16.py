# SPDX-License-Identifier: Apache-2.0
"""Pass ``MultiplyBfloat16``: what is rounded where, and what is left alone."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relay_passes import FuseEpilogue, MultiplyBfloat16
from relay_passes.core.expressions import op_name


@I.ir_module
class Chain:
    @R.function
    def main(
        x: R.Tensor((1, 8, 6, 6), "float32"), w: R.Tensor((8, 8, 1, 1), "float32")
    ) -> R.Tensor((1, 8, 6, 6), "float32"):
        with R.dataflow():
            lv = R.nn.conv2d(x, w)
            lv1 = R.nn.relu(lv)
            lv2 = R.nn.max_pool2d(lv1, pool_size=[3, 3], padding=[1, 1, 1, 1])
            lv3 = R.nn.conv2d(lv2, w)
            gv = R.add(lv3, lv1)
            R.output(gv)
        return gv


def calls(mod: tvm.IRModule) -> list[tuple[str, str]]:
    """Ops of ``main`` in order, with the types of their results."""
    return [
        (str(op_name(binding.value)).removeprefix("relax."), str(binding.var.ty.dtype))
        for block in mod["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call)
    ]


def test_a_tensor_is_stored_once_and_moved_in_bfloat16() -> None:
    half, full = "bfloat16", "float32"
    assert calls(MultiplyBfloat16()(Chain)) == [
        ("astype", half),
        ("astype", half),
        ("nn.conv2d", full),
        ("nn.relu", full),
        ("astype", half),
        ("astype", full),
        ("nn.max_pool2d", half),
        ("nn.conv2d", full),
        ("add", full),
    ]


def test_epilogues_take_the_rounding_and_the_residual() -> None:
    mod = relax.analysis.remove_all_unused(
        FuseEpilogue(halves=True)(MultiplyBfloat16()(Chain))["main"]
    )
    found = [binding.value for binding in mod.body.blocks[0].bindings]
    first, last = (call for call in found if op_name(call) == "relax.tvm_fusion.conv2d")
    assert (first.attrs["out_dtype"], first.attrs["activation"]) == ("bfloat16", "relu")
    assert last.attrs["out_dtype"] == "float32"
    assert [str(each.ty.dtype) for each in last.args] == [
        "bfloat16",
        "bfloat16",
        "float32",
        "bfloat16",
    ]


def test_rows_become_pixels_with_bias_and_activation() -> None:

    def build(rows: int) -> list[tuple[str, str]]:

        x = relax.Var("x", relax.TensorType((rows, 64), "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                lv = builder.emit(relax.op.matmul(x, relax.const(np.ones((64, 80), "float32"))))
                lv = builder.emit(relax.op.add(lv, relax.const(np.ones(80, "float32"))))
                gv = builder.emit_output(relax.op.nn.relu(lv))
            builder.emit_func_output(gv)
        return [name for name, _ in calls(MultiplyBfloat16()(builder.get()))]

    assert build(17) == ["astype", "reshape", "nn.conv2d", "add", "nn.relu", "reshape"]
    assert build(16) == ["astype", "astype", "astype", "matmul", "add", "nn.relu"]


def test_other_types_stay() -> None:
    @I.ir_module
    class Doubles:
        @R.function
        def main(
            x: R.Tensor((1, 8, 6, 6), "float64"), w: R.Tensor((8, 8, 1, 1), "float64")
        ) -> R.Tensor((1, 8, 6, 6), "float64"):
            with R.dataflow():
                gv = R.nn.conv2d(x, w)
                R.output(gv)
            return gv

    tvm.ir.assert_structural_equal(MultiplyBfloat16()(Doubles), Doubles)


def test_exact_takes_only_numbers_of_bfloat16() -> None:
    """Factors that are widened, and weights whose lower bits are 0; else nothing changes."""

    def convolve(weight: float, dtype: str) -> tvm.IRModule:
        x = relax.Var("x", relax.TensorType((1, 8, 6, 6), dtype))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                wide = builder.emit(relax.op.astype(x, "float32")) if dtype != "float32" else x
                weights = relax.const(np.full((8, 8, 1, 1), weight, "float32"))
                gv = builder.emit_output(relax.op.nn.conv2d(wide, weights))
            builder.emit_func_output(gv)
        return builder.get()

    exact = MultiplyBfloat16(exact=True)
    assert ("nn.conv2d", "float32") in calls(taken := exact(convolve(1.5, "bfloat16")))
    assert [str(a.ty.dtype) for a in taken["main"].body.blocks[0].bindings[-1].value.args] == [
        "bfloat16"
    ] * 2
    for weight, dtype in ((1.5, "float32"), (1.5, "float16"), (1 + 2.0**-12, "bfloat16")):
        mod = convolve(weight, dtype)
        tvm.ir.assert_structural_equal(exact(mod), mod)

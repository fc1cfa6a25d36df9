# SPDX-License-Identifier: Apache-2.0
"""The pass ``PackLayout`` before and after, what it refuses, and running it twice."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.target import Target

import relay_passes.op  # noqa: F401  (registers the ops that the modules below call)
from relay_passes.layout.pack_layout import PackLayout
from relay_passes.layout.packed.weight_packing import pack_array, weight_form
from relay_passes.op import quantized_conv2d
from schedules.errors import OpError, TargetError
from schedules.workload.conv2d import ConvLayer


def const(*shape: int, start: int = 1):
    """A constant whose elements all differ."""
    return relax.const(np.arange(start, start + np.prod(shape), dtype="float32").reshape(shape))


def packed(constant, form: str, block: int):
    return relax.const(pack_array(constant.value.numpy(), form, block))


def check(before, expected, block: int) -> None:
    """The pass gives ``expected``, leaves its input as it was, and then changes nothing more."""
    original = before.script(show_meta=True)
    once = PackLayout(block=block)(before)
    tvm.ir.assert_structural_equal(once, expected, map_free_vars=True)
    tvm.ir.assert_structural_equal(PackLayout(block=block)(once), once, map_free_vars=True)
    assert before.script(show_meta=True) == original


W1, B1 = const(13, 3, 3, 3), const(13)
W2, B2 = const(8, 13, 1, 1), const(8)
DW, DB = const(13, 1, 3, 3), const(13)


def test_example_of_the_docstring():
    w1, b1 = packed(W1, "first", 8), packed(B1, "bias", 8)
    w2, b2 = packed(W2, "dense", 8), packed(B2, "bias", 8)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(x, W1, B1, activation="relu")
                lv1 = R.nn.max_pool2d(lv, pool_size=[2, 2], strides=[2, 2])
                lv2 = R.tvm_fusion.conv2d(lv1, W2, B2)
                gv = R.nn.softmax(lv2, axis=1)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(
                    x, w1, b1, activation="relu", data_layout="NCHW", out_layout="NCHW8c",
                    in_channels=3, out_channels=13,
                )  # fmt: skip
                lv1 = R.nn.max_pool2d(
                    lv, pool_size=[2, 2], strides=[2, 2], layout="NCHW8c", out_layout="NCHW8c"
                )
                lv2 = R.tvm_fusion.conv2d(
                    lv1, w2, b2, data_layout="NCHW8c", in_channels=13, out_channels=8
                )
                lv3 = R.tvm_fusion.unpack(lv2, channels=8)
                gv = R.nn.softmax(lv3, axis=1)
                R.output(gv)
            return gv

    check(Before, Expected, 8)


def test_fused_pair_with_residual():
    w1, b1 = packed(DW, "depthwise", 4), packed(DB, "bias", 4)
    w2, b2 = packed(const(13, 13, 1, 1), "dense", 4), packed(B1, "bias", 4)
    w2_plain = const(13, 13, 1, 1)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor(("n", 13, "h", 8), "float32")):
            with R.dataflow():
                gv = R.tvm_fusion.fused_conv2d(
                    x, DW, DB, w2_plain, B1, x,
                    padding1=[1, 1, 1, 1], groups1=13, activation1="relu6", activation2="silu",
                )  # fmt: skip
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor(("n", 13, "h", 8), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.pack(x, block=4)
                lv1 = R.tvm_fusion.fused_conv2d(
                    lv, w1, b1, w2, b2, lv,
                    padding1=[1, 1, 1, 1], groups1=13, activation1="relu6", activation2="silu",
                    data_layout="NCHW4c", in_channels=13, mid_channels=13, out_channels=13,
                )  # fmt: skip
                gv = R.tvm_fusion.unpack(lv1, channels=13)
                R.output(gv)
            return gv

    check(Before, Expected, 4)


def test_squeeze_excite_stays_packed():
    reduce_w, reduce_b = const(5, 13, 1, 1), const(5)
    expand_w, expand_b = const(13, 5, 1, 1), const(13)
    dw, db = packed(DW, "depthwise", 8), packed(DB, "bias", 8)
    rw, rb = packed(reduce_w, "dense", 8), packed(reduce_b, "bias", 8)
    ew, eb = packed(expand_w, "dense", 8), packed(expand_b, "bias", 8)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 13, 6, 6), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(x, DW, DB, groups=13)
                lv1 = R.mean(lv, axis=[2, 3], keepdims=True)
                lv2 = R.tvm_fusion.conv2d(lv1, reduce_w, reduce_b)
                lv3 = R.nn.relu(lv2)
                lv4 = R.tvm_fusion.conv2d(lv3, expand_w, expand_b)
                lv5 = R.sigmoid(lv4)
                lv6 = R.multiply(lv, lv5)
                gv = R.mean(lv6, axis=[2, 3], keepdims=False)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 13, 6, 6), "float32")):
            with R.dataflow():
                p = R.tvm_fusion.pack(x, block=8)
                lv = R.tvm_fusion.conv2d(
                    p, dw, db, groups=13, data_layout="NCHW8c", in_channels=13, out_channels=13
                )
                lv1 = R.mean(lv, axis=[2, 3], keepdims=True)
                lv2 = R.tvm_fusion.conv2d(
                    lv1, rw, rb, data_layout="NCHW8c", in_channels=13, out_channels=5
                )
                lv3 = R.nn.relu(lv2)
                lv4 = R.tvm_fusion.conv2d(
                    lv3, ew, eb, data_layout="NCHW8c", in_channels=5, out_channels=13
                )
                lv5 = R.sigmoid(lv4)
                lv6 = R.multiply(lv, lv5)
                lv7 = R.mean(lv6, axis=[2, 3], keepdims=True)
                lv8 = R.tvm_fusion.unpack(lv7, channels=13)
                gv = R.squeeze(lv8, axis=[2, 3])
                R.output(gv)
            return gv

    check(Before, Expected, 8)


def test_weights_that_are_no_constants_are_packed_by_the_function():
    @I.ir_module
    class Before:
        @R.function
        def main(
            x: R.Tensor((1, 4, 8, 8), "float32"),
            w: R.Tensor((6, 4, 3, 3), "float32"),
            b: R.Tensor((6,), "float32"),
        ):
            with R.dataflow():
                gv = R.tvm_fusion.conv2d(x, w, b)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(
            x: R.Tensor((1, 4, 8, 8), "float32"),
            w: R.Tensor((6, 4, 3, 3), "float32"),
            b: R.Tensor((6,), "float32"),
        ):
            with R.dataflow():
                p = R.tvm_fusion.pack(x, block=4)
                w1 = R.nn.pad(w, [0, 2, 0, 0, 0, 0, 0, 0])
                w2 = R.reshape(w1, (2, 4, 1, 4, 3, 3))
                w3 = R.permute_dims(w2, [0, 2, 4, 5, 3, 1])
                b1 = R.nn.pad(b, [0, 2])
                b2 = R.reshape(b1, (2, 4))
                lv = R.tvm_fusion.conv2d(
                    p, w3, b2, data_layout="NCHW4c", in_channels=4, out_channels=6
                )
                gv = R.tvm_fusion.unpack(lv, channels=6)
                R.output(gv)
            return gv

    check(Before, Expected, 4)


def test_each_tensor_is_packed_and_unpacked_once():
    w, b = const(13, 13, 1, 1), const(13)
    wp, bp = packed(w, "dense", 4), packed(b, "bias", 4)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 13, 8, 8), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(x, w, b)
                lv1 = R.tvm_fusion.conv2d(x, w, b, activation="relu")
                lv2 = R.nn.softmax(lv, axis=1)
                lv3 = R.nn.log_softmax(lv, axis=1)
                gv = (lv1, lv2, lv3)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 13, 8, 8), "float32")):
            with R.dataflow():
                p = R.tvm_fusion.pack(x, block=4)
                lv = R.tvm_fusion.conv2d(
                    p, wp, bp, data_layout="NCHW4c", in_channels=13, out_channels=13
                )
                u = R.tvm_fusion.unpack(lv, channels=13)
                lv1 = R.tvm_fusion.conv2d(
                    p, wp, bp, activation="relu", data_layout="NCHW4c", in_channels=13,
                    out_channels=13,
                )  # fmt: skip
                u1 = R.tvm_fusion.unpack(lv1, channels=13)
                lv2 = R.nn.softmax(u, axis=1)
                lv3 = R.nn.log_softmax(u, axis=1)
                gv = (u1, lv2, lv3)
                R.output(gv)
            return gv

    check(Before, Expected, 4)


def test_pack_of_unpack_cancels():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 2, 8, 8, 4), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.unpack(x, channels=7)
                lv1 = R.tvm_fusion.pack(lv, block=4)
                lv2 = R.tvm_fusion.pack(lv, block=8)
                gv = R.add(lv1, lv1)
                gv1 = R.add(lv2, lv2)
                R.output(gv, gv1)
            return (gv, gv1)

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 2, 8, 8, 4), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.unpack(x, channels=7)
                lv2 = R.tvm_fusion.pack(lv, block=8)
                gv = R.add(x, x)
                gv1 = R.add(lv2, lv2)
                R.output(gv, gv1)
            return (gv, gv1)

    check(Before, Expected, 4)


GPU = Target({"kind": "cuda", "arch": "sm_90"})
TENSOR_CORES, NO_TENSOR_CORES = (
    Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_75")
)


def test_groups_that_cut_blocks_are_packed():
    wg, bg, odd, odd_b = const(14, 2, 3, 3), const(14), const(21, 2, 1, 1), const(21)
    wp, bp = packed(wg, "narrow", 4), packed(bg, "bias", 4)
    odd_p, odd_bp = packed(odd, "grouped", 4), packed(odd_b, "bias", 4)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 14, 8, 8), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(x, wg, bg, groups=7)
                gv = R.tvm_fusion.conv2d(lv, odd, odd_b, groups=7)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 14, 8, 8), "float32")):
            with R.dataflow():
                p = R.tvm_fusion.pack(x, block=4)
                lv = R.tvm_fusion.conv2d(
                    p, wp, bp, groups=7, data_layout="NCHW4c", in_channels=14, out_channels=14
                )
                lv1 = R.tvm_fusion.conv2d(
                    lv, odd_p, odd_bp, groups=7, data_layout="NCHW4c", in_channels=14,
                    out_channels=21,
                )  # fmt: skip
                gv = R.tvm_fusion.unpack(lv1, channels=21)
                R.output(gv)
            return gv

    check(Before, Expected, 4)
    tvm.ir.assert_structural_equal(PackLayout(GPU)(Before), Before)


def test_groups_that_cut_blocks_stay_plain_on_a_gpu_behind_one_unpack():
    wg, bg = const(13, 1, 3, 3), const(13)
    odd = const(26, 1, 1, 1)
    odd_b = const(26)
    wp, bp = packed(wg, "depthwise", 4), packed(bg, "bias", 4)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 13, 8, 8), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(x, wg, bg, groups=13)
                gv = R.tvm_fusion.conv2d(lv, odd, odd_b, groups=13)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 13, 8, 8), "float32")):
            with R.dataflow():
                p = R.tvm_fusion.pack(x, block=4)
                lv = R.tvm_fusion.conv2d(
                    p, wp, bp, groups=13, data_layout="NCHW4c", in_channels=13, out_channels=13
                )
                lv1 = R.tvm_fusion.unpack(lv, channels=13)
                gv = R.tvm_fusion.conv2d(lv1, odd, odd_b, groups=13)
                R.output(gv)
            return gv

    tvm.ir.assert_structural_equal(PackLayout(GPU)(Before), Expected, map_free_vars=True)


def test_dense_layers_of_tf32_have_input_lanes_last():
    """Those of an image, too; others are as in float32."""
    dw, dw_b = const(8, 1, 3, 3), const(8)
    w, b, wg = const(8, 3, 1, 1), const(8), const(8, 4, 1, 1)
    wgp, bp = (
        packed(wg, str(weight_form(ConvLayer(8, 8, (1, 1), groups=2), 4, False)), 4),
        packed(b, "bias", 4),
    )
    wp, dwp, dw_bp = packed(w, "chunks", 4), packed(dw, "depthwise", 4), packed(dw_b, "bias", 4)

    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(x, w, b)
                lv1 = R.tvm_fusion.conv2d(lv, dw, dw_b, groups=8)
                gv = R.tvm_fusion.conv2d(lv1, wg, b, groups=2)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32")):
            with R.dataflow():
                p = R.tvm_fusion.pack(x, block=4)
                lv = R.tvm_fusion.conv2d(
                    p, wp, bp, data_layout="NCHW4c", in_channels=3, out_channels=8
                )
                lv1 = R.tvm_fusion.conv2d(
                    lv, dwp, dw_bp, groups=8, data_layout="NCHW4c", in_channels=8, out_channels=8
                )
                lv2 = R.tvm_fusion.conv2d(
                    lv1, wgp, bp, groups=2, data_layout="NCHW4c", in_channels=8, out_channels=8
                )
                gv = R.tvm_fusion.unpack(lv2, channels=8)
                R.output(gv)
            return gv

    layout = PackLayout(GPU, tf32=True)
    tvm.ir.assert_structural_equal(layout(Before), Expected, map_free_vars=True)


def test_weights_of_pairs_have_input_lanes_last_for_tf32():
    w, b = const(32, 32, 1, 1), const(32)

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 32, 8, 8), "float32")):
            with R.dataflow():
                gv = R.tvm_fusion.fused_conv2d(x, w, b, w, b)
                R.output(gv)
            return gv

    sm_80, sm_75 = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_75"))
    for layout, rank in (
        (PackLayout(sm_80, tf32=True), 7),
        (PackLayout(sm_80), 6),
        (PackLayout(sm_75, tf32=True), 6),
    ):
        [_, call, _] = [b.value for b in layout(Module)["main"].body.blocks[0].bindings]
        assert call.attrs["out_layout"] == "NCHW4c"
        assert {int(call.args[at].ty.ndim) for at in (1, 3)} == {rank}


def _with_weight(weight: np.ndarray, numbers: relax.Expr) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((1, 8, 8, 8), "uint8"))
    with builder.function("main", [x]):
        with builder.dataflow():
            call = quantized_conv2d(x, relax.const(weight), numbers, numbers)
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    return builder.get()


def test_convolutions_of_bytes_are_packed():
    weight = np.zeros((8, 8, 1, 1), "int8")
    weight[3, 2:4, 0, 0] = 127, 2
    w, b = relax.const(weight), const(8)

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 8, 8, 8), "uint8")):
            with R.dataflow():
                gv = R.tvm_fusion.quantized_conv2d(x, w, b, b)
                R.output(gv)
            return gv

    tvm.ir.assert_structural_equal(PackLayout(NO_TENSOR_CORES)(Module), Module)
    [call] = [b.value for b in PackLayout(GPU)(Module)["main"].body.blocks[0].bindings][1:2]
    assert call.attrs["data_layout"] == call.attrs["out_layout"] == "NCHW16c"
    assert tuple(call.args[1].ty.shape.values) == (1, 1, 1, 1, 1, 16, 16)
    np.testing.assert_array_equal(
        call.args[1].value.numpy()[0, 0, 0, 0, 0, :8, :8], weight[:, :, 0, 0]
    )
    assert "NCHW16c" in PackLayout(block=16)(Module).script()
    for cpu, block, dtype in (("znver3", 8, "int16"), ("znver4", 16, "int8")):
        target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu})
        packed = PackLayout(target)(Module)
        assert f"NCHW{block}c" in packed.script()
        [call] = [b.value for b in packed["main"].body.blocks[0].bindings if len(b.value.args) == 4]
        assert str(call.args[1].ty.dtype) == dtype and "limited" not in call.attrs.keys()
    weight[3, 2] = 126  # No pair of products exceeds 16 bits any more.
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver3"})
    packed = PackLayout(target)(_with_weight(weight, b))
    assert "limited=True" in packed.script() and "int16" not in packed.script()


def test_pairs_are_packed_among_single_layers():
    """No layout changes between pairs of float16 or of bytes and their neighbours; an image may
    come first.
    """
    w, b = (relax.const(np.zeros(shape, "float16")) for shape in ((16, 16, 1, 1), (16,)))
    image = relax.const(np.zeros((16, 3, 1, 1), "float16"))

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float16")):
            with R.dataflow():
                lv = R.tvm_fusion.fused_conv2d(x, image, b, w, b)
                lv1 = R.tvm_fusion.conv2d(lv, w, b)
                gv = R.tvm_fusion.fused_conv2d(lv1, w, b, w, b, lv)
                R.output(gv)
            return gv

    weights = [relax.const(np.zeros((24, 24, k, k), "int8")) for k in (3, 1)]
    numbers = const(24)

    @I.ir_module
    class Bytes:
        @R.function
        def main(x: R.Tensor((1, 24, 8, 8), "uint8")):
            with R.dataflow():
                lv = R.tvm_fusion.quantized_conv2d(
                    x, weights[1], numbers, numbers, activation="round_clip", high=255.0,
                    out_dtype="uint8",
                )  # fmt: skip
                gv = R.tvm_fusion.fused_quantized_conv2d(
                    lv, weights[0], numbers, numbers, weights[1], numbers, numbers,
                    padding1=[1] * 4,
                )  # fmt: skip
                R.output(gv)
            return gv

    for module, lanes, calls in ((Module, 8, 3), (Bytes, 16, 2)):
        packed = PackLayout(GPU)(module)
        bound = [binding.value for binding in packed["main"].body.blocks[0].bindings]
        assert len(bound) == calls + 2  # a pack and an unpack
        for call in bound[1:-1]:
            assert call.attrs["data_layout"] == call.attrs["out_layout"] == f"NCHW{lanes}c"
        assert bound[-2].attrs["mid_channels"] in (16, 24)
    assert "fused_quantized_conv2d" in PackLayout(block=16)(Bytes).script()


def half(constant):
    return relax.const(constant.value.numpy().astype("float16"))


def test_dense_layers_of_float16_are_packed_for_tensor_cores():
    """Tensor cores get blocks of 16 bytes, beside those of float32, which have four channels."""
    w, b, w32, b32 = half(const(16, 3, 3, 3)), half(const(16)), const(8, 16, 1, 1), const(8)

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float16"), y: R.Tensor((1, 16, 8, 8), "float32")):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(x, w, b)
                lv1 = R.nn.max_pool2d(lv, (2, 2), strides=(2, 2))
                lv2 = R.tvm_fusion.conv2d(y, w32, b32)
                gv = (lv1, lv2)
                R.output(gv)
            return gv

    layouts = [
        {str(call.attrs["out_layout"]) for call in convolutions(PackLayout(target)(Module))}
        for target in (TENSOR_CORES, NO_TENSOR_CORES)
    ]
    assert layouts == [{"NCHW8c", "NCHW4c"}, {"NCHW", "NCHW4c"}]


def convolutions(mod: tvm.IRModule) -> list[relax.Call]:
    found: list[relax.Call] = []

    def look(expr):
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "").endswith(".conv2d"):
            found.append(expr)

    relax.analysis.post_order_visit(mod["main"], look)
    return found


def test_layers_of_float16_with_groups_are_packed():
    """Whatever the width of a group, so that nothing is repacked between them and dense ones."""
    w, dw, b = half(const(12, 12, 1, 1)), half(const(12, 1, 3, 3)), half(const(12))
    groups = half(const(12, 3, 1, 1))

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 12, 8, 8), "float16")):
            with R.dataflow():
                lv = R.tvm_fusion.conv2d(x, w, b)
                lv1 = R.tvm_fusion.conv2d(lv, dw, b, padding=[1, 1, 1, 1], groups=12)
                gv = R.tvm_fusion.conv2d(lv1, groups, b, groups=4)
                R.output(gv)
            return gv

    packed = PackLayout(TENSOR_CORES)(Module)
    assert {call.attrs["out_layout"] for call in convolutions(packed)} == {"NCHW8c"}
    assert packed.script().count("R.tvm_fusion.pack(") == 1
    tvm.ir.assert_structural_equal(PackLayout(NO_TENSOR_CORES)(Module), Module)


def test_pair_with_odd_groups_stays_plain_on_a_gpu():
    odd, odd_b = const(26, 1, 3, 3), const(26)
    w, b = const(4, 26, 1, 1), const(4)

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 13, 8, 8), "float32")):
            with R.dataflow():
                gv = R.tvm_fusion.fused_conv2d(x, odd, odd_b, w, b, groups1=13)
                R.output(gv)
            return gv

    tvm.ir.assert_structural_equal(PackLayout(GPU)(Module), Module)


def test_modules_without_our_convolutions_are_unchanged():
    w = const(8, 3, 3, 3)

    @I.ir_module
    class Module:
        I.module_attrs({"tvm_fusion.fusion_report": "[]"})

        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32")):
            unused = R.nn.relu(x)  # noqa: F841
            lv = R.nn.conv2d(x, w)
            lv1 = R.nn.relu(lv)
            return lv1

    tvm.ir.assert_structural_equal(PackLayout(block=4)(Module), Module)


def test_attributes_of_the_module_survive():
    @I.ir_module
    class Module:
        I.module_attrs({"tvm_fusion.fusion_report": "[]"})

        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32")):
            with R.dataflow():
                gv = R.tvm_fusion.conv2d(x, W1, B1)
                R.output(gv)
            return gv

    result = PackLayout(block=4)(Module)
    assert result.attrs["tvm_fusion.fusion_report"] == "[]"
    assert "NCHW4c" in result.script()


def test_bodies_of_branches_are_packed_on_their_own():
    w, b = const(13, 13, 1, 1), const(13)
    wp, bp = packed(w, "dense", 4), packed(b, "bias", 4)

    @I.ir_module
    class Before:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((1, 13, 8, 8), "float32")):
            lv = R.tvm_fusion.conv2d(x, w, b)
            if c:
                lv1 = R.tvm_fusion.conv2d(lv, w, b)
                r = R.nn.relu(lv1)
            else:
                r = R.nn.softmax(lv, axis=1)
            return r

    @I.ir_module
    class Expected:
        @R.function
        def main(c: R.Tensor((), "bool"), x: R.Tensor((1, 13, 8, 8), "float32")):
            p = R.tvm_fusion.pack(x, block=4)
            lv = R.tvm_fusion.conv2d(
                p, wp, bp, data_layout="NCHW4c", in_channels=13, out_channels=13
            )
            u = R.tvm_fusion.unpack(lv, channels=13)
            if c:
                lv1 = R.tvm_fusion.conv2d(
                    lv, wp, bp, data_layout="NCHW4c", in_channels=13, out_channels=13
                )
                lv2 = R.nn.relu(lv1)
                r = R.tvm_fusion.unpack(lv2, channels=13)
            else:
                r = R.nn.softmax(u, axis=1)
            return r

    check(Before, Expected, 4)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("target", "lanes"),
    [
        ({"kind": "llvm", "mcpu": "x86-64-v4"}, 16),
        ({"kind": "llvm", "mcpu": "x86-64-v3"}, 8),
        ({"kind": "llvm", "mcpu": "x86-64"}, 4),
        ({"kind": "cuda", "arch": "sm_90"}, 4),
        ({"kind": "opencl"}, 4),
    ],
)
@pytest.mark.parametrize("by_scope", [False, True])
def test_lanes_come_from_the_target(target, lanes, by_scope):
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 3, 8, 8), "float32")):
            with R.dataflow():
                gv = R.tvm_fusion.conv2d(x, W1, B1)
                R.output(gv)
            return gv

    device = Target(target)
    if by_scope:
        with device:
            result = PackLayout()(Module)
    else:
        result = PackLayout(target=device)(Module)
    tvm.ir.assert_structural_equal(result, PackLayout(block=lanes)(Module))


@pytest.mark.parametrize("block", [0, 1, -8, 8.0, "8", True])
def test_block_is_refused(block):
    with pytest.raises(OpError, match="PackLayout: block is .*; expected an integer of at least 2"):
        PackLayout(block=block)


def test_missing_target_is_refused():
    with pytest.raises(OpError, match="PackLayout: no target; pass target=, or run it inside"):
        PackLayout().transform_module(tvm.IRModule({}), tvm.transform.PassContext.current())


def test_target_of_another_kind_is_refused():
    layout = PackLayout(target=Target("metal"))
    with pytest.raises(TargetError, match="target kind is 'metal'"):
        layout.transform_module(tvm.IRModule({}), tvm.transform.PassContext.current())


def test_name_of_the_pass():
    assert PackLayout(block=4).info.name == "PackLayout"

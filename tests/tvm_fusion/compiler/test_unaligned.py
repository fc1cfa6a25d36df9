# SPDX-License-Identifier: Apache-2.0
"""Kernels of a CPU read and write arrays wherever their elements may lie."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

import tvm_fusion
from tvm_fusion.compiler.build_kernels import LowerKernels

MODEL = """
<ir_version: 8, opset_import: ["": 17]>
kernels (float[1,16,20,20] x, float[7,64] a, float[64,33] b, int64[5] i, uint8[4,70] u,
         bool[3,37] t, float16[6,45] h)
    => (float[1,24,20,20] pair, float[1,16,20,20] square, float[1,16,10,10] most,
        float[1,16,1,1] mean, float[1,16,20,20] soft, float[16] sums, float[1,20,20,16] turned,
        float[7,33] product, float[7,64] normed, float[5,33] rows, float[4,70] bytes,
        bool[3,37] not, float16[6,45] halves, float[1,16,20,20] added)
{
    d = Conv<group = 16, pads = [1,1,1,1]>(x, w_depthwise)
    r = Relu(d)
    pair = Conv(r, w_pointwise)
    square = Conv<pads = [1,1,1,1]>(x, w_square)
    most = MaxPool<kernel_shape = [2,2], strides = [2,2]>(x)
    mean = GlobalAveragePool(x)
    soft = Softmax<axis = -1>(x)
    flat = Reshape(x, s_flat)
    sums = ReduceSum<keepdims = 0>(flat, one)
    turned = Transpose<perm = [0,2,3,1]>(x)
    product = MatMul(a, b)
    normed = LayerNormalization<axis = -1>(a, ones)
    rows = Gather(b, i)
    wide = Cast<to = 1>(u)
    bytes = Sqrt(wide)
    not = Not(t)
    halves = Add(h, h)
    added = Add(x, square)
}
"""


@pytest.fixture(scope="module")
def proto() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(MODEL)
    weights = {
        "w_depthwise": rng.standard_normal((16, 1, 3, 3), "float32"),
        "w_pointwise": rng.standard_normal((24, 16, 1, 1), "float32"),
        "w_square": rng.standard_normal((16, 16, 3, 3), "float32"),
        "s_flat": np.array([16, 400]),
        "one": np.array([1]),
        "ones": np.ones(64, "float32"),
    }
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in weights.items()
    )
    return model


def shifted(array: np.ndarray, elements: int) -> np.ndarray:
    """A copy that begins some elements behind a multiple of 64 bytes."""
    size = array.itemsize
    memory = np.empty(array.nbytes + 64 + elements * size, np.uint8)
    start = -memory.ctypes.data % 64 + elements * size
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("fuse", ["all", "none"])
def test_arrays_that_begin_at_any_element(proto: onnx.ModelProto, fuse: str) -> None:
    model = tvm_fusion.compile(proto, threads=2, fuse=fuse)
    rng = np.random.default_rng()
    feed = {
        spec.name: (4 * rng.standard_normal(spec.shape)).astype(spec.dtype) for spec in model.inputs
    }
    feed |= {"i": rng.integers(0, 64, 5), "u": rng.integers(0, 255, (4, 70), "uint8")}
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    wanted = session.run(None, feed)
    first = [array.copy() for array in model(**{n: shifted(a, 0) for n, a in feed.items()})]
    for found, right in zip(first, wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3)
    for elements in (1, 4, 5, 15):
        given = {name: shifted(array, elements) for name, array in feed.items()}
        out = [shifted(np.full_like(array, 1), elements + 2) for array in first]
        found = model(given, out=out)
        for array, target, same in zip(found, out, first, strict=True):
            assert array is target
            np.testing.assert_array_equal(array, same)


@T.prim_func(s_tir=True)
def copy(x: T.Buffer((4, 32), "float32"), y: T.Buffer((4, 32), "float32")):
    T.func_attr({"global_symbol": "copy"})
    for i in T.parallel(4):
        for j in T.vectorized(32):
            with T.sblock("copy"):
                v, w = T.axis.remap("SS", [i, j])
                y[v, w] = x[v, w]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
def test_a_kernel_is_promised_the_alignment_of_an_element(dtype: str) -> None:
    target = Target({"kind": "llvm", "mcpu": "znver4"}, host={"kind": "llvm", "mcpu": "znver4"})
    x = tvm.te.placeholder((8,), dtype, "x")
    func = tvm.te.create_prim_func([x, tvm.te.compute((8,), lambda i: x[i], "y")])
    mod = tvm.IRModule({"copy": func.with_attr("global_symbol", "copy")})
    with target:
        mod = LowerKernels()(tirx.transform.BindTarget(target)(mod))
    size = np.dtype("uint16" if dtype == "bfloat16" else dtype).itemsize
    assert mod.script().count(f'"storage_alignment", {size})') == 2


def test_vectors_of_arguments_are_loaded_and_stored_unaligned() -> None:
    target = Target({"kind": "llvm", "mcpu": "znver3"})
    library = tvm.tirx.build(tvm.IRModule({"copy": copy}), target, pipeline="tvm_fusion_cpu")
    text = library.inspect_source("asm")
    assert "vmovups" in text and "vmovaps\t(" not in text

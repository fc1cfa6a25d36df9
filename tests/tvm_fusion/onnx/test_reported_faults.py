# SPDX-License-Identifier: Apache-2.0
"""Classes of faults that users report most of ONNX Runtime and TVM, and guards against them.

Reports of each are those of ONNX Runtime (O) and TVM (T); the last four end in crashes, too.

1. Resize takes a pixel beside the right one, or wrong cubic weights: O12098, O28310, O11496.
2. Pools with ceil_mode have a window too many, or a wrong mean: T18594, O15446.
3. Transposed convolutions lose output padding or dilation: T18601, O2518, O14208.
4. Operands broadcast along the wrong axis, or a repeated one is lost: T18598, T12305.
5. Sums of float16 overflow or stop, moments cancel: O29034, O11384, O12726.
6. Masked rows of attention are NaN: O4129.
7. Attributes of another opset, and negative axes, steps and indices, are ignored.
8. Optimisation changes results, or loses values that are outputs, too: O4110, O20951, T17835.
9. Indices from data lie beyond the tensor: O24917, O23828, O18970.
10. Tensors without elements: O4559, O1879, O11024.
11. Sizes differ from those of the call before, whose memory is used again: O28359, T15907.
12. Integers are divided by zero: O18648, T19566; ``test_guards.py`` has those.

Each case is expected to have the numbers of ONNX's reference implementation in Python, or of numpy.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import tvm_fusion
from tvm_fusion.errors import InvalidInputError

CASES = {
    # Resize: the nearest pixel is one off, and cubic weights are wrong in small results.
    "nearest": (
        "float[1, 1, 26] x",
        "float[1, 1, 64] y",
        """s = Constant<value = int64[3] {1, 1, 64}>()
        y = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric",
            nearest_mode = "floor">(x, , , s)""",
    ),
    "cubic": (
        "float[1, 1, 4, 4] x",
        "float[1, 1, 1, 1] y",
        """s = Constant<value = int64[4] {1, 1, 1, 1}>()
        y = Resize<mode = "cubic", coordinate_transformation_mode = "half_pixel",
            cubic_coeff_a = -0.75>(x, , , s)""",
    ),
    # Pools with ceil_mode: a window too many, and a mean that counts what lies outside.
    "ceil_maximum": (
        "float[1, 2, 7, 7] x",
        "float[1, 2, 4, 4] y",
        "y = MaxPool<kernel_shape = [2, 2], strides = [2, 2], ceil_mode = 1>(x)",
    ),
    "ceil_mean": (
        "float[1, 2, 7, 7] x",
        "float[1, 2, 4, 4] y",
        """y = AveragePool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1],
            ceil_mode = 1, count_include_pad = 0>(x)""",
    ),
    # PRelu: a slope that broadcasts along other axes than the channel.
    "slope_of_columns": (
        "float[2, 3, 4, 5] x, float[5] s",
        "float[2, 3, 4, 5] y",
        "y = PRelu(x, s)",
    ),
    "slope_of_channels": (
        "float[2, 3, 4, 5] x, float[3, 1, 1] s",
        "float[2, 3, 4, 5] y",
        "y = PRelu(x, s)",
    ),
    # A value that is several operands of one node.
    "repeated_operand": (
        "float[3, 2, 1, 3] x",
        "float[3, 2, 1, 3] y",
        "y = Sum(x, x, x, x, x)",
    ),
    # Sums along an axis, reversed and exclusive.
    "reversed_sums": (
        "float[3, 5] x",
        "float[3, 5] y",
        "a = Constant<value_int = 1>() y = CumSum<reverse = 1, exclusive = 1>(x, a)",
    ),
    # Slices with negative steps, and with ends far beyond the tensor.
    "backwards": (
        "float[3, 9] x",
        "float[3, 4] y",
        """b = Constant<value = int64[1] {-2}>() e = Constant<value = int64[1] {-999}>()
        a = Constant<value = int64[1] {1}>() s = Constant<value = int64[1] {-2}>()
        y = Slice(x, b, e, a, s)""",
    ),
    # Rounding: halves go to even numbers.
    "halves": (
        "float[2, 6] x",
        "float[2, 6] y",
        "t = Constant<value_float = 0.5>() r = Round(x) y = Add(r, t)",
    ),
}


def parse(inputs: str, outputs: str, nodes: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    )


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, 3]).standard_normal(shape, dtype=np.float32)


def run(model: onnx.ModelProto, *values: np.ndarray) -> np.ndarray:
    return tvm_fusion.compile(model, threads=1)(*values)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", CASES)
def test_numbers_of_the_reference(name: str) -> None:
    model = parse(*CASES[name])
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input]
    values = [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    if name == "halves":
        values = [np.arange(-6, 6, dtype="float32").reshape(2, 6) / 2]
    names = [value.name for value in model.graph.input]
    (wanted,) = ReferenceEvaluator(model).run(None, dict(zip(names, values, strict=True)))
    np.testing.assert_allclose(run(model, *values), wanted, rtol=1e-5, atol=1e-5)


def test_transposed_convolution_with_dilation_and_output_padding() -> None:
    """The padding of the output must get the taps that reach it."""
    model = parse(
        "float[1, 2, 5, 5] x, float[2, 3, 2, 2] w",
        "float[1, 3, 11, 11] y",
        """y = ConvTranspose<dilations = [3, 3], output_padding = [1, 1],
            pads = [1, 1, 1, 1], strides = [2, 2]>(x, w)""",
    )
    x, w = normal(1, 2, 5, 5), normal(2, 3, 2, 2, seed=1)
    whole = np.zeros((1, 3, 12, 12))
    for i, j in np.ndindex(2, 2):
        taps = np.einsum("nchw,co->nohw", x, w[:, :, i, j])
        whole[:, :, 3 * i : 3 * i + 9 : 2, 3 * j : 3 * j + 9 : 2] += taps
    np.testing.assert_allclose(run(model, x, w), whole[:, :, 1:, 1:], atol=1e-5)


def test_masked_rows_of_attention_are_numbers() -> None:
    """Masks of the lowest float, added twice, or of whole rows, must not end in NaN."""
    model = parse(
        "float[2, 4, 4] x, float[2, 4, 4] m, float[2, 4, 4] n",
        "float[2, 4, 4] y",
        "a = Add(x, m) b = Add(a, n) y = Softmax<axis = -1>(b)",
    )
    lowest = np.finfo("float32").min
    mask = np.triu(np.full((2, 4, 4), lowest / 2), 1).astype("float32")
    padding = np.zeros((2, 4, 4), "float32")
    padding[1] = lowest / 2
    found = run(model, normal(2, 4, 4), mask, padding)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)
    np.testing.assert_array_equal(np.triu(found[0], 1), 0)


def test_products_of_float16_are_summed_wider() -> None:
    """2048 + 1 is 2048 in float16: a sum of ones must not stop there."""
    model = parse("float16[2, 4096] a, float16[4096, 3] b", "float16[2, 3] y", "y = MatMul(a, b)")
    ones = np.ones((2, 4096), "float16"), np.ones((4096, 3), "float16")
    np.testing.assert_array_equal(run(model, *ones), np.full((2, 3), 4096, "float16"))
    image = "float16[1, 512, 3, 3] x, float16[16, 512, 3, 3] w"
    model = parse(image, "float16[1, 16, 1, 1] y", "y = Conv(x, w)")
    ones = np.ones((1, 512, 3, 3), "float16"), np.ones((16, 512, 3, 3), "float16")
    np.testing.assert_array_equal(run(model, *ones), np.full((1, 16, 1, 1), 4608, "float16"))


def test_layer_norm_of_a_large_mean() -> None:
    """The variance must not be the difference of two large numbers."""
    model = parse(
        "float[4, 64] x, float[64] s", "float[4, 64] y", "y = LayerNormalization<axis = -1>(x, s)"
    )
    x = (normal(4, 64) + 4096).astype("float32")
    wide = x.astype("float64")
    wanted = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(run(model, x, np.ones(64, "float32")), wanted, atol=2e-3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("opset", [13, 18])
def test_axes_of_a_mean_as_attribute_and_as_input(opset: int) -> None:
    """Axes of the other version must not be ignored, which reduces everything."""
    text = {
        13: "y = ReduceMean<axes = [2], keepdims = 0>(x)",
        18: "a = Constant<value_ints = [2]>() y = ReduceMean<keepdims = 0>(x, a)",
    }[opset]
    x = normal(2, 3, 4, 5)
    found = run(parse("float[2, 3, 4, 5] x", "float[2, 3, 5] y", text, opset), x)
    np.testing.assert_allclose(found, x.mean(2), atol=1e-6)


def test_quotients_and_remainders_of_negative_integers() -> None:
    """Div truncates; Mod has the sign of the divisor, with fmod that of the dividend."""
    model = parse(
        "int32[4] a, int32[4] b",
        "int32[4] q, int32[4] r, int32[4] f",
        "q = Div(a, b) r = Mod(a, b) f = Mod<fmod = 1>(a, b)",
    )
    a, b = np.array([7, -7, 7, -7], "int32"), np.array([2, 2, -2, -2], "int32")
    quotient, remainder, other = tvm_fusion.compile(model, threads=1)(a, b)
    np.testing.assert_array_equal(quotient, [3, -3, -3, 3])
    np.testing.assert_array_equal(remainder, np.mod(a, b))
    np.testing.assert_array_equal(other, np.fmod(a, b))


def test_negative_indices_from_data() -> None:
    """They count from the end, also where the compiler cannot see them."""
    model = parse("float[5, 3] x, int64[4] i", "float[4, 3] y", "y = Gather<axis = 0>(x, i)")
    x, indices = normal(5, 3), np.array([-1, 0, -5, 4])
    np.testing.assert_array_equal(run(model, x, indices), x[indices])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "node",
    [
        "a = Gather<axis = 0>(x, i)",
        "a = GatherElements<axis = 0>(x, i)",
        "a = GatherND(x, j)",
        "a = ScatterElements<axis = 0>(x, i, u)",
        "a = ScatterND(x, j, u)",
    ],
)
def test_indices_beyond_the_tensor(node: str) -> None:
    """They read and write no other memory: they are an error of the call, by the node's name."""
    operator = node.split()[2].split("<")[0].split("(")[0]
    kind = "[3, 4]" if operator.startswith("Scatter") else "[2, 4]"
    kind = "[2, 4, 4]" if operator == "Gather" else kind
    inputs = "float[3, 4] x, int64[2, 4] i, int64[2, 1] j, float[2, 4] u"
    compiled = tvm_fusion.compile(parse(inputs, f"float{kind} a", node), threads=1)
    x, u = normal(3, 4), normal(2, 4, seed=1)
    for far in (3, -4, 2**20, 2**40, -(2**62), 2**63 - 1):
        places, rows = np.full((2, 4), far), np.full((2, 1), far)
        with pytest.raises(InvalidInputError, match=rf"\({operator}\) has an index out of bounds"):
            compiled(x, places, rows, u)


def test_tensors_without_elements() -> None:
    """A batch of none has results without elements, and sums of nothing are 0."""
    model = parse(
        "float[N, 4] x, float[4, 3] w",
        "float[N, 3] y, float[3] t",
        "p = MatMul(x, w) y = Relu(p) a = Constant<value_ints = [0]>() "
        "t = ReduceSum<keepdims = 0>(y, a)",
    )
    compiled = tvm_fusion.compile(model, shapes={"N": "N"}, threads=1)
    w = normal(4, 3)
    for rows in (2, 0, 1):
        x = normal(rows, 4)
        y, total = compiled(x, w)
        assert y.shape == (rows, 3)
        np.testing.assert_allclose(total, np.maximum(x @ w, 0).sum(0), atol=1e-5)


def test_values_inside_of_what_is_fused_are_outputs() -> None:
    """Sums before an activation, one of them twice, and an input that is an output."""
    model = parse(
        "float[1, 4, 6, 6] x, float[4, 4, 1, 1] w, float[4] b",
        "float[1, 4, 6, 6] c, float[1, 4, 6, 6] r, float[1, 4, 6, 6] s, float[1, 4, 6, 6] x2",
        "c = Conv(x, w, b) r = Relu(c) s = Add(r, r) x2 = Identity(x)",
    )
    x, w, b = normal(1, 4, 6, 6), normal(4, 4, 1, 1, seed=1), normal(4, seed=2)
    inner = np.einsum("nchw,oc->nohw", x, w[:, :, 0, 0]) + b[:, None, None]
    wanted = inner, np.maximum(inner, 0), 2 * np.maximum(inner, 0), x
    found = tvm_fusion.compile(model, threads=1)(x, w, b)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_sizes_differ_from_those_of_the_call_before() -> None:
    """Neither results nor intermediate values keep the size or the elements of another call."""
    model = parse(
        "float[N, M, 8] x, float[8, 8] w",
        "float[N, M, 8] y",
        "p = MatMul(x, w) q = Softmax<axis = -1>(p) y = Add(q, x)",
    )
    compiled = tvm_fusion.compile(model, shapes={"N": "N", "M": "M"}, threads=1)
    w, kept = normal(8, 8), []
    for sizes in ((2, 5), (7, 3), (1, 1), (3, 9), (2, 5)):
        x = normal(*sizes, 8, seed=sum(sizes))
        powers = np.exp((x @ w) - (x @ w).max(-1, keepdims=True))
        kept.append((compiled(x, w), powers / powers.sum(-1, keepdims=True) + x))
    for found, wanted in kept:
        np.testing.assert_allclose(found, wanted, atol=1e-5)

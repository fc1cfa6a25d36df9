# SPDX-License-Identifier: Apache-2.0
"""Kernels to measure on a machine without TVM: an ONNX graph for us, an expression for the peers.

Nothing but numpy is needed to import this. Weights are a short random block, repeated: a compiled
model then packs to little, and the machine that measures makes the same ones.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.benchmarks import reduction_cases
from examples.benchmarks.reduction_cases import BYTES, Case, Reduction, step_dtypes

from ..array_steps import planned, reduce_torch, run_planned

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""Type and shape of each tensor."""
Node = tuple[str, Sequence[str], Sequence[str], Mapping[str, Any]]
"""An operator of ONNX with its inputs, outputs and attributes."""

BLOCK = np.random.default_rng(7).standard_normal(1021, dtype="float32")
"""Prime length, so that no row of a matrix begins like the one before."""
# Share of the largest magnitude: two roundings to float16, and one of what lies between.
_HALF = 4e-3
_UNIT = 2.0**-7  # what a byte counts, where there are only bytes between layers
_BYTE = 4 / 255  # float16 rounds some bytes between the layers to others
_UNARY = {"neg": "Neg", "abs": "Abs", "exp": "Exp"}
_BINARY = {"add": "Add", "mul": "Mul"}
_REDUCE = {
    "sum": "ReduceSum",
    "prod": "ReduceProd",
    "max": "ReduceMax",
    "min": "ReduceMin",
    "mean": "ReduceMean",
    "sum_squares": "ReduceSumSquare",
}
REDUCTIONS = (
    *("paper2", "paper4", "odd", "sweep/float32 2^1[68]", "sweep/float32 2^2[02468]"),
    *("network/layer_norm gradient *", "network/bias gradient ffn", "network/global pool"),
    *("network/batch_norm mobilenet", "network/gradient norm", "network/softmax max decode 64"),
)


@dataclass(frozen=True)
class KernelCase:
    """A small graph, most often one kernel.

    Parameters
    ----------
    name : str
        The group, a slash, and a name within the group.
    nodes : sequence of Node
        The graph, from the inputs and weights to the outputs.
    inputs, outputs : Tensors
        Tensors by name.
    expression : Callable
        Function of PyTorch's module and all inputs and weights by name that returns the output, or
        a tuple of them.
    weights : Callable
        Makes the weights, arrays by name.
    flops : float
        Arithmetic of multiplications and additions; 0 where only bytes count.
    tolerance : float
        Largest error relative to the largest magnitude of an output.
    options : mapping
        Options of ``tvm_fusion.compile``.
    reduction : Case, optional
        The same as a case of reductions, whose tolerance is by place.
    is_specific : bool
        Whether it is compiled for what only its architecture has: products of warpgroups.
    parameters : Callable, optional
        Makes the weights of the expression, where they are others than those of the graph.
    """

    name: str
    nodes: Sequence[Node]
    inputs: Tensors
    outputs: Tensors
    expression: Callable[..., Any]
    weights: Callable[[], dict[str, NDArray[Any]]] = dict
    flops: float = 0.0
    tolerance: float = 1e-5
    options: Mapping[str, Any] = field(default_factory=dict)
    reduction: Case | None = None
    is_specific: bool = False
    parameters: Callable[[], dict[str, NDArray[Any]]] | None = None

    @property
    def group(self) -> str:
        """Group of the case, the part of the name before the slash."""
        return self.name.partition("/")[0]

    @property
    def file(self) -> str:
        """Name of the case's library."""
        return self.name.replace("/", "-").replace(" ", "_").replace("^", "p") + ".so"

    @property
    def input_bytes(self) -> int:
        """Bytes of all inputs."""
        return _size(self.inputs)

    @property
    def bytes(self) -> int:
        """Compulsory bytes: every input and weight read once, every output written once."""
        weights = sum(
            array.nbytes for array in self.weights().values() if array.dtype != "int64"
        )  # integers of 64 bits are shapes, axes and classes
        return self.input_bytes + weights + _size(self.outputs)

    def run(self, torch: Any, inputs: Sequence[Any], weights: Mapping[str, Any]) -> tuple[Any, ...]:
        """The outputs by PyTorch."""
        named = dict(zip(self.inputs, inputs, strict=True))
        found = self.expression(torch, **named, **weights)
        return found if isinstance(found, tuple) else (found,)


def _size(tensors: Tensors) -> int:
    item = {**BYTES, "uint8": 1}
    return sum(item[dtype] * math.prod(shape) for dtype, shape in tensors.values())


def weight(*shape: int, dtype: str = "float16", scale: float | None = None) -> NDArray[Any]:
    """Weights whose products keep the spread of what they multiply, unless ``scale`` is given."""
    fan = math.prod(shape[1:]) if len(shape) > 2 else shape[0]
    return (np.resize(BLOCK, shape) * (scale or fan**-0.5)).astype(dtype)


def product(
    name: str, m: int, n: int, k: int, dtype: str = "float16", **options: Any
) -> KernelCase:
    """Product of an input and a constant matrix."""
    return KernelCase(
        name,
        [("MatMul", ["x", "w"], ["y"], {})],
        {"x": (dtype, (m, k))},
        {"y": (dtype, (m, n))},
        lambda torch, x, w: x @ w,
        lambda: {"w": weight(k, n, dtype=dtype)},
        2.0 * m * n * k,
        1e-5 if dtype == "float32" and not options else _HALF,
        options,
    )


def of_warpgroups(case: KernelCase) -> KernelCase:
    """A kernel by warpgroups of sm_90a, beside that of single warps."""
    return KernelCase(**{**vars(case), "name": f"{case.name} warpgroups", "is_specific": True})


def attention(name: str, batch: int, heads: int, tokens: int, width: int) -> KernelCase:
    """Attention without a mask, in float16."""
    kind = ("float16", (batch, heads, tokens, width))
    nodes: list[Node] = [
        ("Transpose", ["k"], ["turned"], {"perm": [0, 1, 3, 2]}),
        ("MatMul", ["q", "turned"], ["scores"], {}),
        ("Mul", ["scores", "scale"], ["scaled"], {}),
        ("Softmax", ["scaled"], ["shares"], {"axis": -1}),
        ("MatMul", ["shares", "v"], ["y"], {}),
    ]

    def expression(torch: Any, q: Any, k: Any, v: Any, scale: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return KernelCase(
        name,
        nodes,
        dict.fromkeys("qkv", kind),
        {"y": kind},
        expression,
        lambda: {"scale": np.array(width**-0.5, "float16")},
        4.0 * batch * heads * tokens**2 * width,
        _HALF,
    )


def decoding(
    name: str, batch: int, heads: int, shared: int, keys: int, width: int = 128
) -> KernelCase:
    """A decoder's step in float16: one query a head, of which ``shared`` have the same keys."""
    groups, past = heads // shared, ("float16", (batch, heads // shared, keys, width))
    query = ("float16", (batch, heads, 1, width))
    nodes: list[Node] = []
    for each in "kv":
        nodes += [
            ("Unsqueeze", [each, "two"], [f"{each}1"], {}),
            ("Expand", [f"{each}1", "repeated"], [f"{each}2"], {}),
            ("Reshape", [f"{each}2", "all"], [f"{each}3"], {}),
        ]
    nodes += [
        ("Transpose", ["k3"], ["turned"], {"perm": [0, 1, 3, 2]}),
        ("MatMul", ["q", "turned"], ["scores"], {}),
        ("Mul", ["scores", "scale"], ["scaled"], {}),
        ("Softmax", ["scaled"], ["shares"], {"axis": -1}),
        ("MatMul", ["shares", "v3"], ["y"], {}),
    ]

    def expression(torch: Any, q: Any, k: Any, v: Any, **_: Any) -> Any:
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, enable_gqa=shared > 1)

    def weights() -> dict[str, NDArray[Any]]:
        shape = np.array([batch, groups, shared, keys, width])
        return {
            "two": np.array([2]),
            "repeated": shape,
            "all": np.array([batch, heads, keys, width]),
            "scale": np.array(width**-0.5, "float16"),
        }

    return KernelCase(
        name,
        nodes,
        {"q": query, "k": past, "v": past},
        {"y": query},
        expression,
        weights,
        4.0 * batch * heads * keys * width,
        _HALF,
    )


def pair(
    name: str,
    batch: int,
    channels: tuple[int, int, int],
    size: int,
    depthwise: bool = False,
    dtype: str = "float16",
) -> KernelCase:
    """A 3x3 convolution and a 1x1, each with bias and ReLU."""
    first, inner, last = channels
    groups = first if depthwise else 1
    nodes: list[Node] = [
        ("Conv", ["x", "w1", "b1"], ["a"], {"pads": [1] * 4, "group": groups}),
        ("Relu", ["a"], ["r"], {}),
        ("Conv", ["r", "w2", "b2"], ["c"], {}),
        ("Relu", ["c"], ["y"], {}),
    ]

    def expression(torch: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        conv = torch.nn.functional.conv2d
        return conv(conv(x, w1, b1, padding=1, groups=groups).relu(), w2, b2).relu()

    def weights() -> dict[str, NDArray[Any]]:
        return {
            "w1": weight(inner, first // groups, 3, 3, dtype=dtype),
            "b1": weight(inner, dtype=dtype, scale=0.1),
            "w2": weight(last, inner, 1, 1, dtype=dtype),
            "b2": weight(last, dtype=dtype, scale=0.1),
        }

    return KernelCase(
        name,
        nodes,
        {"x": (dtype, (batch, first, size, size))},
        {"y": (dtype, (batch, last, size, size))},
        expression,
        weights,
        2.0 * batch * size**2 * inner * (9 * first // groups + last),
        _HALF if dtype == "float16" else 1e-5,
    )


def byte_pair(name: str, batch: int, channels: tuple[int, int, int], size: int) -> KernelCase:
    """A 3x3 convolution and a 1x1 of bytes, each with bias and ReLU.

    PyTorch has no convolution of bytes on GPUs, so the expression adds up floats: of 64 bits as the
    reference, of 16 bits as a peer. All scales are powers of two, so that weights are the same in
    each type and the sums of the reference are exact.
    """
    first, inner, last = channels
    nodes: list[Node] = []
    for number, (data, result, pads) in enumerate((("x", "r", 1), ("r", "y", 0)), 1):
        weight_names = [f"{each}{number}" for each in ("w", "s", "z")]
        given = [data, "unit", "zero", *weight_names, "unit", "zero", f"b{number}"]
        nodes.append(("QLinearConv", given, [result], {"pads": [pads] * 4}))

    def expression(torch: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        def as_bytes(value: Any) -> Any:
            return (value / _UNIT).round().clamp(0, 255)

        conv, wide = torch.nn.functional.conv2d, w1.dtype
        inside = as_bytes(conv(x.to(wide) * _UNIT, w1, b1, padding=1))
        return as_bytes(conv(inside * _UNIT, w2, b2)).to(torch.uint8)

    def layers() -> list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]:
        shapes = (inner, first, 3, 3), (last, inner, 1, 1)
        return [(_bytes_of_weights(*shape), *_scales_and_bias(*shape)) for shape in shapes]

    def weights() -> dict[str, NDArray[Any]]:
        tensors = {"unit": np.array(_UNIT, "float32"), "zero": np.array(0, "uint8")}
        for number, (numbers, scale, bias) in enumerate(layers(), 1):
            tensors[f"w{number}"], tensors[f"s{number}"] = numbers, scale
            tensors[f"z{number}"] = np.zeros(scale.shape, "int8")
            tensors[f"b{number}"] = (bias / (_UNIT * scale)).astype("int32")
        return tensors

    def parameters() -> dict[str, NDArray[Any]]:
        tensors = {}
        for number, (numbers, scale, bias) in enumerate(layers(), 1):
            tensors[f"w{number}"] = (numbers * scale[:, None, None, None]).astype("float16")
            tensors[f"b{number}"] = bias.astype("float16")
        return tensors

    return KernelCase(
        name,
        nodes,
        {"x": ("uint8", (batch, first, size, size))},
        {"y": ("uint8", (batch, last, size, size))},
        expression,
        weights,
        2.0 * batch * size**2 * inner * (9 * first + last),
        _BYTE,
        parameters=parameters,
    )


def _bytes_of_weights(*shape: int) -> NDArray[Any]:
    """Bytes whose mean is zero for each output, as the data is positive."""
    numbers = np.resize(BLOCK, shape)
    numbers -= numbers.mean((1, 2, 3), keepdims=True)
    return np.clip(np.round(numbers * 40), -127, 127).astype("int8")


def _scales_and_bias(outputs: int, *shape: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scales by which results keep the spread of what they are made of, and a bias."""
    scale = 2.0 ** np.round(np.log2(math.prod(shape) ** -0.5 / 32))
    bias = np.round(np.resize(BLOCK, outputs) * 32) * 2.0**-8
    return (scale * 2.0 ** (np.arange(outputs) % 2)).astype("float32"), bias


def convolution(
    name: str,
    batch: int,
    channels: tuple[int, int],
    size: int,
    kernel: int = 3,
    stride: int = 1,
    layers: int = 1,
    dtype: str = "float16",
    **options: Any,
) -> KernelCase:
    """Convolutions with bias and ReLU, the first with a stride, behind each other.

    The first one's channels are packed, and those of the last one unpacked.
    """
    first, last = channels
    out = (size - 1) // stride + 1
    inputs = [first, *[last] * (layers - 1)]
    names = ["x", *(f"r{k}" for k in range(1, layers)), "y"]
    nodes: list[Node] = []
    for k in range(layers):
        attributes = {"pads": [kernel // 2] * 4, "strides": [1 if k else stride] * 2}
        nodes += [
            ("Conv", [names[k], f"w{k}", f"b{k}"], [f"a{k}"], attributes),
            ("Relu", [f"a{k}"], [names[k + 1]], {}),
        ]

    def expression(torch: Any, x: Any, **weights: Any) -> Any:
        for k in range(layers):
            step = {"padding": kernel // 2, "stride": 1 if k else stride}
            x = torch.nn.functional.conv2d(x, weights[f"w{k}"], weights[f"b{k}"], **step).relu()
        return x

    def weights() -> dict[str, NDArray[Any]]:
        found: dict[str, NDArray[Any]] = {}
        for k, count in enumerate(inputs):
            found[f"w{k}"] = weight(last, count, kernel, kernel, dtype=dtype)
            found[f"b{k}"] = weight(last, dtype=dtype, scale=0.1)
        return found

    return KernelCase(
        name,
        nodes,
        {"x": (dtype, (batch, first, size, size))},
        {"y": (dtype, (batch, last, out, out))},
        expression,
        weights,
        2.0 * batch * out**2 * last * sum(inputs) * kernel**2,
        _HALF,
        options,
    )


def softmax(name: str, rows: int, columns: int, dtype: str = "float32") -> KernelCase:
    """Softmax of each row."""
    kind = (dtype, (rows, columns))
    return KernelCase(
        name,
        [("Softmax", ["x"], ["y"], {"axis": -1})],
        {"x": kind},
        {"y": kind},
        lambda torch, x: x.softmax(-1),
        tolerance=1e-5 if dtype == "float32" else _HALF,
    )


def layer_norm(name: str, rows: int, columns: int, dtype: str = "float32") -> KernelCase:
    """Layer norm of each row with gain and bias."""
    kind = (dtype, (rows, columns))

    def expression(torch: Any, x: Any, gain: Any, bias: Any) -> Any:
        return torch.nn.functional.layer_norm(x, (columns,), gain, bias)

    return KernelCase(
        name,
        [("LayerNormalization", ["x", "gain", "bias"], ["y"], {"axis": -1, "epsilon": 1e-5})],
        {"x": kind},
        {"y": kind},
        expression,
        lambda: {each: weight(columns, dtype=dtype, scale=1.0) for each in ("gain", "bias")},
        tolerance=2e-5 if dtype == "float32" else _HALF,
    )


def rms_norm(name: str, rows: int, columns: int, dtype: str = "float32") -> KernelCase:
    """Sum with a residual, which is stored, and RMS norm of each row of it with gain."""
    kind = (dtype, (rows, columns))

    def expression(torch: Any, x: Any, residual: Any, gain: Any) -> tuple[Any, ...]:
        total = x + residual
        return torch.nn.functional.rms_norm(total, (columns,), gain, 1e-5), total

    return KernelCase(
        name,
        [
            ("Add", ["x", "residual"], ["z"], {}),
            ("RMSNormalization", ["z", "gain"], ["y"], {"axis": -1, "epsilon": 1e-5}),
        ],
        {"x": kind, "residual": kind},
        {"y": kind, "z": kind},
        expression,
        lambda: {"gain": weight(columns, dtype=dtype, scale=1.0)},
        tolerance=2e-5 if dtype == "float32" else _HALF,
    )


def cross_entropy(name: str, rows: int, classes: int, dtype: str = "float32") -> KernelCase:
    """Mean cross entropy of the softmax of each row, with the class in the middle."""

    def expression(torch: Any, x: Any, target: Any) -> Any:
        return torch.nn.functional.cross_entropy(x, target)

    return KernelCase(
        name,
        [("SoftmaxCrossEntropyLoss", ["x", "target"], ["y"], {"reduction": "mean"})],
        {"x": (dtype, (rows, classes))},
        {"y": (dtype, ())},
        expression,
        lambda: {"target": np.arange(rows) * 7919 % classes},
        tolerance=1e-5 if dtype == "float32" else _HALF,
    )


def reduction(case: Case) -> KernelCase:
    """A case of reductions."""
    work = planned(case)
    nodes: list[Node] = []
    constants: dict[str, NDArray[Any]] = {}
    outputs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, item in enumerate(case.reductions):
        value = _steps(item, number, nodes, constants)
        constants[f"axes{number}"] = np.array(item.axes, "int64")
        dtype = step_dtypes(item, case.dtype)[-1]
        outputs[f"y{number}"] = (dtype, case.output_shape(item))
        given = [value, f"axes{number}"]
        nodes.append((_REDUCE[item.operator], given, [f"y{number}"], {"keepdims": 0}))

    def expression(torch: Any, **tensors: Any) -> tuple[Any, ...]:
        inputs = [tensors[f"x{number}"] for number in range(case.inputs)]
        return run_planned(work, inputs, torch, reduce_torch)

    return KernelCase(
        f"reduction/{case.name.replace('/', ' ')}",
        nodes,
        {f"x{number}": (case.dtype, case.shape) for number in range(case.inputs)},
        outputs,
        expression,
        lambda: constants,
        reduction=case,
    )


def _steps(
    item: Reduction, number: int, nodes: list[Node], constants: dict[str, NDArray[Any]]
) -> str:
    """Add the nodes of the steps before a reduction; returns the name of its data."""
    value = f"x{item.source}"
    for place, step in enumerate(item.steps):
        word, _, argument = step.partition(" ")
        result = f"v{number}_{place}"
        if word == "cast":
            nodes.append(("Cast", [value], [result], {"to": argument}))
        elif word == "reshape":
            constants[f"s{number}_{place}"] = np.array([*map(int, argument.split())])
            nodes.append(("Reshape", [value, f"s{number}_{place}"], [result], {}))
        elif word in _BINARY:
            nodes.append((_BINARY[word], [value, f"x{argument}"], [result], {}))
        else:
            nodes.append((_UNARY[word], [value], [result], {}))
        value = result
    return value


def small_cases() -> list[KernelCase]:
    """Every kind of kernel, small enough for compute-sanitizer."""

    def sums(name: str, shape: tuple[int, ...], axes: tuple[int, ...], operator: str) -> KernelCase:
        return reduction(Case(name, shape, "float32", (Reduction(operator, axes),)))

    tf32: dict[str, Any] = {"precision": "tf32"}
    return [
        *(_renamed(reduction(case)) for case in reduction_cases.paper2() if case.bytes < 1 << 20),
        _renamed(sums("all", (300_001,), (0,), "sum")),
        _renamed(sums("rows", (37, 5003), (1,), "sum")),
        _renamed(sums("columns", (5003, 37), (0,), "sum")),
        _renamed(sums("split", (3, 400_003), (1,), "max")),
        softmax("small/softmax", 33, 1000),
        softmax("small/softmax of clusters", 4, 60_000),
        layer_norm("small/layer norm", 65, 768),
        product("small/product float16", 129, 136, 72),
        of_warpgroups(product("small/product float16 of edges", 1000, 1032, 520)),
        product("small/product float32", 65, 130, 70, "float32"),
        product("small/product tf32", 128, 128, 64, "float32", **tf32),
        of_warpgroups(product("small/product tf32 of edges", 1000, 1032, 520, "float32", **tf32)),
        rms_norm("small/rms norm", 65, 768),
        cross_entropy("small/cross entropy", 33, 5003),
        attention("small/attention", 1, 2, 130, 64),
        of_warpgroups(attention("small/attention of edges", 1, 16, 1000, 64)),
        decoding("small/decoding", 1, 8, 4, 1030),
        of_warpgroups(convolution("small/convolution of edges", 2, (72, 72), 19)),
        of_warpgroups(convolution("small/convolution strided", 2, (136, 64), 15, stride=2)),
        of_warpgroups(convolution("small/convolution 1x1", 3, (192, 200), 13, kernel=1)),
        of_warpgroups(
            convolution("small/convolution tf32", 8, (72, 264), 19, dtype="float32", **tf32)
        ),
        pair("small/pair", 2, (32, 32, 64), 14),
        pair("small/pair depthwise", 2, (64, 64, 64), 14, depthwise=True),
        byte_pair("small/pair int8", 2, (32, 32, 64), 14),
    ]


def _renamed(case: KernelCase) -> KernelCase:
    return KernelCase(**{**vars(case), "name": case.name.replace("reduction/", "small/", 1)})


def timed_cases() -> list[KernelCase]:
    """Cases that race with the peers."""
    half = "float16"
    return [
        *(reduction(case) for case in reduction_cases.select(only=REDUCTIONS)),
        softmax("norm/softmax 8192x8192", 8192, 8192),
        softmax("norm/softmax 4096x36560", 4096, 36560),
        softmax("norm/softmax 32768x1024 float16", 32768, 1024, half),
        layer_norm("norm/layer norm 8192x4096", 8192, 4096),
        layer_norm("norm/layer norm 32768x768", 32768, 768),
        layer_norm("norm/layer norm 32768x1024 float16", 32768, 1024, half),
        rms_norm("norm/rms norm 8192x4096 float16", 8192, 4096, half),
        cross_entropy("norm/cross entropy 4096x32000", 4096, 32000),
        cross_entropy("norm/cross entropy 4096x128256 float16", 4096, 128256, half),
        *(variant for case in _large_products() for variant in (case, of_warpgroups(case))),
        product("product/16x4096x4096", 16, 4096, 4096),
        *(variant for case in _large_attention() for variant in (case, of_warpgroups(case))),
        attention("attention/8x12x128x64", 8, 12, 128, 64),
        decoding("attention/decoding 1x32 of 8, 32768 keys", 1, 32, 4, 32768),
        decoding("attention/decoding 16x32 of 8, 4096 keys", 16, 32, 4, 4096),
        decoding("attention/decoding 8x32, 4096 keys", 8, 32, 1, 4096),
        *(variant for case in _large_convolutions() for variant in (case, of_warpgroups(case))),
        pair("convolution/resnet-50 stage 1, batch 8", 8, (64, 64, 256), 56),
        pair("convolution/resnet-50 stage 2, batch 8", 8, (128, 128, 512), 28),
        pair("convolution/resnet-50 stage 3, batch 8", 8, (256, 256, 1024), 14),
        pair("convolution/resnet-50 stage 4, batch 8", 8, (512, 512, 2048), 7),
        pair("convolution/resnet-50 stage 1, batch 64", 64, (64, 64, 256), 56),
        byte_pair("convolution/resnet-50 stage 1 int8, batch 8", 8, (64, 64, 256), 56),
        byte_pair("convolution/resnet-50 stage 3 int8, batch 8", 8, (256, 256, 1024), 14),
        byte_pair("convolution/resnet-50 stage 1 int8, batch 64", 64, (64, 64, 256), 56),
        pair("convolution/depthwise 128x56, batch 8", 8, (128, 128, 128), 56, depthwise=True),
        pair("convolution/depthwise 128x56, batch 64", 64, (128, 128, 128), 56, depthwise=True),
    ]


def _large_products() -> list[KernelCase]:
    """Products that warpgroups compute faster, as predicted."""
    return [
        product("product/4096x4096x4096", 4096, 4096, 4096),
        product("product/8192x1024x4096", 8192, 1024, 4096),
        product("product/512x3072x768", 512, 3072, 768),
        product("product/4096x4096x4096 tf32", 4096, 4096, 4096, "float32", precision="tf32"),
    ]


def _large_convolutions() -> list[KernelCase]:
    """Convolutions that warpgroups compute faster, as predicted."""
    layers: dict[str, Any] = {"layers": 4}
    tf32: dict[str, Any] = {"dtype": "float32", "precision": "tf32"}
    return [
        convolution("convolution/4 3x3 128 of 28, batch 64", 64, (128, 128), 28, **layers),
        convolution("convolution/4 3x3 256 of 14, batch 64", 64, (256, 256), 14, **layers),
        convolution("convolution/4 3x3 256 of 14, batch 8", 8, (256, 256), 14, **layers),
        convolution("convolution/3x3 128 of 56 strided, batch 64", 64, (128, 128), 56, stride=2),
        convolution("convolution/1x1 1024 to 256 of 14, batch 64", 64, (1024, 256), 14, kernel=1),
        convolution("convolution/3x3 256 of 14 tf32, batch 64", 64, (256, 256), 14, **tf32),
    ]


def _large_attention() -> list[KernelCase]:
    """Attention of float16 that warpgroups compute faster, as predicted."""
    return [
        attention("attention/1x16x2048x64", 1, 16, 2048, 64),
        attention("attention/8x16x2048x64", 8, 16, 2048, 64),
        attention("attention/4x16x2048x128", 4, 16, 2048, 128),
    ]


def select(patterns: Sequence[str], cases: Iterable[Any] = ()) -> list[Any]:
    """Those of which a shell pattern matches the name or the group; by default of all kernels."""
    return [
        case
        for case in cases or (*small_cases(), *timed_cases())
        if not patterns
        or any(fnmatch.fnmatchcase(case.name, one) or case.group == one for one in patterns)
    ]

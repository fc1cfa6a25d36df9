# SPDX-License-Identifier: Apache-2.0
"""Ops between two convolutions of an ONNX model stay packed, with the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from between_onnx import Between, between
from onnx_reference import assert_same, random_feed, run_onnx
from tvm import relax

import tvm_fusion
from tvm_fusion.compiler import pipeline
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.onnx.frontend import import_onnx

SIZE = 9
TARGET = "x86-64-v3"  # eight lanes


def one(kind: str, **attributes):
    return lambda b, x: (b.node(kind, x, **attributes), b.channels)


def concat(b: Between, x: str):
    parts = [b.node("Relu", b.conv(x, b.channels, b.channels, size)) for size in (1, 3)]
    return b.node("Concat", " ".join(parts), axis=1), 2 * b.channels


def split(b: Between, x: str, channels: int | None = None):
    """The second half goes through a convolution and joins the first again."""
    half = (channels or b.channels) // 2
    left, right = b.node("Split", f"{x} {b.integers(half, half)}", 2, axis=1).split()
    right = b.node("Relu", b.conv(right, half, half))
    return b.node("Concat", f"{left} {right}", axis=1), 2 * half


def split_and_add(b: Between, x: str):
    left, right = b.node("Split", x, 2, axis=1).split()
    return b.node("Add", f"{left} {b.node('Sigmoid', right)}"), b.channels // 2


def shuffle(b: Between, x: str, groups: int = 2):
    inner = b.integers(1, groups, b.channels // groups, SIZE, SIZE)
    x = b.node("Transpose", b.node("Reshape", f"{x} {inner}"), perm=[0, 2, 1, 3, 4])
    return b.node("Reshape", f"{x} {b.integers(1, b.channels, SIZE, SIZE)}"), b.channels


def shuffle_unit(b: Between, x: str):
    """Two units of ShuffleNet V2: split, convolution, concatenation, shuffle."""
    for _ in range(2):
        x, _ = shuffle(b, split(b, x)[0])
    return x, b.channels


def excite(gate: str, inner: str):
    def middle(b: Between, x: str):
        scale = b.node(inner, b.conv(b.node("GlobalAveragePool", x), b.channels, 6))
        return b.node("Mul", f"{x} {b.node(gate, b.conv(scale, 6, b.channels))}"), b.channels

    return middle


def excite_by_gemm(b: Between, x: str):
    scale = b.node("Flatten", b.node("GlobalAveragePool", x))
    for outputs, inputs, activation in ((6, b.channels, "Relu"), (b.channels, 6, "HardSigmoid")):
        weights = f"{b.floats(outputs, inputs, scale=inputs**-0.5)} {b.floats(outputs)}"
        scale = b.node(activation, b.node("Gemm", f"{scale} {weights}", transB=1))
    scale = b.node("Reshape", f"{scale} {b.integers(1, b.channels, 1, 1)}")
    return b.node("Mul", f"{x} {scale}"), b.channels


def resize(mode: str, rule: str):
    def middle(b: Between, x: str):
        scales = b.constant(np.array([1, 1, 2, 2], "float32"))
        attributes = {"mode": mode, "coordinate_transformation_mode": rule}
        return b.node("Resize", f"{x} - {scales}", **attributes), b.channels

    return middle


def residual(b: Between, x: str):
    return b.node("Relu", b.node("Add", f"{b.conv(x, b.channels, b.channels, 3)} {x}")), b.channels


def add(b: Between, x: str):
    pooled = b.node("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4)
    return b.node("Add", f"{b.node('Sigmoid', x)} {pooled}"), b.channels


def clip(b: Between, x: str):
    bounds = [b.constant(np.array(bound, "float32")) for bound in (0.5, 2)]
    return b.node("Clip", " ".join([x, *bounds])), b.channels


def prelu(*slopes: int):
    def middle(b: Between, x: str):
        shape = [b.channels if extent == 0 else extent for extent in slopes]
        return b.node(
            "PRelu", f"{b.conv(x, b.channels, b.channels)} {b.floats(*shape)}"
        ), b.channels

    return middle


def norm(b: Between, x: str):
    x = b.node("MaxPool", x, kernel_shape=[3, 3], pads=[1] * 4)
    statistics = [b.floats(b.channels) for _ in range(3)]
    variance = b.constant(np.linspace(0.3, 2, b.channels, dtype="float32"))
    x = b.node("BatchNormalization", " ".join([x, *statistics, variance]))
    return b.node("Relu", x), b.channels


def after_conv(kind: str):
    return lambda b, x: (b.node(kind, b.conv(x, b.channels, b.channels)), b.channels)


WINDOW = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
MIDDLES = {
    "split and add": split_and_add,
    "shuffle": shuffle,
    "excite": excite("Sigmoid", "Relu"),
    "hard excite": excite("HardSigmoid", "HardSwish"),
    "nearest": resize("nearest", "asymmetric"),
    "linear": resize("linear", "half_pixel"),
    "max pool": one("MaxPool", **WINDOW),
    "average pool": one("AveragePool", **WINDOW),
    "average pool over padding": one("AveragePool", count_include_pad=1, **WINDOW),
    "global average pool": one("GlobalAveragePool"),
    "residual": residual,
    "add": add,
    "hardswish": one("HardSwish"),
    "clip": clip,
    "slopes of channels": prelu(0, 1, 1),
    "slope of all": prelu(1),
    "leaky": after_conv("LeakyRelu"),
    "elu": after_conv("Elu"),
    "sigmoid": one("Sigmoid"),
    "batch normalization": norm,
}
ONLY_FULL_BLOCKS = {
    "concat": concat,
    "split": split,
    "shuffle units": shuffle_unit,
    "softplus": after_conv("Softplus"),
}


def phase(model, *names: str) -> tvm.IRModule:
    """The module after some phases."""
    target = resolve(TARGET, cores=2)
    steps = pipeline.phases(target, pipeline.Options())
    return pipeline.run_phases(
        import_onnx(model).mod, target, {name: steps[name] for name in names}
    )


def ops(mod: tvm.IRModule) -> list[str]:
    """The ops that ``main`` calls, in order."""
    found: list[str] = []

    def look(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call):
            found.append(expr.op.name.removeprefix("relax.").removeprefix("tvm_fusion."))

    relax.analysis.post_order_visit(mod["main"], look)
    return found


LAYOUT_CHANGES = {"pack", "unpack", "permute_dims", "layout_transform", "reshape"}


def layout_changes(model) -> list[str]:
    """Changes of layout, but for that of the result."""
    found = [
        name for name in ops(phase(model, "simplify", "fuse", "pack")) if name in LAYOUT_CHANGES
    ]
    assert found.pop() == "unpack"
    return found


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("channels", [48, 20])
@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES.keys())
def test_nothing_is_unpacked_between(middle, channels: int) -> None:
    assert layout_changes(between(middle, channels, SIZE)) == []


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("middle", ONLY_FULL_BLOCKS.values(), ids=ONLY_FULL_BLOCKS.keys())
def test_nothing_is_unpacked_between_where_channels_fill_blocks(middle) -> None:
    assert layout_changes(between(middle, 48, SIZE)) == []


def writes(mod: tvm.IRModule) -> list[tuple[int, ...]]:
    """The shapes of what the kernels of ``main`` write, in order."""
    found: list[tuple[int, ...]] = []

    def look(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and expr.op.name == "relax.call_tir":
            (ty,) = expr.ty_args
            fields = ty.fields if isinstance(ty, relax.TupleType) else [ty]
            found.extend(tuple(int(extent) for extent in field.shape.values) for field in fields)

    relax.analysis.post_order_visit(mod["main"], look)
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("channels", [20, 116])
@pytest.mark.parametrize("middle", ONLY_FULL_BLOCKS.values(), ids=ONLY_FULL_BLOCKS.keys())
def test_in_cut_blocks_no_kernel_writes_another_layout(middle, channels: int) -> None:
    """Unpacking, the op and packing are one kernel, which reads and writes NCHW[x]c."""
    shapes = writes(phase(between(middle, channels, SIZE), "simplify", "fuse", "pack", "lower"))
    assert len(shapes) > 2
    assert all(len(shape) == 5 and shape[4] == 8 for shape in shapes[:-1])
    assert shapes[-1] == (1, 24, SIZE, SIZE)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("channels", [48, 20])
def test_only_the_gate_of_dense_layers_is_unpacked(channels: int) -> None:
    model = between(excite_by_gemm, channels, SIZE)
    shapes = writes(phase(model, "simplify", "fuse", "pack", "lower"))
    image = [shape for shape in shapes[:-1] if np.prod(shape) > channels * 2]
    assert image and all(len(shape) == 5 for shape in image)


NUMBERS = {**MIDDLES, **ONLY_FULL_BLOCKS, "excite by gemm": excite_by_gemm}
HALVES = {"split and add", "shuffle", *ONLY_FULL_BLOCKS}
"""Graphs that split the channels in halves, odd ones of 58."""
BY_ELEMENT = {"hardswish", "clip", "leaky", "elu", "sigmoid", "softplus", "batch normalization"}
"""Graphs of ops by element; the tests of the rules of packed layouts have their numbers, too."""


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "channels"),
    [
        pytest.param(name, each, marks=pytest.mark.slow if is_slow else ())
        for number, name in enumerate(NUMBERS)
        for place, each in enumerate((48, 20, 58) if name in HALVES else (48, 20))
        for is_slow in [name in BY_ELEMENT or (number + place) % 3 > 0 or place > 1]
    ],
)
def test_numbers(name: str, channels: int) -> None:
    middle = NUMBERS[name]
    model = between(middle, channels, SIZE)
    feed = random_feed(model, channels)
    assert_same(tvm_fusion.compile(model)(**feed), run_onnx(model, feed), limit=1e-5)

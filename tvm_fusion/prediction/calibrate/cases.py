# SPDX-License-Identifier: Apache-2.0
"""Kernels that a calibration measures, as small Relax modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import tvm
from tvm import relax

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One small module."""

    name: str  # What it computes; results are kept under this name.
    build: Callable[[], tvm.IRModule]
    """Returns the module, whose ``main`` has the weights as constants."""


def cases() -> list[Case]:
    """All cases, of each kind one after the other, so that the first ones cover all kinds."""
    kinds = (_convolutions(), _products(), _rows(), _streams(), _winograd(), _pairs())
    return [case for group in zip_longest(*kinds) for case in group if case is not None]


def _module(
    inputs: Sequence[tuple[Shape, str]], compute: Callable[..., relax.Expr]
) -> tvm.IRModule:
    """A module whose ``main`` computes one output."""
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"x{number}", relax.TensorType(shape, dtype))
        for number, (shape, dtype) in enumerate(inputs)
    ]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(compute(builder.emit, *params))
        builder.emit_func_output(out)
    return builder.get()


def _weight(*shape: int) -> relax.Expr:
    generator = np.random.default_rng(0)
    scale = float(np.prod(shape[1:])) ** -0.5
    return relax.const(generator.standard_normal(shape, np.float32) * np.float32(scale))


@dataclass(frozen=True)
class _Layer:
    """A convolution with bias and ReLU."""

    kernel: int
    inputs: int
    outputs: int
    stride: int = 1
    groups: int = 1

    def __str__(self) -> str:
        text = f"{self.kernel}x{self.kernel} {self.inputs}-{self.outputs}"
        text += f" s{self.stride}" if self.stride > 1 else ""
        return text + (f" g{self.groups}" if self.groups > 1 else "")

    def apply(self, emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Var:
        """Emit the layer."""
        shape = (self.outputs, self.inputs // self.groups, self.kernel, self.kernel)
        convolution = relax.op.nn.conv2d(
            x,
            _weight(*shape),
            strides=self.stride,
            padding=self.kernel // 2,
            groups=self.groups,
        )
        biased = relax.op.add(emit(convolution), _weight(1, self.outputs, 1, 1))
        return emit(relax.op.nn.relu(emit(biased)))


def _depthwise(kernel: int, channels: int, stride: int = 1) -> _Layer:
    return _Layer(kernel, channels, channels, stride, channels)


def _network(*layers: _Layer, size: int) -> Case:
    def compute(emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Expr:
        for layer in layers:
            x = layer.apply(emit, x)
        return x

    name = " + ".join(map(str, layers))
    inputs = [((1, layers[0].inputs, size, size), "float32")]
    return Case(f"conv {name} @{size}", functools.partial(_module, inputs, compute))


def _convolutions() -> list[Case]:
    layers = (
        (_Layer(1, 64, 256), 56),
        (_Layer(3, 3, 32, 2), 224),
        (_depthwise(3, 32), 112),
        (_Layer(3, 128, 128, 2), 56),
        (_Layer(1, 256, 1024), 14),
        (_depthwise(3, 480), 14),
        (_Layer(1, 512, 128), 28),
        (_Layer(1, 960, 160), 7),
        (_Layer(7, 3, 64, 2), 224),
        (_Layer(1, 256, 512, 2), 56),
        (_depthwise(5, 120), 28),
        (_Layer(1, 16, 96), 112),
        (_Layer(1, 2048, 512), 7),
        (_Layer(3, 512, 512, 2), 14),
        (_Layer(1, 24, 144), 56),
        (_Layer(1, 160, 960), 7),
        (_depthwise(3, 96, 2), 112),
        (_Layer(1, 1024, 512), 14),
        (_Layer(1, 96, 24), 56),
        (_Layer(1, 672, 168), 1),
    )
    return [_network(layer, size=size) for layer, size in layers]


def _winograd() -> list[Case]:
    layers = ((64, 56), (256, 14), (512, 7), (128, 28), (256, 56), (64, 112), (512, 28))
    return [_network(_Layer(3, channels, channels), size=size) for channels, size in layers]


def _pairs() -> list[Case]:
    pairs = (
        (_depthwise(3, 512), 512, 14),
        (_depthwise(3, 32), 64, 112),
        (_depthwise(3, 128, 2), 256, 56),
        (_depthwise(3, 144), 24, 56),
        (_depthwise(3, 576), 96, 14),
        (_depthwise(3, 96, 2), 24, 112),
    )
    return [  # a layer before them packs their data, as in a network
        _network(_Layer(1, 64, first.inputs), first, _Layer(1, first.outputs, outputs), size=size)
        for first, outputs, size in pairs
    ]


def _products() -> list[Case]:
    def dense(rows: int, columns: int, depth: int) -> Case:
        def compute(emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Expr:
            product = emit(relax.op.matmul(x, _weight(depth, columns)))
            return relax.op.add(product, _weight(columns))

        name = f"matmul {rows}x{depth} by {depth}x{columns}"
        return Case(name, functools.partial(_module, [((rows, depth), "float32")], compute))

    def batched(count: int, rows: int, columns: int, depth: int) -> Case:
        inputs = [((count, rows, depth), "float32"), ((count, depth, columns), "float32")]
        name = f"{count} matmuls {rows}x{depth} by {depth}x{columns}"
        build = functools.partial(_module, inputs, lambda emit, x, y: relax.op.matmul(x, y))
        return Case(name, build)

    return [
        dense(128, 768, 768),
        dense(1, 1000, 1280),
        batched(12, 128, 128, 64),
        dense(128, 768, 3072),
        dense(1, 4096, 4096),
        dense(64, 1000, 1280),
        dense(1, 512, 1024),
        dense(512, 512, 512),
        batched(12, 128, 64, 128),
        dense(16, 1024, 1024),
        dense(1, 256, 512),
        dense(256, 2304, 768),
    ]


def _rows() -> list[Case]:
    def softmax(rows: int, columns: int) -> Case:
        build = functools.partial(
            _module,
            [((rows, columns), "float32")],
            lambda emit, x: relax.op.nn.softmax(x, axis=-1),
        )
        return Case(f"softmax {rows}x{columns}", build)

    def layer_norm(rows: int, columns: int) -> Case:
        def compute(emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Expr:
            return relax.op.nn.layer_norm(x, _weight(columns), _weight(columns), axes=[-1])

        build = functools.partial(_module, [((rows, columns), "float32")], compute)
        return Case(f"layer norm {rows}x{columns}", build)

    def after_layer(name: str, channels: int, size: int, op: Callable[..., relax.Expr]) -> Case:
        """An operator on the packed output of a convolution."""

        def compute(emit: Callable[..., relax.Var], x: relax.Expr) -> relax.Expr:
            return op(_Layer(1, 64, channels).apply(emit, x))

        build = functools.partial(_module, [((1, 64, size, size), "float32")], compute)
        return Case(f"{name} of {channels} @{size}", build)

    mean = functools.partial(relax.op.mean, axis=[2, 3], keepdims=True)
    pool = relax.op.nn.max_pool2d
    large = functools.partial(pool, pool_size=3, strides=2, padding=1)
    small = functools.partial(pool, pool_size=2, strides=2)
    return [
        softmax(1536, 128),
        layer_norm(128, 768),
        after_layer("mean", 512, 14, mean),
        after_layer("max pool 3x3 s2", 64, 112, large),
        softmax(64, 1000),
        layer_norm(3136, 96),
        after_layer("mean", 1280, 7, mean),
        after_layer("max pool 2x2 s2", 64, 224, small),
        softmax(16, 4096),
        layer_norm(512, 1024),
        after_layer("mean", 96, 56, mean),
        after_layer("max pool 2x2 s2", 256, 28, small),
    ]


def _streams() -> list[Case]:
    def add(elements: int) -> Case:
        inputs = [((elements // 64, 64), "float32")] * 2
        build = functools.partial(_module, inputs, lambda emit, x, y: relax.op.add(x, y))
        return Case(f"add of {elements}", build)

    def unary(name: str, elements: int, op: Callable[..., relax.Expr]) -> Case:
        inputs = [((elements // 64, 64), "float32")]
        build = functools.partial(_module, inputs, lambda emit, x: op(x))
        return Case(f"{name} of {elements}", build)

    def transpose(shape: Shape, axes: Sequence[int]) -> Case:
        build = functools.partial(
            _module, [(shape, "float32")], lambda emit, x: relax.op.permute_dims(x, axes)
        )
        return Case(f"transpose {shape} to {tuple(axes)}", build)

    return [
        add(1 << 17),
        transpose((1, 128, 12, 64), (0, 2, 1, 3)),
        add(1 << 20),
        unary("gelu", 1 << 18, relax.op.nn.gelu),
        transpose((1, 128, 12, 64), (0, 2, 3, 1)),
        add(1 << 23),
        unary("tanh", 1 << 16, relax.op.tanh),
        transpose((1, 12, 128, 64), (0, 2, 1, 3)),
        add(1 << 15),
        transpose((256, 512), (1, 0)),
        add(1 << 18),
        transpose((1, 64, 56, 56), (0, 2, 3, 1)),
    ]

# SPDX-License-Identifier: Apache-2.0
"""Random small networks: packed and plain give the same numbers, and packing twice is once."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from relay_passes.layout.pack_layout import PackLayout
from relay_passes.op import channel_shuffle, conv2d, fused_conv2d
from tests.targets import compile_unchecked

nn, op = relax.op.nn, relax.op
CHANNELS = (3, 8, 13, 24, 40)
TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})
STEPS = (
    "dense", "depthwise", "grouped", "pair", "residual", "gate", "plain gate", "unary", "scalar",
    "divide", "bias", "add", "concat", "split", "pool", "mean", "resize", "softmax", "transpose",
    "shuffle", "halves", "prelu",
)  # fmt: skip


class Network:
    """Builds one function step by step; each step reads tensors made before."""

    def __init__(self, choose, seed: int) -> None:
        self.choose = choose
        self.rng = np.random.default_rng(seed)
        self.builder = relax.BlockBuilder()
        self.tensors: list[relax.Var] = []

    def const(self, *shape: int, scale: float = 1.0):
        return relax.const((self.rng.standard_normal(shape) * scale).astype("float32"))

    def any_tensor(self) -> relax.Var:
        """A tensor to read, a late one more likely than an early one."""
        return self.tensors[-1 - self.choose(range(min(3, len(self.tensors))))]

    def same_shape(self, x: relax.Var) -> relax.Var:
        """Another tensor of the shape of ``x``; ``x`` itself at worst."""
        return next(y for y in self.tensors if shape_of(y) == shape_of(x))

    def add(self, expr: relax.Expr) -> relax.Var:
        self.tensors.append(self.builder.emit(expr))
        return self.tensors[-1]

    def weight(self, outputs: int, inputs: int, kernel: int):
        return self.const(outputs, inputs, kernel, kernel, scale=(inputs * kernel**2) ** -0.5)

    def convolve(
        self, x, outputs: int, kernel: int = 1, groups: int = 1, residual=None, act="relu"
    ):
        weight = self.weight(outputs, shape_of(x)[1] // groups, kernel)
        padding = [kernel // 2] * 4
        return conv2d(
            x, weight, self.const(outputs), residual, padding=padding, groups=groups,
            activation=act,
        )  # fmt: skip

    def step(self, kind: str) -> None:
        x = self.any_tensor()
        _, channels, height, width = shape_of(x)
        if kind == "dense":
            self.add(self.convolve(x, self.choose(CHANNELS), self.choose((1, 3))))
        elif kind == "depthwise":
            self.add(self.convolve(x, channels, 3, groups=channels, act="none"))
        elif kind == "grouped":
            groups = next(count for count in (4, 2, 3, 13, 1) if channels % count == 0)
            self.add(self.convolve(x, channels, 1, groups=groups, act="sigmoid"))
        elif kind == "pair":
            outputs = self.choose(CHANNELS)
            self.add(
                fused_conv2d(
                    x,
                    self.weight(channels, 1, 3),
                    None,
                    self.weight(outputs, channels, 1),
                    None,
                    padding1=[1] * 4,
                    groups1=channels,
                    activation1="relu6",
                    activation2="relu",
                )  # fmt: skip
            )
        elif kind == "residual":
            self.add(self.convolve(x, channels, 3, residual=self.same_shape(x), act="none"))
        else:
            self.pointwise(kind, x, channels, (height, width))

    def pointwise(self, kind: str, x, channels: int, size: tuple[int, int]) -> None:
        emit = self.builder.emit
        if kind == "gate":
            mean = emit(op.mean(x, [2, 3], True))
            small = emit(self.convolve(mean, self.choose((3, 8))))
            self.add(op.multiply(x, emit(self.convolve(small, channels, act="sigmoid"))))
        elif kind == "plain gate":
            mean = emit(op.mean(x, [2, 3], False))
            self.add(op.multiply(x, emit(op.reshape(mean, (shape_of(x)[0], channels, 1, 1)))))
        elif kind == "unary":
            self.add(self.choose((nn.relu, op.sigmoid, nn.silu, op.tanh, op.abs))(x))
        elif kind == "scalar":
            self.add(op.subtract(relax.const(0.5, "float32"), x))
        elif kind == "divide":
            self.add(op.divide(x, emit(op.add(emit(op.abs(x)), relax.const(1.0, "float32")))))
        elif kind == "bias":
            self.add(op.add(x, self.const(1, channels, 1, 1)))
        elif kind == "add":
            self.add(op.add(x, self.same_shape(x)))
        elif kind == "concat":
            self.add(op.concat([x, self.same_shape(x)], 1))
        elif kind == "split" and channels > 1:
            parts = emit(op.split(x, [max(1, channels // 16 * 8)], 1))
            self.add(relax.TupleGetItem(parts, 0))
            self.add(relax.TupleGetItem(parts, 1))
        elif kind == "pool":
            pool = self.choose((nn.max_pool2d, nn.avg_pool2d))
            self.add(pool(x, (3, 3), (1, 1), (1, 1, 1, 1)))
        elif kind == "mean":
            self.add(op.mean(x, [2, 3], True))
        elif kind == "resize":
            self.add(op.image.resize2d(x, size, method="nearest_neighbor"))
        elif kind == "softmax":
            self.add(nn.softmax(x, 1))
        elif kind == "transpose":
            self.add(op.permute_dims(x, [0, 1, 3, 2]))
        elif kind == "shuffle":
            self.add(channel_shuffle(x, channels, 2 if channels % 2 == 0 else channels))
        elif kind == "halves" and channels > 1:
            parts = emit(op.split(x, [channels // 2], 1))
            self.add(relax.TupleGetItem(parts, 0))
            self.add(relax.TupleGetItem(parts, 1))
        elif kind == "prelu":
            self.add(nn.prelu(x, self.const(channels)))

    def build(self, steps: list[str], channels: int) -> tvm.IRModule:
        image = relax.Var("image", relax.TensorType((1, channels, 4, 4), "float32"))
        with self.builder.function("main", [image]):
            with self.builder.dataflow():
                self.tensors.append(image)
                self.add(self.convolve(image, self.choose(CHANNELS), 3))
                for kind in steps:
                    self.step(kind)
                last = self.convolve(self.tensors[-1], 5, act="none")
                output = self.builder.emit_output(
                    relax.Tuple([self.builder.emit(last), x_of(self)])
                )
            self.builder.emit_func_output(output)
        return self.builder.get()


def x_of(network: Network) -> relax.Var:
    """A second result of the function: something from the middle."""
    return network.any_tensor()


def shape_of(x: relax.Var) -> tuple[int, ...]:
    return tuple(int(extent) for extent in x.ty.shape.values)


def run(mod: tvm.IRModule, data: np.ndarray) -> list[np.ndarray]:
    with tvm.transform.PassContext():  # TVM's own passes need no checks of ours
        machine = relax.VirtualMachine(compile_unchecked(mod, TARGET), tvm.cpu())
    return [result.numpy() for result in machine["main"](tvm.runtime.tensor(data))]


def draw_network(data, most: int) -> tvm.IRModule:
    steps = data.draw(st.lists(st.sampled_from(STEPS), min_size=1, max_size=most), label="steps")
    network = Network(lambda options: data.draw(st.sampled_from(options)), seed=len(steps))
    return network.build(steps, data.draw(st.sampled_from(CHANNELS), label="channels"))


@pytest.mark.slow
@settings(max_examples=100)
@given(st.data(), st.sampled_from([4, 8, 16]))
def test_twice_is_once(data, block):
    once = PackLayout(block=block)(draw_network(data, most=10))
    tvm.ir.assert_structural_equal(PackLayout(block=block)(once), once)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 5)
@given(st.data(), st.sampled_from([4, 8, 16]))
def test_numbers(data, block):
    mod = draw_network(data, most=6)
    rng = np.random.default_rng(0)
    image = rng.standard_normal(shape_of(mod["main"].params[0])).astype("float32")
    for found, expected in zip(
        run(PackLayout(block=block)(mod), image), run(mod, image), strict=True
    ):
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("channels", CHANNELS)
def test_only_convolutions_need_no_layout_change(block, channels):
    network = Network(lambda options: channels if channels in options else options[0], seed=0)
    mod = PackLayout(block=block)(network.build(["dense", "depthwise", "pair", "residual"], 1))
    names = []

    def look(expr) -> None:
        if isinstance(expr, relax.Call):
            names.append(expr.op.name.rpartition(".")[2])

    relax.analysis.post_order_visit(mod["main"], look)
    assert names.count("unpack") == 2 and "pack" not in names  # one for each result

# SPDX-License-Identifier: Apache-2.0
"""Kernels and bytes of random sub-graphs with reductions, for a GPU.

    python examples/benchmarks/reducing_graphs.py [--graphs 200] [--seed 0] [--arch sm_90]

No GPU needed. A sub-graph is a normalization, a loss, a gradient, a statistic or the like, of
random shape and type; each of its intermediate tensors is an output, too, with a probability of one
third, as training keeps tensors for the backward pass. Printed are, by kind, the share of
sub-graphs that become one kernel, and the bytes that kernels read and write over the bytes of
inputs and outputs.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tvm
from rich.table import Table
from tvm import DataType, relax
from tvm.target import Target

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# The checkout itself holds the modules beside this one.
from examples.benchmarks.gpu.with_tvm import command_line  # noqa: E402
from tvm_fusion.compiler.phases import gpu_phases  # noqa: E402

op = relax.op
KEPT = 1 / 3
ROWS = (8, 64, 160, 300, 1024, 4096, 8192)
COLUMNS = (15, 128, 384, 768, 1000, 1024, 4096, 21128)


class Graph:
    """Sub-graph under construction.

    Parameters
    ----------
    seed : int
        Seed of all random choices.
    small : bool
        Whether extents are small and mostly odd.
    """

    def __init__(self, seed: int, small: bool = False) -> None:
        self.random = random.Random(seed)
        self.inputs: list[relax.Var] = []
        self.steps: list[relax.Var] = []
        self.results: list[relax.Var] = []
        self.builder = relax.BlockBuilder()
        rows, columns = ((3, 8, 33), (5, 64, 131)) if small else (ROWS, COLUMNS)
        self.rows, self.columns = self.random.choice(rows), self.random.choice(columns)
        self.dtype = self.random.choice(("float32", "float32", "float16"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the data of a matrix."""
        return (self.rows, self.columns)

    def image(self) -> tuple[int, ...]:
        """Extents of a small batch of images with channels in front."""
        side = self.random.choice((7, 14, 28))
        return (self.random.choice((2, 32)), self.random.choice((3, 64)), side, side)

    def input(self, *shape: int, dtype: str = "") -> relax.Var:
        """A further input."""
        ty = relax.TensorType(list(shape), dtype or self.dtype)
        self.inputs.append(relax.Var(f"x{len(self.inputs)}", ty))
        return self.inputs[-1]

    def wide(self, *shape: int) -> relax.Var:
        """A further input, as float32."""
        found = self.input(*shape)
        return found if self.dtype == "float32" else self(op.astype(found, "float32"))

    def __call__(self, value: relax.Expr) -> relax.Var:
        """A step, which may become an output."""
        self.steps.append(self.builder.emit(value))
        return self.steps[-1]

    def scaled(self, x: relax.Expr, factor: float) -> relax.Var:
        """``x`` times a number."""
        return self(op.multiply(x, relax.const(factor, x.ty.dtype)))

    def out(self, *results: relax.Expr) -> None:
        """Name the outputs."""
        self.results += [r if isinstance(r, relax.Var) else self(r) for r in results]

    def narrow(self, x: relax.Expr) -> relax.Var:
        """``x`` in the type of the inputs."""
        return x if self.dtype == "float32" else self(op.astype(x, self.dtype))


def layer_norm(g: Graph) -> None:
    """The output, and the statistics that the backward pass needs."""
    x = g.wide(*g.shape)
    mean = g(op.mean(x, [1], keepdims=True))
    centred = g(op.subtract(x, mean))
    variance = g(op.mean(g(op.multiply(centred, centred)), [1], keepdims=True))
    scale = g(op.rsqrt(g(op.add(variance, relax.const(1e-5)))))
    normal = g(op.multiply(centred, scale))
    shifted = op.add(g(op.multiply(normal, g.wide(g.columns))), g.wide(g.columns))
    g.out(g.narrow(g(shifted)), mean, scale)


def rms_norm(g: Graph) -> None:
    """RMS norm of a residual stream, which is an output."""
    stream = g(op.add(g.wide(*g.shape), g.wide(*g.shape)))
    squares = g(op.mean(g(op.multiply(stream, stream)), [1], keepdims=True))
    scale = g(op.rsqrt(g(op.add(squares, relax.const(1e-6)))))
    g.out(g.narrow(g(op.multiply(g(op.multiply(stream, scale)), g.wide(g.columns)))), stream)


def batch_statistics(g: Graph) -> None:
    """Sum and sum of squares of each channel after an activation."""
    shape = g.image()
    axes = [0, 2, 3] if g.random.random() < 0.5 else [0, 1, 2]
    active = g(op.nn.relu(g.wide(*shape)))
    g.out(op.sum(active, axes), op.sum(g(op.multiply(active, active)), axes))


def log_sum_exp(g: Graph) -> None:
    """Logarithm of the sum of exponentials of data that a given maximum shifts."""
    shifted = g(op.subtract(g.wide(*g.shape), g.input(g.rows, 1, dtype="float32")))
    g.out(op.log(g(op.sum(g(op.exp(shifted)), [1], keepdims=True))), shifted)


def softmax(g: Graph) -> None:
    """Softmax with its maximum and sum."""
    x = g.wide(*g.shape)
    largest = g(op.max(x, [1], keepdims=True))
    terms = g(op.exp(g(op.subtract(x, largest))))
    total = g(op.sum(terms, [1], keepdims=True))
    g.out(g.narrow(g(op.divide(terms, total))))


def variance(g: Graph) -> None:
    """Variance of data whose mean is known."""
    centred = g(op.subtract(g.wide(*g.shape), g.input(g.rows, 1, dtype="float32")))
    g.out(op.mean(g(op.multiply(centred, centred)), [1]), centred)


def norm_gradient(g: Graph) -> None:
    """Gradients of gain and bias, of the normal data, and what the gradient of the data needs."""
    gradient, x = g.wide(*g.shape), g.wide(*g.shape)
    mean, scale = (g.input(g.rows, 1, dtype="float32") for _ in range(2))
    normal = g(op.multiply(g(op.subtract(x, mean)), scale))
    product = g(op.multiply(gradient, normal))
    g.out(op.sum(product, [0]), op.sum(gradient, [0]), normal)


def norm_data_gradient(g: Graph) -> None:
    """Row sums of the backward pass of a layer norm, with the products kept."""
    scaled = g(op.multiply(g.wide(*g.shape), g.wide(g.columns)))
    centred = g(op.subtract(g.wide(*g.shape), g.input(g.rows, 1, dtype="float32")))
    g.out(op.sum(g(op.multiply(scaled, centred)), [1], keepdims=True), g.scaled(centred, -2.0))
    g.out(op.multiply(scaled, g.input(g.rows, 1, dtype="float32")))


def softmax_gradient(g: Graph) -> None:
    """Products of a probability and its gradient, and their sums."""
    y, gradient = g.wide(*g.shape), g.wide(*g.shape)
    total = g(op.sum(g(op.multiply(y, gradient)), [1], keepdims=True))
    g.out(g.narrow(g(op.multiply(y, g(op.subtract(gradient, total))))))


def entropy_gradient(g: Graph) -> None:
    """Gradient of a cross entropy, and that of the bias before it."""
    x, labels = g.wide(*g.shape), g.input(*g.shape, dtype="float32")
    largest, inverse = (g.input(g.rows, 1, dtype="float32") for _ in range(2))
    terms = g(op.exp(g(op.subtract(x, largest))))
    gradient = g(op.subtract(g(op.multiply(terms, inverse)), labels))
    g.out(op.sum(gradient, [0]), g.narrow(gradient))


def cross_entropy(g: Graph) -> None:
    """Loss over probabilities, and its gradient."""
    y, labels = g(op.divide(g.wide(*g.shape), relax.const(3.0))), g.wide(*g.shape)
    logs = g(op.log(g(op.maximum(y, relax.const(1e-6)))))
    g.out(op.sum(g(op.multiply(labels, logs)), [1]), g.narrow(g(op.subtract(y, labels))))


def dropout_gradient(g: Graph) -> None:
    """Gradient through a dropout, and that of a bias before it."""
    mask = g(op.less(g.input(*g.shape, dtype="float32"), relax.const(0.9)))
    kept = g(op.multiply(g.wide(*g.shape), g(op.astype(mask, "float32"))))
    gradient = g.scaled(kept, 1.11)
    g.out(op.sum(gradient, [0]), gradient)


def activation_gradient(g: Graph) -> None:
    """Gradient of tanh, by its result, with the gradient of the bias."""
    y, gradient = g.wide(*g.shape), g.wide(*g.shape)
    slope = g(op.subtract(relax.const(1.0), g(op.multiply(y, y))))
    through = g(op.multiply(gradient, slope))
    g.out(op.sum(through, [0]), g.narrow(through))


def clipped_gradient(g: Graph) -> None:
    """Scaled gradient, and the square of its norm."""
    unscaled = g(op.multiply(g.wide(*g.shape), g.input(1, dtype="float32")))
    g.out(op.sum(g(op.multiply(unscaled, unscaled))), g.scaled(unscaled, 5.0))


def moments(g: Graph) -> None:
    """Moments of an optimizer, with the norms of the gradient and of the step."""
    gradient, first, second = (g.input(*g.shape, dtype="float32") for _ in range(3))
    mean = g(op.add(g.scaled(first, 0.9), g.scaled(gradient, 0.1)))
    squares = g(op.multiply(gradient, gradient))
    spread = g(op.add(g.scaled(second, 0.999), g.scaled(squares, 0.001)))
    step = g(op.divide(mean, g(op.add(g(op.sqrt(spread)), relax.const(1e-6)))))
    g.out(mean, spread, step, op.sum(squares), op.sum(g(op.multiply(step, step))))


def absolute_loss(g: Graph) -> None:
    """Mean of absolute differences, which are kept."""
    difference = g(op.subtract(g.wide(*g.shape), g.wide(*g.shape)))
    g.out(op.mean(g(op.abs(difference))), difference)


def quantization(g: Graph) -> None:
    """Copy in half precision, and the largest magnitude of each row or of all."""
    x = g.input(*g.shape, dtype="float32")
    axes = [1] if g.random.random() < 0.5 else None
    g.out(op.max(g(op.abs(x)), axes), op.astype(x, "float16"))


def token_choice(g: Graph) -> None:
    """The most likely token, and shifted logits."""
    logits = g.scaled(g.wide(*g.shape), 0.7)
    g.out(op.argmax(logits, 1), op.max(logits, [1]), g.narrow(logits))


def global_pooling(g: Graph) -> None:
    """Means of an activation's channels; the activation is kept."""
    x = g.wide(*g.image())
    gate = g(op.clip(g(op.add(x, relax.const(3.0))), 0, 6))
    g.out(op.mean(g(op.multiply(x, g.scaled(gate, 1 / 6))), [2, 3]))


def several_statistics(g: Graph) -> None:
    """Sum, extremes and norm of one product."""
    product = g(op.multiply(g.wide(*g.shape), g.wide(*g.shape)))
    axes = g.random.choice(([0], [1], None))
    g.out(op.sum(product, axes), op.max(product, axes), op.min(product, axes))
    g.out(op.sum(g(op.multiply(product, product)), axes))


def finite_check(g: Graph) -> None:
    """True if all elements are small, and the elements as half precision."""
    x = g.input(*g.shape, dtype="float32")
    small = g(op.astype(g(op.less(g(op.abs(x)), relax.const(6e4))), "int32"))
    g.out(op.min(small), op.astype(x, "float16"))


def both_axes(g: Graph) -> None:
    """Sums of one product over rows and over columns."""
    product = g(op.multiply(g.wide(*g.shape), g.wide(*g.shape)))
    g.out(op.sum(product, [0]), op.sum(product, [1]))


def strangers(g: Graph) -> None:
    """Two sums of different extents."""
    g.out(op.sum(g(op.exp(g.wide(*g.shape))), [1]), op.sum(g.wide(g.rows, 77), [0]))


KINDS: tuple[Callable[[Graph], None], ...] = (
    *(layer_norm, rms_norm, batch_statistics, log_sum_exp, softmax, variance, norm_gradient),
    *(norm_data_gradient, softmax_gradient, entropy_gradient, cross_entropy, dropout_gradient),
    *(activation_gradient, clipped_gradient, moments, absolute_loss, quantization, token_choice),
    *(global_pooling, several_statistics, finite_check, both_axes, strangers),
)


def build(seed: int, small: bool = False) -> tvm.IRModule:
    """The sub-graph of a seed, whose kind is ``KINDS[seed % len(KINDS)]``."""
    graph = Graph(seed, small)
    builder, kind = graph.builder, KINDS[seed % len(KINDS)]
    with builder.function("main"):
        with builder.dataflow():
            kind(graph)
            kept = [step for step in graph.steps if graph.random.random() < KEPT]
            outputs = list(dict.fromkeys([*graph.results, *kept]))
            result = builder.emit_output(relax.Tuple(outputs))
        builder.emit_func_output(result, graph.inputs)
    return builder.get()


@dataclass(frozen=True)
class Count:
    """Result for a sub-graph: kernels, their bytes, and those of inputs and outputs."""

    kernels: int
    moved: int
    least: int

    @classmethod
    def of(cls, mod: tvm.IRModule, target: Target) -> Count:
        """Fuse a sub-graph as the compiler does."""
        main = mod["main"]
        least = sum(map(_bytes, [*(param.ty for param in main.params), main.ret_ty]))
        with target:
            for name, passes in gpu_phases(target).items():
                mod = mod if name == "schedule" else tvm.transform.Sequential(passes)(mod)
        calls: list[relax.Call] = []
        for block in mod["main"].body.blocks:
            values = (binding.value for binding in block.bindings)
            calls += [v for v in values if getattr(getattr(v, "op", 0), "name", "") == _CALL]
        reads = (tensor.ty for call in calls for tensor in dict.fromkeys(call.args[1].fields))
        moved = sum(map(_bytes, [*reads, *(call.ty for call in calls)]))
        return cls(len(calls), moved, least)


_CALL = "relax.call_tir"


def _bytes(ty: relax.Type) -> int:
    if isinstance(ty, relax.TupleType):
        return sum(map(_bytes, ty.fields))
    bits = DataType(str(ty.dtype)).bits if isinstance(ty, relax.TensorType) else 0
    return math.prod(map(int, ty.shape)) * -(-bits // 8) if bits else 0


def table(counts: Sequence[Count]) -> Table:
    """One row a kind, and one for all."""
    graphs = Table(title=f"{len(counts)} sub-graphs with reductions")
    for heading in ("kind", "sub-graphs", "in one kernel", "kernels", "bytes / least"):
        graphs.add_column(heading, justify="left" if heading == "kind" else "right")
    names = [kind.__name__ for kind in KINDS]
    for name, chosen in ((n, counts[k :: len(KINDS)]) for k, n in enumerate(names)):
        if chosen:
            graphs.add_row(name, *_row(chosen))
    graphs.add_row("all", *_row(counts))
    return graphs


def _row(counts: Sequence[Count]) -> list[str]:
    one = sum(count.kernels == 1 for count in counts)
    moved, least = (sum(getattr(count, of) for count in counts) for of in ("moved", "least"))
    kernels = sum(count.kernels for count in counts) / len(counts)
    return [str(len(counts)), f"{one / len(counts):.0%}", f"{kernels:.2f}", f"{moved / least:.2f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    options = argparse.ArgumentParser(description="Kernels of random sub-graphs with reductions.")
    options.add_argument("--graphs", type=int, default=len(KINDS) * 10, metavar="N")
    options.add_argument("--seed", type=int, default=0, help="of the first sub-graph")
    options.add_argument("--arch", default="sm_90", help="default: %(default)s")
    given = options.parse_args(arguments)
    target = Target({"kind": "cuda", "arch": given.arch}, host="llvm")
    first = given.seed * len(KINDS)
    counts = [Count.of(build(seed), target) for seed in range(first, first + given.graphs)]
    command_line.make_console().print(table(counts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

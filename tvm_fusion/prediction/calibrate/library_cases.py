# SPDX-License-Identifier: Apache-2.0
"""Kernels of PyTorch that a calibration measures, forward and backward, and their time.

They are timed as they run inside a model. Before each timed call the operands that the layer before
writes are written again; weights come from memory, copies of which take turns.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from math import prod
from typing import Any

from schedules.cost.kernel_call import KernelCall

from ..model.lowered import Tensor, conv2d, elementwise, gather, gemm, rows

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LibraryCase:
    """One kernel of PyTorch."""

    name: str  # What it computes; results are kept under this name.
    call: KernelCall  # The kernel as its model sees it.
    data: tuple[Shape, ...]
    weights: tuple[Shape, ...]
    """``data`` and ``weights``: shapes of the operands that the layer before writes, and of those
    that lie in memory."""
    run: Callable[..., Any]  # Runs it, given PyTorch and the operands.


def library_cases() -> list[list[LibraryCase]]:
    """All cases by kind; none without the extra ``torch``."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "scipy")):
        return []
    return [_products(), _convolutions(), _convolutions_1d(), _rows(), _streams(), _lookups()]


def _float(*shape: int) -> Tensor:
    return Tensor(shape, "float32")


def _backward(call: KernelCall, extra: float) -> KernelCall:
    """Backward of a layer: twice the arithmetic; reads the gradient, too, and writes two."""
    return replace(
        call,
        op=f"{call.op}_backward",
        flops=2 * call.flops,
        read_bytes=call.read_bytes + call.written_bytes,
        written_bytes=extra,
    )


def _products() -> list[LibraryCase]:
    sizes = (
        *((128, 768, 768), (1, 1000, 1280), (64, 256, 100), (512, 512, 512), (128, 768, 3072)),
        *((16, 1024, 1024), (32, 64, 64), (256, 256, 13), (1, 4096, 4096), (2048, 256, 256)),
        *((8, 128, 512), (1, 512, 256)),
    )
    return [case for size in sizes for case in _product(*size)] + _batched_products()


def _product(m: int, n: int, k: int) -> list[LibraryCase]:
    """A linear layer, and both products of its gradients."""
    left, right, out = _float(m, k), _float(k, n), _float(m, n)
    text = f"{m}x{k} by {k}x{n}"
    forward = gemm(left, right, out, batched=False)
    data = replace(gemm(out, _float(n, k), left, batched=False), op="gemm_backward")
    weight = replace(gemm(_float(n, m), left, _float(n, k), batched=False), op="gemm_backward")
    return [
        LibraryCase(
            f"pytorch linear {text}",
            forward,
            ((m, k),),
            ((n, k), (n,)),
            lambda torch, x, w, b: torch.nn.functional.linear(x, w, b),
        ),
        LibraryCase(
            f"pytorch gradient of data, {text}",
            data,
            ((m, n),),
            ((n, k),),
            lambda torch, g, w: torch.mm(g, w),
        ),
        LibraryCase(
            f"pytorch gradient of weights, {text}",
            weight,
            ((m, n), (m, k)),
            (),
            lambda torch, g, x: torch.mm(g.t(), x),
        ),
    ]


def _batched_products() -> list[LibraryCase]:
    cases = []
    sizes = ((12, 128, 128, 64), (256, 9, 9, 64), (12, 128, 64, 128), (32, 64, 64, 64))
    for b, m, n, k in sizes:
        call = gemm(_float(b, m, k), _float(b, k, n), _float(b, m, n), batched=True)
        operands = (b, m, k), (b, k, n)
        name = f"pytorch {b} matmuls {m}x{k} by {k}x{n}"
        cases.append(LibraryCase(name, call, operands, (), lambda torch, x, y: torch.bmm(x, y)))
        name = f"pytorch gradient of {b} matmuls {m}x{k} by {k}x{n}"
        call = gemm(_float(b, k, m), _float(b, m, n), _float(b, k, n), batched=True)
        call = replace(call, op="bmm_backward")
        operands = (b, m, k), (b, m, n)
        run = lambda torch, x, g: torch.bmm(x.transpose(1, 2), g)  # noqa: E731
        cases.append(LibraryCase(name, call, operands, (), run))
    return cases


def _convolutions() -> list[LibraryCase]:
    layers = (  # batch, inputs, outputs, size, kernel, stride, groups
        *((1, 64, 256, 56, 1, 1, 1), (1, 64, 64, 56, 3, 1, 1), (1, 96, 96, 56, 3, 1, 96)),
        *((1, 3, 32, 224, 3, 2, 1), (1, 256, 1024, 14, 1, 1, 1), (1, 480, 480, 14, 3, 1, 480)),
        *((1, 256, 256, 14, 3, 1, 1), (1, 512, 128, 28, 1, 1, 1), (8, 32, 32, 32, 3, 1, 1)),
        *((1, 3, 64, 224, 7, 2, 1), (1, 120, 120, 28, 5, 1, 120), (1, 960, 160, 7, 1, 1, 1)),
        *((1, 512, 512, 7, 3, 1, 1), (1, 128, 128, 56, 3, 2, 1), (16, 64, 128, 16, 3, 2, 1)),
        *((1, 16, 96, 112, 1, 1, 1), (1, 256, 512, 56, 1, 2, 1), (1, 32, 32, 112, 3, 1, 32)),
        *((1, 24, 144, 56, 1, 1, 1), (1, 672, 672, 14, 5, 2, 672), (1, 128, 128, 28, 3, 1, 1)),
    )
    return [case for layer in layers for case in _convolution(*layer)]


def _convolution(
    b: int, inputs: int, outputs: int, size: int, kernel: int, stride: int, groups: int
) -> list[LibraryCase]:
    pad, out = kernel // 2, (size + 2 * (kernel // 2) - kernel) // stride + 1
    weight = outputs, inputs // groups, kernel, kernel
    data, result = (b, inputs, size, size), (b, outputs, out, out)
    call = conv2d(_float(*data), _float(*weight), _float(*result), groups)
    text = f"{b} {inputs}-{outputs} {kernel}x{kernel} s{stride} g{groups} @{size}"
    both = _backward(call, 4.0 * (prod(data) + prod(weight)))
    return _layer("conv2d", text, call, both, data, weight, result, 2, stride, pad, groups)


def _layer(
    op: str,
    text: str,
    forward: KernelCall,
    backward: KernelCall,
    data: Shape,
    weight: Shape,
    result: Shape,
    axes: int,
    stride: int,
    pad: int,
    groups: int,
) -> list[LibraryCase]:
    """A convolution with its bias, and all of its gradients."""

    def run(torch: Any, x: Any, w: Any, b: Any) -> Any:
        return getattr(torch.nn.functional, op)(x, w, b, stride, pad, 1, groups)

    def gradients(torch: Any, g: Any, x: Any, w: Any) -> Any:
        rest = [stride] * axes, [pad] * axes, [1] * axes, False, [0] * axes, groups, [True] * 3
        return torch.ops.aten.convolution_backward(g, x, w, [weight[0]], *rest)

    return [
        LibraryCase(f"pytorch {op} {text}", forward, (data,), (weight, weight[:1]), run),
        LibraryCase(
            f"pytorch {op} backward {text}", backward, (result, data), (weight,), gradients
        ),
    ]


def _convolutions_1d() -> list[LibraryCase]:
    layers = (  # batch, inputs, outputs, length, kernel
        *((1, 64, 128, 256, 3), (8, 128, 128, 128, 3), (1, 256, 256, 64, 5), (4, 16, 32, 4096, 9)),
        *((1, 512, 512, 128, 1), (16, 64, 64, 512, 3)),
    )
    cases = []
    for b, inputs, outputs, length, kernel in layers:
        data, weight, result = (b, inputs, length), (outputs, inputs, kernel), (b, outputs, length)
        operands = [_float(*shape) for shape in (data, weight)]
        call = elementwise("conv1d", operands, _float(*result), 2.0 * inputs * kernel)
        both = _backward(call, 4.0 * (prod(data) + prod(weight)))
        text = f"{b} {inputs}-{outputs} {kernel} @{length}"
        shapes = data, weight, result
        cases += _layer("conv1d", text, call, both, *shapes, 1, 1, kernel // 2, 1)
    return cases


def _rows() -> list[LibraryCase]:
    sizes = ((1536, 128), (128, 768), (64, 1000), (512, 1024), (16, 4096), (4096, 256))
    cases = []
    for count, width in sizes:
        data, shape, text = _float(count, width), (count, width), f"{count}x{width}"
        softmax, norm = (
            rows(op, data, width, data, extra)
            for op, extra in (("softmax", 0), ("layer_norm", 8 * width))
        )
        cases += [
            LibraryCase(
                f"pytorch softmax {text}",
                softmax,
                (shape,),
                (),
                lambda torch, x: torch.softmax(x, -1),
            ),
            LibraryCase(
                f"pytorch softmax backward {text}",
                _backward(softmax, data.bytes),
                (shape, shape),
                (),
                lambda torch, g, y: torch.ops.aten._softmax_backward_data(g, y, -1, g.dtype),
            ),
            LibraryCase(
                f"pytorch layer norm {text}",
                norm,
                (shape,),
                ((width,), (width,)),
                lambda torch, x, w, b: torch.nn.functional.layer_norm(x, w.shape, w, b),
            ),
            LibraryCase(
                f"pytorch layer norm backward {text}",
                _backward(norm, data.bytes),
                (shape, shape),
                ((count, 1), (count, 1), (width,), (width,)),
                lambda torch, g, x, mean, scale, w, b: torch.ops.aten.native_layer_norm_backward(
                    g, x, w.shape, mean, scale, w, b, [True] * 3
                ),
            ),
        ]
    return cases + _batch_norms() + _pools()


def _batch_norms() -> list[LibraryCase]:
    cases = []
    for shape in ((1, 64, 56, 56), (8, 32, 32, 32), (1, 512, 7, 7), (16, 128, 16, 16)):
        data, channels = _float(*shape), (shape[1],)
        call = elementwise("batch_norm", [data, *[_float(*channels)] * 4], data)
        text = " x ".join(map(str, shape))
        cases.append(
            LibraryCase(
                f"pytorch batch norm {text}",
                call,
                (shape,),
                (channels,) * 4,
                lambda torch, x, mean, var, w, b: torch.nn.functional.batch_norm(
                    x, mean, var * var, w, b
                ),
            )
        )
        cases.append(
            LibraryCase(
                f"pytorch batch norm backward {text}",
                elementwise("batch_norm_backward", [data, data, *[_float(*channels)] * 5], data),
                (shape, shape),
                (channels,) * 5,
                lambda torch, g, x, w, *rest: torch.ops.aten.native_batch_norm_backward(
                    g, x, w, *rest, True, 1e-5, [True] * 3
                ),
            )
        )
    return cases


def _pools() -> list[LibraryCase]:
    """The largest of windows that overlap or do not, and the mean of each image."""
    cases = []
    for shape, window in (
        ((1, 64, 112, 112), 3),
        ((1, 64, 224, 224), 2),
        ((1, 256, 28, 28), 2),
        ((8, 128, 16, 16), 3),
        ((1, 2048, 7, 7), 2),
    ):
        data, text = _float(*shape), " x ".join(map(str, shape))
        pad, channels = window // 3, _float(*shape[:2])
        out = _float(*shape[:2], *((size + 2 * pad - window) // 2 + 1 for size in shape[2:]))
        cases += [
            LibraryCase(
                f"pytorch max pool {window}x{window} of {text}",
                elementwise("pool", [data], out, window**2),
                (shape,),
                (),
                partial(_max_pool, window, pad),
            ),
            LibraryCase(
                f"pytorch mean of images of {text}",
                elementwise("reduce", [data], channels, prod(shape[2:])),
                (shape,),
                (),
                lambda torch, x: x.mean((2, 3)),
            ),
        ]
    return cases


def _max_pool(window: int, pad: int, torch: Any, x: Any) -> Any:
    return torch.nn.functional.max_pool2d(x, window, 2, pad)


def _streams() -> list[LibraryCase]:
    cases = []
    for count in (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 23):
        shape = count // 64, 64
        for op, (operands, run) in _OPERATORS.items():
            out = _float(*shape)
            joined = _float(2 * shape[0], 64)
            call = elementwise(op, [out] * operands, joined if op == "concat" else out)
            name = f"pytorch {op.replace('_', ' ')} of {count}"
            cases.append(LibraryCase(name, call, (shape,) * operands, (), run))
    return cases


_Run = Callable[..., Any]
_OPERATORS: dict[str, tuple[int, _Run]] = {
    "add": (2, lambda torch, x, y: torch.add(x, y)),
    "relu": (1, lambda torch, x: torch.relu(x)),
    "relu_backward": (2, lambda torch, g, x: torch.ops.aten.threshold_backward(g, x, 0)),
    "gelu": (1, lambda torch, x: torch.nn.functional.gelu(x)),
    "gelu_backward": (2, lambda torch, g, x: torch.ops.aten.gelu_backward(g, x)),
    "tanh": (1, lambda torch, x: torch.tanh(x)),
    "tanh_backward": (2, lambda torch, g, y: torch.ops.aten.tanh_backward(g, y)),
    "copy": (1, lambda torch, x: x.clone()),
    "concat": (2, lambda torch, x, y: torch.cat([x, y])),
    "transpose": (1, lambda torch, x: x.t().contiguous()),
    "tril": (1, lambda torch, x: torch.tril(x)),
    "tril_backward": (1, lambda torch, g: torch.tril(g)),
    "dropout": (1, lambda torch, x: torch.nn.functional.dropout(x, 0.1, True)),
    "dropout_backward": (
        2,
        lambda torch, g, x: torch.ops.aten.native_dropout_backward(g, x > 0, 1.1),
    ),
}
"""Operators on any number of elements: their operands, and how they run."""


def _lookups() -> list[LibraryCase]:
    sizes = (  # bags, rows, lookups, width
        *((128, 1000, 10, 64), (512, 100_000, 10, 64), (1024, 1_000_000, 20, 32)),
        *((256, 10_000, 40, 128), (2048, 100_000, 1, 16), (512, 1000, 80, 64)),
    )
    cases = []
    for bags, count, bag_rows, width in sizes:
        lookups, wide = bags * bag_rows, 4.0 * width
        named = {"B": bags, "T": 1, "E": count, "L": bag_rows, "D": width}
        flops, read = float(lookups * width), lookups * (wide + 8)
        call = KernelCall("embedding_bag", named, "float32", flops, read, bags * wide)
        both = replace(
            call,
            op="embedding_bag_backward",
            flops=2 * flops,
            read_bytes=bags * wide + lookups * (wide + 8),
            written_bytes=lookups * wide,
        )
        text = f"{bags} of {bag_rows} in {count}x{width}"
        table, grad = (count, width), (bags, width)
        run, backward = _lookup_of(bags, count, bag_rows)
        cases.append(LibraryCase(f"pytorch embedding bag {text}", call, (), (table,), run))
        cases.append(_gather(lookups, count, width))
        name = f"pytorch embedding bag backward {text}"
        cases.append(LibraryCase(name, both, (grad,), (table,), backward))
    return cases


def _gather(lookups: int, count: int, width: int) -> LibraryCase:
    """Rows of a table, not summed up."""
    out, indices = _float(lookups, width), Tensor((lookups,), "int64")
    call = gather(_float(count, width), indices, out)
    run, _ = _lookup_of(lookups, count, 1, summed=False)
    return LibraryCase(
        f"pytorch {lookups} rows of {count}x{width}", call, (), ((count, width),), run
    )


def _lookup_of(bags: int, count: int, bag_rows: int, summed: bool = True) -> tuple[_Run, _Run]:
    """Lookups of equally likely rows, and their gradient with its update by plain SGD."""
    kept: list[Sequence[Any]] = []

    def operands(torch: Any, table: Any) -> Sequence[Any]:
        if not kept:
            indices = torch.randint(count, (bags * bag_rows,))
            offsets = torch.arange(0, bags * bag_rows, bag_rows)
            kept.append((indices, offsets, torch.ops.aten.embedding_bag(table, indices, offsets)))
        return kept[0]

    def run(torch: Any, table: Any) -> Any:
        indices, offsets, _ = operands(torch, table)
        if not summed:
            return torch.nn.functional.embedding(indices, table)
        return torch.nn.functional.embedding_bag(indices, table, offsets, mode="sum")

    def backward(torch: Any, gradient: Any, table: Any) -> Any:
        indices, offsets, (_, *rest) = operands(torch, table)
        found = torch.ops.aten._embedding_bag_backward(
            gradient, indices, offsets, *rest, count, False, 0, True, None
        )
        return table.add_(found, alpha=-1e-6)

    return run, backward


ROUNDS = 3
"""Rounds of calls, a pause apart, of which the fastest counts: some are disturbed throughout."""
RUNS = 12
"""Calls of a round."""
SECONDS = 0.1
"""Most time of the calls of a round."""
_PAUSE = 0.02
MOST_COPIES = 64
_CHAIN = 65
_LARGEST = 31 << 20
"""Bytes of the largest buffer that the C library keeps when it is freed, just under 32 MB."""


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees, for results up to 32 MB.

    glibc gives memory above twice the largest buffer freed so far back to the system, so that the
    pages of the next result fault, each of which takes a microsecond in a virtual machine.
    """
    import torch

    torch.empty(_LARGEST, dtype=torch.uint8)


def time_library(
    case: LibraryCase,
    threads: int,  # Threads of PyTorch.
    cold: int,  # Bytes of all copies of the weights together.
) -> float:
    """Typical seconds of a kernel."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    keep_freed_memory()
    with torch.no_grad():
        data = [torch.randn(shape) for shape in case.data]
        sets = [[torch.randn(shape) for shape in case.weights]]
        weights = sum(tensor.numel() * tensor.element_size() for tensor in sets[0])
        copies = max(1, min(MOST_COPIES, cold // weights)) if weights else 1
        sets += [[tensor.clone() for tensor in sets[0]] for _ in range(copies - 1)]

        def write() -> None:
            for tensor in data:
                tensor.mul_(1.0)

        turns = [partial(case.run, torch, *data, *own) for own in sets]
        found = [_typical(turns, write)]
        while len(found) < ROUNDS:
            time.sleep(_PAUSE)
            found.append(_typical(turns, write))
        return min(found)


def eager_overhead(threads: int) -> float:
    """Seconds that PyTorch's modules add to each operator of a model: T1 of its host."""
    import torch

    torch.set_num_threads(threads)
    one = torch.ones(1)
    with torch.no_grad():
        model = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(_CHAIN)))
        chain = _typical([lambda: model(one)], lambda: None)
        alone = _typical([lambda: [torch.relu(one) for _ in range(_CHAIN)]], lambda: None)
    return max(chain - alone, 1e-8) / _CHAIN


def _typical(turns: Sequence[Callable[[], Any]], before: Callable[[], None]) -> float:
    """Lower quartile of the seconds of calls: other work of the machine only lengthens them."""
    clock, times = time.perf_counter, []
    until = clock() + SECONDS
    for number, call in enumerate(cycle(turns)):
        before()
        begin = clock()
        call()
        end = clock()
        if number >= 3:
            times.append(end - begin)
        if len(times) >= RUNS or (len(times) >= 3 and end > until):
            return statistics.quantiles(times, n=4)[0]
    raise AssertionError("there is at least one turn")

# SPDX-License-Identifier: Apache-2.0
"""Calls of operators on a CPU, with sizes by hand."""

from __future__ import annotations

import pytest

from tvm_fusion.prediction.model.lowered import Tensor, elementwise
from tvm_fusion.prediction.traces.kernel_calls import host_call
from tvm_fusion.prediction.traces.kineto import HostEvent


def event(name: str, shapes: tuple, end: float = 1.0, values: tuple = ()) -> HostEvent:
    types = ("float",) * len(shapes)
    return HostEvent(name, "op", 1, 0.0, end, shapes=shapes, types=types, values=values)


def call(name: str, *shapes: tuple, values: tuple = ()):
    found = host_call(event(f"aten::{name}", shapes, values=values), [])
    assert found is not None
    return found


def test_products() -> None:
    linear = call("linear", (2, 3, 5), (7, 5), (7,))
    assert (linear.op, dict(linear.sizes)) == ("gemm", {"B": 1, "M": 6, "N": 7, "K": 5})
    assert (linear.flops, linear.read_bytes, linear.written_bytes) == (420, 4 * 65, 4 * 42)
    product = call("matmul", (2, 3, 4, 5), (2, 3, 5, 6))
    assert (product.op, dict(product.sizes)) == ("bmm", {"B": 6, "M": 4, "N": 6, "K": 5})


@pytest.mark.parametrize(
    ("values", "size"), [(("", "", "", "[2, 2]", "[1, 1]", "[1, 1]"), 4), ((), 8)]
)
def test_convolutions(values: tuple, size: int) -> None:
    found = call("conv2d", (2, 6, 8, 8), (4, 3, 3, 3), (4,), values=values)
    names = ("B", "IC", "OC", "H", "W", "FH", "FW", "OH", "OW", "groups")
    assert tuple(found.sizes[name] for name in names) == (2, 6, 4, 8, 8, 3, 3, size, size, 2)
    assert found.flops == 2 * (2 * 4 * size * size) * 27
    back = call("convolution_backward", (2, 4, size, size), (2, 6, 8, 8), (4, 3, 3, 3))
    assert (back.op, back.flops) == ("conv2d_backward", 2 * found.flops)
    assert back.sizes["OH"] == size
    assert call("conv1d", (2, 6, 16), (4, 6, 3)).flops == 2 * (2 * 4 * 16) * 18


def test_rows_lookups_and_others() -> None:
    assert dict(call("softmax", (4, 8, 16)).sizes) == {"B": 32, "H": 16}
    assert call("_softmax_backward_data", (4, 16), (4, 16)).op == "softmax_backward"
    assert call("native_layer_norm_backward", (4, 16), (4, 16)).op == "layer_norm_backward"
    back = call("_embedding_bag_backward", (8, 16), (80,), values=("",) * 6 + ("1000",))
    assert back.op == "embedding_bag_backward"
    assert dict(back.sizes) == {"B": 8, "T": 1, "E": 1000, "L": 10, "D": 16}
    joined = call("cat", ((4, 8), (4, 16)))
    assert (joined.op, joined.read_bytes) == ("concat", 4 * (32 + 64))
    for name, op in (
        ("dropout", "dropout"),
        ("tril", "tril"),
        ("threshold_backward", "relu_backward"),
    ):
        assert call(name, (4, 8)).op == op


@pytest.mark.parametrize("name", ["softmax", "gelu", "gelu_backward", "tanh", "clone", "cat"])
def test_operators_have_the_flops_and_bytes_with_which_they_were_calibrated(name: str) -> None:
    operands = [Tensor((4, 16), "float32")] * (2 if name in ("cat", "gelu_backward") else 1)
    ops = {"clone": "copy", "cat": "concat"}
    out = Tensor((8 if name == "cat" else 4, 16), "float32")
    expected = elementwise(ops.get(name, name), operands, out)
    shapes = [one.shape for one in operands]
    found = call(name, tuple(shapes)) if name == "cat" else call(name, *shapes)
    assert (found.op, found.flops) == (expected.op, expected.flops)
    assert found.moved_bytes == expected.moved_bytes


def test_operators_of_autograd_are_the_longest_one_inside() -> None:
    outer = event("autograd::engine::evaluate_function: AddmmBackward0", ())
    short, long = event("aten::mm", ((4, 8), (8, 2)), 2.0), event("aten::mm", ((4, 8), (8, 5)), 3.0)
    found = host_call(outer, [short, long])
    assert found is not None and (found.op, found.sizes["N"]) == ("gemm_backward", 5)


def test_views_compute_nothing() -> None:
    view = event("aten::reshape", ((4, 8),))
    assert host_call(view, []) is None
    copied = host_call(view, [event("aten::clone", ((4, 8),))])
    assert copied is not None and copied.op == "copy"
    assert host_call(view, [event("aten::copy_", ((), ()))]) is None  # It copies a number.
    assert host_call(event("aten::mul", ()), []) is None

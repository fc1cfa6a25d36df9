# SPDX-License-Identifier: Apache-2.0
"""An ONNX model as a function of PyTorch, node by node, for the models of ``examples/``.

It supports their operators, with constant shapes and axes. The loop over nodes is unrolled when
torch.compile traces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
from onnx import helper, numpy_helper

from tvm_fusion.errors import EngineError

from .engine import module

Arguments = Mapping[str, Any]
_INTEGER_INPUTS = {"Reshape": (1,), "Unsqueeze": (1,), "Squeeze": (1,), "Split": (1,)}
_INTEGER_INPUTS |= {"ReduceSum": (1,), "ReduceMean": (1,)}


class TorchTwin:
    """The model; called with its inputs as tensors, it returns the outputs as a tuple.

    Parameters
    ----------
    model : onnx.ModelProto
        Model with fixed shapes; its weights go to ``device``.
    device : str
        Such as ``cuda``.

    Raises
    ------
    EngineError
        If an operator is not known here.
    """

    def __init__(self, model: onnx.ModelProto, device: str) -> None:
        torch = module("torch")
        arrays = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
        missing = sorted({node.op_type for node in model.graph.node} - {*_OPERATORS})
        if missing:
            raise EngineError(f"no twin in PyTorch of the operators {', '.join(missing)}")
        self._weights = {
            name: torch.from_numpy(array.copy()).to(device) for name, array in arrays.items()
        }
        self._steps = []
        for node in model.graph.node:
            integers = {
                place: arrays[node.input[place]].tolist()
                for place in _INTEGER_INPUTS.get(node.op_type, ())
                if place < len(node.input)
            }
            attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
            if "to" in attributes:  # torch.compile does not look into onnx
                attributes["to"] = str(helper.tensor_dtype_to_np_dtype(attributes["to"]))
            function = _OPERATORS[node.op_type]
            self._steps.append((function, [*node.input], integers, attributes, [*node.output]))
        self._inputs = [value.name for value in model.graph.input if value.name not in arrays]
        self._outputs = [value.name for value in model.graph.output]
        self._torch = torch

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run all nodes."""
        values = dict(self._weights)
        values.update(zip(self._inputs, inputs, strict=True))
        for function, names, integers, attributes, outputs in self._steps:
            given = [
                integers[place] if place in integers else values[name] if name else None
                for place, name in enumerate(names)
            ]
            found = function(self._torch, given, attributes)
            values.update(zip(outputs, found if len(outputs) > 1 else [found], strict=True))
        return tuple(values[name] for name in self._outputs)


def _elementwise(name: str) -> Callable[..., Any]:
    return lambda torch, given, attributes: getattr(torch, name)(*given)


def _cast(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    return given[0].to(getattr(torch, attributes["to"]))


def _clip(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    return torch.clamp(*given)


def _hard_sigmoid(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    alpha, beta = attributes.get("alpha", 0.2), attributes.get("beta", 0.5)
    return torch.clamp(given[0] * alpha + beta, 0, 1)


def _hard_swish(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    return torch.nn.functional.hardswish(given[0])


def _gemm(torch: Any, operands: Sequence[Any], attributes: Arguments) -> Any:
    a = operands[0].t() if attributes.get("transA") else operands[0]
    b = operands[1].t() if attributes.get("transB") else operands[1]
    alpha, beta = attributes.get("alpha", 1.0), attributes.get("beta", 1.0)
    if len(operands) < 3:
        return alpha * (a @ b)
    return torch.addmm(operands[2], a, b, beta=beta, alpha=alpha)


def _pads(attributes: Arguments) -> list[int]:
    """Padding of both sides, which must be the same."""
    pads = [*attributes.get("pads", [0, 0, 0, 0])]
    half = len(pads) // 2
    if pads[:half] != pads[half:] or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        raise EngineError(f"no twin in PyTorch of the padding {pads}")
    return pads[:half]


def _conv(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    return torch.conv2d(
        given[0],
        given[1],
        given[2] if len(given) > 2 else None,
        stride=attributes.get("strides", [1, 1]),
        padding=_pads(attributes),
        dilation=attributes.get("dilations", [1, 1]),
        groups=attributes.get("group", 1),
    )


def _batch_norm(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    x, scale, shift, mean, variance = given
    return torch.nn.functional.batch_norm(
        x, mean, variance, scale, shift, False, 0.0, attributes.get("epsilon", 1e-5)
    )


def _max_pool(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    return torch.nn.functional.max_pool2d(
        given[0], attributes["kernel_shape"], attributes.get("strides", [1, 1]), _pads(attributes)
    )


def _layer_norm(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    axis = attributes.get("axis", -1) % given[0].ndim
    shape = given[0].shape[axis:]
    return torch.nn.functional.layer_norm(
        given[0], shape, *given[1:], eps=attributes.get("epsilon", 1e-5)
    )


def _gather(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    data, index = given
    axis = attributes.get("axis", 0) % data.ndim
    found = torch.index_select(data, axis, index.reshape(-1))
    return found.reshape(*data.shape[:axis], *index.shape, *data.shape[axis + 1 :])


def _reshape(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    shape = [given[0].shape[i] if size == 0 else size for i, size in enumerate(given[1])]
    return given[0].reshape(shape)


def _unsqueeze(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    value = given[0]
    for axis in sorted(given[1]):
        value = value.unsqueeze(axis)
    return value


def _split(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
    return torch.split(given[0], given[1], attributes.get("axis", 0))


def _reduced(name: str) -> Callable[..., Any]:
    def reduce(torch: Any, given: Sequence[Any], attributes: Arguments) -> Any:
        axes = given[1] if len(given) > 1 else attributes.get("axes", [*range(given[0].ndim)])
        return getattr(torch, name)(given[0], axes, keepdim=bool(attributes.get("keepdims", 1)))

    return reduce


_OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": _elementwise("add"),
    "Sub": _elementwise("sub"),
    "Mul": _elementwise("mul"),
    "Div": _elementwise("div"),
    "Pow": _elementwise("pow"),
    "Mod": _elementwise("remainder"),
    "Erf": _elementwise("erf"),
    "Tanh": _elementwise("tanh"),
    "Sigmoid": _elementwise("sigmoid"),
    "Relu": _elementwise("relu"),
    "Where": _elementwise("where"),
    "MatMul": _elementwise("matmul"),
    "Clip": _clip,
    "Cast": _cast,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Gemm": _gemm,
    "Conv": _conv,
    "BatchNormalization": _batch_norm,
    "MaxPool": _max_pool,
    "GlobalAveragePool": lambda torch, given, _: given[0].mean((2, 3), keepdim=True),
    "LayerNormalization": _layer_norm,
    "Softmax": lambda torch, given, a: torch.softmax(given[0], a.get("axis", -1)),
    "Gather": _gather,
    "Reshape": _reshape,
    "Flatten": lambda torch, given, a: given[0].flatten(a.get("axis", 1)),
    "Transpose": lambda torch, given, a: given[0].permute(*a["perm"]),
    "Unsqueeze": _unsqueeze,
    "Concat": lambda torch, given, a: torch.cat(given, a["axis"]),
    "Split": _split,
    "ReduceSum": _reduced("sum"),
    "ReduceMean": _reduced("mean"),
}

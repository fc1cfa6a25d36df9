# SPDX-License-Identifier: Apache-2.0
"""Reading an ONNX model from a path, from bytes or from a ``ModelProto``, without trusting it.

A model may be untrusted: it must not read files outside its folder, and any defect becomes
an ``InvalidModelError`` before TVM sees the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

import onnx
from google.protobuf.message import DecodeError

from tvm_fusion.errors import InvalidModelError
from tvm_fusion.warning_filters import warnings_ignored

from .graph_edits import all_graphs, default_opset, is_default_domain, opset_of
from .shapes import check_size

MIN_IR_VERSION = 3
OWN_OPSET = 18
"""Version of ONNX's operators for a model that has none of them."""

CONTRIB_DOMAIN = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""

MAX_BYTES = 2**31 - 1
"""Protobuf cannot hold a larger message."""

PACKED_BITS = {
    **dict.fromkeys(("INT4", "UINT4", "FLOAT4E2M1"), 4),
    **dict.fromkeys(("INT2", "UINT2"), 2),
    **dict.fromkeys(("FLOAT6E2M3", "FLOAT6E3M2"), 6),
}
"""Element types of which several share a byte in a file."""


def read_model(model: str | os.PathLike[str] | bytes | onnx.ModelProto) -> bytes:
    """Return the serialised model, given in any form."""
    if isinstance(model, onnx.ModelProto):
        try:
            return model.SerializeToString()
        except Exception as error:  # protobuf has no one exception for a message over 2 GB
            raise InvalidModelError(
                "the model is over 2 GB; save it with external data and pass its path"
            ) from error
    if isinstance(model, bytes | bytearray | memoryview):
        return bytes(model)
    if not isinstance(model, str | os.PathLike):
        raise InvalidModelError(
            f"the model is a {type(model).__name__}; expected a path, bytes or onnx.ModelProto"
        )
    path = Path(model)
    try:
        if path.exists() and not path.is_file():
            # Reading a device may never end, reading a pipe may block.
            raise InvalidModelError(f"cannot read model {str(path)!r}: it is not a regular file")
        if path.exists() and path.stat().st_size > MAX_BYTES:
            raise InvalidModelError(
                f"{str(path)!r} is over 2 GB, so it is not an ONNX model; a larger model keeps its "
                "weights as external data"
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = getattr(error, "strerror", None) or error
        raise InvalidModelError(f"cannot read model {str(path)!r}: {reason}") from error


def parse_model(data: bytes) -> onnx.ModelProto:
    """Return the model that ``data`` holds, its external data not yet loaded."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise InvalidModelError("the model is not ONNX, or is damaged or cut off") from error
    if not model.HasField("graph") or not model.graph.output:
        raise InvalidModelError("the model is not ONNX: it holds no graph with an output")
    if model.ir_version < MIN_IR_VERSION:
        raise InvalidModelError(
            f"the model has IR version {model.ir_version}; expected {MIN_IR_VERSION} or newer: "
            "export it again"
        )
    _complete(model)
    return model


def _complete(model: onnx.ModelProto) -> None:
    """Add what ``onnx.checker`` requires and ONNX Runtime does not.

    That is the names of graphs, the short form of the default domain, and the version of ONNX
    Runtime's own operators.
    """
    nodes = [node for graph in all_graphs(model) for node in graph.node]
    is_used = any(node.domain == CONTRIB_DOMAIN for node in nodes)
    if is_used and opset_of(model, CONTRIB_DOMAIN) is None:
        model.opset_import.add(domain=CONTRIB_DOMAIN, version=1)
    for graph in all_graphs(model):
        if isinstance(graph, onnx.GraphProto) and not graph.name:
            graph.name = "graph"
        for node in graph.node:
            if is_default_domain(node):
                node.ClearField("domain")


def model_files(path: Path) -> list[Path]:
    """The files that a model is read from: its own, and those of its external data."""
    tensors = external_tensors(parse_model(read_model(path)))
    named = {entry.value for t in tensors for entry in t.external_data if entry.key == "location"}
    return [path, *(path.parent / name for name in sorted(named))]


def check_opset(model: onnx.ModelProto) -> None:
    """Refuse a model without a default operator set, or with one that onnx does not know."""
    newest = onnx.defs.onnx_opset_version()
    opset = default_opset(model)
    if opset is None and any(map(is_default_domain, model.graph.node)):
        raise InvalidModelError(
            "the model imports no version of the ai.onnx operators; export it again"
        )
    if opset is None:
        opset = OWN_OPSET
        model.opset_import.add(domain="", version=opset)
    if not 1 <= opset <= newest:
        raise InvalidModelError(
            f"the model uses opset {opset}; onnx {onnx.__version__} knows 1 to {newest}: "
            "export the model with one of these, or install a newer onnx"
        )


def check_model(model: onnx.ModelProto) -> None:
    """Run ``onnx.checker`` on a model without its weights."""
    complete = onnx.ModelProto()
    complete.CopyFrom(model)
    for output in complete.graph.output:
        # The checker requires a type and a shape of every output; inference computes them.
        if not output.HasField("type"):
            output.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
        output.type.tensor_type.shape.SetInParent()
    try:
        with warnings_ignored():
            onnx.checker.check_model(complete)
    except (onnx.checker.ValidationError, ValueError, RuntimeError, TypeError) as error:
        raise InvalidModelError(f"onnx.checker refuses the model: {first_lines(error)}") from error


def check_external_data(model: onnx.ModelProto, path: Path | None) -> None:
    """Refuse external data that is not in a file below the folder of the model's file.

    If that file is a link, the folder that it leads to counts as well: caches of downloads keep all
    files of a model in one folder, under other names. Every tensor gets the whole path of its data,
    and the ``length`` of its shape.
    """
    for tensor in external_tensors(model):
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        what = f"tensor {tensor.name!r} has external data at {location!r}"
        if path is None:
            raise InvalidModelError(
                f"{what}, but the model has no folder; pass the path of its file instead"
            )
        file = _external_file(what, location, path)
        length = _check_extent(tensor, entries, file, what)
        del tensor.external_data[:]
        for key, value in {**entries, "location": file, "length": length}.items():
            tensor.external_data.add(key=key, value=str(value))


def _external_file(what: str, location: str, path: Path) -> Path:
    """Return the file at ``location``, refusing all that does not lie below the model's folder."""
    # The same rule on every system: backslashes and drives count on all of them.
    windows = PureWindowsPath(location)
    absolute = os.path.isabs(location) or windows.drive or windows.root
    if not location or absolute or ".." in windows.parts or "\0" in location:
        raise InvalidModelError(f"{what}; expected a relative path inside the model's folder")
    folder = path.parent.resolve()
    target = (folder / location).resolve()
    if not any(map(target.is_relative_to, (folder, path.resolve().parent))):
        raise InvalidModelError(
            f"{what}, a link that leaves the model's folder; put the data beside the model"
        )
    if not target.is_file():
        raise InvalidModelError(f"{what}; there is no such file in {str(path.parent)!r}")
    return target


def _check_extent(tensor: onnx.TensorProto, entries: dict[str, str], file: Path, what: str) -> int:
    """Return the size of the tensor in bytes, refusing a file that is too short."""
    check_size(tensor.name, tensor.dims)
    size = _byte_size(tensor)
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", size))
    except ValueError as error:
        raise InvalidModelError(
            f"{what}, whose offset or length is not a number: {error}"
        ) from error
    if length != size:
        raise InvalidModelError(f"{what} of length {length}; its shape and type take {size} bytes")
    if offset < 0 or offset + size > file.stat().st_size:
        raise InvalidModelError(
            f"{what}, {size} bytes from offset {offset}; the file has {file.stat().st_size} bytes"
        )
    return size


def _byte_size(tensor: onnx.TensorProto) -> int:
    """Number of bytes in a file for the tensor's shape and element type."""
    try:
        bits = 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    except KeyError as error:
        raise InvalidModelError(
            f"tensor {tensor.name!r} holds elements of the unknown type {tensor.data_type}"
        ) from error
    bits = PACKED_BITS.get(onnx.TensorProto.DataType.Name(tensor.data_type), bits)
    return -(-bits * math.prod(tensor.dims) // 8)


def load_external_data(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return the tensor with its external data, which :func:`check_external_data` has accepted."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return tensor
    loaded = onnx.TensorProto()
    loaded.CopyFrom(tensor)
    loaded.ClearField("external_data")
    loaded.data_location = onnx.TensorProto.DEFAULT
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        with open(entries["location"], "rb") as file:
            file.seek(int(entries.get("offset", 0)))
            loaded.raw_data = file.read(int(entries["length"]))
    except OSError as error:
        raise InvalidModelError(
            f"cannot load the external data of tensor {tensor.name!r}: {error.strerror}"
        ) from error
    if len(loaded.raw_data) != int(entries["length"]):
        raise InvalidModelError(f"the external data of tensor {tensor.name!r} became shorter")
    return loaded


def load_all_external_data(model: onnx.ModelProto) -> None:
    """Load, in place, the external data of every tensor that is still in the model."""
    for tensor in external_tensors(model):
        tensor.CopyFrom(load_external_data(tensor))


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor of a model with external data."""
    for graph in all_graphs(model):
        tensors = list(getattr(graph, "initializer", ()))
        for sparse in getattr(graph, "sparse_initializer", ()):
            tensors += [sparse.values, sparse.indices]
        for node in graph.node:
            for attribute in node.attribute:
                tensors += [attribute.t, *attribute.tensors]
                for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                    tensors += [sparse.values, sparse.indices]
        for tensor in tensors:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                yield tensor


def first_lines(error: Exception, count: int = 3) -> str:
    """Shorten an exception's text to its first lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:count]) or type(error).__name__

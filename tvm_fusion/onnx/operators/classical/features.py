# SPDX-License-Identifier: Apache-2.0
"""Operators of ``ai.onnx.ml`` that prepare features: scaling, imputation, encoding.

Numbers are those of ONNX Runtime, also where the specification leaves them open.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from ...model.expansion import Expansion
from ..indexing import set_message
from ..operator import ML_DOMAIN, Operator
from .refusals import classical_refusal

FLOAT, DOUBLE, INT64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64


def cast(parts: Expansion, x: str, kind: int) -> str:
    """Append a cast to an ONNX element type."""
    return x if parts.facts.dtype(x) == kind else parts.emit("Cast", x, to=kind)


def float_rows(parts: Expansion, kind: int = FLOAT) -> str:
    """The first input as numbers of a type, [rows, features]; a vector is one row."""
    x = cast(parts, parts.input(0), kind)
    return x if len(parts.facts.dims(parts.input(0)) or ()) > 1 else parts.reshape(x, 1, -1)


def per_feature(parts: Expansion, name: str, values: np.ndarray) -> str | None:
    """Return why the values are neither one nor one a feature, if so."""
    dims = parts.facts.dims(parts.input(0)) or ()
    features = dims[-1] if dims else None
    if len(values) == 1 or features == len(values):
        return None
    return f"its {name} has {len(values)} values; expected 1 or one for each of {features} features"


def scaler(parts: Expansion) -> str | None:
    """``(x - offset) * scale``."""
    kind = DOUBLE if parts.facts.dtype(parts.input(0)) == DOUBLE else FLOAT
    x = cast(parts, parts.input(0), kind)
    for name, operator, neutral in (("offset", "Sub", 0.0), ("scale", "Mul", 1.0)):
        values = np.array(parts.get(name, [neutral]), np.float32)
        reason = per_feature(parts, name, values)
        if reason is not None:
            return reason
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        x = parts.emit(operator, x, parts.constant(name, values.astype(dtype)))
    parts.finish(parts.emit("Cast", x, to=FLOAT))
    return None


def normalizer(parts: Expansion) -> str | None:
    """Rows divided by their maximum, by the sum of their absolute values or by their length."""
    norm, axis = parts.get("norm", "MAX"), parts.integers([-1])
    x = cast(parts, parts.input(0), FLOAT)
    zero = parts.number(0, FLOAT)
    if norm == "MAX":
        lowest = parts.number(np.finfo(np.float32).min, FLOAT)
        known = parts.emit("Where", parts.emit("IsNaN", x), lowest, x)
        total = parts.reduced("ReduceMax", known)
    elif norm in ("L1", "L2"):
        part = parts.emit("Abs", x) if norm == "L1" else parts.emit("Mul", x, x)
        total = parts.emit("ReduceSum", part, axis)
    else:
        return f"its norm is {norm!r}; expected 'MAX', 'L1' or 'L2'"
    if norm == "L2":
        share = parts.emit("Sqrt", parts.emit("Div", part, total))
        result = parts.emit("Mul", parts.emit("Sign", x), share)
    else:
        result = parts.emit("Div", x, total)
    parts.finish(parts.emit("Where", parts.emit("Equal", total, zero), x, result))
    return None


def imputer(parts: Expansion) -> str | None:
    """Other values in the place of those that stand for missing ones."""
    x, kind = parts.input(0), parts.facts.dtype(parts.input(0))
    is_float = kind in (FLOAT, DOUBLE)
    names = ("imputed_value_floats", "replaced_value_float")
    names = names if is_float else ("imputed_value_int64s", "replaced_value_int64")
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    given = parts.get(names[0], [])
    if not given:
        return f"it has no {names[0]}"
    values, replaced = np.array(given).astype(dtype), np.array(parts.get(names[1], 0))
    reason = per_feature(parts, names[0], values)
    if reason is not None:
        return reason
    if np.isnan(replaced):
        missing = parts.emit("IsNaN", x)
    else:
        missing = parts.emit("Equal", x, parts.constant("replaced", replaced.astype(dtype)))
    parts.finish(parts.emit("Where", missing, parts.constant("imputed", values), x))
    return None


def binarizer(parts: Expansion) -> str | None:
    """1 where a number is above the threshold, else 0."""
    kind = parts.facts.dtype(parts.input(0))
    wide = kind if kind in (FLOAT, DOUBLE) else FLOAT
    x, threshold = cast(parts, parts.input(0), wide), parts.get("threshold", 0.0)
    above = parts.emit("Greater", x, parts.number(threshold, wide))
    parts.finish(parts.emit("Cast", above, to=kind))
    return None


def feature_vectorizer(parts: Expansion) -> str | None:
    """The features of all inputs beside each other, cut or filled up by zeros to given numbers."""
    counts = list(parts.get("inputdimensions", []))
    if len(counts) != len(parts.node.input):
        return f"it has {len(counts)} inputdimensions for {len(parts.node.input)} inputs"
    columns = []
    for name, count in zip(parts.node.input, counts, strict=True):
        dims = parts.facts.dims(name)
        if dims is None or None in dims[1:] or dims[-1:] in ((), (None,)):
            return f"the number of features of {name!r} is only known at run time"
        x = parts.emit("Cast", name, to=FLOAT)
        x = parts.emit("Flatten", x, axis=min(1, len(dims) - 1))
        found = math.prod(size or 0 for size in (dims[1:] if len(dims) > 1 else dims))
        if found > count:
            bounds = [parts.integers([bound]) for bound in (0, count, 1)]
            x = parts.emit("Slice", x, *bounds)
        elif found < count:
            x = parts.emit("Pad", x, parts.integers([0, 0, 0, count - found]))
        columns.append(x)
    parts.finish(parts.emit("Concat", *columns, axis=1))
    return None


def array_feature_extractor(parts: Expansion) -> str | None:
    """Columns by their indices."""
    chosen = parts.emit("Gather", parts.input(0), parts.reshape(parts.input(1), -1), axis=-1)
    is_vector = len(parts.facts.dims(parts.input(0)) or ()) == 1
    parts.finish(parts.reshape(chosen, 1, -1) if is_vector else chosen)
    return None


def _entries(parts: Expansion, what: str) -> np.ndarray | None:
    """Keys or values of a LabelEncoder."""
    tensor = parts.get(f"{what}_tensor")
    if tensor is not None:
        return numpy_helper.to_array(tensor).ravel()
    for name, dtype in ((f"{what}_int64s", np.int64), (f"{what}_floats", np.float32)):
        found = parts.get(name)
        if found is not None:
            return np.array(found, dtype)
    return None


def _default(parts: Expansion, dtype: np.dtype[Any]) -> np.ndarray:
    tensor = parts.get("default_tensor")
    if tensor is not None and tensor.data_type:
        return numpy_helper.to_array(tensor).ravel()[0].astype(dtype)
    name, default = ("default_float", -0.0) if dtype.kind == "f" else ("default_int64", -1)
    return np.array(parts.get(name, default)).astype(dtype)


def label_encoder(parts: Expansion) -> str | None:
    """The value that stands beside a number in a list of keys."""
    keys, values = _entries(parts, "keys"), _entries(parts, "values")
    if keys is None or values is None or len(keys) != len(values) or not len(keys):
        return "it has no keys and values of numbers, as many of one as of the other"
    x, default = parts.input(0), _default(parts, values.dtype)
    _, first = np.unique(keys, return_index=True)  # sorted, each once, no number last
    kept = first[~np.isnan(keys[first])]
    result = parts.constant("default", default)
    if len(kept):
        known = parts.constant("keys", keys[kept])
        column = parts.emit("Unsqueeze", x, parts.integers([-1]))
        below = parts.emit("Cast", parts.emit("GreaterOrEqual", column, known), to=INT64)
        count = parts.emit("ReduceSum", below, parts.integers([-1]), keepdims=0)
        place = parts.emit("Max", parts.emit("Sub", count, parts.integers(1)), parts.integers(0))
        found = parts.emit("Equal", parts.emit("Gather", known, place), x)
        value = parts.emit("Gather", parts.constant("values", values[kept]), place)
        result = parts.emit("Where", found, value, result)
    missing = first[np.isnan(keys[first])]
    if len(missing) or not len(kept):
        value = parts.constant("missing", values[missing[0]] if len(missing) else default)
        result = parts.emit("Where", parts.emit("IsNaN", x), value, result)
    parts.finish(result)
    return None


def one_hot_encoder(parts: Expansion) -> str | None:
    """1 in the column of a number's category, 0 in the others."""
    categories = np.array(parts.get("cats_int64s", []), np.int64)
    count = len(categories)
    if not count or len(set(categories)) != count:
        return "its cats_int64s are missing, or repeat a category"
    x = cast(parts, parts.input(0), INT64)
    column = parts.emit("Unsqueeze", x, parts.integers([-1]))
    is_category = parts.emit("Equal", column, parts.constant("categories", categories))
    if parts.get("zeros", 1):
        parts.finish(parts.emit("Cast", is_category, to=FLOAT))
        return None
    # The place of an unknown category is outside of the table, which is an error at run time.
    distance = parts.constant("distances", np.arange(count) - count)
    steps = parts.emit("Mul", parts.emit("Cast", is_category, to=INT64), distance)
    total = parts.emit("ReduceSum", steps, parts.integers([-1]), keepdims=0)
    place = parts.emit("Add", total, parts.integers(count))
    table = parts.constant("rows", np.eye(count, dtype=np.float32))
    parts.finish(parts.emit("Gather", table, place))
    set_message(
        parts.nodes[-1],
        f"{parts.input(0)!r} holds a category that the OneHotEncoder does not know; train it with "
        "handle_unknown='ignore' to get zeros instead",
    )
    return None


OPERATORS = [
    Operator(
        name, ML_DOMAIN, refuse=classical_refusal, is_foreign=True, needs_shapes=True, expand=rule
    )
    for name, rule in (
        ("ArrayFeatureExtractor", array_feature_extractor),
        ("Binarizer", binarizer),
        ("FeatureVectorizer", feature_vectorizer),
        ("Imputer", imputer),
        ("LabelEncoder", label_encoder),
        ("Normalizer", normalizer),
        ("OneHotEncoder", one_hot_encoder),
        ("Scaler", scaler),
    )
]

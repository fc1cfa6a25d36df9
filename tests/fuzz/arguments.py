# SPDX-License-Identifier: Apache-2.0
"""Cases of arguments of a model's call: arrays of other types, shapes, layouts and kinds.

A call returns the numbers of a numpy reference, or raises an error of ours; whatever it was, the
next call with good arguments returns the right numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .outcomes import Found, WrongResultError, outcome_of

Arrays = Sequence[np.ndarray]


class Subject(NamedTuple):
    """A compiled model, good inputs, and what numpy makes of inputs."""

    model: Any
    inputs: tuple[np.ndarray, ...]
    reference: Callable[..., Arrays]


HEADER = '<ir_version: 8, opset_import: ["": 17]> graph '
GRAPHS: tuple[tuple[str, Callable[..., Arrays]], ...] = (
    ("(float[4,8] x) => (float[4,8] y) { z = Relu(x) y = Mul(z, x) }", lambda x: [x * (x > 0) * x]),
    (
        "(float[n,3] x, float[n,3] y) => (float[n,3] z) { z = Sub(x, y) }",
        lambda x, y: [x - y],
    ),
    (
        "(float16[2,3] h, bool[2,3] m, uint8[4] u) => (float16[2,3] a, uint8[4] b, bool[2,3] c)"
        " { s = Add(h, h) a = Where(m, h, s) b = Add(u, u) c = Not(m) }",
        lambda h, m, u: [np.where(m, h, h + h), u + u, ~m],
    ),
    ("(double s, int64[0,4] e) => (double t) { t = Add(s, s) }", lambda s, e: [s + s]),
    ("(bfloat16[2,3] x) => (bfloat16[2,3] y) { y = Neg(x) }", lambda x: [-x]),
    (
        "(float[5,2] x, int64[3] i) => (float[3,2] y) { y = Gather(x, i) }",
        lambda x, i: [x[i]],
    ),
    ("(int32[3] x) => (int32[3] x_out, int32[3] y) { x_out = Identity(x) y = Neg(x) }", None),
)


@cache
def subjects() -> tuple[Subject, ...]:
    """Models to call; compiled once a process."""
    import onnx

    import tvm_fusion

    found = []
    for text, reference in GRAPHS:
        sizes = {"n": "n"} if "[n," in text else {}
        graph = onnx.parser.parse_model(HEADER + text)
        model = tvm_fusion.compile(graph, "native", sizes, threads=1)
        inputs = tuple(_good(spec) for spec in model.inputs)
        found.append(Subject(model, inputs, reference or (lambda x: [x, -x])))
    return tuple(found)


def _good(spec: Any, seed: int = 0) -> np.ndarray:
    """An array for an input: small integers, which every type has."""
    shape = tuple(size if isinstance(size, int) else 2 for size in spec.shape)
    values = np.random.default_rng(seed).integers(0, 2 if spec.dtype == "int64" else 5, shape)
    return np.asarray(values).astype(getattr(ml_dtypes, spec.dtype, spec.dtype))


def attempt(number: int) -> Found:
    """Call a model with one or two arguments of another kind."""
    rng = random.Random(f"arguments {number}")
    subject = rng.choice(subjects())

    def call() -> str:
        args, named = _called(subject, rng)
        method = rng.choice([_call] * 8 + [_tensors, _benchmark])
        try:
            found = method(subject.model, args, named, rng)
        finally:
            _compare(subject.model(*subject.inputs), subject.reference(*subject.inputs))
        if found is not None:
            _compare(found, subject.reference(*_understood(subject, args, named)))
        return "result"

    outcome, where = outcome_of(call)
    return ("refused call", where) if outcome == "refused" else (outcome, where)


def _call(model: Any, args: list[Any], named: dict[Any, Any], _: random.Random) -> Any:
    return model(*args, **named)


def _tensors(model: Any, args: list[Any], named: dict[Any, Any], _: random.Random) -> Any:
    model.tensors(*args, **named)


def _benchmark(model: Any, args: list[Any], named: dict[Any, Any], rng: random.Random) -> Any:
    counts = (1, 1, 0, -1, 2.5, "3", None, np.int64(2), True, float("nan"), [1])
    inputs = dict(zip([spec.name for spec in model.inputs], args, strict=False)) | named
    model.benchmark(rng.choice(counts), rng.choice(counts[2:]), rng.choice([inputs, args, 3, None]))


def _called(subject: Subject, rng: random.Random) -> tuple[list[Any], dict[Any, Any]]:
    """Arguments by position and by name, with one or two changes."""
    values: list[Any] = list(subject.inputs)
    for _ in range(rng.randint(0, 2)):
        index = rng.randrange(len(values))
        if isinstance(values[index], np.ndarray) and values[index].size < 1000:
            values[index] = rng.choice(CHANGES)(values[index], rng)
    names = [spec.name for spec in subject.model.inputs]
    named = dict(zip(names, values, strict=True))
    form = rng.randrange(12)
    if form < 4:
        return values, {}
    if form < 6:
        return [], named
    if form == 6:
        return [named], {}
    if form == 7:
        return values, {rng.choice([*names, "other", ""]): values[0]}
    if form == 8:
        return values[:-1], {}
    if form == 9:
        return [*values, values[0]], {}
    if form == 10:
        wrong = {rng.choice([0, None, b"x", "X", ("x",), 1.5]): values[0]}
        return [rng.choice([wrong, named | wrong, {}, list(named), list(named.items())])], {}
    return [named], {names[0]: values[0]}


def _understood(subject: Subject, args: list[Any], named: Mapping[Any, Any]) -> list[np.ndarray]:
    """The arrays that accepted arguments hold; an error if they do not fit the inputs."""
    specs = subject.model.inputs
    if len(args) == 1 and isinstance(args[0], Mapping) and not named:
        args, named = [], args[0]
    given = dict(zip([spec.name for spec in specs], args, strict=False)) | dict(named)
    arrays = []
    for spec, good in zip(specs, subject.inputs, strict=True):
        value = given[spec.name]
        array = value.array if isinstance(value, Carrier) else np.asarray(value)
        if array.dtype == object:  # a tensor
            array = np.from_dlpack(value)
        sizes = [size if isinstance(size, int) else None for size in spec.shape]
        fits = len(sizes) == array.ndim and all(
            size in (None, got) for size, got in zip(sizes, array.shape, strict=True)
        )
        if array.dtype != good.dtype or not fits:
            raise WrongResultError(f"{spec} took {array.dtype} {array.shape}")
        arrays.append(array)
    return arrays


def _compare(found: Any, expected: Arrays) -> None:
    results = list(found) if isinstance(found, tuple) else [found]
    for one, wanted in zip(results, expected, strict=True):
        same = one.dtype == wanted.dtype and one.shape == wanted.shape
        if not same or not np.array_equal(one.astype("float64"), wanted.astype("float64")):
            raise WrongResultError(f"{one!r} instead of {wanted!r}")


class Carrier:
    """An object with DLPack, honest or not."""

    def __init__(self, array: np.ndarray, device: Any = (1, 0), capsule: Any = None) -> None:
        self.array, self.device, self.capsule = array, device, capsule

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """The array's own capsule, or what was given."""
        if isinstance(self.capsule, BaseException):
            raise self.capsule
        return self.array.__dlpack__(*args, **kwargs) if self.capsule is None else self.capsule

    def __dlpack_device__(self) -> Any:
        """Return the device that was given."""
        if isinstance(self.device, BaseException):
            raise self.device
        return self.device


class Renamed(np.ndarray):
    """A subclass of arrays."""


Change = Callable[[np.ndarray, random.Random], Any]


def _another_layout(array: np.ndarray, rng: random.Random) -> Any:
    """The same numbers, elsewhere in memory."""
    kind = rng.randrange(9)
    if kind == 0:
        return np.asfortranarray(array)
    if kind == 1 and array.ndim:
        wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    if kind == 2 and array.ndim:
        return np.ascontiguousarray(array[::-1])[::-1]
    if kind == 3:
        return np.broadcast_to(array.ravel()[0], array.shape) if array.size else array
    if kind == 4:
        copy = array.copy()
        copy.flags.writeable = False
        return copy
    if kind == 5:
        memory = bytearray(array.nbytes + 64)
        memory[1 : 1 + array.nbytes] = array.tobytes()
        return np.frombuffer(memory, array.dtype, array.size, 1).reshape(array.shape)
    if kind == 6:
        return array.astype(array.dtype.newbyteorder()) if array.dtype.isbuiltin == 1 else array
    if kind == 7:
        return array.copy().view(rng.choice([Renamed, np.ma.MaskedArray]))
    return array[()] if array.ndim == 0 else array.T.copy().T


def _dlpack(array: np.ndarray, rng: random.Random) -> Any:
    kind = rng.randrange(4)
    if kind == 0:
        return Carrier(array.copy())
    with contextlib.suppress(Exception):  # types without DLPack
        import tvm_ffi

        if kind == 1:
            return tvm_ffi.from_dlpack(array.copy())
    errors = (BufferError("no"), RuntimeError("no"), AttributeError("no"), KeyError("no"))
    devices = ((2, 0), (1, 5), (99, 0), (), (1,), None, 1, "cpu", ("x", 0), (1.0, 0), *errors)
    if kind == 2:
        return Carrier(array, rng.choice(devices))
    return Carrier(array, capsule=rng.choice([3, b"", "capsule", object(), *errors]))


def _another_type(array: np.ndarray, rng: random.Random) -> Any:
    names = "float32 float64 float16 int8 uint8 int32 int64 uint64 bool complex64 complex128 object"
    others = ("S4", "U2", "M8[s]", "m8[D]", "V3", "f4,i4", "bfloat16", "float8_e4m3fn", "int4")
    name = rng.choice([*names.split(), *others])
    with contextlib.suppress(TypeError, ValueError, RuntimeError, np.exceptions.ComplexWarning):
        return array.astype(getattr(ml_dtypes, name, name))
    return np.zeros(array.shape, name)


def _another_shape(array: np.ndarray, rng: random.Random) -> Any:
    kind = rng.randrange(7)
    if kind == 0:
        return array[None]
    if kind == 1:
        return array.ravel()
    if kind == 2 and array.ndim:
        return array[..., :-1]
    if kind == 3 and array.ndim:
        return np.concatenate([array, array], axis=rng.randrange(array.ndim))
    if kind == 4 and array.ndim:
        return array[:0]
    if kind == 5:
        return np.zeros((), array.dtype)
    shape = (1 << 15,) * max(1, array.ndim)
    return np.lib.stride_tricks.as_strided(np.zeros(1, array.dtype), shape, (0,) * len(shape))


def _other_kind(array: np.ndarray, rng: random.Random) -> Any:
    return rng.choice(
        [
            *(None, 3, 2.5, True, "x", b"", (), {}, set(), [], object(), np.ndarray, range(3)),
            *(array.tolist(), array.tobytes(), memoryview(b"1234"), iter([1]), [array], (array,)),
            *(np.float32(3), np.int64(1), array.dtype, Exception("x"), lambda: array, float("nan")),
        ]
    )


def _other_values(array: np.ndarray, rng: random.Random) -> Any:
    """Extreme numbers of the type."""
    changed = array.copy()
    if changed.size and changed.dtype.kind == "i":
        limits = np.iinfo(changed.dtype)
        place = rng.randrange(changed.size)
        changed.flat[place] = rng.choice([limits.min + 1, limits.max, -1, 4, 5, -5, -6])
    return changed


CHANGES: tuple[Change, ...] = (
    *(_another_layout, _another_layout, _another_layout, _dlpack, _another_type),
    *(_another_shape, _other_kind, _other_values),
)

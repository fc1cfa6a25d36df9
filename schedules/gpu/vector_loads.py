# SPDX-License-Identifier: Apache-2.0
"""Wide loads for an expression whose reads run along neighbouring elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm_ffi
from tvm import DataType, ir, tirx
from tvm.ir import Range
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer

from ..expression_walk import loads

WIDEST_LOAD = 16  # bytes of one instruction

Value = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]
Flat = Callable[[tirx.Buffer], tirx.Buffer | None]


class VectorLoads:
    """Reads of ``value(m, n)`` for a vector of neighbouring ``m`` or ``n``.

    A read whose address grows by one element a lane becomes one load of ``vector`` elements into
    registers, one whose address stays the same becomes a scalar, all others stay as they are.

    Parameters
    ----------
    value : Callable
        From two int64 indices to the expression there.
    along_m : bool
        Whether lanes are neighbours in ``m``, else in ``n``.
    vector : int
        Number of lanes, a power of two; the index of lane 0 is a multiple of it.
    """

    def __init__(self, value: Value, along_m: bool, vector: int):
        self.value = value
        self.along_m = along_m
        self.vector = vector
        self.kinds = self._classify()

    def fetch(self, m: tirx.Expr, n: tirx.Expr, flat: Flat) -> Callable[[int], tirx.Expr]:
        """Emit the loads of one vector.

        Parameters
        ----------
        m, n : tirx.Expr
            Position of lane 0.
        flat : Callable
            From a parameter to its one-dimensional view, or None if it has none.

        Returns
        -------
        Callable
            From a lane to its expression on the loaded registers.
        """
        registers: list[tuple[ir.TensorLoad, tirx.Buffer | None, bool]] = []
        for load, kind in zip(loads(self.value(m, n)), self.kinds, strict=True):
            known = next((entry for entry in registers if _same(entry[0], load)), None)
            if known is not None:
                registers.append(known)
            else:
                register = None if kind == "each" else self._load(load, kind, flat)
                registers.append((load, register, kind == "vector"))

        def lane(k: int) -> tirx.Expr:
            expression = self._at(m, n, tirx.const(k, "int64"))
            pairs = list(zip(loads(expression), registers, strict=True))

            def replace(load: ir.TensorLoad) -> tirx.Expr:
                for original, (_, register, is_vector) in pairs:
                    if register is not None and _same(original, load):
                        value = register[k if is_vector else 0]
                        return value != 0 if str(load.ty.dtype) == "bool" else value
                return load

            return tvm_ffi.structural_map(expression, (ir.TensorLoad, replace))

        return lane

    def _at(self, m: tirx.Expr, n: tirx.Expr, lane: tirx.Expr) -> tirx.Expr:
        return self.value(m + lane, n) if self.along_m else self.value(m, n + lane)

    def _classify(self) -> list[str]:
        """For each read, in order: ``vector``, ``uniform`` or ``each``."""
        analyzer = Analyzer()
        base, other, lane = (tirx.Var(name, "int64") for name in ("base", "other", "lane"))
        for var, extent in ((base, 1 << 40), (other, 1 << 40), (lane, self.vector)):
            analyzer.bind(var, Range.from_min_extent(_const(0), _const(extent)))
        start = base * _const(self.vector)
        m, n = (start, other) if self.along_m else (other, start)
        first, moved = loads(self.value(m, n)), loads(self._at(m, n, lane))
        if self.vector == 1 or _is_guarded(self.value(m, n)):
            return ["each"] * len(first)
        kinds = []
        for a, b in zip(first, moved, strict=True):
            step = analyzer.simplify(ravel(b) - ravel(a))
            if any(loads(subscript) for subscript in a.indices):
                kinds.append("each")
            elif analyzer.can_prove_equal(step, _const(0)):
                kinds.append("uniform")
            else:
                aligned = self._is_aligned(analyzer, ravel(a))
                follows = aligned and analyzer.can_prove_equal(step, lane)
                kinds.append("vector" if follows else "each")
        return kinds

    def _is_aligned(self, analyzer: Analyzer, index: tirx.Expr) -> bool:
        """Whether an index is a multiple of the vector, as its load needs it."""
        known = analyzer.modular_set(index)
        return known.coeff % self.vector == 0 and known.base % self.vector == 0

    def _load(self, load: ir.TensorLoad, kind: str, flat: Flat) -> tirx.Buffer | None:
        source = flat(load.source)
        if source is None:
            return None
        index = ravel(load)
        lanes = self.vector if kind == "vector" else 1
        register = T.alloc_buffer((lanes,), source.dtype, scope="local")
        if lanes == 1:
            T.buffer_store(register, source[index], [0])
            return register
        width = min(lanes, WIDEST_LOAD * 8 // DataType(str(source.dtype)).bits)
        for start in range(0, lanes, width):
            with T.vectorized(0, width) as k:
                element = source[index + (k + start).astype("int64")]
                T.buffer_store(register, element, [k + start])
        return register


def ravel(load: ir.TensorLoad) -> tirx.Expr:
    """Row-major position of a read in its tensor."""
    index: tirx.Expr = _const(0)
    for subscript, extent in zip(load.indices, load.source.shape, strict=True):
        index = index * _wide(extent) + _wide(subscript)
    return index


def _is_guarded(expression: tirx.Expr) -> bool:
    """Whether some read must not happen for every element."""
    found: list[ir.Call] = []

    def note(call: ir.Call) -> None:
        if isinstance(call.op, ir.Op) and call.op.name.endswith("if_then_else"):
            found.append(call)

    tvm_ffi.structural_walk(expression, (ir.Call, note))
    return bool(found)


def _same(a: ir.TensorLoad, b: ir.TensorLoad) -> bool:
    return a.same_as(b) or (a.source.same_as(b.source) and _equal(a.indices, b.indices))


def _equal(a: Sequence[tirx.Expr], b: Sequence[tirx.Expr]) -> bool:
    return len(a) == len(b) and all(
        tvm_ffi.structural_equal(x, y) for x, y in zip(a, b, strict=True)
    )


def _wide(index: tirx.Expr | int) -> tirx.Expr:
    return _const(index) if isinstance(index, int) else index.astype("int64")


def _const(value: int) -> tirx.Expr:
    return tirx.const(value, "int64")

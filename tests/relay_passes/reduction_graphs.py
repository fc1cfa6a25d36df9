# SPDX-License-Identifier: Apache-2.0
"""The sub-graphs of Table 2 of the Panamera paper with smaller extents, and modules of reductions.

A sub-graph is the types of its parameters, its reductions as Relax expressions, and the same in
numpy. Of those that the paper only lists by their ops (8, 11), the operands are our choice.
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relax

from relay_passes import CoalesceReduction
from relay_passes.op import coalesced_reduce

op = relax.op


def data(*shape, dtype="float32", name="x"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def total(x, axes=None, operator="sum"):
    return coalesced_reduce(x, operator, axes)


def several(build: Callable, *params: relax.Var) -> tvm.IRModule:
    """A module whose ``main`` returns all that ``build(emit, *params)`` returns."""
    builder = relax.BlockBuilder()
    with builder.function("main", list(params)):
        with builder.dataflow():
            results = build(builder.emit, *params)
            result = builder.emit_output(relax.Tuple([builder.emit(r) for r in results]))
        builder.emit_func_output(result)
    return builder.get()


def legal(mod: tvm.IRModule) -> tvm.IRModule:
    """``mod`` as the passes that fuse reductions expect it."""
    transform = relax.transform
    passes = [CoalesceReduction(), transform.LegalizeOps(), transform.AnnotateTIROpPattern()]
    return tvm.transform.Sequential(passes)(mod)


def calls(mod: tvm.IRModule) -> list[str]:
    """The functions that ``main`` calls, in order; there are no others in ``mod``."""
    found: list[relax.Call] = []
    relax.analysis.post_order_visit(
        mod["main"], lambda e: found.append(e) if isinstance(e, relax.Call) else None
    )
    assert all(call.op.name == "relax.call_tir" for call in found)
    names = [call.args[0].name_hint for call in found]
    functions = {var.name_hint for var in mod.functions} - {"main"}
    assert functions == set(names)
    return names


def f16(x):
    return op.astype(x, "float16")


def f32(x):
    return op.astype(x, "float32")


HALF, SINGLE = "float16", "float32"
TABLE_2 = {
    1: (
        [(SINGLE, (6, 2))],
        lambda x: [total(f16(f32(f16(x))), [0])],
        lambda x: [x.sum(0)],
    ),
    2: ([(SINGLE, (9, 13))], lambda x: [total(f16(x), [0])], lambda x: [x.sum(0)]),
    3: ([(HALF, (8, 11))], lambda x: [total(f32(x), [0])], lambda x: [x.sum(0)]),
    4: (
        [(SINGLE, (5, 13))] * 2,
        lambda x, y: [total(op.multiply(x, y), [1])],
        lambda x, y: [(x * y).sum(1)],
    ),
    5: (
        [(SINGLE, (13,))] * 2,
        lambda x, y: [total(op.multiply(op.negative(x), y))],
        lambda x, y: [(-x * y).sum()],
    ),
    6: (
        [(SINGLE, (31,))] * 3,
        lambda x, y, z: [total(op.multiply(op.multiply(x, y), z))],
        lambda x, y, z: [(x * y * z).sum()],
    ),
    7: (
        [(SINGLE, (4, 3, 7))] * 3,
        lambda x, y, z: [total(op.multiply(op.add(x, y), z), [0])],
        lambda x, y, z: [((x + y) * z).sum(0)],
    ),
    8: (
        [(SINGLE, (4, 3, 7))] * 4,
        lambda x, y, z, w: [
            total(op.multiply(op.add(x, y), z), [0, 1]),
            total(op.multiply(op.add(x, w), z), [0, 1]),
        ],
        lambda x, y, z, w: [((x + y) * z).sum((0, 1)), ((x + w) * z).sum((0, 1))],
    ),
    9: (
        [(SINGLE, (9, 7))] * 2,
        lambda x, y: [total(x, [0]), total(y, [0])],
        lambda x, y: [x.sum(0), y.sum(0)],
    ),
    10: (
        [(HALF, (12, 10))],
        lambda x: [total(f32(op.reshape(x, (3, 4, 2, 5))), [0, 1])],
        lambda x: [x.sum(0).reshape(2, 5)],
    ),
    11: (
        [(HALF, (12, 10))],
        lambda x: [total(f32(op.reshape(x, (3, 4, 10))), [0, 1])],
        lambda x: [x.sum(0)],
    ),
    12: (
        [(HALF, (6, 10))],
        lambda x: [total(op.reshape(x, (3, 20)))],
        lambda x: [x.sum()],
    ),
}

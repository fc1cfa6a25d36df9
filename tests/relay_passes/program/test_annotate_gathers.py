# SPDX-License-Identifier: Apache-2.0
"""Pass ``AnnotateGathers``: what becomes injective, what stays opaque, and what is fused then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from op_calls import function_names
from reduction_checks import run
from tvm import relax, tirx

import relay_passes
from relay_passes import AnnotateGathers

TABLE = np.arange(40, dtype="float32").reshape(8, 5)


def lower(make: Callable[[relax.BlockBuilder, relax.Var], relax.Expr]) -> tvm.IRModule:
    """Legalized, with patterns: ``main`` of int64 indices (3, 4)."""
    index = relax.Var("index", relax.TensorType((3, 4), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [index]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(make(builder, index)))
        builder.emit_func_output(result)
    mod = relax.transform.LegalizeOps(enable_warning=False)(builder.get())
    return relax.transform.AnnotateTIROpPattern()(mod)


def annotate(mod: tvm.IRModule) -> tvm.IRModule:
    """Run the pass; check that it leaves its input alone and changes nothing more next time."""
    functions = dict(mod.functions_items())
    once = AnnotateGathers()(mod)
    assert dict(mod.functions_items()) == functions
    tvm.ir.assert_structural_equal(AnnotateGathers()(once), once)
    return once


def patterns(mod: tvm.IRModule) -> dict[str, int]:
    return {
        name.name_hint: int(func.attrs["op_pattern"])
        for name, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }


def test_pass_has_the_name_of_its_file_and_is_exported() -> None:
    assert AnnotateGathers().info.name == "AnnotateGathers"
    assert relay_passes.AnnotateGathers is AnnotateGathers
    assert AnnotateGathers.__module__ == "relay_passes.program.lowering"


@pytest.mark.parametrize("mode", ["clip", "wrap"])
def test_a_gather_becomes_injective(mode: str) -> None:
    mod = lower(lambda builder, index: relax.op.take(relax.const(TABLE), index, 0, mode))
    assert patterns(mod) == {"take": 8}
    assert patterns(annotate(mod)) == {"take": 2}


@pytest.mark.parametrize(
    "make",
    [
        lambda b, i: relax.op.scatter_elements(i, i, i, axis=1),
        lambda b, i: relax.op.sort(i, 1),
        lambda b, i: relax.op.cumsum(i, 1),
        lambda b, i: relax.op.nn.softmax(b.emit(relax.op.astype(i, "float32"))),
    ],
)
def test_what_stays(make: Callable[[relax.BlockBuilder, relax.Var], relax.Expr]) -> None:
    mod = lower(make)
    tvm.ir.assert_structural_equal(annotate(mod), mod)


def test_embeddings_of_several_columns_are_one_function() -> None:
    def make(builder: relax.BlockBuilder, index: relax.Var) -> relax.Expr:
        parts = []
        for column in range(4):
            key = builder.emit(relax.op.take(index, relax.const(column, "int64"), 1, "clip"))
            key = builder.emit(relax.op.add(key, relax.const(column, "int64")))
            parts.append(builder.emit(relax.op.take(relax.const(TABLE), key, 0, "clip")))
        return relax.op.concat(parts, 1)

    mod = annotate(lower(make))
    fused = relax.transform.FuseTIR()(relax.transform.FuseOps()(mod))
    fused = relax.transform.DeadCodeElimination()(fused)
    assert len(function_names(fused)) == 1
    index = np.random.default_rng(0).integers(0, 4, (3, 4))
    expected = np.concatenate([TABLE[index[:, column] + column] for column in range(4)], 1)
    np.testing.assert_array_equal(run(fused, index), expected)

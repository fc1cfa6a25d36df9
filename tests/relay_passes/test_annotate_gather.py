# SPDX-License-Identifier: Apache-2.0
"""Pass ``AnnotateGather``: lookups fuse with their neighbours, reshapes stay views."""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.relax import op, transform

from relay_passes import AnnotateGather


def _annotated(build, *types) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    variables = [
        relax.Var(f"x{k}", relax.TensorType(shape, dtype)) for k, (shape, dtype) in enumerate(types)
    ]
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(build(builder, *variables)))
        builder.emit_func_output(result)
    passes = [transform.LegalizeOps(), transform.AnnotateTIROpPattern()]
    return tvm.transform.Sequential(passes)(builder.get())


def _patterns(mod: tvm.IRModule) -> dict[str, int]:
    return {
        name.name_hint: int(func.attrs["op_pattern"])
        for name, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }


TABLE, INDEX = ([100, 8], "float32"), ([5], "int64")


def test_lookups_are_injective() -> None:
    before = _annotated(lambda _, table, index: op.take(table, index, 0), TABLE, INDEX)
    assert _patterns(before) == {"take": 8}
    after = AnnotateGather()(before)
    assert _patterns(after) == {"take": 2}
    assert _patterns(before) == {"take": 8}
    tvm.ir.assert_structural_equal(AnnotateGather()(after), after)


def test_lookups_and_their_concatenation_become_one_function() -> None:
    def build(builder, table, index):
        parts = []
        for k in range(3):
            one = builder.emit(op.take(index, relax.const(k, "int64"), 0))
            mended = builder.emit(
                op.where(
                    op.less(one, relax.const(0, "int64")),
                    op.add(one, relax.const(100, "int64")),
                    one,
                )
            )
            parts.append(builder.emit(op.take(table, op.reshape(mended, (1,)), 0)))
        return op.concat(parts, 1)

    passes = [AnnotateGather(), transform.FuseOps(), transform.FuseTIR()]
    before = _annotated(build, TABLE, INDEX)
    after = tvm.transform.Sequential([*passes, transform.DeadCodeElimination()])(before)
    assert len(_names(after)) == 1


def _names(mod: tvm.IRModule) -> list[str]:
    return [n.name_hint for n, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)]


def test_reshapes_and_scatters_are_left_alone() -> None:
    mod = _annotated(lambda _, table: op.reshape(table, (8, 100)), TABLE)
    mod["reshape"] = mod["reshape"].with_attr("op_pattern", 8)  # as TVM calls those of views
    tvm.ir.assert_structural_equal(AnnotateGather()(mod), mod)
    mod = _annotated(
        lambda _, table, index, rows: op.scatter_elements(table, index, rows),
        TABLE,
        ([5, 8], "int64"),
        ([5, 8], "float32"),
    )
    assert AnnotateGather()(mod) is not None
    tvm.ir.assert_structural_equal(AnnotateGather()(mod), mod)

# SPDX-License-Identifier: Apache-2.0
"""Pass ``ExchangeInPlace``: what becomes of exchanges, slices, and readers of both."""

from __future__ import annotations

import json

import pytest
import tvm
from rank_programs import calls, distributed, packed, residual_block
from tvm import relax

from relay_passes import ExchangeInPlace
from schedules import attributes
from schedules.tir.parameter_windows import windows_of


def windows(mod: tvm.IRModule, call: relax.Call) -> dict[int, tuple[int, int]]:
    """Rows of the windows of a call's parameters."""
    return {at: window[2] for at, window in windows_of(mod[call.args[0]]).items()}


def shape(call: relax.Call) -> list[int]:
    return [int(extent) for extent in call.ty.shape.values]


def test_results_and_residuals_in_place() -> None:
    before = distributed(residual_block)
    after = ExchangeInPlace()(before)
    for rank, rows in ((0, (0, 4)), (1, (1, 5))):
        name = f"part_{rank}"
        assert windows(before, calls(before, name)["first"]) == {}
        found = calls(after, name)
        first, second = (call for call in found.values() if call.op.name == "relax.call_tir")
        assert shape(first) == [1, 1, 5, 8, 4] and windows(after, first) == {3: rows}
        assert windows(after, second)[3] == rows and second.args[1].fields[0].same_as(
            second.args[1].fields[3]
        )
        exchanged = [call for call in found.values() if call.op.name == "relax.call_dps_packed"]
        assert shape(exchanged[0]) == [1]
        results = after[name].body.blocks[-1].bindings[-1].value.fields
        assert len(results) == (2 if rank == 0 else 1)  # the last exchange is not dropped
    tvm.ir.assert_structural_equal(ExchangeInPlace()(after), after)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_slices_are_read_where_they_lie(ranks: int) -> None:
    """The stride of 2 reads seven of a rank's eight rows; one rank exchanges nothing."""

    def build(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        first = builder.emit(packed(x), "first")
        second = builder.emit(packed(first, size=1, strides=[2, 2]), "second")
        return packed(first, second, strides=[2, 2])

    before = distributed(build, ranks)
    assert "strided_slice" in before.script()
    after = ExchangeInPlace()(before)
    assert "strided_slice" not in after.script()
    tvm.ir.assert_structural_equal(ExchangeInPlace()(after), after)


def test_what_other_kernels_write_or_read_stays() -> None:
    def written_by_another(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        return packed(builder.emit(relax.op.nn.relu(x), "first"))

    def read_by_another(builder: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        first = builder.emit(packed(x), "first")
        second = builder.emit(packed(first), "second")
        return relax.op.add(first, second)

    for build in (written_by_another, read_by_another):
        mod = ExchangeInPlace()(distributed(build))
        inner = [call for call in calls(mod, "part_1").values() if call.ty.ndim == 5]
        first = next(call for call in inner if call.op.name == "relax.call_dps_packed")
        assert shape(first)[2] == 5


def test_ranks_with_one_program_and_different_places() -> None:
    """Programs that are shared stay where their rows lie differently."""
    mod = distributed(residual_block)
    plan = json.loads(str(mod.attrs[attributes.RANK_PLAN]))
    plan["parts"][1]["function"] = "part_0"
    after = ExchangeInPlace()(mod.with_attr(attributes.RANK_PLAN, json.dumps(plan)))
    first = calls(after, "part_0")["first"]
    assert windows(after, first) == {}


def test_modules_without_ranks_stay() -> None:
    mod = distributed(residual_block).without_attr(attributes.RANK_PLAN)
    assert ExchangeInPlace()(mod).same_as(mod)

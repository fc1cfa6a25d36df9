# SPDX-License-Identifier: Apache-2.0
"""Tensors that a kernel of reductions stores beside its results, and those that it does not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from reduction_checks import run
from reduction_graphs import calls, data, f16, legal, op, several, total
from tvm import relax
from tvm.ir.transform import Sequential
from tvm.relax import transform
from tvm.target import Target

from relay_passes import FuseReductions
from relay_passes.reduction import groups as reduction_groups
from relay_passes.reduction.coalesce_reduction import read_reduction_report
from relay_passes.reduction.fuse_reduction_producers import MAX_TENSORS
from schedules.cost.decisions import recorded

H100 = Target({"kind": "cuda", "arch": "sm_90"})
LONG = (4, 300_000)  # rows that no cluster of an H100 has at once


def fuse(build: Callable, *params: relax.Var) -> tuple[list[str], list[str]]:
    """The kernels of a graph, and the kinds of its groups; numbers are those of the graph."""
    before = legal(several(build, *params))
    grouped = FuseReductions(H100)(before)
    passes = [transform.FuseOps(), transform.FuseTIR(), transform.DeadCodeElimination()]
    after = Sequential(passes)(grouped)
    if all(int(np.prod([int(e) for e in param.ty.shape])) < 10_000 for param in params):
        rng = np.random.default_rng(0)
        shapes = [[int(e) for e in param.ty.shape] for param in params]
        inputs = [rng.uniform(0.5, 1.5, shape).astype("float32") for shape in shapes]
        for actual, wanted in zip(run(after, *inputs), run(before, *inputs), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4, atol=1e-5)
    return calls(after), [entry["kind"] for entry in read_reduction_report(grouped)["groups"]]


def pair(*shape: int) -> list[relax.Var]:
    return [data(*shape, name=name) for name in "xy"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("axes", [[0], [1], None])
def test_producers_that_are_outputs(axes: list[int] | None) -> None:
    """Also one that another producer reads, and whatever the size of a row."""

    def build(emit, x, y):
        first = emit(op.add(x, y))
        second = emit(op.exp(emit(op.multiply(first, y))))
        return [total(second, axes), first, second]

    for shape in ((33, 65), LONG):
        kernels, kinds = fuse(build, *pair(*shape))
        assert len(kernels) == 1 and kinds == ["stored"]


def test_outputs_beside_a_reduction_of_the_same_data() -> None:
    def build(emit, x, y):
        return [total(x, [1]), f16(x), op.subtract(emit(op.exp(x)), y)]

    kernels, kinds = fuse(build, *pair(33, 65))
    assert len(kernels) == 1 and kinds == ["stored"]


def test_outputs_of_an_optimizer() -> None:
    """A tensor between two stored ones is not stored, and it is computed with them."""

    def build(emit, x, y):
        mean = emit(op.add(emit(op.multiply(x, relax.const(0.1))), y))
        step = emit(op.divide(mean, emit(op.sqrt(y))))
        return [total(emit(op.multiply(x, x))), mean, emit(op.exp(step)), emit(op.negative(step))]

    kernels, _ = fuse(build, *pair(33, 65))
    assert len(kernels) == 1


def test_a_row_that_is_an_output_before_an_epilogue() -> None:
    def build(emit, x, scale):
        halved = emit(op.multiply(scale, relax.const(0.5)))
        return [op.multiply(emit(total(x, [1])), halved), halved]

    kernels, kinds = fuse(build, data(33, 65), data(33, name="scale"))
    assert len(kernels) == 1 and kinds == ["epilogue"]


def test_reads_at_another_place_stay_apart() -> None:
    """They would not be the reads of the reduction."""

    def build(emit, x):
        return [total(x, [1]), op.exp(emit(op.permute_dims(x)))]

    kernels, _ = fuse(build, data(33, 65))
    assert len(kernels) == 2


def test_an_output_of_other_data_stays_apart() -> None:
    kernels, _ = fuse(lambda emit, x, y: [total(x, [1]), op.exp(y)], *pair(33, 65))
    assert len(kernels) == 2


def test_views_stay_views() -> None:
    def build(emit, x):
        return [total(op.exp(x), [1]), emit(op.reshape(x, (65, 33)))]

    kernels, _ = fuse(build, data(33, 65))
    assert sorted(kernels) == ["fused_tir_exp_coalesced_sum", "reshape"]


def test_no_view_of_what_is_stored_is_copied() -> None:
    def build(emit, x, y, w):
        added = emit(op.add(x, y))
        flat = emit(op.reshape(added, (65, 33)))
        return [added, total(flat, [1]), emit(op.matmul(flat, w))]

    kernels, _ = fuse(build, *pair(33, 65), data(33, 3, name="w"))
    assert sorted(kernels) == ["add", "coalesced_sum", "matmul", "reshape"]


def test_a_late_output_does_not_keep_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reduction would wait for the product, and with it its own input."""

    def build(emit, x, y, w):
        hidden = emit(op.matmul(w, y))
        sums = emit(total(emit(op.multiply(x, hidden)), [1]))
        late = emit(op.matmul(emit(op.matmul(w, hidden)), w))
        return [sums, late, op.multiply(x, late)]

    params = [*pair(33, 33), data(33, 33, name="w")]
    count = len(fuse(build, *params)[0])
    monkeypatch.setattr(reduction_groups, "KEPT_BYTES", 33 * 33 * 4 - 1)
    assert len(fuse(build, *params)[0]) == count + 1


def test_an_epilogue_of_a_product_stays_with_it() -> None:
    def build(emit, x, y):
        product = emit(op.add(emit(op.matmul(x, y)), relax.const(1.0)))
        return [total(product, [0]), product]

    kernels, _ = fuse(build, *pair(33, 33))
    assert kernels == ["fused_matmul_add", "coalesced_sum"]


def test_no_call_joins_that_waits_for_the_group() -> None:
    def build(emit, x, y):
        sums = emit(total(x, [1], "sum"))
        product = emit(op.matmul(y, sums))
        return [op.multiply(x, emit(op.expand_dims(product, 1)))]

    kernels, _ = fuse(build, *pair(33, 33))
    assert kernels[0] == "coalesced_sum" and len(kernels) == 3


@pytest.mark.slow
def test_only_so_many_are_stored() -> None:
    def build(emit, x):
        results = [emit(op.add(x, relax.const(float(k)))) for k in range(MAX_TENSORS + 2)]
        return [total(x, [1]), *results]

    kernels, _ = fuse(build, data(33, 65))
    assert len(kernels) == 3


def test_a_stranger_joins_a_group_that_stores() -> None:
    def build(emit, x, y):
        return [total(x, [1]), op.exp(x), total(y, [1])]

    kernels, kinds = fuse(build, *pair(33, 65))
    assert len(kernels) == 1 and kinds == ["stored"]


def test_an_online_sum_stores_its_logits() -> None:
    def build(emit, x, y):
        logits = emit(op.add(x, y))
        largest = emit(total(logits, [1], "max"))
        shifted = emit(op.subtract(logits, emit(op.expand_dims(largest, 1))))
        return [total(emit(op.exp(shifted)), [1]), logits]

    kernels, kinds = fuse(build, *pair(*LONG))
    assert len(kernels) == 1 and kinds == ["online"]


@pytest.mark.parametrize(("rows", "together"), [(1, False), (256, True)])
def test_few_blocks_do_not_store_what_a_whole_device_stores_faster(
    rows: int, together: bool
) -> None:
    """A cluster has a long row of a norm; another kernel of its data would have all blocks."""

    def build(emit, x):
        total_of_row = emit(op.expand_dims(emit(total(x, [1])), 1))
        return [op.divide(x, total_of_row), op.exp(x)]

    with recorded() as comparisons:
        kernels, kinds = fuse(build, data(rows, 200_000))
    assert kinds == ["chain"] and len(kernels) == (1 if together else 2)
    assert {found.decision for found in comparisons} == {"store"}
    assert [found.chosen for found in comparisons][-1] == (
        "one kernel" if together else "two kernels"
    )

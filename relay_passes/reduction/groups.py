# SPDX-License-Identifier: Apache-2.0
"""Groups of calls in a dataflow block that one reduction kernel computes.

A *group* has reductions over one :class:`~relay_passes.reduction.row_space.RowSpace`, and calls
computed from their results in this space. Groups are formed in six steps:

1. In the order of the block, a reduction joins the first group that it belongs to: one whose
   tensors it reduces (a *chain*), or one with which it shares a large input (*sisters*). An
   injective call joins if it reads results at the row that it writes: always if it has as many
   elements as there are results (an *epilogue*), in a chain also if it has as many as the data.
2. Groups of the same space that are no chains are merged although they share no tensor, to save a
   launch: unless that keeps more than :data:`KEPT_BYTES` of tensors alive longer.
3. A reshape of a tensor that a group writes anyway leaves the group: TVM makes it a view.
4. A call that is stored anyway joins a group that reads the same data
   (:mod:`relay_passes.reduction.row_space`).
5. A chain computes sums of columns over groups of its rows (:mod:`.joined_sums`).
6. Each group absorbs producers (:mod:`relay_passes.reduction.fuse_reduction_producers`). One that
   is also read outside joins the group, which writes its tensor, too.

A group is a *chain* if it reduces or stores elements that use its results. It needs a whole row at
once: :func:`schedules.gpu.reduce.plan.chain_config.chain_fits` decides where that pays off.
Elsewhere a sum of exponentials and the maximum that it is relative to can still be a group, which
then is *online* (:mod:`relay_passes.reduction.joined_sums`). No call joins a group on which it
depends through a call outside, which could run neither before nor after it, and no group has more
than ``MAX_TENSORS`` reductions, inputs or stored tensors of the size of the data.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tvm import relax

from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.plan.chain_config import chain_fits
from schedules.tir.extents import constant

from ..core.prim_functions import ElementFunction
from .fuse_reduction_producers import MAX_TENSORS, Absorption, count_large
from .row_space import (
    ROW,
    TILE,
    RowSpace,
    calls_after,
    calls_between,
    is_stored,
    pays_off,
    tensors_before,
    tensors_in_place,
)
from .tir_calls import BlockOrder, TIRCalls, count_bytes, count_elements, item_bytes

KEPT_BYTES = 1 << 26  # little compared with the memory of a device


@dataclass(frozen=True, eq=False)
class ReductionGroup:
    """Calls that one kernel computes."""

    space: RowSpace  # Their loops.
    finish: str  # Finish of the split, the same for all reductions.
    # The members: reductions, calls of as many elements as results, and as the data.
    reductions: frozenset[relax.Var] = frozenset()
    rows: frozenset[relax.Var] = frozenset()
    tiles: frozenset[relax.Var] = frozenset()
    # Further members, of as many elements as the data: the calls between a maximum and a sum that
    # uses it, in an online group (:mod:`relay_passes.reduction.joined_sums`).
    links: frozenset[relax.Var] = frozenset()
    # Further members: sums of columns over groups of rows.
    columns: frozenset[relax.Var] = frozenset()

    @cached_property
    def members(self) -> frozenset[relax.Var]:
        """All members."""
        return self.reductions | self.rows | self.tiles | self.links | self.columns

    def joined(self, var: relax.Var, kind: str) -> ReductionGroup:
        """The group with one more call of rows or of tiles."""
        if kind == ROW:
            return replace(self, rows=self.rows | {var})
        return replace(self, tiles=self.tiles | {var})

    def united(self, other: ReductionGroup) -> ReductionGroup:
        """A group of the members of both."""
        return ReductionGroup(
            self.space,
            self.finish,
            self.reductions | other.reductions,
            self.rows | other.rows,
            self.tiles | other.tiles,
            self.links | other.links,
            self.columns | other.columns,
        )


class ReductionGroups:
    """The groups of a block.

    ``calls``: the block's calls. ``order``: the block's dependences. ``gpu``: the device.
    ``links``: for sums to merge with their maximum although no block can process a row, the calls
    between. ``groups``: by the first member. ``absorption``: producers that they absorb.
    """

    def __init__(
        self,
        calls: TIRCalls,
        order: BlockOrder,
        gpu: GPUInfo,
        links: Mapping[relax.Var, frozenset[relax.Var]] | None = None,
    ) -> None:
        self.calls, self.order, self.gpu = calls, order, gpu
        self._links = dict(links or {})
        linking = frozenset().union(*self._links.values())
        self.groups: list[ReductionGroup] = []
        self._functions: dict[relax.Expr, ElementFunction | None] = {}
        self._members: dict[relax.Var, frozenset[relax.Var]] = {}
        self._large: dict[ReductionGroup, frozenset[relax.Expr]] = {}
        self._before: dict[ReductionGroup, frozenset[relax.Expr]] = {}
        self._input_spans: dict[ReductionGroup, dict[relax.Expr, tuple[int, float, int]]] = {}
        self._agreed: dict[tuple[RowSpace, relax.Var, frozenset[relax.Expr]], bool] = {}
        for var in order.bindings:
            if var in calls.reductions:
                self._add_reduction(var)
            elif var in calls.injective and var not in linking:
                self._add_injective(var)
        if self.groups:
            self._unite_strangers()
            self._leave_views()
            self._join_stored()
            self._join_columns()
        self.absorption = self._absorb()

    def group_of(self, var: relax.Var) -> ReductionGroup | None:
        """The group that a call is a member of."""
        return next((group for group in self.groups if var in group.members), None)

    def kind(self, group: ReductionGroup) -> str:
        """Kind of a group, by its members beside reductions.

        ``chain``, ``online``, ``stored``, ``sisters``, ``epilogue`` or ``producers``.
        """
        if self.is_chain(group):
            return "chain"
        if group.links or group.tiles:
            return "online" if group.links else "stored"
        if len(group.reductions) > 1:
            return "sisters"
        return "epilogue" if group.rows else "producers"

    def is_chain(self, group: ReductionGroup) -> bool:
        """Return whether elements of the size of the data, but links, use results of the group."""
        later = set(group.reductions)
        for var in sorted(group.members - later, key=self.order.position.__getitem__):
            if not later.isdisjoint(self.calls.tensors(var)):
                later.add(var)
        return not later.isdisjoint(group.tiles)

    def is_result(self, var: relax.Var, group: ReductionGroup) -> bool:
        """Return whether a group has a tensor that others read or the block returns."""
        users = self.calls.users.get(var, set())
        is_read = not isinstance(var, relax.DataflowVar) or not users <= group.members
        return is_read and var in group.members

    def rows_of(self, var: relax.Var) -> ReductionGroup | None:
        """The chain of whole rows that reads most of the data of a sum of columns."""
        before: dict[tuple[int | None, int | None], frozenset[relax.Expr]] = {}
        most, best = 0, None
        for group in self.groups:
            space = group.space
            if [kind for kind, _ in space.runs] == ["P", "R"] and self.is_chain(group):
                extents = constant(space.outputs), constant(space.reduced)
                if extents not in before:
                    before[extents] = tensors_before(self.calls, space, {var})
                own = before[extents] & (self.large_inputs(group) | group.members)
                shared = sum(map(count_bytes, own))
                if shared > most:
                    most, best = shared, group
        return best

    def large_inputs(self, group: ReductionGroup) -> frozenset[relax.Expr]:
        """The inputs of a group with at least as many elements as it reduces."""
        if group not in self._large:
            least, inputs = self._elements(group), self._inputs(group.members)
            self._large[group] = frozenset(e for e in inputs if count_elements(e) >= least)
        return self._large[group]

    def _add_reduction(self, var: relax.Var) -> None:
        workload = self.calls.workload(var)
        data = self.calls.tensors(var)[0]
        links = self._links.get(var, frozenset())
        space = RowSpace(data.ty.shape, workload)
        single = ReductionGroup(space, workload.finish, frozenset({var}), links=links)
        if constant(single.space.reduced) == 1:
            return  # a tensor of rows would be one of tiles
        before = {tensor for link in links for tensor in self.calls.tensors(link)}
        read = self.large_inputs(single)
        for group in sorted(self.groups, key=lambda group: data not in group.tiles):
            related = data in group.tiles or not read.isdisjoint(self.large_inputs(group))
            if links:
                related = not group.members.isdisjoint(before)
            if related and self._unite(group, single):
                return
        self.groups.append(single)
        self._members[var] = single.members

    def _add_injective(self, var: relax.Var) -> None:
        for group in self.groups:
            if not group.members.isdisjoint(self.calls.tensors(var)):
                kind = group.space.kind(var)
                if kind is not None and self._replace(group, group.joined(var, kind)):
                    return

    def _unite_strangers(self) -> None:
        for group in list(self.groups):
            for earlier in self.groups[: self.groups.index(group)]:
                strangers = not self.is_chain(earlier) and not self.is_chain(group)
                if strangers and self._unite(earlier, group, kept_bytes=KEPT_BYTES):
                    self.groups.remove(group)
                    break

    def _leave_views(self) -> None:
        """Remove reshapes of tensors that are written anyway; outside they are free."""
        for number, group in enumerate(self.groups):
            for var in reversed(self.order.bindings):
                if var in group.rows | group.tiles and self._is_view(var, group):
                    rows, tiles = group.rows - {var}, group.tiles - {var}
                    group = self.groups[number] = replace(group, rows=rows, tiles=tiles)
                    self._members[var] = frozenset({var})
            self._members.update(dict.fromkeys(group.members, group.members))

    def _is_view(self, var: relax.Var, group: ReductionGroup) -> bool:
        """Return whether a member is a reshape for others of a tensor that others read, too."""
        is_read = not group.members.isdisjoint(self.calls.users.get(var, set()))
        if is_read or not self.calls.is_reshape(var):
            return False
        source = self.calls.tensors(var)[0]
        kept = not isinstance(source, relax.DataflowVar)
        return kept or not self.calls.users[source] <= group.members

    def _absorb(self) -> Absorption:
        """Absorb producers, and add those as members whose tensors the group can write."""
        while True:
            kernels = {v: number for number, g in enumerate(self.groups) for v in g.members}
            absorption = Absorption(self.calls, kernels, lambda var: bool(self._writers(var)))
            absorption.choose(self.calls.injective, copies=True)
            has_joined = False
            for var in self.calls.injective:
                alone = var not in kernels and var not in absorption.taken
                if alone and not absorption.is_epilogue(var):
                    for group, united in self._writers(var)[:1]:
                        has_joined |= self._replace(group, united)
            if not has_joined:
                return absorption

    def _join_stored(self) -> None:
        """Let groups store what is stored anyway."""
        nothing = Absorption(self.calls, {})
        for var in self.calls.injective:
            is_free = is_stored(self.calls, var) and not nothing.is_epilogue(var)
            if is_free and self.group_of(var) is None:
                for group, united in self._writers(var)[:1]:
                    self._replace(group, united)

    def _join_columns(self) -> None:
        """Let chains compute sums of their columns."""
        for var in self.calls.columns:
            group = self.rows_of(var)
            if group is not None:
                self._replace(group, replace(group, columns=group.columns | {var}))

    def _writers(self, var: relax.Var) -> list[tuple[ReductionGroup, ReductionGroup]]:
        """The groups that could write a tensor, each without it and with it."""
        if self.calls.is_reshape(var):
            return []
        pairs = ((group, self._with_call(group, var)) for group in self.groups)
        return [(group, united) for group, united in pairs if united is not None]

    def _with_call(self, group: ReductionGroup, var: relax.Var) -> ReductionGroup | None:
        """The group with a call before or beside it, if that can and should be one kernel."""
        calls, space = self.calls, group.space
        kind = space.kind(var)
        if kind is None:
            return None
        joining = calls_between(calls, space, var, group.members)
        if not joining and kind == TILE and is_stored(calls, var):
            own = tensors_in_place(calls, space, var, lambda v, e: self._agrees(space, v, e))
            alone = ReductionGroup(space, group.finish, tiles=frozenset({var}))
            is_shared = not own.isdisjoint(self._tensors_before(group))
            if is_shared and self._bytes_kept_longer(group, alone) <= KEPT_BYTES:
                joining = calls_after(calls, own, group.members) | {var}
        if not joining or any(self.group_of(each) is not None for each in joining):
            return None
        united = group
        for each in joining:
            united = united.joined(each, space.kind(each) or TILE)
        copies_view = any(calls.is_reshape(e) and self.is_result(e, united) for e in joining)
        if copies_view or not self.is_kernel(united):
            return None
        if not self.is_chain(united) or kind == ROW:
            return united
        moved = self._inputs({var}) | {var}
        more = (moved - self._inputs(group.members)) | {var}
        blocks = self.gpu.max_cluster * (constant(space.outputs) or self.gpu.multiprocessors)
        return united if pays_off(var, blocks, more, moved, self.gpu) else None

    def _tensors_before(self, group: ReductionGroup) -> frozenset[relax.Expr]:
        if group not in self._before:
            self._before[group] = tensors_before(self.calls, group.space, group.members)
        return self._before[group]

    def _unite(
        self, group: ReductionGroup, other: ReductionGroup, kept_bytes: float = math.inf
    ) -> bool:
        """Merge another group into ``group``, if the result can be one kernel."""
        too_many = len(group.reductions) + len(other.reductions) > MAX_TENSORS
        if too_many or group.finish != other.finish or not group.space.is_same(other.space):
            return False
        if kept_bytes < math.inf and self._bytes_kept_longer(group, other) > kept_bytes:
            return False
        return self._replace(group, group.united(other))

    def _replace(self, group: ReductionGroup, larger: ReductionGroup) -> bool:
        """Replace a group by a larger one, if that can be one kernel."""
        if not self.is_kernel(larger):
            return False
        self.groups[self.groups.index(group)] = larger
        self._members.update(dict.fromkeys(larger.members, larger.members))
        return True

    def is_kernel(self, group: ReductionGroup) -> bool:
        """Return whether calls of one space can and should be one kernel."""
        members = group.members
        direct = {e for var in members for e in self.calls.tensors(var) if e not in members}
        elements = self._elements(group)
        inputs = min(count_large(read, elements) for read in (direct, self._inputs(members)))
        if inputs > MAX_TENSORS:
            return False
        computed = members - group.reductions - group.columns
        if not all(self._agrees(group.space, var, members) for var in computed):
            return False
        if sum(self.is_result(var, group) for var in group.tiles) > MAX_TENSORS:
            return False
        if self.is_chain(group) and (group.links or not self._has_rows_at_once(group)):
            return False
        return self.order.is_convex(members, self._members)

    def _has_rows_at_once(self, group: ReductionGroup) -> bool:
        space = group.space
        read = self.large_inputs(group) or {self._data(group)}  # Small tensors count as read.
        itemsize = sum(map(item_bytes, read))
        outputs, reduced = constant(space.outputs), constant(space.reduced)
        return chain_fits(outputs, reduced, itemsize, self.gpu, space.form)

    def _agrees(self, space: RowSpace, var: relax.Var, members: frozenset[relax.Expr]) -> bool:
        """Return whether a call fits into the space; cached, since groups grow step by step."""
        read = frozenset(members.intersection(self.calls.tensors(var)))
        key = (space, var, read)
        if key not in self._agreed:
            function = self.calls.injective[var].args[0]
            if function not in self._functions:
                self._functions[function] = ElementFunction.read(self.calls.mod[function])
            call = self.calls.injective[var]
            self._agreed[key] = space.agrees(self._functions[function], call, read)
        return self._agreed[key]

    def _elements(self, group: ReductionGroup) -> int:
        """``M`` times ``N``, as a number."""
        return count_elements(self._data(group))

    def _data(self, group: ReductionGroup) -> relax.Expr:
        """The data of one of the reductions."""
        return self.calls.tensors(next(iter(group.reductions)))[0]

    def _inputs(self, members: Collection[relax.Var]) -> set[relax.Expr]:
        """The outside inputs of calls and of the producers that only they read."""
        inside, inputs = set(members), set()
        queue = list(members)
        while queue:
            for tensor in self.calls.tensors(queue.pop()):
                if tensor in inside:
                    continue
                users = self.calls.users.get(tensor, set())
                local = isinstance(tensor, relax.DataflowVar) and users <= inside
                if local and tensor in self.calls.injective:
                    inside.add(tensor)
                    inputs.discard(tensor)
                    queue.append(tensor)
                else:
                    inputs.add(tensor)
        return inputs

    def _bytes_kept_longer(self, *groups: ReductionGroup) -> int:
        """Bytes of inputs that are otherwise dead before the last input is available."""
        spans = {tensor: span for group in groups for tensor, span in self._spans(group).items()}
        last = max((first for first, _, _ in spans.values()), default=0)
        return sum(size for _, end, size in spans.values() if end < last)

    def _spans(self, group: ReductionGroup) -> dict[relax.Expr, tuple[int, float, int]]:
        """Definition and last use of inputs, and their bytes."""
        if group not in self._input_spans:
            position, users = self.order.position, self.calls.users
            self._input_spans[group] = {
                tensor: (
                    position[tensor],
                    max(position[user] for user in users[tensor])
                    if isinstance(tensor, relax.DataflowVar)
                    else math.inf,
                    count_bytes(tensor),
                )
                for tensor in self._inputs(group.members)
                if tensor in position
            }
        return self._input_spans[group]

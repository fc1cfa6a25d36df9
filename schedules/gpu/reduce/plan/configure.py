# SPDX-License-Identifier: Apache-2.0
"""Reading a group from a function, and the choice of a configuration, which an attribute carries.

A reduction is three consecutive blocks: the one with the annotation, the one that combines, and the
one that gives the result. Sums of columns are one block. All others are element-wise. They are
inlined into their readers, except epilogues, which are computed once for each ``m``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from schedules import attributes
from schedules.gpu.core.machine import GPUInfo
from schedules.tir.expression_walk import loads, nodes, substitute, uses
from schedules.tir.extents import Extent, constant, extent_of, size_of, unravel
from schedules.tir.index_math import as_type, i64, ravel, simplified
from schedules.workload.reduce import CanonicalLoops, ReduceWorkload

from .chain_config import chain_fits, choose_chain
from .config import ReduceConfig, choose_sisters, workspace_words
from .group import (
    ColumnSums,
    ElementOutput,
    Epilogue,
    ReduceGroup,
    Reduction,
    ReductionStage,
    Result,
    in_one_stage,
)
from .group_workload import GroupWorkload
from .sister_space import decide_split


def read_group(func: tirx.PrimFunc) -> ReduceGroup | None:
    """Read the group of a function; None if it is no group of reductions of one form."""
    blocks = nodes(func.body, s_tir.SBlock)
    first = next((block for block in blocks if attributes.REDUCE in block.annotations), None)
    if first is None:
        return None
    reader = _GroupReader(func, first)
    try:
        for block in blocks:
            if block.iter_vars:
                reader.read(block)
        return reader.group()
    except _NotAGroupError:
        return None


class _NotAGroupError(Exception):
    """The function has something that does not belong to a group."""


@dataclass(frozen=True)
class _Definition:
    """An element-wise block: the element at ``variables``, which run over ``shape``."""

    variables: tuple[tirx.Var, ...]
    shape: tuple[Extent, ...]
    value: tirx.Expr
    stage: int  # the one whose results it uses; -1 if none


@dataclass
class _GroupReader:
    """Reader state: the blocks read so far, in the order of execution."""

    func: tirx.PrimFunc
    first: s_tir.SBlock
    definitions: dict[tirx.Buffer, _Definition] = field(default_factory=dict)
    lifted: dict[tirx.Buffer, s_tir.SBlock] = field(default_factory=dict)
    combined: dict[tirx.Buffer, s_tir.SBlock] = field(default_factory=dict)
    results: dict[tirx.Buffer, tirx.Var] = field(default_factory=dict)
    reductions: list[tuple[int, Reduction]] = field(default_factory=list)
    epilogues: list[tuple[int, Epilogue]] = field(default_factory=list)
    stored: list[tirx.Buffer] = field(default_factory=list)
    columns: list[s_tir.SBlock] = field(default_factory=list)
    _read_indices: dict[tirx.Var, tirx.Expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outputs, self.reduced = self._extents(self.first)
        self.m, self.n = tirx.Var("m", "int64"), tirx.Var("n", "int64")
        self.loops = _loops(self.first)
        self.analyzer = Analyzer()
        for var, extent in ((self.m, self.outputs), (self.n, self.reduced)):
            self.analyzer.bind(var, Range.from_min_extent(i64(0), i64(extent)))

    def read(self, block: s_tir.SBlock) -> None:
        """Add a block.

        Raises ``_NotAGroupError`` if it does not belong to a group.
        """
        if attributes.REDUCE in block.annotations:
            self.lifted[_store(block).buffer] = block
        elif attributes.COLUMN_SUMS in block.annotations:
            self.columns.append(block)
        elif block.init is not None:
            self._read_combine(block)
        elif any(load.source in self.combined for load in loads(_store(block).value)):
            self._read_finish(block)
        else:
            self._read_elementwise(block)

    def group(self) -> ReduceGroup:
        """All blocks together.

        Raises ``_NotAGroupError`` if the reductions do not have the same extents and form, or
        something is missing.
        """
        if len(self.reductions) < len(self.lifted):
            raise _NotAGroupError
        stages = tuple(
            ReductionStage(
                tuple(part for at, part in self.reductions if at == number),
                tuple(part for at, part in self.epilogues if at == number),
            )
            for number in range(1 + max(at for at, _ in self.reductions))
        )
        elements = tuple(self._element_output(buffer) for buffer in self.stored)
        turns = {int(block.annotations[attributes.COLUMN_SUMS]) for block in self.columns}
        columns = tuple(map(self._column_sums, self.columns))
        group = ReduceGroup(
            self.func, stages, elements, self.outputs, self.reduced, columns, max(turns, default=1)
        )
        if columns and (len(turns) > 1 or not group.is_chain):
            raise _NotAGroupError
        return group

    def _read_combine(self, block: s_tir.SBlock) -> None:
        read = [load.source for load in nodes(block.body, ir.TensorLoad)]
        source = next((buffer for buffer in read if buffer in self.lifted), None)
        if source is None:
            raise _NotAGroupError  # a reduction of another kind
        stores = nodes(block.body, tirx.BufferStore)
        self.combined |= {store.buffer: self.lifted[source] for store in stores}

    def _read_finish(self, block: s_tir.SBlock) -> None:
        store = _store(block)
        source = next(
            self.combined[load.source]
            for load in loads(store.value)
            if load.source in self.combined
        )
        loops = _loops(source)
        same = all(
            _same(*pair)
            for pair in zip(self._extents(source), (self.outputs, self.reduced), strict=True)
        )
        if not same or loops.form != self.loops.form:
            raise _NotAGroupError
        places = dict(zip((v.var for v in source.iter_vars), (self.m, self.n), strict=True))
        value = self._inline(substitute(source.body.value, places))
        workload = ReduceWorkload.from_json(str(source.annotations[attributes.REDUCE]))
        result = tirx.Var("result", workload.out_dtype)
        results = (Result(result, self._output(store.buffer)),)
        reduction = Reduction(workload, loops, self._function(value), results)
        self.reductions.append((1 + self._stage(value), reduction))
        self.results[store.buffer] = result

    def _read_elementwise(self, block: s_tir.SBlock) -> None:
        store = _store(block)
        variables = tuple(iter_var.var for iter_var in block.iter_vars)
        shape = tuple(extent_of(v.dom.extent) for v in block.iter_vars)
        subscripts = store.indices or variables[:1]  # a block of one element still has a loop
        plain = len(subscripts) == len(variables) and all(map(_is_same, subscripts, variables))
        if not plain or any(int(v.iter_type) != 0 for v in block.iter_vars):
            raise _NotAGroupError
        stage = max((self._stage_of(load) for load in loads(store.value)), default=-1)
        is_output = self._output(store.buffer) is not None
        definition = _Definition(variables, shape, store.value, stage)
        if _same(size_of(shape), self.outputs) and (stage >= 0 or is_output):
            self._add_epilogue(store.buffer, definition)
            return
        self.definitions[store.buffer] = definition
        if is_output:
            self.stored.append(store.buffer)

    def _add_epilogue(self, buffer: tirx.Buffer, definition: _Definition) -> None:
        places = unravel(self.m, definition.shape)
        at_m = substitute(definition.value, dict(zip(definition.variables, places, strict=True)))
        value, m = self._inline(at_m), self.m
        result = tirx.Var("result", str(buffer.dtype))
        stored = Result(result, self._output(buffer))
        epilogue = Epilogue(lambda at: substitute(value, {m: at}), stored)
        self.epilogues.append((max(0, definition.stage), epilogue))
        self.results[buffer] = result

    def _element_output(self, buffer: tirx.Buffer) -> ElementOutput:
        definition = self.definitions[buffer]
        places = self._subscripts(definition.shape)
        at = substitute(definition.value, dict(zip(definition.variables, places, strict=True)))
        value, place = self._inline(at), ravel(places, definition.shape)
        functions = self._function(value), self._function(place)
        return ElementOutput(*functions, buffer, 1 + self._stage(value))

    def _column_sums(self, block: s_tir.SBlock) -> ColumnSums:
        store = _store(block)
        [source] = {load.source for load in loads(store.value)} - {store.buffer}
        is_row = [kind for kind, _ in self.loops.runs] == ["P", "R"]
        same = _same(extent_of(store.buffer.shape[1]), self.reduced)
        if self._output(store.buffer) is None or not is_row or not same:
            raise _NotAGroupError
        element = source[tuple(self._subscripts(tuple(map(extent_of, source.shape))))]
        value = self._inline(element.astype("float32"))
        return ColumnSums(self._function(value), store.buffer)

    def _subscripts(self, shape: Sequence[Extent]) -> list[tirx.Expr]:
        """Place of element ``(m, n)`` of the data in a tensor of as many elements."""
        for _, reduction in self.reductions:
            loops = reduction.loops
            if len(shape) == len(loops.shape) and all(map(_agree, shape, loops.shape)):
                return CanonicalLoops(tuple(shape), loops.axes).subscripts(self.m, self.n)
        kinds = [kind for kind, _ in self.loops.runs]
        count: Extent = self.outputs * self.reduced
        if not _same(size_of(shape), count):
            raise _NotAGroupError
        if kinds == ["P", "R"]:
            flat = self.m * i64(self.reduced) + self.n
        elif kinds == ["R", "P"]:
            flat = self.n * i64(self.outputs) + self.m
        else:
            places = self.loops.subscripts(self.m, self.n)
            flat = ravel(places, self.loops.shape)
        return [self.analyzer.simplify(index) for index in unravel(flat, shape)]

    def _inline(self, expression: tirx.Expr) -> tirx.Expr:
        """Replace reads of tensors of the group; the expression depends on ``m`` and ``n``."""
        inlined = self._expand(expression)
        while any(uses(inlined, var) for var in self._read_indices):
            inlined = substitute(inlined, self._read_indices)
        computed = {*self.results, *self.definitions, *self.lifted, *self.combined}
        for load in loads(inlined):
            if load.source in computed or load.source not in self.func.params:
                raise _NotAGroupError  # a result at another place, or something unknown
        return inlined

    def _expand(self, expression: tirx.Expr) -> tirx.Expr:
        def replace(load: ir.TensorLoad) -> tirx.Expr:
            source = load.source
            if source in self.results:
                place = ravel(load.indices, source.shape)
                is_here = self.analyzer.can_prove_equal(place, self.m)
                return self.results[source] if is_here else load
            if source in self.definitions:
                definition = self.definitions[source]
                places = map(self._inside, load.indices, definition.shape)
                indices = dict(zip(definition.variables, places, strict=False))
                return self._expand(substitute(definition.value, indices))
            return load

        return tvm_ffi.structural_map(expression, (ir.TensorLoad, replace))

    def _inside(self, index: tirx.Expr, extent: Extent) -> tirx.Expr:
        """An index, or where it is read from memory a variable that is known to be inside."""
        if not loads(index):
            return index
        dtype = str(index.ty.dtype)
        var, zero = tirx.Var("inside", dtype), tirx.const(0, dtype)
        self.analyzer.bind(var, Range.from_min_extent(zero, as_type(extent, dtype)))
        self._read_indices[var] = index
        return var

    def _function(self, value: tirx.Expr):
        m_var, n_var = self.m, self.n
        return lambda m, n: substitute(value, {m_var: m, n_var: n})

    def _stage(self, value: tirx.Expr) -> int:
        """The last stage whose results an expression uses; -1 if it uses none."""
        parts: list[tuple[int, Reduction | Epilogue]] = [*self.reductions, *self.epilogues]
        results = [(at, result.var) for at, part in parts for result in part.results]
        return max((at for at, var in results if uses(value, var)), default=-1)

    def _stage_of(self, load: ir.TensorLoad) -> int:
        if load.source in self.results:
            return self._stage(self.results[load.source])
        if load.source in self.definitions:
            return self.definitions[load.source].stage
        return -1

    def _output(self, buffer: tirx.Buffer) -> tirx.Buffer | None:
        return buffer if buffer in self.func.params else None

    def _extents(self, block: s_tir.SBlock) -> tuple[Extent, Extent]:
        outputs, reduced = (extent_of(iter_var.dom.extent) for iter_var in block.iter_vars)
        return outputs, reduced


def _store(block: s_tir.SBlock) -> tirx.BufferStore:
    if not isinstance(block.body, tirx.BufferStore):
        raise _NotAGroupError
    return block.body


def _loops(block: s_tir.SBlock) -> CanonicalLoops:
    """Axes of the data of a reduction."""
    shape = json.loads(str(block.annotations[attributes.REDUCE_SHAPE]))
    workload = ReduceWorkload.from_json(str(block.annotations[attributes.REDUCE]))
    known = tuple(tirx.Var("extent", "int64") if e is None else e for e in shape)
    return CanonicalLoops(known, workload.axes)


def _is_same(a: tirx.Expr, b: tirx.Expr) -> bool:
    return a.same_as(b)


def _same(a: Extent, b: Extent) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return constant(simplified(i64(a) - i64(b))) == 0


def _agree(extent: Extent, of_data: Extent) -> bool:
    """Return whether an extent may be that of the data, which may be unknown."""
    return constant(extent) == constant(of_data)


def configure(
    func: tirx.PrimFunc,  # Not scheduled.
    gpu: GPUInfo,
    # The configuration; that of :func:`choose_config` by default.
    config: ReduceConfig | None = None,
) -> tirx.PrimFunc:
    """Give a function its configuration, unless it has one.

    Returns the function with the attribute ``attributes.REDUCE_CONFIG``, and before its other
    parameters, if the last block is to combine the results of all, a workspace ``int32[words]``,
    which must be zero at the first call but for its last two words. ``func`` itself if it is no
    group of reductions.
    """
    group = None if attributes.REDUCE_CONFIG in func.attrs else read_group(func)
    if group is None:
        return func
    config = config or choose_config(GroupWorkload.of(group), gpu)
    func = func.with_attr(attributes.REDUCE_CONFIG, json.dumps(asdict(config)))
    if config.finish != "last_block":
        return func
    [stage] = _staged(group, config).stages
    words = workspace_words(config, stage.reductions[0].loops, stage.workloads)
    workspace = tirx.decl_buffer((words,), "int32", "workspace")
    return tirx.PrimFunc([workspace, *func.params], func.body, func.ret_type, func.attrs)


def read_configured(func: tirx.PrimFunc, gpu: GPUInfo) -> tuple[ReduceGroup, ReduceConfig] | None:
    """Group of a function, in the stages that the kernel has, and its configuration.

    Without the attribute ``attributes.REDUCE_CONFIG`` it is one that needs no workspace. None if
    the function is no group of reductions, or sums columns of rows that no block can keep.
    """
    group = read_group(func)
    if group is None:
        return None
    if attributes.REDUCE_CONFIG in func.attrs:
        config = ReduceConfig(**json.loads(str(func.attrs[attributes.REDUCE_CONFIG])))
    else:
        config = choose_config(GroupWorkload.of(group), gpu, has_workspace=False)
    if group.columns and not config.kept:
        return None
    return _staged(group, config), config


def choose_config(group: GroupWorkload, gpu: GPUInfo, has_workspace: bool = True) -> ReduceConfig:
    """Choose the stages and the configuration of a group; without records, nothing else does.

    Where a machine is in use (:mod:`schedules.cost.decisions`), its figures choose the split of
    sisters and its finish; the stages, and the configuration of chains, do not depend on it.
    """
    if not group.is_chain:
        return _choose_sisters(group, gpu, has_workspace)
    if group.one_stage is None or prefers_chain(group, gpu):
        return choose_chain(group, gpu)
    return replace(_choose_sisters(group.one_stage, gpu, has_workspace), is_online=True)


def _choose_sisters(group: GroupWorkload, gpu: GPUInfo, has_workspace: bool) -> ReduceConfig:
    default = choose_sisters(group, gpu, has_workspace)
    return decide_split(group, default, gpu, has_workspace)


def prefers_chain(group: GroupWorkload, gpu: GPUInfo) -> bool:
    """Return whether a chain that can be one stage stays a chain.

    Its rows are short enough for a block, or many enough, and threads keep them in registers: else
    each stage would read them again.
    """
    outputs, reduced = constant(group.outputs), constant(group.reduced)
    fits = chain_fits(outputs, reduced, sum(group.row_inputs) or 1, gpu, group.form)
    return fits and (reduced is None or choose_chain(group, gpu).kept > 0)


def _staged(group: ReduceGroup, config: ReduceConfig) -> ReduceGroup:
    """The group in the stages of its kernel."""
    return (in_one_stage(group) or group) if config.is_online else group

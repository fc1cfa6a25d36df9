# SPDX-License-Identifier: Apache-2.0
"""Passes ``DistributeRows`` and ``SeparatePairs``, which runs before it.

``DistributeRows`` makes one function for each rank, which computes rows of every activation;
``SeparatePairs`` makes two convolutions again of fused ones with large weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import IRModule, relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules import attributes
from schedules.distribute.cost import Network, Processor
from schedules.distribute.rows.row_cost import choose_exchanges, row_cost, segments
from schedules.distribute.rows.row_plan import (
    EXCHANGE,
    ROOT,
    RankPart,
    RankPlan,
    RowExchange,
    RowPlacement,
    StageOperand,
    rows_needed,
)
from schedules.workload.conv2d import Conv2DKernel

from ..core.expressions import op_name, operands, substitute
from ..op.conv2d import FUSED_CONV2D, conv2d
from ..op.conv_types import read_kernel
from .row_rules import AXIS, image_shape, tensors
from .row_stages import BoundStage, read_row_stages

Range = tuple[int, int]


def is_exchange(value: relax.Expr) -> bool:
    """Return whether a value is a call that exchanges rows."""
    return (
        op_name(value) == "relax.call_dps_packed" and str(value.args[0].global_symbol) == EXCHANGE
    )


def rank_function(
    stages: Sequence[BoundStage],
    placement: RowPlacement,
    transfers: Sequence[np.ndarray],
    rank: int,
    name: str,
) -> relax.Function | None:
    """The part of one rank.

    ``placement``: rows of all stages on all ranks. ``transfers``: messages of every exchange, in
    the order of ``placement.exchanged``. ``name``: name of the new function. Returns it takes the
    rows that the rank reads of each input, of those inputs of which it reads some, and returns a
    tuple: on the first rank the result; then a byte for each exchange in which the rank only sends.
    None where the rank has nothing to do.
    """
    writer = _Writer(stages, placement, rank)
    params = writer.parameters()
    if not params and not any((sent[:, :2] == rank).any() for sent in transfers):
        return None
    builder = writer.builder
    numbers = {stage: number for number, stage in enumerate(placement.exchanged)}
    with builder.function(name, params):
        with builder.dataflow():
            for index in range(len(stages)):
                writer.compute(index)
                if index in numbers:
                    writer.exchange(index, numbers[index], transfers[numbers[index]])
            result = builder.emit_output(relax.Tuple(writer.results()))
        builder.emit_func_output(result)
    return builder.get()[name]


class _Writer:
    """Emits the calls of one rank; knows which rows of which stage are in which variable."""

    def __init__(self, stages: Sequence[BoundStage], placement: RowPlacement, rank: int) -> None:
        self.builder = relax.BlockBuilder()
        self._stages, self._placement, self._rank = stages, placement, rank
        self._places = {bound.var: index for index, bound in enumerate(stages)}
        self._found: list[dict[Range, relax.Var]] = [{} for _ in stages]
        self._shares: dict[int, relax.Var] = {}  # Shares of stages split by channels.
        self._sent: list[relax.Var] = []
        self._last: list[relax.Var] = []

    def parameters(self) -> list[relax.Var]:
        """The inputs of which the rank reads something."""
        params = []
        for index, bound in enumerate(self._stages):
            rows = self._computed(index)
            if bound.stage.is_input and rows[0] < rows[1]:
                param = relax.Var(bound.var.name, self._type(index, rows))
                self._found[index][rows] = param
                params.append(param)
        return params

    def compute(self, index: int) -> None:
        """Emit the call of a stage."""
        bound, rows = self._stages[index], self._computed(index)
        if bound.value is None or rows[0] >= rows[1]:
            return
        value = bound.value
        if index in self._placement.by_channels:
            assert bound.channels is not None, "only stages of several blocks are split so"
            arguments = self._operands(index, lambda read: self._channels_read(read, rows))
            value = bound.channels.rebuild(arguments, *rows)
            self._shares[index] = self.builder.emit(value, bound.var.name)
            return
        if bound.rows is None:
            for operand in set(operands(value)):
                place = self._places[operand]
                whole = 0, self._stages[place].stage.rows
                value = substitute(value, operand, self._take(place, whole))
        else:
            arguments = self._operands(index, lambda read: self._rows_read(read, rows))
            value = bound.rows.rebuild(arguments, *rows)
        self._found[index][rows] = self.builder.emit(value, bound.var.name)

    def exchange(self, index: int, number: int, messages: np.ndarray) -> None:
        """Emit an exchange after a stage, if the rank takes part in it."""
        computed, held = self._computed(index), self._range(self._placement.held[index])
        source, dest = messages[:, 0], messages[:, 1]
        sends, receives = bool((source == self._rank).any()), bool((dest == self._rank).any())
        if not sends and not receives:
            return
        mine = []
        if computed[0] < computed[1]:
            shares = self._shares
            mine = [shares[index] if index in shares else self._found[index][computed]]
        # The last exchange's result keeps them in order, which FuseOps would not: ranks would wait
        # for each other in different ones.
        arguments = relax.Tuple([relax.prim_value(number), *mine, *self._last])
        needs = self._type(index, held) if receives else relax.TensorType([1], "uint8")
        call = relax.op.call_dps_packed(EXCHANGE, arguments, needs)
        received = self.builder.emit(call, self._stages[index].var.name)
        self._last = [received]
        if receives:
            self._found[index][held] = received
        else:
            self._sent.append(received)

    def results(self) -> list[relax.Var]:
        """Outputs of the rank."""
        last = len(self._stages) - 1
        whole = 0, self._stages[last].stage.rows
        return [*([self._take(last, whole)] if self._rank == ROOT else []), *self._sent]

    def _operands(self, index: int, part: Callable[[StageOperand], relax.Expr]) -> list[relax.Expr]:
        """Arguments of a stage: constants, and of each variable the part that is read."""
        bound = self._stages[index]
        given = iter(bound.stage.operands)
        return [
            part(next(given)) if isinstance(operand, relax.Var) else operand
            for operand in tensors(bound.value)
        ]

    def _rows_read(self, read: StageOperand, rows: Range) -> relax.Expr:
        """Rows of an operand for some rows of a stage."""
        source = self._stages[read.stage].stage
        begin, end = rows_needed(source, read, np.array([rows]))[0].tolist()
        return self._take(read.stage, (begin, end))

    def _channels_read(self, read: StageOperand, blocks: Range) -> relax.Expr:
        """An operand for blocks of channels: all rows of the image, or these blocks of another."""
        if read.maps == () and read.stage in self._shares:
            return self._shares[read.stage]
        whole = self._take(read.stage, (0, self._stages[read.stage].stage.rows))
        if read.maps != ():
            return whole
        begin, end = blocks
        return self.builder.emit(relax.op.strided_slice(whole, [1], [begin], [end]))

    def _take(self, index: int, rows: Range) -> relax.Var:
        """Rows of a stage, cut from others that hold them."""
        ranges = self._found[index]
        if rows not in ranges:
            low, high = min(
                (held for held in ranges if held[0] <= rows[0] and rows[1] <= held[1]),
                key=lambda held: held[1] - held[0],
            )
            begin, end = rows[0] - low, rows[1] - low
            cut = relax.op.strided_slice(ranges[low, high], [AXIS], [begin], [end])
            ranges[rows] = self.builder.emit(cut)
        return ranges[rows]

    def _computed(self, index: int) -> Range:
        return self._range(self._placement.computed[index])

    def _range(self, rows: np.ndarray) -> Range:
        begin, end = rows[self._rank].tolist()
        return begin, end

    def _type(self, index: int, rows: Range) -> relax.Type:
        """Type of some rows of a stage."""
        var = self._stages[index].var
        shape = image_shape(var)
        if shape is None:
            return var.ty
        shape[AXIS] = rows[1] - rows[0]
        return relax.TensorType(shape, var.ty.dtype)


@tvm.transform.module_pass(opt_level=0, name="DistributeRows")
class DistributeRows:
    """Replace ``main`` by the programs of several ranks, each on its rows of the images.

    Before::

        def main(x: R.Tensor((1, 3, 8, 8))):
            lv = R.tvm_fusion.conv2d(x, w1, b1, padding=[1, 1, 1, 1])
            gv = R.tvm_fusion.conv2d(lv, w2, b2, padding=[1, 1, 1, 1])
            return gv

    After, on the first of two ranks, if the rows of both results are exchanged::

        def part_0(x: R.Tensor((1, 3, 5, 8))):             # rows 0 to 5
            lv = R.tvm_fusion.conv2d(x, w1, b1, padding=[1, 1, 0, 1])            # rows 0 to 4
            lv1 = R.call_dps_packed("tvm_fusion.exchange_rows", (0, lv), ...)    # rows 0 to 5
            gv = R.tvm_fusion.conv2d(lv1, w2, b2, padding=[1, 1, 0, 1])          # rows 0 to 4
            gv1 = R.call_dps_packed("tvm_fusion.exchange_rows", (1, gv, lv1), ...)  # rows 0 to 8
            return (gv1,)

    Ranks whose programs are the same share a function. Convolutions, pooling, element-wise ops,
    concatenations of channels and enlargements are split; any other op runs on the ranks that need
    its result, after all rows that it reads are there. Of a packed convolution, ranks may compute
    channels instead, with their share of its weights, and columns of a product with a constant
    matrix. Results are on the first rank. Run after
    ``PackLayout`` and ``ChooseWinograd``, whose choices are those for the whole image, so that all
    sums are in the same order; tiles of Winograd's algorithm are not cut.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    network, processor : Network, Processor
        Figures for the choice of exchanges.
    exchange : str
        Choice as in :func:`schedules.distribute.rows.row_cost.choose_exchanges`.
    """

    def __init__(
        self, ranks: int, network: Network, processor: Processor, exchange: str = "auto"
    ) -> None:
        self.ranks, self.exchange = ranks, exchange
        self.network, self.processor = network, processor

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Replace ``main``; the module's attribute ``tvm_fusion.rank_plan`` describes the ranks."""
        if "main" not in [name.name_hint for name in mod.get_global_vars()]:
            return mod
        bound = read_row_stages(mod["main"])
        stages = [one.stage for one in bound]
        placement = choose_exchanges(
            stages, self.ranks, self.network, self.processor, self.exchange
        )
        sent = [placement.transfers(index) for index in placement.exchanged]
        functions: dict[str, relax.Function] = {}
        parts = []
        for rank in range(self.ranks):
            func = rank_function(bound, placement, sent, rank, "part")
            # The text shows no values of constants: those of ranks with other channels differ.
            shares = [placement.computed[i][rank].tolist() for i in sorted(placement.by_channels)]
            text = "" if func is None else f"{func.script(show_meta=False)}{shares}"
            if func is not None and text not in functions:
                functions[text] = func.with_attr("global_symbol", f"part_{len(functions)}")
            name = str(functions[text].attrs["global_symbol"]) if text else ""
            parts.append(RankPart(name, _inputs(bound, placement, rank)))
        cost = row_cost(stages, placement, self.network, self.processor)
        plan = RankPlan(
            tuple(parts), _exchanges(bound, placement), segments(stages, placement, cost)
        )
        result = IRModule(
            {name: func for name, func in mod.functions_items() if name.name_hint != "main"},
            attrs=mod.attrs,
            global_infos=mod.global_infos,
        )
        for func in functions.values():
            result[str(func.attrs["global_symbol"])] = func
        return result.with_attr(attributes.RANK_PLAN, json.dumps(plan.to_json()))


def _inputs(
    bound: Sequence[BoundStage], placement: RowPlacement, rank: int
) -> tuple[tuple[int, int] | None, ...]:
    found = []
    for index, one in enumerate(bound):
        if one.stage.is_input:
            begin, end = placement.computed[index][rank].tolist()
            found.append((begin, end) if begin < end else None)
    return tuple(found)


def _exchanges(bound: Sequence[BoundStage], placement: RowPlacement) -> tuple[RowExchange, ...]:
    exchanges = []
    for index in placement.exchanged:
        var = bound[index].var
        by_channels = index in placement.by_channels
        shape = [int(extent) for extent in var.ty.shape.values]
        width = shape[1] // bound[index].stage.blocks if by_channels else 1
        own, held = (
            tuple((int(begin), int(end)) for begin, end in rows)
            for rows in (width * placement.computed[index], placement.held[index])
        )
        exchanges.append(
            RowExchange(var.name, tuple(shape), str(var.ty.dtype), own, held, by_channels)
        )
    return tuple(exchanges)


_LARGE = 4  # times the bytes of the images; estimated


@tvm.transform.module_pass(opt_level=0, name="SeparatePairs")
class SeparatePairs:
    """Take fused pairs apart whose layers ranks had better share by channels.

    Before::

        lv = R.tvm_fusion.fused_conv2d(x, w1, b1, w2, b2, residual)

    After::

        lv = R.tvm_fusion.conv2d(x, w1, b1)
        lv1 = R.tvm_fusion.conv2d(lv, w2, b2, residual)

    That is where weights are many times as large as the images: of the few rows there, one rank has
    more than another, and each reads all weights. Results have the same bits. Left alone: pairs of
    which a layer has several groups, whose channels are not shared, and those that are not packed.
    It runs on ``main`` after ``PackLayout``, before ``DistributeRows``.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Return the module with more convolutions."""
        if "main" not in [name.name_hint for name in mod.get_global_vars()]:
            return mod
        separator = _Separator(mod)
        separator.builder_.update_func(
            mod.get_global_var("main"), separator.visit_expr(mod["main"])
        )
        return separator.builder_.get()


@mutator
class _Separator(PyExprMutator):
    """Replaces calls of pairs."""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Two calls in the place of one."""
        call = self.visit_expr_post_order(call)
        if op_name(call) != FUSED_CONV2D.name:
            return call
        kernel = read_kernel(call, FUSED_CONV2D)
        if not _is_apart(kernel):
            return call
        layer1, layer2 = kernel.layers
        first = conv2d(
            *call.args[:3],
            **layer1.to_attrs(),
            data_layout=kernel.data_layout,
            out_layout=kernel.out_layout,
            in_channels=layer1.in_channels,
            out_channels=layer1.out_channels,
        )
        return conv2d(
            self.builder_.emit(first),
            *call.args[3:],
            **layer2.to_attrs(),
            data_layout=kernel.out_layout,
            out_layout=kernel.out_layout,
            in_channels=layer2.in_channels,
            out_channels=layer2.out_channels,
        )


def _is_apart(kernel: Conv2DKernel) -> bool:
    if not kernel.is_static or kernel.out_layout == "NCHW":
        return False
    if any(layer.groups > 1 for layer in kernel.layers):
        return False
    assert kernel.height is not None and kernel.width is not None
    size = kernel.height, kernel.width
    images = [kernel.layers[0].in_channels * math.prod(size)]
    for layer in kernel.layers:
        size = layer.output_size(*size)
    images.append(kernel.layers[-1].out_channels * math.prod(size))
    weights = [one.in_channels * one.out_channels * math.prod(one.kernel) for one in kernel.layers]
    return sum(weights) > _LARGE * (kernel.batch or 1) * sum(images)

# SPDX-License-Identifier: Apache-2.0
"""One rank's part of a function: the same calls on its rows, with exchanges in between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax

from schedules.distribute.rows.row_plan import EXCHANGE, ROOT, RowPlacement, rows_needed

from ..core.expressions import op_name, operands, substitute
from .row_rules import AXIS, image_shape, tensors
from .row_stages import BoundStage

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

    Parameters
    ----------
    stages : Sequence[BoundStage]
        The function.
    placement : RowPlacement
        Rows of all stages on all ranks.
    transfers : Sequence[np.ndarray]
        Messages of every exchange, in the order of ``placement.exchanged``.
    rank : int
        The rank.
    name : str
        Name of the new function.

    Returns
    -------
    relax.Function | None
        It takes the rows that the rank reads of each input, of those inputs of which it reads some,
        and returns a tuple: on the first rank the result; then a byte for each exchange in which
        the rank only sends. None where the rank has nothing to do.
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
        self._shares: dict[int, relax.Var] = {}  # of stages split by channels
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
            arguments = self._channel_operands(index, rows)
            value = bound.channels.rebuild(arguments, *rows)
            self._shares[index] = self.builder.emit(value, bound.var.name)
            return
        if bound.rows is None:
            for operand in set(operands(value)):
                place = self._places[operand]
                whole = 0, self._stages[place].stage.rows
                value = substitute(value, operand, self._take(place, whole))
        else:
            arguments = self._operands(index, rows)
            value = bound.rows.rebuild(arguments, *rows)
        self._found[index][rows] = self.builder.emit(value, bound.var.name)

    def exchange(self, index: int, number: int, messages: np.ndarray) -> None:
        """Emit an exchange after a stage, if the rank takes part in it."""
        own, held = self._computed(index), self._range(self._placement.held[index])
        source, dest = messages[:, 0], messages[:, 1]
        sends, receives = bool((source == self._rank).any()), bool((dest == self._rank).any())
        if not sends and not receives:
            return
        mine = []
        if own[0] < own[1]:
            shares = self._shares
            mine = [shares[index] if index in shares else self._found[index][own]]
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

    def _operands(self, index: int, rows: Range) -> list[relax.Expr]:
        bound = self._stages[index]
        arguments: list[relax.Expr] = []
        given = iter(bound.stage.operands)
        for operand in tensors(bound.value):
            if not isinstance(operand, relax.Var):
                arguments.append(operand)
                continue
            read = next(given)
            source = self._stages[read.stage].stage
            begin, end = rows_needed(source, read, np.array([rows]))[0].tolist()
            arguments.append(self._take(read.stage, (begin, end)))
        return arguments

    def _channel_operands(self, index: int, blocks: Range) -> list[relax.Expr]:
        """Operands for blocks of channels: all rows of the image, these blocks of the others."""
        bound = self._stages[index]
        arguments: list[relax.Expr] = []
        given = iter(bound.stage.operands)
        for operand in tensors(bound.value):
            if not isinstance(operand, relax.Var):
                arguments.append(operand)
                continue
            read = next(given)
            if read.maps == () and read.stage in self._shares:
                arguments.append(self._shares[read.stage])
                continue
            whole = self._take(read.stage, (0, self._stages[read.stage].stage.rows))
            if read.maps == ():
                begin, end = blocks
                cut = relax.op.strided_slice(whole, [1], [begin], [end])
                whole = self.builder.emit(cut)
            arguments.append(whole)
        return arguments

    def _take(self, index: int, rows: Range) -> relax.Var:
        """Rows of a stage, cut from others that hold them."""
        found = self._found[index]
        if rows not in found:
            low, high = min(
                (held for held in found if held[0] <= rows[0] and rows[1] <= held[1]),
                key=lambda held: held[1] - held[0],
            )
            begin, end = rows[0] - low, rows[1] - low
            cut = relax.op.strided_slice(found[low, high], [AXIS], [begin], [end])
            found[rows] = self.builder.emit(cut)
        return found[rows]

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

# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers as one kernel each: all steps of an LSTM, a GRU or a simple RNN.

The products of the inputs with their weights are computed before, for all steps at once. Then::

    for step in range(40):                            # in all threads, which wait after each step
        for part in T.parallel(2):                    # a thread
            for block in range(8):                    # of hidden units; backwards in odd steps
                for gates in range(4):                # as many at once as fit into registers
                    for rows in range(2):             # tiles of the batch
                        for k in range(256):
                            tile[...] += state[rows, k] * weights[block, gates, k, 0:16]
                        sums[gates, rows, 0:16] = tile[...]
                for row in range(8):
                    state[...], cell[...] = activations of sums

Threads are started once for all steps, and a thread has the same blocks in each step. Weights that
exceed its cache would all be gone whenever it comes back to the first one; backwards, those read
last are read first. Weights have the layout ``[block][gate][k][lane]``, so that each pass reads
them from first to last. Tiles have as many rows as fit, because each tile reads the weights again;
the registers that are left hold further gates. A step reads one copy of the state and writes the
other one. A GRU that resets before the product needs its reset state whole: it has two loops a
step.

Source: the formulas of the operators LSTM, GRU and RNN in the ONNX standard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import prod

from tvm import DataType, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from schedules import attributes
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.core.prefetch import line_elements, prefetch
from schedules.errors import OpError
from schedules.tir.vector_math import vectorize_math

LANES = 16
"""Hidden units of a block."""

_FREE_REGISTERS = 4
"""Registers that hold no sums: one in this many, for weights and the state."""


@dataclass(frozen=True)
class ProductTile:
    """Sums that a loop over the state holds in registers."""

    rows: int  # Rows of the batch.
    gates: int  # Vectors of ``LANES`` units in each row.


def vectors_of(dtype: str, cpu: CPUInfo) -> int:
    """Registers of ``LANES`` units."""
    return max(1, LANES // cpu.lanes(dtype))


def product_tile(
    # ``batch``, ``gates``: rows, and vectors of ``LANES`` units in each.
    batch: int,
    gates: int,
    dtype: str,  # Type of the elements.
    cpu: CPUInfo,
) -> ProductTile:
    """The tile of the product of a state and its weights.

    As many rows as fit, because all tiles of a batch read the same weights: with R rows,
    a core with two multiply-adds a cycle needs two vectors of weights in R cycles. A row has two
    vectors at least, so that the state is loaded less often than it is multiplied.

    Returns at most ``batch`` rows and ``gates`` gates; the last of each may be less.
    """
    vectors = vectors_of(dtype, cpu)
    sums = cpu.num_vector_registers - cpu.num_vector_registers // _FREE_REGISTERS
    most = max(1, sums // max(2, vectors))
    rows = -(-batch // -(-batch // most))
    passes = -(-gates // max(1, sums // (rows * vectors)))
    return ProductTile(rows, -(-gates // passes))


Activation = Callable[[tirx.Expr, float, float], tirx.Expr]


def like(x: tirx.Expr, value: float) -> tirx.Expr:
    """A number in all lanes of a vector's type."""
    return T.broadcast(tirx.const(value, str(x.ty.dtype).partition("x")[0]), LANES)


def _hard_sigmoid(x: tirx.Expr, alpha: float, beta: float) -> tirx.Expr:
    return tirx.max(like(x, 0), tirx.min(like(x, 1), x * like(x, alpha) + like(x, beta)))


def _elu(x: tirx.Expr, alpha: float, beta: float) -> tirx.Expr:
    below = like(x, alpha) * (tirx.exp(tirx.min(x, like(x, 0))) - like(x, 1))
    return tirx.Select(x > like(x, 0), x, below)


def _softplus(x: tirx.Expr, alpha: float, beta: float) -> tirx.Expr:
    size = tirx.max(x, like(x, 0) - x)
    return tirx.max(x, like(x, 0)) + tirx.log(like(x, 1) + tirx.exp(like(x, 0) - size))


ACTIVATIONS: dict[str, Activation] = {
    "Affine": lambda x, a, b: x * like(x, a) + like(x, b),
    "Elu": _elu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": lambda x, a, b: tirx.Select(x < like(x, 0), x * like(x, a), x),
    "Relu": lambda x, a, b: tirx.max(x, like(x, 0)),
    "ScaledTanh": lambda x, a, b: like(x, a) * tirx.tanh(x * like(x, b)),
    "Sigmoid": lambda x, a, b: tirx.sigmoid(x),
    "Softplus": _softplus,
    "Softsign": lambda x, a, b: x / (like(x, 1) + tirx.max(x, like(x, 0) - x)),
    "Tanh": lambda x, a, b: tirx.tanh(x),
    "ThresholdedRelu": lambda x, a, b: tirx.Select(x >= like(x, a), x, like(x, 0)),
}
"""Functions of a vector and the two parameters that ONNX calls alpha and beta."""


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
"""Gates of each cell, in ONNX's order: i o f c, z r h, and the only one."""

_WORTH_THREADS = 1 << 18
"""Multiply-adds of a step: about 5 microseconds of a thread. A wait of all takes one or two."""

_ADDITIONS_AT_ONCE = 8
"""Multiply-adds of vectors that a core has under way: a latency of 4 cycles, two in each."""

_MOST_UNROLLED = 4
"""Steps of a product's loop that are written out, so that some prefetch and others do not."""


@dataclass(frozen=True)
class RecurrentCell:
    """A recurrent layer of one direction."""

    kind: str  # ``LSTM``, ``GRU`` or ``RNN``.
    steps: int
    batch: int
    hidden: int
    """``steps``, ``batch`` and ``hidden``: length of the sequences, their number, and the units of
    the state."""
    activations: tuple[tuple[str, float, float], ...]  # Name, alpha and beta of each, as in ONNX.
    clip: float = 0.0  # Bound of what the activations of gates get; none if 0.
    reverse: bool = False  # Whether it begins with the last step.
    has_lengths: bool = False
    """Whether sequences have lengths of their own, at most ``steps``; after its end the outputs of
    one are 0."""
    has_peepholes: bool = False  # Whether the gates of an LSTM read its cell.
    coupled: bool = False  # Whether the forget gate of an LSTM is 1 minus its input gate.
    reset_after: bool = False
    """Whether a GRU resets after the product (ONNX's ``linear_before_reset``)."""
    dtype: str = "float32"

    @property
    def blocks(self) -> int:
        """Blocks of hidden units."""
        return -(-self.hidden // LANES)

    @property
    def padded(self) -> int:
        """Hidden units with those that fill the last block."""
        return self.blocks * LANES

    @property
    def gates(self) -> int:
        """Number of gates."""
        return GATES[self.kind]


def recurrent_cell(
    cell: RecurrentCell,
    cpu: CPUInfo,  # The CPU, whose registers hold the sums.
) -> tirx.PrimFunc:
    """The scheduled function of a recurrent layer.

    Its parameters are ``products`` [steps, batch, blocks * gates * LANES], ``weights`` [blocks,
    gates, hidden, LANES], ``state`` [batch, hidden], ``memory`` [batch, padded], ``lengths`` int32
    [batch], ``peepholes`` [blocks, 3 * LANES] (i, o, f), ``bias`` of a GRU's last gate [padded],
    and the results: all states [steps, batch, padded], the last one, and the last memory [batch,
    padded]. Lanes past the last unit are undefined. Raises ``OpError`` if the kind or an activation
    is unknown.
    """
    unknown = [name for name, _, _ in cell.activations if name not in ACTIVATIONS]
    if cell.kind not in GATES or unknown:
        raise OpError(
            f"recurrent cell {cell.kind!r} with activations {unknown}; expected one of "
            f"{', '.join(GATES)} with {', '.join(ACTIVATIONS)}"
        )
    padded, width = cell.padded, cell.gates * LANES
    shapes = {
        "products": (cell.steps, cell.batch, cell.blocks * width),
        "weights": (cell.blocks, cell.gates, cell.hidden, LANES),
        "state": (cell.batch, cell.hidden),
        "memory": (cell.batch, padded),
        "lengths": (cell.batch,),
        "peepholes": (cell.blocks, 3 * LANES),
        "bias": (padded,),
        "states": (cell.steps, cell.batch, padded),
        "last_state": (cell.batch, padded),
        "last_memory": (cell.batch, padded),
    }
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_name("main")
            views = {}
            for name, shape in shapes.items():
                dtype = "int32" if name == "lengths" else cell.dtype
                buffer = tirx.decl_buffer(shape, dtype, name)
                T.arg(name, buffer)
                views[name] = buffer
            T.func_attr({"tirx.is_scheduled": True, attributes.RULE: "RecurrentCell"})
            with T.sblock("root"):
                T.reads()
                T.writes()
                flat = {
                    name: T.decl_buffer((prod(shapes[name]),), view.dtype, data=view.data)
                    for name, view in views.items()
                }
                _Writer(cell, flat, cpu).write()
    return vectorize_math(builder.get().without_attr("global_symbol"))


@dataclass
class _Writer:
    """Emits the loops; offsets count elements of flat buffers."""

    cell: RecurrentCell
    flat: dict[str, tirx.Buffer]
    cpu: CPUInfo
    own: dict[str, tirx.Buffer] = field(default_factory=dict)

    def write(self) -> None:
        cell = self.cell
        size = cell.batch * cell.padded
        self.own["states"] = T.sblock_alloc_buffer((2 * size,), cell.dtype)
        if cell.kind == "GRU" and not cell.reset_after:
            self.own["update"] = T.sblock_alloc_buffer((size,), cell.dtype)
            self.own["reset"] = T.sblock_alloc_buffer((size,), cell.dtype)
        self._begin()
        with self._threads(), T.serial(0, cell.steps) as step:
            if "update" in self.own:
                self._gates(step, [0, 1], self._gru_gates)
                self._gates(step, [2], self._gru_reset_before)
            else:
                finish = {"LSTM": self._lstm, "GRU": self._gru_reset_after, "RNN": self._rnn}
                self._gates(step, list(range(cell.gates)), finish[cell.kind])
        with T.serial(0, size // LANES) as vector:
            at = vector * LANES
            last = self.own["states"][_ramp(cell.steps % 2 * size + at)]
            self._store(self.flat["last_state"], last, at)

    def _begin(self) -> None:
        """Copy the initial state and memory, the lanes past the last unit being 0."""
        cell = self.cell
        with T.serial(0, cell.batch) as row, T.serial(0, cell.padded) as unit:
            is_unit = unit < cell.hidden
            first = tirx.if_then_else(
                is_unit,
                self.flat["state"][row * cell.hidden + tirx.min(unit, cell.hidden - 1)],
                tirx.const(0, cell.dtype),
            )
            T.buffer_store(self.own["states"], first, [row * cell.padded + unit])
            memory = self.flat["memory"][row * cell.padded + unit]
            T.buffer_store(self.flat["last_memory"], memory, [row * cell.padded + unit])

    @property
    def _is_parallel(self) -> bool:
        """True if a step is worth threads."""
        cell = self.cell
        work = cell.hidden * cell.padded * cell.gates * cell.batch
        return work >= _WORTH_THREADS and min(cell.blocks, self.cpu.num_cores) > 1

    def _threads(self) -> AbstractContextManager[object]:
        """Run what is inside in all threads."""
        return T.attr(0, "pragma_parallel_launch_point", 1) if self._is_parallel else nullcontext()

    @contextmanager
    def _blocks(self, step: tirx.Var) -> Iterator[tirx.Expr]:
        """The loop over the blocks, behind which the threads wait for each other."""
        blocks = self.cell.blocks
        parts = min(blocks, self.cpu.num_cores) if self._is_parallel else 1
        barrier = "pragma_parallel_barrier_when_finish"
        with ExitStack() as loops:
            part = 0
            if parts > 1:
                loops.enter_context(T.attr(0, barrier, 1))
                part = loops.enter_context(T.parallel(0, parts))
            first, end = (tirx.floordiv(n * blocks, parts) for n in (part, part + 1))
            place = loops.enter_context(T.serial(0, end - first))
            yield tirx.Select(step % 2 == 0, first + place, end - 1 - place)

    def _gates(self, step: tirx.Var, gates: Sequence[int], finish: Finish) -> None:
        """Compute some gates of all units, then what follows from them."""
        cell = self.cell
        tile = product_tile(cell.batch, len(gates), cell.dtype, self.cpu)
        with self._blocks(step) as block, T.sblock("block"):
            T.reads()
            T.writes()
            sums = T.sblock_alloc_buffer((len(gates) * cell.batch * LANES,), cell.dtype)
            for start in range(0, len(gates), tile.gates):
                chosen = range(start, min(start + tile.gates, len(gates)))
                ahead = self._ahead(step, gates, chosen)
                with T.serial(0, cell.batch // tile.rows) as number:
                    rows = _Rows(number, number * tile.rows, tile.rows)
                    self._product(step, block, rows, gates, chosen, sums, ahead)
                rest = cell.batch % tile.rows
                if rest:
                    rows = _Rows(cell.batch // tile.rows, cell.batch - rest, rest)
                    self._product(step, block, rows, gates, chosen, sums, ahead)
            with T.serial(0, cell.batch) as row, T.sblock("units"):
                T.reads()
                T.writes()
                found = {gate: T.sblock_alloc_buffer((LANES,), cell.dtype) for gate in gates}
                for place, total in enumerate(found.values()):
                    at = (place * cell.batch + row) * LANES
                    self._store(total, sums[_ramp(at)], 0)
                finish(_GateSums(_HiddenUnits(self, step, block, row), found))

    def _ahead(self, step: tirx.Var, gates: Sequence[int], chosen: Sequence[int]) -> tirx.Expr:
        """Distance from a pass's first weight to that of the next pass in this step."""
        cell = self.cell
        size = cell.hidden * LANES
        if chosen[-1] + 1 < len(gates):
            return tirx.const(len(chosen) * size, "int32")
        back = gates[0] - gates[chosen[0]]
        return tirx.Select(step % 2 == 0, back + cell.gates, back - cell.gates) * size

    def _product(
        self,
        step: tirx.Var,
        block: tirx.Expr,
        rows: _Rows,
        gates: Sequence[int],
        chosen: Sequence[int],
        sums: tirx.Buffer,
        ahead: tirx.Expr,
    ) -> None:
        """Multiply some rows of the state by the weights of some gates."""
        cell, first = self.cell, rows.first
        tile = list(itertools.product(range(rows.count), chosen))
        chains = self._chains(len(tile))
        source, base = self.own["states"], step % 2 * (cell.batch * cell.padded)
        if gates == [2] and "reset" in self.own:
            source, base = self.own["reset"], 0
        weights = (block * cell.gates + gates[chosen[0]]) * (cell.hidden * LANES)
        unrolled, lines = self._lines(len(chosen), chains)
        with T.sblock("product"):
            T.reads()
            T.writes()
            totals = {
                (chain, *one): T.sblock_alloc_buffer((LANES,), cell.dtype)
                for chain in range(chains)
                for one in tile
            }
            for (chain, row, place), total in totals.items():
                start = self._start(step, block, first + row, gates[place])
                self._store(total, like(start, 0) if chain else start, 0)
            groups = cell.hidden // (chains * unrolled)
            with T.serial(0, groups) as group:
                for line in range(lines):
                    offset = ((rows.number * groups + group) * lines + line) * line_elements(
                        cell.dtype
                    )
                    prefetch(self.flat["weights"], weights + ahead + offset, level=2)
                for turn, ((chain, row, place), total) in itertools.product(
                    range(unrolled), totals.items()
                ):
                    k = (group * unrolled + turn) * chains + chain
                    value = source[base + (first + row) * cell.padded + k]
                    offset = weights + ((place - chosen[0]) * cell.hidden + k) * LANES
                    product = T.broadcast(value, LANES) * self.flat["weights"][_ramp(offset)]
                    self._store(total, total[_ramp(0)] + product, 0)
            for row, place in tile:
                value, *others = (totals[chain, row, place][_ramp(0)] for chain in range(chains))
                self._store(sums, sum(others, value), (place * cell.batch + first + row) * LANES)

    def _lines(self, gates: int, chains: int) -> tuple[int, int]:
        """Turns of a product's loop, and lines of the next weights to prefetch after so many.

        All tiles of the batch together prefetch what the next pass reads, so that it comes from
        the last-level cache while they multiply. A single row waits for that cache in any case.
        """
        cell = self.cell
        weights = cell.blocks * cell.gates * cell.hidden * LANES * DataType(cell.dtype).bits // 8
        parts = self.cpu.num_cores if self._is_parallel else 1
        if cell.batch == 1 or weights <= parts * self.cpu.l2_bytes:
            return 1, 0
        tiles = -(-cell.batch // product_tile(cell.batch, gates, cell.dtype, self.cpu).rows)
        lines = gates * chains * LANES // line_elements(cell.dtype)
        turns = cell.hidden // chains
        wanted = min(tiles // lines, _MOST_UNROLLED)
        unrolled = max(n for n in range(1, max(1, wanted) + 1) if turns % n == 0)
        if 2 * lines * unrolled < tiles:
            return 1, 0  # so many rows hide the latency, and would prefetch far too much
        return unrolled, -(-lines * unrolled // tiles)

    def _chains(self, sums: int) -> int:
        """Parts of each sum, so that enough additions do not wait for each other."""
        chains, vectors = 1, sums * vectors_of(self.cell.dtype, self.cpu)
        while vectors * chains < _ADDITIONS_AT_ONCE and self.cell.hidden % (2 * chains) == 0:
            chains *= 2
        return chains

    def _start(
        self, step: tirx.Var, block: tirx.Expr, row: tirx.Expr | int, gate: int
    ) -> tirx.Expr:
        """Terms that the product of the state is added to."""
        if self.cell.kind == "GRU" and gate == 2 and self.cell.reset_after:
            return self._bias(block)
        return _HiddenUnits(self, step, block, row).product(gate)

    def _bias(self, block: tirx.Expr) -> tirx.Expr:
        return self.flat["bias"][_ramp(block * LANES)]

    def _activate(self, number: int, x: tirx.Expr, clipped: bool = True) -> tirx.Expr:
        """An activation, by its number in ONNX's order."""
        name, alpha, beta = self.cell.activations[number]
        if self.cell.clip and clipped:
            bound = like(x, self.cell.clip)
            x = tirx.max(tirx.min(x, bound), like(x, 0) - bound)
        return ACTIVATIONS[name](x, alpha, beta)

    def _lstm(self, tile: _GateSums) -> None:
        place, gates = tile.place, tile.gates
        memory = self.flat["last_memory"]
        old = memory[_ramp(place.state_offset)]
        peepholes = [
            self.flat["peepholes"][_ramp(place.block * (3 * LANES) + i * LANES)] for i in range(3)
        ]

        def gate(number: int, state: tirx.Expr, activation: int) -> None:
            total = gates[number][_ramp(0)]
            if self.cell.has_peepholes and number < 3:
                total = total + peepholes[number] * state
            self._store(gates[number], self._activate(activation, total), 0)

        gate(0, old, 0)
        if self.cell.coupled:
            self._store(gates[2], like(old, 1) - gates[0][_ramp(0)], 0)
        else:
            gate(2, old, 0)
        gate(3, old, 1)
        new = gates[2][_ramp(0)] * old + gates[0][_ramp(0)] * gates[3][_ramp(0)]
        self._store(gates[3], new, 0)
        gate(1, gates[3][_ramp(0)], 0)
        shown = self._activate(2, gates[3][_ramp(0)], clipped=False)
        self._store(gates[1], gates[1][_ramp(0)] * shown, 0)
        self._store(memory, place.unless_over(gates[3][_ramp(0)], old), place.state_offset)
        place.put(gates[1][_ramp(0)])

    def _rnn(self, tile: _GateSums) -> None:
        total = tile.gates[0]
        self._store(total, self._activate(0, total[_ramp(0)]), 0)
        tile.place.put(total[_ramp(0)])

    def _gru_gates(self, tile: _GateSums) -> None:
        """The update gate and the state after the reset."""
        for number, name in enumerate(("update", "reset")):
            total = tile.gates[number]
            self._store(total, self._activate(0, total[_ramp(0)]), 0)
            value = total[_ramp(0)]
            value = value * tile.place.state if name == "reset" else value
            self._store(self.own[name], value, tile.place.state_offset)

    def _gru_reset_before(self, tile: _GateSums) -> None:
        total = tile.gates[2]
        self._store(total, self._activate(1, total[_ramp(0)]), 0)
        self._mix(tile, self.own["update"][_ramp(tile.place.state_offset)])

    def _gru_reset_after(self, tile: _GateSums) -> None:
        gates = tile.gates
        for number in (0, 1):
            self._store(gates[number], self._activate(0, gates[number][_ramp(0)]), 0)
        total = tile.place.product(2) + gates[1][_ramp(0)] * gates[2][_ramp(0)]
        self._store(gates[2], total, 0)
        self._store(gates[2], self._activate(1, gates[2][_ramp(0)]), 0)
        self._mix(tile, gates[0][_ramp(0)])

    def _mix(self, tile: _GateSums, update: tirx.Expr) -> None:
        """The new state between the old one and the candidate."""
        candidate = tile.gates[2][_ramp(0)]
        value = (like(update, 1) - update) * candidate + update * tile.place.state
        self._store(tile.gates[2], value, 0)
        tile.place.put(tile.gates[2][_ramp(0)])

    @staticmethod
    def _store(buffer: tirx.Buffer, value: tirx.Expr, at: tirx.Expr | int) -> None:
        T.buffer_store(buffer, value, [_ramp(at)])


@dataclass(frozen=True)
class _Rows:
    """A tile of the batch: its number, first row and count of rows."""

    number: tirx.Expr | int
    first: tirx.Expr | int
    count: int


@dataclass
class _HiddenUnits:
    """One row of a block of hidden units, in one step."""

    writer: _Writer
    step: tirx.Var
    block: tirx.Expr
    row: tirx.Expr | int

    @property
    def state_offset(self) -> tirx.Expr:
        """Offset in one copy of the state."""
        return self.row * self.writer.cell.padded + self.block * LANES

    @property
    def is_over(self) -> tirx.Expr:
        """True if the sequence has ended."""
        return self.step >= self.writer.flat["lengths"][self.row]

    @property
    def time(self) -> tirx.Expr:
        """Position in the sequence that is read and written."""
        cell = self.writer.cell
        if not cell.reverse:
            return self.step
        if not cell.has_lengths:
            return cell.steps - 1 - self.step
        length = tirx.min(self.writer.flat["lengths"][self.row], cell.steps)
        return tirx.if_then_else(self.is_over, self.step, length - 1 - self.step)

    @property
    def state(self) -> tirx.Expr:
        """The old state."""
        cell = self.writer.cell
        base = self.step % 2 * (cell.batch * cell.padded)
        return self.writer.own["states"][_ramp(base + self.state_offset)]

    def product(self, gate: int) -> tirx.Expr:
        """The inputs' product for a gate."""
        cell = self.writer.cell
        width = cell.gates * LANES
        row = (self.time * cell.batch + self.row) * (cell.blocks * width)
        return self.writer.flat["products"][_ramp(row + self.block * width + gate * LANES)]

    def unless_over(self, value: tirx.Expr, other: tirx.Expr) -> tirx.Expr:
        """The value, or another after the end of the sequence."""
        if not self.writer.cell.has_lengths:
            return value
        return tirx.Select(T.broadcast(self.is_over, LANES), other, value)

    def put(self, value: tirx.Expr) -> None:
        """Store the new state, and what the layer returns."""
        cell, writer = self.writer.cell, self.writer
        size = cell.batch * cell.padded
        new = self.unless_over(value, self.state)
        writer._store(writer.own["states"], new, (self.step + 1) % 2 * size + self.state_offset)
        shown = self.unless_over(value, like(value, 0))
        writer._store(writer.flat["states"], shown, self.time * size + self.state_offset)


@dataclass
class _GateSums:
    """A place and the sums of its gates."""

    place: _HiddenUnits
    gates: dict[int, tirx.Buffer]


Finish = Callable[[_GateSums], None]


def _ramp(at: tirx.Expr | int) -> tirx.Expr:
    return T.ramp(at, 1, LANES)

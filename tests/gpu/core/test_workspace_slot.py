# SPDX-License-Identifier: Apache-2.0
"""Calls that share the scratch of one module: their blocks mixed at will, and in several queues."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from cuda_text import count, cuda_source, opcodes, ptxas, sass
from group_cases import Build, Group
from opencl import BLOCK_BY_BLOCK, OpenCLKernels, Session, compile_opencl, new_queue
from reduce_cases import CUDA, OPENCL, Case, check, check_workspace, random_data, reference
from tvm import relax
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from relay_passes.op import coalesced_reduce
from schedules.gpu.core import intrinsics, workspace_slot
from schedules.gpu.core.intrinsics import LAST_TURN, current_stream
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.core.tagged_words import BUSY_TURNS
from schedules.gpu.reduce.kernel import group_kernel
from schedules.gpu.reduce.plan.config import tiles
from schedules.workload.workspace_layout import (
    FAILED,
    HEADER_WORDS,
    LINE_WORDS,
    LOCK,
    PLACES,
    WATCHED,
    first_word,
    ticket_stride,
)
from tests.selection import in_turns

op = relax.op

# Several tiles and splits, but few blocks; one tile; columns.
SHAPES: dict[str, tuple[tuple[int, ...], list[int]]] = {
    "x": ((3, 2060), [1]),
    "all": ((5003,), [0]),
    "y": ((200, 70), [0]),
}
Check = Callable[[Sequence[np.ndarray], np.ndarray], None]


def need_two_threads() -> None:
    """Skip the running test where a block that waits takes the only thread of the device."""
    if new_queue().device.max_compute_units < 2:
        pytest.skip("a waiting block takes the only thread")


class Calls:
    """Calls of one kernel, each with an input and outputs of its own, and a workspace for all.

    Parameters
    ----------
    kernels : OpenCLKernels
        The function.
    arguments : Sequence
        Arguments of each call: workspace, input, outputs.
    at_rest : Callable
        Checks the workspace at the end.
    compare : Callable
        Compares the outputs with what the input gives.
    outputs : Sequence[int]
        Further arguments that are shared.
    """

    def __init__(
        self,
        kernels: OpenCLKernels,
        arguments: Sequence[Sequence[np.ndarray]],
        at_rest: Callable[[np.ndarray], None],
        compare: Check,
        outputs: Sequence[int] = (),
    ) -> None:
        self.sessions: list[Session] = []
        shared = [0, *outputs]
        for given in arguments:
            first = self.sessions[0] if self.sessions else None
            self.sessions.append(kernels.session(*given, other=first, shared=shared))
        grid = kernels.launches(*arguments[0])[0].grid
        self.grid = [(x, y) for x in range(grid[0]) for y in range(grid[1])]
        self._at_rest = at_rest
        self.inputs = [given[1] for given in arguments]
        self._compare = compare

    def run_blocks(
        self, rng: np.random.Generator, sessions: Sequence[Session], skip: int = 0
    ) -> None:
        """Run blocks of these calls, all but the first few of each, in any order.

        The third index of a block, which the kernels do not use, is the number of its call.
        """
        blocks = [(session, block) for session in sessions for block in self.grid[skip:]]
        for number in rng.permutation(len(blocks)):
            session, block = blocks[number]
            session.launch_block(*block, self.sessions.index(session))

    def check(self) -> None:
        """All results, and that every place and the lock are free and all tickets are drawn."""
        for session, data in zip(self.sessions, self.inputs, strict=True):
            self._compare([np.array(a) for a in session.read()[2:]], data)
        self._at_rest(np.array(self.sessions[0].read()[0]))


def calls_of_one(
    form: str,
    calls: int,
    rng: np.random.Generator,
    helpers: str = "",
    same_output: bool = False,
) -> Calls:
    """Calls of a sum; with ``same_output`` each element is that of any of them."""
    shape, axes = SHAPES[form]
    case = Case("sum", "float32", shape, axes, "last_block")
    assert case.config.splits > 1
    inputs = [random_data(rng, "sum", "float32", shape) for _ in range(calls)]
    sums = np.stack([reference("sum", data, axes) for data in inputs])
    kept = reference("sum", inputs[0], axes).shape

    def compare(outputs: Sequence[np.ndarray], data: np.ndarray) -> None:
        wanted = reference("sum", data, axes)
        if same_output:
            nearest = np.abs(sums - outputs[0]).argmin(0)
            wanted = np.take_along_axis(sums, nearest[None], 0)[0]
        check("sum", outputs[0], data, wanted)

    kernels = compile_opencl(case.func, OPENCL, helpers)
    arguments = [case.arguments(data, kept) for data in inputs]
    at_rest = functools.partial(check_workspace, case.config, case.loops)
    return Calls(kernels, arguments, at_rest, compare, [2] if same_output else [])


def calls_of_group(
    build: Build,
    shape: tuple[int, int],
    calls: int,
    rng: np.random.Generator,
    compare: Check,
    helpers: str = "",
) -> Calls:
    """Calls of a group of several reductions."""
    group = Group(build, ("float32", shape))
    assert group.config.finish == "last_block"
    inputs = [random_data(rng, "sum", "float32", shape) for _ in range(calls)]
    loops = group.group.reductions[0].loops
    at_rest = functools.partial(check_workspace, group.config, loops)
    arguments = [group.arguments(data) for data in inputs]
    return Calls(group.compile(helpers), arguments, at_rest, compare)


def _sisters(data: relax.Expr) -> list[relax.Expr]:
    return [coalesced_reduce(data, name, [1], finish="last_block") for name in ("argmax", "sum")]


def _compare_sisters(outputs: Sequence[np.ndarray], data: np.ndarray) -> None:
    np.testing.assert_array_equal(outputs[0], data.argmax(1))
    check("sum", outputs[1], data, reference("sum", data, [1]))


def _softmax_sums(data: relax.Expr) -> list[relax.Expr]:
    emit = relax.BlockBuilder.current().emit
    maximum = emit(op.max(data, [1], keepdims=True))
    return [maximum, op.sum(emit(op.exp(emit(op.subtract(data, maximum)))), [1])]


def _compare_softmax_sums(outputs: Sequence[np.ndarray], data: np.ndarray) -> None:
    exact = data.astype("float64")
    maximum = exact.max(1, keepdims=True)
    np.testing.assert_array_equal(outputs[0], maximum)
    np.testing.assert_allclose(outputs[1], np.exp(exact - maximum).sum(1), rtol=4e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "calls"), in_turns(SHAPES, [PLACES, 2], every=4))
def test_blocks_of_several_calls_in_any_order(
    form: str, calls: int, rng: np.random.Generator
) -> None:
    all_calls = calls_of_one(form, calls, rng, BLOCK_BY_BLOCK)
    assert len(all_calls.grid) > 2
    for _ in range(5):
        all_calls.run_blocks(rng, all_calls.sessions)
        all_calls.check()


@pytest.mark.slow
@pytest.mark.parametrize(("form",), in_turns(SHAPES))
def test_calls_on_two_streams_with_the_same_output(
    form: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool may give them one address. No result is mixed from the data of both."""
    cuda = GPUInfo.from_target(CUDA)
    monkeypatch.setattr(group_kernel, "current_stream", lambda _: current_stream(cuda))
    calls = calls_of_one(form, 2, rng, BLOCK_BY_BLOCK, same_output=True)
    for number, session in enumerate(calls.sessions):
        session.stream = 0x7F12_3400_0000 + 0x1A0 * number
    for _ in range(5):
        calls.run_blocks(rng, calls.sessions)
        calls.check()


@pytest.mark.slow
@pytest.mark.parametrize(("form",), in_turns(SHAPES))
def test_a_replayed_launch_beside_one_with_its_output_and_stream(
    form: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph owns neither the stream that captured it nor memory that a pool has given away."""
    number = functools.partial(T.call_extern, "int64", "get_global_offset", 2)
    monkeypatch.setattr(workspace_slot, "launch_number", lambda _: number())
    calls = calls_of_one(form, 2, rng, BLOCK_BY_BLOCK, same_output=True)
    for _ in range(5):
        calls.run_blocks(rng, calls.sessions)
        calls.check()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("arch",), in_turns(["sm_75", "sm_80", "sm_90"]))
def test_the_device_numbers_the_launches(arch: str) -> None:
    """The driver passes the number among the constants of a kernel; data is loaded before it."""
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    case = Case("sum", "float32", (64, 1 << 16), [1], "last_block", target)
    [code] = sass(cuda_source(case.func, arch), arch).values()
    lines = [line for line in code.splitlines() if opcodes(line)]
    read = next(k for k, line in enumerate(lines) if "c[0x0][0x30]" in line)
    assert any("LDG.E.128" in line for line in lines[:read])


def test_the_host_asks_for_the_stream() -> None:
    """Only where its number is used."""
    for finish in ("last_block", "atomic", "one_block"):
        case = Case("sum", "float32", (64, 1 << 16), [1], finish, CUDA)
        assert ("runtime.get_cuda_stream" in case.func.script()) == (finish == "last_block")


@pytest.mark.slow
def test_waiting_has_an_end() -> None:
    """The registers are none more, and nothing goes to the stack."""
    case = Case("sum", "float16", (64, 1 << 16), [1], "last_block", CUDA)
    source = cuda_source(case.func)
    # Waits for a slot, and for words of other blocks.
    for last in (LAST_TURN, LAST_TURN + BUSY_TURNS):
        assert f"({last} <= " in source
    [used] = ptxas(source).values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    [code] = sass(source).values()
    assert count(opcodes(code), "NANOSLEEP") == 2
    assert source.count(f"workspace_ptr)[{WATCHED // 2}])), 0) == (int64_t)0)") == 2
    assert source.count("tvm_fusion_fail();") == 2  # where no host looks for the note
    assert count(opcodes(code), "BPT.TRAP") and not count(opcodes(code), "CALL")


@pytest.mark.slow
@pytest.mark.parametrize(("form", "spoilt"), in_turns(SHAPES, ["slots", "tickets"]))
def test_a_spoilt_workspace_is_noted_and_can_be_reset(
    form: str, spoilt: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No slot is free, or the block that finishes a tile waits for others that have ended."""
    patient = calls_of_one(form, 1, rng)
    monkeypatch.setattr(intrinsics, "LAST_TURN", 1 << 12)
    [impatient] = calls_of_one(form, 1, rng).sessions
    shape, axes = SHAPES[form]
    case = Case("sum", "float32", shape, axes, "last_block")
    workspace = np.zeros(case.words, "int32")
    if spoilt == "slots":
        workspace[: 2 * PLACES] = 0x1234
    else:
        count = tiles(case.config, case.loops)
        workspace[HEADER_WORDS : first_word(count)] = 1
    impatient.write(0, workspace)
    for _ in range(2):  # the note stays until there is a reset
        impatient.launch()
        left = np.array(impatient.read()[0])
        assert left[FAILED] == 1
    [session] = patient.sessions
    session.write(0, left)
    session.write(0, np.zeros_like(left))
    for _ in range(3):
        session.launch()
        patient.check()


@pytest.mark.slow
def test_sisters_in_one_workspace(rng: np.random.Generator) -> None:
    calls = calls_of_group(_sisters, (3, 2060), PLACES, rng, _compare_sisters, BLOCK_BY_BLOCK)
    for _ in range(3):
        calls.run_blocks(rng, calls.sessions)
        calls.check()


@pytest.mark.slow
def test_maximum_and_sum_of_exponentials(rng: np.random.Generator) -> None:
    shape = (1, 40_001)
    calls = calls_of_group(_softmax_sums, shape, 3, rng, _compare_softmax_sums, BLOCK_BY_BLOCK)
    for _ in range(2):
        calls.run_blocks(rng, calls.sessions)
        calls.check()


@pytest.mark.slow
def test_nobody_claims_a_place_under_the_lock_of_another(rng: np.random.Generator) -> None:
    need_two_threads()
    calls = calls_of_one("x", 2, rng, BLOCK_BY_BLOCK)
    waiting, other = calls.sessions
    calls.run_blocks(rng, [other])
    header = np.zeros(HEADER_WORDS, "int32")
    header[LOCK] = 1
    other.write(0, header)
    waiting.launch_block(*calls.grid[0], 0, wait=False)
    time.sleep(0.2)  # A block that does not wait ends meanwhile.
    np.testing.assert_array_equal(np.array(other.read()[0])[:HEADER_WORDS], header)
    other.write(0, np.zeros_like(header))
    calls.run_blocks(rng, [waiting], skip=1)
    calls.check()


@pytest.mark.slow
def test_a_call_without_a_place_waits_for_one(rng: np.random.Generator) -> None:
    """Its block waits on one thread of the device, while another one runs the other blocks."""
    need_two_threads()
    calls = calls_of_one("x", PLACES + 1, rng, BLOCK_BY_BLOCK)
    *others, late = calls.sessions
    for session in others:
        session.launch_block(*calls.grid[0], 0)
    late.launch_block(*calls.grid[0], 0, wait=False)
    calls.run_blocks(rng, others, skip=1)
    calls.run_blocks(rng, [late], skip=1)
    calls.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    in_turns(["x", "y", "sisters", "softmax"], [PLACES + 4, 2, PLACES], every=3),
)
def test_calls_in_several_queues(name: str, count: int, rng: np.random.Generator) -> None:
    """Also more at once than there are places."""
    if name == "sisters":
        calls = calls_of_group(_sisters, (3, 20_060), count, rng, _compare_sisters)
    elif name == "softmax":
        calls = calls_of_group(_softmax_sums, (2, 40_001), count, rng, _compare_softmax_sums)
    else:
        calls = calls_of_one(name, count, rng)
    queues = [new_queue() for _ in calls.sessions]
    for _ in range(10):
        for number in rng.permutation(count):
            calls.sessions[number].launch(queues[number])
    calls.check()


@pytest.mark.slow
def test_code_of_the_lock() -> None:
    """The names are read in the cache that all blocks share, each of them at once."""
    shape, axes = (64, 1 << 16), [1]
    for finish in ("last_block", "atomic", "one_block"):
        case = Case("sum", "float32", shape, axes, finish, CUDA)
        source = cuda_source(case.func)
        for used in ptxas(source).values():
            assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
        names = [name for code in sass(source).values() for name in opcodes(code)]
        has_lock = finish == "last_block"
        assert (count(names, "ATOMG.E.CAS") > 0) == has_lock
        words = -(-case.config.splits // case.config.threads) if has_lock else 0
        notes = 4  # whether a thread has given up, and whether the host looks, in both pauses
        read = PLACES + words + notes if has_lock else 0
        assert count(names, "LDG.E.64.STRONG.GPU") == read
        assert not any("STRONG.SYS" in name or "MEMBAR.SC" in name for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(("arch",), in_turns(["sm_75", "sm_80", "sm_90"]))
def test_a_ticket_is_drawn_early_and_nothing_lies_between_storing_and_reading(arch: str) -> None:
    """No fence and no update: the words carry tags. One barrier more than a block alone needs."""
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    case = Case("sum", "float32", (1 << 24,), [0], "last_block", target)
    [code] = sass(cuda_source(case.func, arch), arch).values()
    names = opcodes(code)
    ticket = next(k for k, name in enumerate(names) if "INC" in name)
    loads = [k for k, name in enumerate(names) if name.startswith("LDG.E.128")]
    stored = next(
        k for k, name in enumerate(names) if k > loads[-1] and count([name], "STG.E.64.STRONG.GPU")
    )
    words = [k for k in range(stored, len(names)) if count([names[k]], "LDG.E.64.STRONG.GPU")]
    assert count(names[words[-3] : words[-2]], "NANOSLEEP") == 1  # then it reads both notes
    words = words[:-2]
    assert ticket < loads[-1] and len(words) == -(-case.config.splits // 32)
    between = names[loads[-1] : words[-1]]
    assert count(between, "MEMBAR") == count(between, "ATOMG") == count(between, "ATOM") == 0
    assert count(between, "BAR") == 1
    assert not count(names[words[0] : words[-1]], "BRA")  # all are read at once
    # The slot is given back behind one fence and one barrier more.
    behind = [name for name in names[words[-1] :] if name.startswith("MEMBAR")]
    assert len([name for name in behind if name.endswith("GPU")]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "fences"), [("sm_80", 5), ("sm_90", 3)])
def test_only_releases_wait_for_stores(arch: str, fences: int) -> None:
    """The name, the lock and the slot are released. Before sm_90, locking and finding a slot wait,
    too.
    """
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    case = Case("sum", "float32", (1 << 22,), [0], "last_block", target)
    [code] = sass(cuda_source(case.func, arch), arch).values()
    assert opcodes(code).count("MEMBAR.ALL.GPU") == fences


@pytest.mark.slow
def test_the_states_of_the_warps_and_the_ticket_are_read_at_once() -> None:
    """No branch lies between them and the store of the block's result."""
    case = Case("sum", "float32", (1 << 22,), [0], "last_block", CUDA)
    [code] = sass(cuda_source(case.func)).values()
    names = opcodes(code)
    barrier = next(k for k, name in enumerate(names) if name.startswith("BAR"))
    stored = names.index("STG.E.64.STRONG.GPU", barrier)
    assert count(names[barrier:stored], "LDS") >= 4 and not count(names[barrier:stored], "BRA")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("form", "tag"), in_turns(SHAPES, [1, 2]))
def test_words_of_the_launch_before_are_not_taken(
    form: str, tag: int, rng: np.random.Generator
) -> None:
    """The block with the last ticket runs first, and waits for those that come later."""
    need_two_threads()
    calls = calls_of_one(form, 2, rng, BLOCK_BY_BLOCK, same_output=True)
    waiting, other = calls.sessions  # both have the name of one launch
    other.write(1, calls.inputs[0])
    shape, axes = SHAPES[form]
    case = Case("sum", "float32", shape, axes, "last_block")
    count, splits = tiles(case.config, case.loops), case.config.splits
    words = first_word(count)
    workspace = np.zeros(case.words, "int32")
    workspace[words::2], workspace[words + 1 :: 2] = 0x4000_0000, 3 - tag
    first = 0 if tag == 1 else splits
    begun = workspace[:words]
    begun[HEADER_WORDS:] = first
    first_tile = slice(HEADER_WORDS, words, ticket_stride(count))  # The first tile of every slot.
    begun[first_tile] += splits - 1
    other.write(0, workspace)
    before = np.array(other.read()[2])
    waiting.launch_block(*calls.grid[0], 0, wait=False)
    time.sleep(0.2)  # A block that does not wait ends meanwhile.
    begun, output = np.array(other.read()[0])[:words], np.array(other.read()[2])
    np.testing.assert_array_equal(output, before)
    assert (begun[first_tile] == (first + splits) % (2 * splits)).sum() == 1  # it has drawn it
    begun[first_tile] = first
    other.write(0, begun)
    calls.run_blocks(rng, [other], skip=1)
    check("sum", waiting.read()[2], calls.inputs[0], reference("sum", calls.inputs[0], axes))


@pytest.mark.slow
def test_the_place_is_sought_while_data_is_under_way() -> None:
    """A turn of loads stands before the first strong load, their use behind it."""
    for shape, axes in (((64, 1 << 16), [1]), ((1 << 16, 64), [0]), ((1 << 22,), [0])):
        case = Case("sum", "float32", shape, axes, "last_block", CUDA)
        [code] = sass(cuda_source(case.func)).values()
        names = opcodes(code)
        first = next(k for k, name in enumerate(names) if "STRONG" in name or "MEMBAR" in name)
        before = names[:first]
        assert count(before, "LDG.E.128") >= case.config.unroll > 1
        assert not count(before, "FADD") and count(names, "FADD")


def test_polled_words_and_tickets_have_lines_of_their_own() -> None:
    case = Case("sum", "float32", *SHAPES["x"], "last_block")
    stride = ticket_stride(tiles(case.config, case.loops))
    assert 4 * LINE_WORDS == 128
    assert LOCK >= LINE_WORDS >= 2 * PLACES
    assert FAILED % 2 == WATCHED % 2 == 0 and LOCK < FAILED < WATCHED < LOCK + LINE_WORDS
    assert LOCK // LINE_WORDS < HEADER_WORDS // LINE_WORDS
    assert HEADER_WORDS % LINE_WORDS == stride % LINE_WORDS == 0
    assert first_word(tiles(case.config, case.loops)) % LINE_WORDS == 0


def test_every_place_has_its_tickets_and_partial_results() -> None:
    case = Case("sum", "float32", *SHAPES["x"], "last_block")
    count = tiles(case.config, case.loops)
    before = first_word(count)
    assert before >= HEADER_WORDS + PLACES * count
    each = case.config.splits * case.config.tile_outputs
    assert case.words == before + 2 * PLACES * count * each  # a tag beside each word

# SPDX-License-Identifier: Apache-2.0
"""Distributed programs on ranks of this process: the bits of one rank, whatever is distributed."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_nests import (
    CASES,
    SEVERAL,
    argmax,
    blur,
    chain,
    heat2d,
    matmul,
    pipeline,
    random_arrays,
    wave2d,
)
from rank_stencils import poison, run, run_all, slices
from tvm import s_tir, te, tirx, topi

from examples.stencils import function, image
from schedules.cost.machine import Figure, Machine
from schedules.distribute.cost import Network, Processor
from schedules.distribute.exchange import Exchange
from schedules.distribute.transfer import FINISH, Mode, send_recv
from tests.selection import in_turns
from tvm_fusion.compiler.targets import resolve
from tvm_fusion.distributed import Program, compile, estimated_processor
from tvm_fusion.distributed.program import default_processor
from tvm_fusion.distributed.world.local_world import LocalWorld, run_ranks
from tvm_fusion.errors import DistributedError, InvalidInputError, OpError, TargetError
from tvm_fusion.machine.host import host_cpu
from tvm_fusion.prediction.machines import calibration_path, native_name


@functools.cache
def one_rank(name: str, *sizes: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    func = CASES[name](*sizes)
    arrays = random_arrays(func)
    result = run(compile(func, 1), arrays)
    assert not np.isnan(result).any()
    return arrays, result


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, 3) for name in CASES] + [("blur", 2), ("chain", 5), ("every_fourth", 7), ("blur", 64)],
)
def test_same_bits(name: str, ranks: int) -> None:
    arrays, expected = one_rank(name)
    np.testing.assert_array_equal(run(compile(CASES[name](), ranks), arrays), expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["blur", "reduced_convolution", "matmul"])
def test_same_bits_on_a_grid(name: str) -> None:
    arrays, expected = one_rank(name)
    program = compile(CASES[name](), 6, loop=[0, 1], grid=(3, 2))
    np.testing.assert_array_equal(run(program, arrays), expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "ranks"), in_turns(["blur", "chain", "dilated", "heat2d"], [1, 2, 3, 4, 7], every=3)
)
def test_same_bits_overlapped(name: str, ranks: int) -> None:
    arrays, expected = one_rank(name, 48)
    loops = (0, 1) if (name, ranks) == ("heat2d", 4) else (0,)
    program = compile(CASES[name](48), ranks, loop=loops, overlap="always")
    overlapped = [any(piece.is_interior for piece in pieces) for pieces in program.pieces]
    assert any(overlapped) == (ranks > 1)
    np.testing.assert_array_equal(run(program, arrays), expected)


@functools.cache
def fields_of_one_rank(name: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    func = SEVERAL[name]()
    arrays = random_arrays(func)
    return arrays, run_all(compile(func, 1, loop="i"), arrays)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("name", "ranks"), in_turns(SEVERAL, [2, 3, 4, 7]))
def test_several_outputs(name: str, ranks: int) -> None:
    arrays, expected = fields_of_one_rank(name)
    assert len(expected) == 2 and not any(np.isnan(each).any() for each in expected.values())
    program = compile(SEVERAL[name](), ranks, loop="i", overlap="always" if ranks < 4 else "never")
    for output, found in run_all(program, arrays).items():
        np.testing.assert_array_equal(found, expected[output])


def test_waves_of_numpy() -> None:
    arrays, found = fields_of_one_rank("wave2d")
    a, speed = (arrays[name].astype(np.float64) for name in "AV")
    change = a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:] - 4 * a[1:-1, 1:-1]
    speed[1:-1, 1:-1] += 0.1 * change
    np.testing.assert_allclose(found["speed"], speed, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["next"], a + speed, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "deep"), [(3, 1), (4, 3)])
def test_steps_of_several_fields(ranks: int, deep: int) -> None:
    fields = {"A": "next", "V": "speed"}
    arrays = random_arrays(wave2d())
    expected = run_all(compile(wave2d(), 1, repeat=fields), arrays, steps=5)
    program = compile(wave2d(), ranks, repeat=fields, exchange_every=deep, overlap="always")
    assert any(piece.is_interior for pieces in program.pieces for piece in pieces)
    for output, found in run_all(program, arrays, steps=5).items():
        np.testing.assert_array_equal(found, expected[output])


@pytest.mark.slow
@given(name=st.sampled_from(sorted(CASES)), data=st.data())
@settings(max_examples=settings.default.max_examples // 4)
def test_same_bits_for_any_sizes(name: str, data: st.DataObject) -> None:
    arrays, expected = one_rank(name)
    extent = len(expected)
    cuts = sorted(data.draw(st.lists(st.integers(0, extent), max_size=6)))
    sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, extent], strict=True)]
    overlap: Any = data.draw(st.sampled_from(["always", "never"]))
    program = compile(CASES[name](), sizes=sizes, overlap=overlap)
    np.testing.assert_array_equal(run(program, arrays), expected)


def test_blur_of_numpy() -> None:
    arrays, result = one_rank("blur")
    a = arrays["A"].astype(np.float64)
    rows = a[:, :-2] + a[:, 1:-1] + a[:, 2:]
    expected = (rows[:-2] + rows[1:-1] + rows[2:]) / 9
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_a_row_too_few_is_seen() -> None:
    """The poison of a halo that is not sent shows in the result."""
    arrays, _ = one_rank("blur")
    program = compile(blur(), 3)

    def work(world: LocalWorld) -> bool:
        local = program.on(world)
        held = local.input("A")
        held.window.array[...] = np.nan
        held.owned[...] = arrays["A"][slices(held.region)]
        world.start = lambda *_: None  # type: ignore[method-assign]
        world.finish = lambda *_: None  # type: ignore[method-assign]
        return bool(np.isnan(local()).any())

    assert run_ranks(3, work) == [True] * 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("ranks", "overlap"), [(1, "never"), (2, "always"), (4, "never")])
def test_steps(ranks: int, overlap: Any) -> None:
    func = heat2d(9, 6)
    arrays = random_arrays(func)
    program = compile(func, ranks, repeat="A", overlap=overlap)
    expected = arrays["A"]
    single = compile(func, 1)
    for _ in range(5):
        expected = run(single, arrays | {"A": expected})
    np.testing.assert_array_equal(run(program, arrays, steps=5), expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "loops", "ranks", "deep", "steps"),
    [
        ("heat2d", [0], 3, 3, 7),
        ("heat2d", [0, 1], 4, 2, 4),
        ("chain", [0], 3, 2, 3),
        ("heat2d", [0], 12, 4, 5),  # halos are wider than what a neighbour owns
    ],
)
def test_several_steps_share_an_exchange(
    name: str, loops: list[int], ranks: int, deep: int, steps: int
) -> None:
    func = CASES[name]()
    arrays, _ = one_rank(name)
    expected = run(compile(func, 1, repeat="A"), arrays, steps)
    program = compile(func, ranks, loop=loops, repeat="A", exchange_every=deep)
    assert len(program.pieces[-1]) == deep
    np.testing.assert_array_equal(run(program, arrays, steps), expected)


def quotients(rows: int = 40, cols: int = 3) -> tirx.PrimFunc:
    """A step whose first block divides by integers; the second reads two rows far apart of it.

    The other field takes quotients of its own row alone.
    """
    a, v = image(rows, cols, dtype="int32"), image(rows, cols, name="V", dtype="int32")
    k = te.reduce_axis((0, cols), "k")
    b = te.compute((rows,), lambda i: te.sum(1000 // a[i, k], k), "b")
    ends = lambda i: b[te.max(i - 2, 0)] % 7 + b[te.min(i + 8, rows - 1)] % 5  # noqa: E731
    after = te.compute((rows, cols), lambda i, j: 1 + ends(i) + j, "next")
    return function(a, v, after, te.compute((rows, cols), lambda i, j: 9 - 8 // v[i, j], "W"))


@pytest.mark.quick_cases("12-6-1")
@pytest.mark.parametrize(
    ("rows", "ranks", "deep"), [(40, 20, 1), (40, 20, 2), (40, 3, 3), (12, 6, 1)]
)
def test_no_division_by_what_nobody_has_filled(rows: int, ranks: int, deep: int) -> None:
    """Ranks compute rows in gaps, too; where these held 0, a division would end the process."""
    fields = {"A": "next", "V": "W"}
    step = quotients(rows)
    program = compile(step, ranks, repeat=fields, exchange_every=deep, overlap="always")
    first = np.random.default_rng(0).integers(1, 9, (2, rows, 3), np.int32)
    (a, v), at = first, np.arange(rows)
    for _ in range(4):
        b = (1000 // a).sum(1)
        ends = b[np.maximum(at - 2, 0)] % 7 + b[np.minimum(at + 8, rows - 1)] % 5
        a, v = 1 + ends[:, None] + np.arange(3), 9 - 8 // v

    def work(world: LocalWorld) -> np.ndarray:
        local = program.on(world)
        for buffer in local.buffers.values():
            buffer.array[...] = 0
        for name, values in zip("AV", first, strict=True):
            held = local.input(name)
            held.owned[...] = values[slices(held.region)]
        return np.stack(local(4))

    np.testing.assert_array_equal(np.concatenate(run_ranks(ranks, work), 1), [a, v])


@pytest.mark.slow
def test_steps_between_exchanges_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is what counts: no kernel is compiled."""
    scheduled = "tvm_fusion.distributed.program.schedule_function"
    monkeypatch.setattr(scheduled, lambda name, func, *_: func)
    monkeypatch.setattr(tvm, "compile", lambda *_: SimpleNamespace(jit=lambda **_: {}))
    processor = Processor(rate=1e9, bandwidth=1e10)

    def chosen(latency: float) -> int:
        network = Network(latency=latency, bandwidth=1e9)
        figures: Any = {"network": network, "processor": processor}
        program = compile(heat2d(64, 64), 4, repeat="A", exchange_every="auto", **figures)
        return program.distribution.deep

    assert chosen(0.0) == 1 < chosen(2e-6) < chosen(1e-2) == 16


def test_transfers() -> None:
    arrays, expected = one_rank("blur")
    transfers = [
        send_recv("A", (0, 4), 0, 2),
        send_recv("A", (5, 7), 1, 0, Mode(synchronous=True, blocking=False)),
    ]
    program = compile(blur(), 3, transfers=transfers)
    np.testing.assert_array_equal(run(program, arrays), expected)


def late_mask(rows: int = 12, cols: int = 5) -> tirx.PrimFunc:
    """Sums of rows, to which the second block adds an input that the first does not read."""
    a, m = image(rows + 2, cols), image(rows + 2, cols, name="M")
    b = te.compute((rows + 2, cols), lambda i, j: a[i, j] + 2.0, "b")
    return function(
        a, m, te.compute((rows, cols), lambda i, j: b[i, j] + b[i + 2, j] + m[i + 1, j], "out")
    )


def in_two_nests(sch: s_tir.Schedule) -> None:
    sch.parallel(sch.get_loops("out")[0])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_wait_before_a_block(ranks: int) -> None:
    func, mode = late_mask(), Mode(blocking=False)
    arrays = random_arrays(func)
    expected = run(compile(func, 1), arrays)
    transfers = [send_recv("M", (5, 13), 0, 1, mode, before="out")]
    given: dict[str, Any] = {"owned": {"M": [14, *[0] * (ranks - 1)]}, "transfers": transfers}
    for schedule in (None, in_two_nests):
        program = compile(func, ranks, schedule=schedule, overlap="always", **given)
        np.testing.assert_array_equal(run(program, arrays), expected)
    text = program.kernels[program.pieces[1][-1].kernel].script()
    assert text.index('sblock("b")') < text.index(FINISH) < text.index('sblock("out")')


def test_wait_fails_within_a_kernel() -> None:
    transfers = [send_recv("M", (5, 13), 0, 1, Mode(blocking=False), before="out")]
    program = compile(late_mask(), 2, owned={"M": [14, 0]}, transfers=transfers)

    def work(world: LocalWorld) -> None:
        local = program.on(world)
        start = world.start
        if world.rank == 0:  # it never sends what rank 1 waits for
            world.start = lambda e, b: start(Exchange(0, ()) if e.id == 0 else e, b)  # type: ignore[method-assign]
        local()

    with pytest.raises(DistributedError, match="exchange 0: rank 1 waits for rank 0"):
        run_ranks(2, work, timeout=0.2)


def test_transfer_of_an_output() -> None:
    """The last rank has all rows at the end, its own and those of the others."""
    arrays, expected = one_rank("blur")
    transfers = [send_recv("by", (0, 4), 0, 1), send_recv("by", (0, 8), 1, 2)]
    program = compile(blur(), 3, transfers=transfers)

    def work(world: LocalWorld) -> np.ndarray:
        local = program.on(world)
        held = local.input("A")
        held.owned[...] = arrays["A"][slices(held.region)]
        assert len(local()) == len(local.output.owned)
        return local.output.window.view(((0, 8), (0, 5))) if world.rank == 2 else expected[:8]

    for rows in run_ranks(3, work):
        np.testing.assert_array_equal(rows, expected[:8])


def test_reduced_loop() -> None:
    """All ranks have the whole result; parts differ, are empty, and read halos."""
    a, k = image(5, 9), te.reduce_axis((0, 4), "k")
    d = te.compute((4, 9), lambda i, j: a[i + 1, j] - a[i, j], "d")
    func = function(a, te.compute((9,), lambda j: te.sum(d[k, j] * d[k, j], axis=k), "C"))
    arrays = random_arrays(func)
    expected = (np.diff(arrays["A"].astype(np.float64), axis=0) ** 2).sum(0)
    for ranks, sizes in ((1, None), (3, None), (7, None), (3, [1, 0, 3])):
        program = compile(func, ranks, loop="k", sizes=sizes, overlap="always")
        assert program.explain().startswith(f"sum of loop k over {ranks} ranks; ")
        assert (ranks == 7 or bool(sizes)) == ("  none" in program.explain())

        def work(world: LocalWorld, program: Program = program) -> np.ndarray:
            local = program.on(world)
            held = local.input("A")
            held.owned[...] = arrays["A"][slices(held.region)]
            poison(local, world)
            return local()

        first, *others = run_ranks(ranks, work)
        np.testing.assert_allclose(first, expected, rtol=1e-5)
        assert all(other.tobytes() == first.tobytes() for other in others)


def test_sum_of_infinities() -> None:
    """Numpy does not warn, as the kernels do not."""
    a, k = image(2, 4), te.reduce_axis((0, 2), "k")
    func = function(a, te.compute((4,), lambda j: te.sum(a[k, j], axis=k), "C"))
    whole = np.full((2, 4), np.inf, np.float32)
    whole[1] = -np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found in gathered(compile(func, 2, loop="k"), whole):
            assert np.isnan(found).all()


def test_parts_of_one_iteration() -> None:
    """Loops of the result are merged, since each part has another first row."""
    a, k = image(3, 5, 6), te.reduce_axis((0, 3), "k")
    func = function(a, te.compute((5, 6), lambda i, j: te.sum(a[k, i, j], axis=k), "C"))
    whole = np.random.default_rng(0).random((3, 5, 6), np.float32)
    for found in gathered(compile(func, 3, loop="k"), whole):
        np.testing.assert_allclose(found, whole.sum(0), rtol=1e-6)


def first_largest(x: tuple[tirx.Expr, ...], y: tuple[tirx.Expr, ...]) -> tuple[tirx.Expr, ...]:
    """Argmax of numpy: NaN is larger than all, and of equal values the first one is taken."""
    mine, other = tirx.isnan(x[1]), tirx.isnan(y[1])  # LLVM compares so that NaN equals all
    first = x[0] <= y[0]
    greater = tirx.any(x[1] > y[1], tirx.all(x[1] == y[1], first))
    holds = tirx.Select(mine, tirx.any(tirx.Not(other), first), tirx.all(tirx.Not(other), greater))
    return tuple(tirx.Select(holds, a, b) for a, b in zip(x, y, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "ranks", "sizes"),
    [
        ("float32", 1, None),
        ("float32", 3, None),
        ("float32", 7, [2, 0, 9, 1, 1, 4, 20]),
        ("float32", 64, None),
        ("float64", 2, None),
        ("float16", 4, None),
        ("int8", 7, None),
    ],
)
def test_argmax_of_numpy(dtype: str, ranks: int, sizes: list[int] | None) -> None:
    """Ties between ranks, and NaN, are decided so; the pairs are both outputs."""
    a, k = image(37, 21, dtype=dtype), te.reduce_axis((0, 37), "k")
    infinite = functools.partial(tirx.const, -np.inf)
    least = te.min_value if dtype == "int8" else infinite
    after_all = tirx.IntImm("int64", 99)  # -1 would be before the first of equal values
    kind = te.comm_reducer(first_largest, lambda at, value: (after_all, least(value)), "argmax")
    at, most = te.compute((21,), lambda j: kind((k.astype("int64"), a[k, j]), axis=k), "C")
    program = compile(function(a, at, most), ranks, loop="k", sizes=sizes)
    generator = np.random.default_rng(ranks)
    whole = generator.integers(-3, 4, (37, 21)).astype(dtype)
    if dtype != "int8":
        whole[generator.random(whole.shape) < 0.02] = np.nan
        whole[:, 3] = -np.inf
    for found in gathered(program, whole):
        np.testing.assert_array_equal(found[0], whole.argmax(0))
        np.testing.assert_array_equal(found[1], whole.max(0))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("loop", ["j", "k"])
def test_first_of_equal_values_in_rows(loop: str) -> None:
    """Vectors do not change the order in which they are found."""
    a, k = image(4, 370), te.reduce_axis((0, 370), "k")
    pair = te.compute((4,), lambda j: argmax()((k.astype("int64"), a[j, k]), axis=k), "C")
    whole = np.random.default_rng(0).integers(0, 50, (4, 370)).astype("float32")
    found = gathered(compile(function(a, *pair), 2, loop=loop), whole)
    at, most = np.concatenate(found, axis=1) if loop == "j" else found[1]
    np.testing.assert_array_equal(at, whole.argmax(1))
    np.testing.assert_array_equal(most, whole.max(1))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4, 9])
def test_extremes_of_topi(ranks: int) -> None:
    """They copy the position; the second of two reduced loops is in it, too."""
    a = image(8, 5, 6)
    whole = np.random.default_rng(ranks).integers(0, 4, (8, 5, 6)).astype("float32")
    last = topi.argmax(a, 0, select_last_index=True)
    for loop, tensor, expected in (
        ("k0", topi.argmin(a, (0, 1)), whole.reshape(40, 6).argmin(0)),
        ("k1", topi.argmax(a, (0, 1)), whole.reshape(40, 6).argmax(0)),
        ("k1", topi.argmax(a), whole.argmax()),
        ("k0", last, 7 - whole[::-1].argmax(0)),
    ):
        program = compile(function(a, tensor), ranks, loop=loop)
        for found in gathered(program, whole):
            np.testing.assert_array_equal(found, expected)


def gathered(program: Program, whole: np.ndarray) -> list[Any]:
    """The results of all ranks, of which each reduces its part of an array."""

    def work(world: LocalWorld) -> Any:
        local = program.on(world)
        held = local.input("A")
        held.owned[...] = whole[slices(held.region)]
        for output in local.outputs.values():  # what an init must overwrite
            output.owned[...] = 99
        return local()

    return run_ranks(program.ranks, work)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"repeat": "A"}, "leave out grid= and repeat=, and write it into the input before"),
        ({"devices": ["opencl"]}, "devices compute parts of outputs, and not of a reduction; leav"),
    ],
)
def test_reduced_loops_refuse(options: dict[str, Any], reason: str) -> None:
    a, k = image(8, 8), te.reduce_axis((0, 8), "k")
    func = function(a, te.compute((8,), lambda j: te.sum(a[k, j], axis=k), "C"))
    with pytest.raises(OpError, match=reason):
        compile(func, 2, loop="k", **options)


def test_devices_have_no_hidden_outputs() -> None:
    a, k = image(8, 8), te.reduce_axis((0, 8), "k")
    pair = te.compute((8,), lambda j: argmax()((k.astype("int64"), a[k, j]), axis=k), "C")
    with pytest.raises(OpError, match="computes 'C.v1' beside an output.*make it an output, too"):
        compile(function(a, pair[0]), loop="j", devices=["opencl"])


@pytest.mark.slow
def test_own_schedules() -> None:
    arrays, expected = one_rank("blur")
    seen = []

    def tile(schedule: s_tir.Schedule) -> None:
        block = schedule.get_sblock("by")
        rows, cols = schedule.get_loops(block)
        outer, inner = schedule.split(rows, [None, 2])
        schedule.compute_at(schedule.get_sblock("bx"), outer)
        schedule.vectorize(cols)
        seen.append(schedule)

    program = compile(blur(), 3, schedule=tile)
    assert len(seen) == len(program.kernels) == 2
    np.testing.assert_array_equal(run(program, arrays), expected)
    mixed = compile(blur(), 3, schedule={1: tile})
    assert len(mixed.kernels) == 3
    np.testing.assert_array_equal(run(mixed, arrays), expected)


@pytest.mark.slow
def test_ranks_share_kernels() -> None:
    assert len(compile(blur(64, 8), 8).kernels) == 1
    assert len(compile(heat2d(64, 8), 8).kernels) == 2  # a border's window is a row shorter


@pytest.mark.slow
def test_explain() -> None:
    program = compile(
        blur(12, 6),
        2,
        network=Network(latency=2e-6, bandwidth=1e9),
        processor=Processor(rate=1e6, bandwidth=1e9),
    )
    assert (
        program.explain()
        == """\
loops i over 2 ranks; 64 bytes in 2 messages; overlap: auto
rank  iterations               sends    receives    compute   exchange        overlap  kernels
   0  0:6                         32          32   252.0 us     2.0 us   no, -38.0 us  part_0[0:6]
      from 1: A[7:8, 0:8], 32 bytes
   1  6:12                        32          32   252.0 us     2.0 us   no, -38.0 us  part_0[6:12]
      from 0: A[6:7, 0:8], 32 bytes"""
    )
    overlapped = compile(heat2d(8), 10, overlap="always").explain()
    assert "0:0" not in overlapped and "none" in overlapped


def on_gpu(schedule: s_tir.Schedule) -> None:
    """A schedule that no CPU can run."""
    schedule.bind(schedule.get_loops("by")[0], "threadIdx.x")


@pytest.mark.slow
def test_overlap_by_the_model() -> None:
    slow = Network(latency=1e-3, progress=1.0)
    idle = Processor(rate=1e6, bandwidth=1e9)
    chosen = compile(blur(), 2, network=slow, processor=idle)
    assert [piece.is_interior for piece in chosen.pieces[0]] == [True, False]
    assert "overlap: auto" in chosen.explain() and "yes, +" in chosen.explain()
    assert len(compile(blur(), 2, network=Network(progress=0.0)).pieces[0]) == 1


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"overlap": "maybe"}, OpError, "overlap is 'maybe'; expected"),
        ({"target": "opencl"}, TargetError, "the target of ranks is their CPU; name GPUs as"),
        ({"repeat": "B"}, OpError, "repeat names 'B'; the inputs are A"),
        ({"repeat": "A"}, OpError, "'A' of shape .* cannot take the output"),
        ({"loop": "k", "devices": ["opencl"]}, OpError, "has no loop 'k'"),
        ({"loop": 1.5}, OpError, "a loop is 1.5; expected its name, an axis of the output"),
        ({"threads": 0}, InvalidInputError, "threads is 0; expected a positive integer"),
        (
            {"network": "network.json"},
            InvalidInputError,
            "network is 'network.json'; expected a Net",
        ),
        ({"processor": 2e10}, InvalidInputError, r"processor is 20000000000.0; expected a Proces"),
        ({"loop": True}, OpError, "a loop is True; expected its name"),
        ({"sizes": 8}, OpError, "sizes are 8; expected a list of integers"),
        ({"owned": [8, 0]}, OpError, r"owned is \[8, 0\]; expected sizes by inputs"),
        ({"owned": {"A": 8}}, OpError, "owners of 'A' are 8; expected a list of integers"),
        ({"owned": {"A": [4.0, 4.0]}}, OpError, "owners of 'A' have 4.0; expected integers"),
        (
            {"transfers": ["A"]},
            OpError,
            r"transfers are \['A'\]; expected a list of what send_recv",
        ),
        ({"devices": "opencl"}, InvalidInputError, "devices are 'opencl'; expected a list of them"),
        ({"schedule": on_gpu}, OpError, "schedule of part_0 binds loops to threads of a GPU, and"),
        ({"schedule": "fast"}, OpError, "a schedule is 'fast'; expected a function of a schedule"),
        ({"schedule": {1: "fast"}}, OpError, "a schedule is 'fast'; expected a function"),
        ({"schedule": {2: print}}, OpError, "given for rank 2; ranks are 0 to 1"),
    ],
)
def test_refused(arguments: dict, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        compile(blur(), 2, **arguments)


def test_refused_steps() -> None:
    with pytest.raises(OpError, match="rank 0 owns .* leave out owned="):
        compile(heat2d(9), 2, repeat="A", owned={"A": [2, 7]})
    program = compile(pipeline(), 1)
    for steps in (0, 2, "2"):
        with pytest.raises(InvalidInputError, match=f"steps is {steps!r}; expected 1, or more for"):
            run_ranks(1, lambda world, steps=steps: program.on(world)(steps))
    run_ranks(1, lambda world: program.on(world)(np.int64(1)))
    image = np.zeros((100, 100))
    with pytest.raises(InvalidInputError, match=r"(?s)steps is array.{1,60}; .* inputs are writ"):
        run_ranks(1, lambda world: program.on(world)(image))


def test_refused_ranks() -> None:
    program = compile(matmul(), 2)
    with pytest.raises(InvalidInputError, match="compiled for 2 ranks and there are 3; start it"):
        run_ranks(3, program.on)
    other = compile(chain(), 2)
    with pytest.raises(DistributedError, match=r"ranks \[1\] and rank 0 have different programs"):
        run_ranks(2, lambda world: (other if world.rank else program).on(world))


@pytest.mark.parametrize("world", [None, 2, "world"])
def test_no_ranks(world: Any) -> None:
    with pytest.raises(InvalidInputError, match="the ranks are .*; expected what .*session.. yi"):
        compile(matmul(), 1).on(world)


def test_refused_inputs() -> None:
    program = compile(matmul(), 1)
    with pytest.raises(InvalidInputError, match="no input is called 'C'; the inputs are"):
        run_ranks(1, lambda world: program.on(world).input("C"))


def test_figures_of_a_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this CPU are taken; of another one, or without a file, there are estimates."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = resolve("native", 1)
    assert default_processor(target) == estimated_processor(target)
    measured = {"peak_flops.float32": 3e10, "bandwidth.memory": 7e9, "multiprocessors": 1}
    figures = {name: Figure(value, "measured") for name, value in measured.items()}
    path = calibration_path(1)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(Machine(native_name(), "cpu", "this CPU", figures).to_json()))
    assert compile(blur(), 2).processor == Processor(3e10, 7e9)
    other = resolve("znver2" if host_cpu() != "znver2" else "znver3", 1)
    assert default_processor(other) == estimated_processor(other)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["heat2d", "wave2d"])
def test_windows_begin_at_different_places_of_their_pages(name: str) -> None:
    local = compile({"heat2d": heat2d, "wave2d": wave2d}[name](8, 16), 1).alone()
    places = sorted(buffer.array.ctypes.data % 4096 for buffer in local.buffers.values())
    apart = 4096 // len(places)
    assert places == [apart * place for place in range(len(places))]

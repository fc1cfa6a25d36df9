# SPDX-License-Identifier: Apache-2.0
"""CPU and OpenCL devices on one algorithm: the results of the CPU alone, whatever the split."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from device_runs import WatchedDriver, run
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_nests import CASES, SEVERAL, Interpreter, blur, elements, heat2d, random_arrays
from opencl import opencl_context
from tvm import s_tir

from schedules.distribute.cost import Processor
from schedules.distribute.split import Accelerator, MeasuredRows, MeasuredSplit
from schedules.distribute.transfer import Mode, send_recv
from tvm_fusion import distributed
from tvm_fusion.codegen.host_code import Launch
from tvm_fusion.distributed import Device, compile, measure_split
from tvm_fusion.distributed.world.local_world import LocalWorld, run_ranks
from tvm_fusion.errors import DistributedError, InvalidInputError, OpError, TargetError

pytestmark = pytest.mark.usefixtures("as_gpu")

EXACT = ("blur", "upsample", "concatenation", "flip", "pipeline")
"""Their arithmetic is the same in both compilers: no products are joined with sums."""
LATE = send_recv("A", (0, 2), 0, 1, Mode(blocking=False), before="next")


@functools.cache
def alone(name: str, steps: int = 1) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, ...]]:
    """Arrays, and the outputs of the CPU alone."""
    func = (CASES | SEVERAL)[name]()
    arrays = random_arrays(func)
    loop, repeat = "i" if name in SEVERAL else 0, "A" if steps > 1 else None
    return arrays, run(compile(func, 1, loop=loop, repeat=repeat), arrays, steps)


def check(program: distributed.Program, name: str, steps: int = 1) -> None:
    arrays, expected = alone(name, steps)
    found = run(program, arrays, steps)
    for result, wanted in zip(found, expected, strict=True):
        if name in EXACT:
            np.testing.assert_array_equal(result, wanted)
        np.testing.assert_allclose(result, wanted, rtol=2e-6, atol=2e-6)


def opencl(chunks: int | None = None, **others: Any) -> Device:
    return Device("opencl", chunks=chunks, **others)


@pytest.mark.quick_cases("convolution")
@pytest.mark.parametrize("name", CASES)
def test_same_result_as_the_cpu_alone(name: str, opened: list[WatchedDriver]) -> None:
    func = CASES[name]()
    extent = int(func.params[-1].shape[0])
    split = [extent // 3, extent - extent // 3]
    program = compile(func, devices=[opencl(3)], split=split)
    check(program, name)
    [[share]] = program.shares.devices
    into, out = share.sequence.bytes(program.distribution.itemsizes)
    log = opened[0].log
    assert sum(size for what, size in log if what == "in") == into
    assert sum(size for what, size in log if what == "out") == out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split"), [("gradients", [3, 7]), ("turned", [3, 5]), ("positions", [3, 5])]
)
def test_several_outputs(name: str, split: list[int], opened: list[WatchedDriver]) -> None:
    check(compile(SEVERAL[name](), loop="i", devices=[opencl(2)], split=split), name)


@pytest.mark.slow
def test_without_ranks(opened: list[WatchedDriver]) -> None:
    arrays, [expected] = alone("blur")
    local = compile(blur(), devices=["opencl"], split=[6, 7], threads=2).alone()
    local.input("A").owned[...] = arrays["A"]
    np.testing.assert_array_equal(local(), expected)
    assert local.world.threads == 2
    with pytest.raises(InvalidInputError, match="compiled for 2 ranks and there are 1"):
        compile(blur(), 2).alone()


def test_copies_are_what_the_rows_read(opened: list[WatchedDriver]) -> None:
    """Counted against every element that the rows read."""
    func = blur()
    run(compile(func, devices=[opencl(1)], split=[4, 9]), random_arrays(func))
    interpreter = Interpreter(func)
    read = set().union(*(interpreter.reads(index) for index in elements(((4, 13), (0, 5)))))
    assert opened[0].log[0] == ("in", 4 * len(read))
    assert [what for what, _ in opened[0].log] == ["in", "kernel", "out"]


def test_all_is_enqueued_before_the_cpu_computes(
    opened: list[WatchedDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tvm_fusion.distributed.local_program import LocalProgram

    alone("blur", 1)  # what it is compared with has no device
    run_pieces = LocalProgram.run_pieces
    waiting: list[list[int]] = []

    def noted(self: LocalProgram, step: int, interior: bool) -> None:
        if not interior:
            opened[0].log.append(("cpu", 0))
            waiting.append([len(queue._events) for queue in opened[0].queues])
        run_pieces(self, step, interior)

    monkeypatch.setattr(LocalProgram, "run_pieces", noted)
    check(compile(blur(), devices=[opencl(2)], split=[3, 10]), "blur")
    assert [what for what, _ in opened[0].log] == ["in", "kernel", "out"] * 2 + ["cpu"]
    assert waiting == [[2, 0, 2]]  # an event that is dropped waits for its copy
    assert [len(queue._events) for queue in opened[0].queues] == [0, 0, 0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("split", [[0, 13], [13, 0], [12, 1]])
def test_one_side_may_have_nothing(split: list[int], opened: list[WatchedDriver]) -> None:
    program = compile(blur(), devices=["opencl"], split=split)
    check(program, "blur")
    used = [driver for driver in opened if driver.queues]
    assert (bool(program.pieces[0]), len(used)) == (split[0] > 0, int(split[1] > 0))


@given(data=st.data())
@settings(max_examples=settings.default.max_examples // 10)
def test_any_split_chunks_and_loop(data: st.DataObject) -> None:
    opencl_context()
    loop = data.draw(st.sampled_from([0, 1]))
    extent = (13, 5)[loop]
    rows = data.draw(st.integers(0, extent))
    chunks = data.draw(st.integers(1, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tvm_fusion.distributed.program.open_driver", lambda _, index: WatchedDriver(index)
        )
        program = compile(blur(), loop=loop, devices=[opencl(chunks)], split=[rows, extent - rows])
        check(program, "blur")


@pytest.mark.slow
def test_ranks_with_devices(opened: list[WatchedDriver]) -> None:
    """Halos of ranks pass through the memory of the host; one rank has two devices."""
    program = compile(
        blur(),
        3,
        devices={0: [opencl(2)], 2: [opencl(1), "opencl:1"]},
        split={0: [1, 3], 2: [2, 2, 1]},
    )
    check(program, "blur")
    assert program.distribution.bytes == compile(blur(), 3).distribution.bytes
    assert sorted(driver.name for driver in opened) == ["opencl:0", "opencl:0", "opencl:1"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("split", [{0: [2, 9]}, {0: [2, 3], 1: [4, 2]}])
def test_steps(split: dict[int, list[int]], opened: list[WatchedDriver]) -> None:
    program = compile(heat2d(), len(split), repeat="A", devices=[opencl(2)], split=split)
    check(program, "heat2d", steps=4)


def on_blocks(schedule: s_tir.Schedule) -> None:
    for name in ("bx", "by"):
        rows, columns = schedule.get_loops(schedule.get_sblock(name))
        schedule.bind(rows, "blockIdx.x")
        schedule.bind(columns, "threadIdx.x")


def test_own_schedule(opened: list[WatchedDriver]) -> None:
    program = compile(blur(), devices=[opencl(3, schedule=on_blocks)], split=[4, 9])
    check(program, "blur")
    [[share]] = program.shares.devices
    assert [len(calls) for calls in share.calls] == [2] * 3  # a kernel for each block
    assert len(share.code.hosts) == 1  # chunks of equal extents share them
    assert share.calls[0][0].launch.block == (5, 1, 1)


def test_machine_code_for_a_gpu_that_is_not_here() -> None:
    program = compile(blur(), devices=[Device("cuda -arch=sm_90", chunks=2)], split=[3, 10])
    [[share]] = program.shares.devices
    assert share.code.cubin.startswith(b"\x7fELF") and share.calls[0]
    assert "cuda:0 meanwhile: 3:13 in 2 chunks" in program.explain()


def test_the_split_of_the_model(opened: list[WatchedDriver]) -> None:
    device = opencl(figures=Accelerator(rate=3e9, bandwidth=1e12, link=1e12, latency=1e-9))
    program = compile(
        blur(400, 64), devices=[device], processor=Processor(rate=1e9, bandwidth=1e12)
    )
    [[share]] = program.shares.devices
    [[(begin, end)]] = [share.rows]
    assert abs(begin - 100) <= 4 and end == 400
    slow = opencl(figures=Accelerator(rate=1e12, bandwidth=1e12, link=1e12, latency=1.0))
    assert compile(blur(400, 64), devices=[slow]).shares.devices == ((),)


@pytest.mark.slow
def test_one_rank_whose_devices_are_here_is_measured(
    opened: list[WatchedDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def measured(source: Any, devices: Any, **options: Any) -> MeasuredSplit:
        asked.append(options)
        return MeasuredSplit(MeasuredRows(0.0, 1.0), (MeasuredRows(0.0, 3.0),))

    monkeypatch.setattr("tvm_fusion.distributed.program.measure_split", measured)
    for devices in (["opencl"], {0: ["opencl"]}):
        program = compile(blur(12, 6), devices=devices, threads=2)
        assert program.shares.cpu == (((0, 9),),)
    assert [options["threads"] for options in asked] == [2, 2] and len(opened) == 2
    figures = Accelerator(rate=1e9, bandwidth=1e9, link=1e9, latency=1e-6)
    compile(blur(12, 6), devices=[opencl(figures=figures)])
    compile(blur(12, 6), devices=["opencl"], processor=Processor(1e9, 1e9))
    compile(blur(12, 6), devices=["opencl"], split="model")
    compile(blur(12, 6), 2, devices=["opencl"])
    assert len(asked) == 2


def test_devices_that_are_not_here_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(kind: str, index: int) -> None:
        raise TargetError("this machine has no device")

    monkeypatch.setattr("tvm_fusion.distributed.program.open_driver", absent)
    found = [compile(blur(), devices=["opencl"], split=split) for split in ("auto", "model")]
    assert found[0].shares.cpu == found[1].shares.cpu


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("split", "busy"), [([6, 6], 2), ([12, 0], 1), ([0, 12], 1), ("model", 2), ({0: [6, 6]}, 2)]
)
def test_a_device_on_the_cpu_shares_its_memory(
    split: Any, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvm_fusion.distributed.accelerator.device._cpu_units", lambda index: 2)
    processor = Processor(1e9, 1e9, node_bandwidth=1e9, node_ranks=8)
    program = compile(blur(12, 6), devices=["opencl"], split=split, processor=processor)
    assert program.processor == processor.beside(busy)
    for share in program.shares.devices[0]:
        assert share.device.accelerator.cores == processor.beside(busy)
    assert compile(blur(12, 6), devices=["cuda -arch=sm_90"], split=[6, 6], processor=processor)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("together", "device_rows"),
    [([0.7, 0.8, 0.9, 0.9], 48), ([0.9, 0.8, 0.7, 0.6], 36), ([1.3, 1.2, 1.3, 1.4], 0)],
)
def test_measured_together(
    together: list[float],
    device_rows: int,
    opened: list[WatchedDriver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device may be faster or slower beside the CPU; where the pair is, one has all rows."""

    def rows_of(local: Any) -> list[int]:
        counts = [device._share.rows[0][1] - device._share.rows[0][0] for device in local.devices]
        return [local.plan.parts[0].rows[0][1] - sum(counts), *counts]

    def seconds_of_sides(programs: list[Any]) -> list[float]:
        rows = map(rows_of, programs)
        sides = [(cpu / 120, *(count / 60 for count in device)) for cpu, *device in rows]
        return [seconds for of_program in sides for seconds in of_program if seconds]

    def seconds_together(programs: list[Any]) -> list[float]:
        assert [rows_of(local) for local in programs] == [
            [72, 48],
            [76, 44],
            [80, 40],
            [84, 36],
            [120],
        ]
        return [*together, 1.0]

    module = "tvm_fusion.distributed.accelerator.measure_split"
    monkeypatch.setattr(f"{module}._seconds_of_sides", seconds_of_sides)
    monkeypatch.setattr(f"{module}._seconds_together", seconds_together)
    found = measure_split(blur(120, 6), ["opencl"])
    program = compile(blur(120, 6), devices=["opencl"], split=found)
    assert program.shares.cpu[0][0] == (0, 120 - device_rows)


def test_each_turn_begins_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take turns, of which the first run, when others had the caches, does not count."""
    from tvm_fusion.distributed.accelerator import measure_split as module

    log: list[str] = []
    now = 0.0

    def call(name: str, cold: float, warm: float) -> None:
        nonlocal now
        now += cold if not log or log[-1] != name else warm
        log.append(name)

    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    calls = [functools.partial(call, "a", 9.0, 1.0), functools.partial(call, "b", 7.0, 2.0)]
    assert module._in_turns(*calls) == pytest.approx([1.0, 2.0])
    assert log[:9] == ["a"] * 4 + ["b"] * 4 + ["a"]


def test_other_work_slows_a_whole_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls keep their ratio, whatever other work does to their turns."""
    from tvm_fusion.distributed.accelerator import measure_split as module

    now, calls_made = 0.0, 0

    def call(seconds: float) -> None:
        nonlocal now, calls_made
        turn = calls_made // 8
        calls_made += 1
        now += seconds * (1 + turn % 3)

    monkeypatch.setattr(module.time, "perf_counter", lambda: now)
    first, second = module._in_turns(functools.partial(call, 0.1), functools.partial(call, 0.11))
    assert second / first == pytest.approx(1.1)
    assert first == pytest.approx(0.1)  # Figure of the turns without other work.


@pytest.mark.slow
def test_the_split_of_a_measurement(opened: list[WatchedDriver]) -> None:
    found = measure_split(blur(64, 32), ["opencl"])
    assert found.cpu(64) > 0 and found.devices[0](64) > 0
    program = compile(blur(), devices=["opencl"], split=found)
    check(program, "blur")
    even = MeasuredSplit(MeasuredRows(0.0, 1.0), (MeasuredRows(0.0, 2.0),))
    [[share]] = compile(blur(12, 4), devices=["opencl"], split=even).shares.devices
    assert share.rows == ((8, 12),)


def test_explain() -> None:
    device = opencl(2, figures=Accelerator(rate=1e9, bandwidth=1e9, link=1e9, latency=1e-6))
    program = compile(blur(12, 6), devices=[device], split=[6, 6], processor=Processor(1e6, 1e9))
    assert (
        program.explain()
        == """\
loops i over 1 ranks; 0 bytes in 0 messages; overlap: never
rank  iterations               sends    receives    compute   exchange        overlap  kernels
   0  0:12                         0           0   252.0 us     0.0 us              -  part_0[0:6]
      opencl:0 meanwhile: 6:12 in 2 chunks, 320 bytes in, 144 out, 4.7 us"""
    )


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"devices": ["native"]}, TargetError, "'native' is a CPU, which computes its rows"),
        ({"devices": ["opencl:x"]}, TargetError, "unknown target"),
        ({"devices": [Device("opencl", -1)]}, InvalidInputError, "index -1 and None chunks"),
        ({"devices": [Device("opencl", chunks=0)]}, InvalidInputError, "index 0 and 0 chunks"),
        ({"devices": [Device("opencl", chunks=2.5)]}, InvalidInputError, "and 2.5 chunks; exp"),
        ({"devices": [Device("opencl", index="0")]}, InvalidInputError, "has index '0' and None"),
        ({"devices": [Device("opencl", schedule="x")]}, InvalidInputError, "'x'; expected a func"),
        ({"devices": [Device("opencl", figures=1)]}, InvalidInputError, "are 1; expected an Acce"),
        ({"devices": [None]}, InvalidInputError, "a device is None; expected its name, or a Dev"),
        ({"devices": {0: "opencl"}}, InvalidInputError, "devices are 'opencl'; expected a list"),
        ({"devices": {3: ["opencl"]}}, InvalidInputError, "for rank 3; ranks are 0 to 1"),
        ({"split": "half"}, OpError, "split is 'half'; expected 'auto', 'model' or rows"),
        ({"split": {2: [1]}}, OpError, "a split is given for rank 2; ranks are 0 to 1"),
        ({"split": [4, 4]}, OpError, r"split \[4, 4\] is not a split of 6 rows"),
        ({"split": [3.0, 3.0]}, OpError, "rows of the split have 3.0; expected integers"),
        ({"split": 0.5}, OpError, "rows of the split are 0.5; expected a list of integers"),
        ({"split": None}, OpError, "rows of the split are None; expected a list of integers"),
        ({"split": MeasuredSplit(MeasuredRows(0, 1), ())}, OpError, "0 devices were measured"),
        ({"overlap": "always"}, OpError, "overlap='always' is for ranks without devices"),
        (
            {"exchange_every": 2, "devices": [Device("opencl", chunks=2)]},
            OpError,
            "exchange_every is 2, and a device with chunks= or in_place=True shares its rows",
        ),
        ({"devices": 5, "exchange_every": 2}, InvalidInputError, "devices are 5; expected"),
        ({"transfers": ["A"]}, OpError, r"transfers are \['A'\]; expected a list of what"),
        ({"transfers": [LATE]}, OpError, "before= of a transfer is for ranks without devices"),
        (
            {"devices": [Device("opencl", schedule=lambda _: None)], "split": [3, 3]},
            OpError,
            "the schedule for opencl binds no loop to a block",
        ),
    ],
)
def test_refused(arguments: dict, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        compile(heat2d(12), 2, **{"devices": ["opencl"], "repeat": "A"} | arguments)


def test_split_as_an_array() -> None:
    split = np.array([3, 9])
    shares = compile(heat2d(12), devices=["opencl"], repeat="A", split=split).shares
    assert shares.cpu[0][0] == (0, 3)


def test_refused_measurement() -> None:
    with pytest.raises(InvalidInputError, match="no devices are given"):
        measure_split(blur(12, 6), [])
    with pytest.raises(InvalidInputError, match="split= is not for a measurement"):
        measure_split(blur(12, 6), ["opencl"], split=[6, 6])
    with pytest.raises(InvalidInputError, match="a loop of 1 rows cannot be measured"):
        measure_split(blur(1, 4), ["opencl"])


def test_a_device_that_fails(opened: list[WatchedDriver]) -> None:
    program = compile(blur(), devices=["opencl"], split=[3, 10])
    [[share]] = program.shares.devices
    other = dataclasses.replace(share.code, kind="cuda")
    with pytest.raises(OpError, match="code for cuda does not run on opencl:0"):
        WatchedDriver(0).load(other)
    broken = dataclasses.replace(share.code, text=share.code.text.replace("{", "{ no_such_name;"))
    with pytest.raises(DistributedError, match="opencl:0 refuses a kernel"):
        WatchedDriver(0).load(broken)
    with pytest.raises(DistributedError, match=r"no \d+ bytes of memory; cut its rows into more"):
        WatchedDriver(0).allocate(1 << 60)
    large = Launch("rows_0_kernel", (1, 1, 1), (1 << 20, 1, 1))
    driver = WatchedDriver(0)
    kernels, queue = driver.load(share.code), driver.queue()
    arguments = [driver.allocate(4), driver.allocate(4), *map(np.int64, (0, 0, 0))]
    with pytest.raises(DistributedError, match="opencl:0 cannot launch 'rows_0_kernel'"):
        queue.launch(kernels["rows_0_kernel"], large, arguments, [])


@pytest.mark.parametrize("split", [[3, 10], [13, 0], "auto"])
def test_a_device_that_is_not_there(split: Any) -> None:
    """It is refused by whoever is to run it, though it may have no rows."""
    opencl_context()
    program = compile(blur(), devices=["opencl:77"], split=split)
    program.explain()
    absent = "this machine has no device opencl:77; it has opencl:0"
    with pytest.raises(TargetError, match=absent):
        program.alone()
    with pytest.raises(TargetError, match=absent):
        run(program, random_arrays(blur()))


def test_a_device_that_one_rank_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before anything is sent; no other rank opens it."""
    opencl_context()
    split = {0: [6], 1: [7, 0]}
    program = compile(blur(), 2, devices={1: ["cuda:7 -arch=sm_90"]}, split=split)
    sent: list[str] = []
    monkeypatch.setattr(LocalWorld, "_gather", lambda self, value, what: sent.append(what))

    def work(world: LocalWorld) -> None:
        if world.rank == 1:
            program.on(world)

    with pytest.raises(TargetError, match="this machine has no (NVIDIA driver|device cuda:7)"):
        run_ranks(2, work)
    assert sent == []

# SPDX-License-Identifier: Apache-2.0
"""Predicted times of reductions: the model by hand, machine code, and the table of the docs."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from examples.benchmarks import predict_gpu, reduction_cases
from examples.benchmarks.gpu import sass
from examples.benchmarks.gpu.warp_paths import block_cycles, warp_path
from schedules.cost.gpu_kernels import StreamingKernel, predict_streaming
from schedules.cost.machine import load_machine, machine_from_json
from schedules.errors import PredictionError

KERNEL = StreamingKernel(
    blocks=8,
    threads=256,
    registers=64,
    shared_bytes=0,
    turn_bytes=64,
    flight_bytes=64,
    turn_instructions=32,
    start_cycles=100,
    head_cycles=0,
    turn_cycles=0,
    finish_cycles=400,
)


def machine(**figures: float):
    values = {"multiprocessors": 2, "clock": 1e9, "bandwidth.memory": 1e11, "share.read": 0.5,
              "latency.memory": 5e-7, **figures}  # fmt: skip
    stored = {name: {"value": value, "origin": "by hand"} for name, value in values.items()}
    return machine_from_json({"name": "toy", "kind": "gpu", "title": "Toy", "figures": stored})


def test_a_wave_by_hand() -> None:
    """Four blocks of 64 registers and 256 threads fit two multiprocessors: all eight at once."""
    found = predict_streaming(KERNEL, 8 * 256 * 64 * 10, machine())
    # Nine further waits of 0.5 us; 1.31 MB at 50 GB/s take 26.2 us.
    wave = math.hypot(9 * 5e-7, 8 * 256 * 640 / 5e10)
    assert found.seconds == pytest.approx(1e-7 + 5e-7 + wave + 4e-7)
    assert found.share == pytest.approx(8 * 256 * 640 / 5e10 / found.seconds)
    assert (found.waves, found.flight_bytes) == (1.0, 4 * 256 * 64)


def test_what_makes_it_slower() -> None:
    bytes_ = 8 * 256 * 64 * 10
    base = predict_streaming(KERNEL, bytes_, machine()).seconds
    for change in (
        {"flight_bytes": 16},
        {"registers": 128},  # two waves
        {"blocks": 9},  # a block alone
        {"turn_instructions": 3200},
        {"contenders": 1000},
        {"head_contenders": 10_000},
        {"head_cycles": 9000},
    ):
        slower = predict_streaming(dataclasses.replace(KERNEL, **change), bytes_, machine())
        assert slower.seconds > 1.01 * base, change


def test_missing_figures_are_named() -> None:
    with pytest.raises(PredictionError, match=r"znver4.*share\.read"):
        predict_streaming(KERNEL, 1e6, dataclasses.replace(load_machine("znver4"), kind="gpu"))


LISTING = """
.L_x_1:
        /*0000*/                   LDG.E.128.CONSTANT R4, desc[UR36][R24.64] ;
        /*0010*/                   LDG.E.128.CONSTANT R8, desc[UR36][R24.64+0x1000] ;
        /*0020*/                   IADD3 R24, P0, R24, 0x2000, RZ ;
        /*0030*/                   FADD.FTZ R19, R5, R19 ;
        /*0040*/                   LDG.E.128.CONSTANT R12, desc[UR36][R24.64] ;
        /*0050*/              @!P0 BRA `(.L_x_1) ;
        /*0060*/                   MEMBAR.ALL.GPU ;
        /*0070*/                   BRA `(.L_x_2) ;
        /*0080*/                   MUFU.EX2 R1, R1 ;
.L_x_2:
        /*0090*/                   FADD R1, R19, R1 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   BRA `(.L_x_2) ;
"""


def test_machine_code_by_hand() -> None:
    code = sass.instructions(LISTING)
    loop = sass.main_range(code)
    assert loop == range(6)
    body = [code[place] for place in loop]
    assert sum(each.loaded_bytes for each in body) == 48
    assert sass.bytes_before_use(body) == 32  # R5 is the second word of the first load
    # The fence blocks, the branch is taken, the last sum is there five cycles after its issue.
    assert block_cycles(code, range(6, 12), {"MEMBAR": 100}) == 2 + 100 + 2 + 2 + 5


WARPS = """
        /*0000*/                   S2R R1, SR_TID.X ;
        /*0010*/                   ISETP.NE.AND P0, PT, R1, RZ, PT ;
        /*0020*/                   LOP3.LUT P1, RZ, R1.reuse, 0x1f, RZ, 0xc0, !PT ;
        /*0030*/               @P0 BRA `(.L_x_1) ;
        /*0040*/                   MUFU.EX2 R2, R3 ;
        /*0050*/                   FADD R2, R2, R2 ;
.L_x_1:
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   ISETP.NE.AND P2, PT, R1, 0x20, PT ;
        /*0080*/               @P2 EXIT ;
        /*0090*/                   MEMBAR.ALL.GPU ;
        /*00a0*/               @P3 BRA `(.L_x_2) ;
        /*00b0*/                   NANOSLEEP 0x32 ;
.L_x_2:
        /*00c0*/               @P1 MUFU.EX2 R4, R3 ;
        /*00d0*/                   STG.E desc[UR36][R2.64], R4 ;
        /*00e0*/                   EXIT ;
"""


def opcodes_of(thread: int | None) -> list[str]:
    code = sass.instructions(WARPS)
    return [each.name for each in warp_path(code, range(2, len(code)), thread)]


def test_the_thread_decides_where_its_warp_goes() -> None:
    """Nobody knows P3, which leads around a pause; P1 is false in the first lane of a warp."""
    assert opcodes_of(0) == "LOP3 NOP MUFU FADD BAR ISETP".split()
    assert opcodes_of(32) == "LOP3 BRA BAR ISETP NOP MEMBAR BRA NOP STG".split()
    everything = "LOP3 BRA MUFU FADD BAR ISETP EXIT MEMBAR BRA MUFU STG".split()
    assert opcodes_of(None) == everything


CONSTANTS = """
        /*0000*/                   HFMA2.MMA R1, -RZ, RZ, 0, 0 ;
        /*0010*/                   HFMA2.MMA R2, -RZ, RZ, 0, 5.9604644775390625e-08 ;
        /*0020*/                   ISETP.NE.AND P0, PT, R1, RZ, PT ;
        /*0030*/                   ISETP.NE.AND P1, PT, R2, 0x1, PT ;
        /*0040*/              @!P0 BRA `(.L_x_1) ;
        /*0050*/                   MEMBAR.ALL.GPU ;
.L_x_1:
        /*0060*/              @!P1 BRA `(.L_x_2) ;
        /*0070*/                   MEMBAR.ALL.GPU ;
.L_x_2:
        /*0080*/                   EXIT ;
"""


def test_constants_made_by_half_precision_are_known() -> None:
    """The compiler moves some constants by the unit for halves, as 0 and as the least one here."""
    code = sass.instructions(CONSTANTS)
    names = [each.name for each in warp_path(code, range(len(code)))]
    assert names == "HFMA2 HFMA2 ISETP ISETP BRA BRA".split()


def test_warps_wait_for_each_other_at_a_barrier() -> None:
    code = sass.instructions(WARPS)
    known = {"MEMBAR": 100, "S2R": 0, "MUFU": 50, "BAR": 30}
    part = range(2, len(code))
    first, second = (block_cycles(code, part, known, [thread]) for thread in (0, 32))
    # The barrier opens when the first warp comes, after its exponential.
    arrival = 2 + 2 + 2 + 50 + 2
    assert first == arrival + 30 + 2 + 5
    both = block_cycles(code, part, known, [0, 32])
    assert both - second == arrival - 6  # the second warp comes after two instructions


def test_results_that_nobody_uses_yet_may_be_left_out() -> None:
    code = sass.instructions(LISTING)
    waiting, going_on = (
        block_cycles(code, range(2), {"LDG": 500}, waits=each) for each in (True, False)
    )
    assert (waiting, going_on) == (504, 4)


@pytest.mark.slow
def test_a_kernel_of_a_case() -> None:
    """One wave, whose first loads are under way while the slot is sought; all bytes once."""
    [case] = reduction_cases.select(only=["sweep/float32 2^24"])
    kernel, time = predict_gpu.predict(case, load_machine("h100"))
    assert (kernel.blocks, kernel.threads) == (512, 256)
    assert (kernel.head_contenders, kernel.contenders) == (512, 1)  # tickets are drawn early
    assert kernel.flight_bytes >= 64 and 0.9 < time.waves <= 1
    assert 0.9 < time.share < 1 and 0.4e-6 < time.finish_seconds < 0.8e-6


@pytest.mark.slow
def test_sixteen_mebibytes_take_four_fifths_of_the_bandwidth() -> None:
    """So little of the time of a short kernel goes into its finish."""
    [case] = reduction_cases.select(only=["sweep/float32 2^22"])
    _, time = predict_gpu.predict(case, load_machine("h200"))
    assert time.share > 0.8 and time.finish_seconds < 0.65e-6


def test_what_is_stored_takes_no_further_turn() -> None:
    bytes_ = 8 * 256 * 64 * 10
    alone = predict_streaming(KERNEL, bytes_, machine())
    beside = predict_streaming(KERNEL, bytes_ + 4, machine(), bytes_)
    assert beside.seconds == pytest.approx(alone.seconds, rel=1e-5)
    assert predict_streaming(KERNEL, bytes_ + 4, machine()).seconds > 1.001 * alone.seconds


@pytest.mark.slow
def test_goals() -> None:
    """Each has a prediction on both machines; sums reach theirs, and no share is above all."""
    goals, *machines, _ = predict_gpu.goals_table(predict_gpu.GOAL_MACHINES).columns
    assert len(machines) == 2
    for each in machines:
        told = dict(zip(map(str, goals.cells), map(str, each.cells), strict=True))
        assert len(told) == len(predict_gpu.GOALS)
        shares = {goal: re.findall(r"(\d+)%", text) for goal, text in told.items()}
        assert all(0 < int(share) <= 100 for found in shares.values() for share in found), told
        for size, least in (("64", 92), ("16", 80)):
            [share] = next(shares[goal] for goal in told if f"of {size} MiB" in goal)
            assert int(share) >= least

# SPDX-License-Identifier: Apache-2.0
"""Predicted times of reductions: the model by hand, machine code, and the table of the docs."""

from __future__ import annotations

import dataclasses
import math

import pytest

from examples.benchmarks import predict_gpu, reduction_cases
from examples.benchmarks.gpu import sass
from schedules.cost.machine import load_machine, machine_from_json
from schedules.cost.memory_bound import StreamingKernel, predict_streaming
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
    assert sass.warp_cycles(code, range(6, 12), {"MEMBAR": 100}) == 2 + 100 + 2 + 2 + 5


def test_a_kernel_of_a_case() -> None:
    """One wave, whose first loads are under way while the slot is sought; all bytes once."""
    [case] = reduction_cases.select(only=["sweep/float32 2^24"])
    kernel, time = predict_gpu.predict(case, load_machine("h100"))
    assert (kernel.blocks, kernel.threads, kernel.contenders) == (512, 256, 512)
    assert kernel.flight_bytes >= 64 and 0.9 < time.waves <= 1
    assert 0.9 < time.share < 1 and 0.5e-6 < time.finish_seconds < 2e-6

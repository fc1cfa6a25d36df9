# SPDX-License-Identifier: Apache-2.0
"""Models of our GPU kernels, by hand."""

from dataclasses import replace

import pytest

from schedules.cost.decisions import predict
from schedules.cost.gpu_kernels import REDUCE, STORE, has_latencies, streaming_kernel
from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import known_machines, load_machine

H100 = load_machine("h100")


def test_few_blocks_have_their_share_of_the_bandwidth():
    reachable = 3.35e12 * 0.94
    for blocks, share in ((99, 0.75), (132, 1), (1000, 1)):
        call = KernelCall(STORE, {"blocks": blocks, "launches": 1}, read_bytes=1e8)
        found = predict(call, H100)
        assert found.seconds == pytest.approx(1e8 / reachable / share + 1.5e-6)
        assert found.model == "estimate, gpu.store" and found.bound == "memory"
        assert not found.in_range
        assert found.roofline_seconds == pytest.approx(1e8 / reachable)


def test_round_trips_are_those_of_the_machine():
    names = ("blocks threads registers shared_bytes turn_bytes flight_bytes turn_instructions "
             "turn_cycles contenders")  # fmt: skip
    sizes = {**dict.fromkeys(names.split(), 1), "launches": 0, "head_cycles": 10,
             "head_trips": 2, "finish_cycles": 20, "finish_trips": 3}  # fmt: skip
    call = KernelCall(REDUCE, sizes, read_bytes=1)
    kernel, trip = streaming_kernel(call, H100), 1.5e-7 * 1.98e9
    assert kernel.head_cycles == pytest.approx(10 + 2 * trip)
    assert kernel.finish_cycles == pytest.approx(20 + 3 * trip)
    twice = KernelCall(REDUCE, {**sizes, "launches": 1}, read_bytes=1)
    assert predict(twice, H100).seconds - predict(call, H100).seconds == pytest.approx(1.5e-6)


def test_all_gpus_that_we_compile_for_have_the_figures():
    for machine in map(load_machine, known_machines()):
        if machine.kind == "gpu" and machine.get("compute_capability", 0) >= 7:
            assert has_latencies(machine), machine.name
    few = {name: one for name, one in H100.figures.items() if name != "share.read"}
    assert not has_latencies(replace(H100, figures=few))

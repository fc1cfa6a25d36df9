# SPDX-License-Identifier: Apache-2.0
"""An OpenCL device that is a CPU: kernels for CPUs, in the host's memory, with the CPU's bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device_runs import WatchedDriver, run
from loop_nests import CASES, SEVERAL, blur, heat2d, random_arrays
from tvm import te

from examples.stencils import wave2d
from tvm_fusion import distributed
from tvm_fusion.distributed import Device, compile, measure_split
from tvm_fusion.distributed.accelerator import opencl_driver
from tvm_fusion.errors import InvalidInputError, TargetError

FIELDS = {"A": "next", "V": "speed"}


def check(
    func: Any, opened: list[WatchedDriver], steps: int = 1, ranks: int = 1, **options: Any
) -> distributed.Program:
    """Compile for devices, and compare the bits with one rank without."""
    arrays = random_arrays(func)
    shared = {name: options[name] for name in ("loop", "repeat") if name in options}
    expected = run(compile(func, 1, **shared), arrays, steps)
    program = compile(func, ranks, **options)
    for found, wanted in zip(run(program, arrays, steps), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert {what for driver in opened for what, _ in driver.log} == {"kernel"}  # and no copies
    return program


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", [*CASES, *sorted(SEVERAL.keys() - {"levels"})])
def test_the_bits_of_the_cpu(name: str, opened: list[WatchedDriver]) -> None:
    func, options = (CASES | SEVERAL)[name](), {"loop": "i"} if name in SEVERAL else {}
    extent = compile(func, 1, **options).distribution.nest.extents[0]
    split = [extent // 3, extent - extent // 3]
    check(func, opened, devices=["opencl"], split=split, **options)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("func", "steps", "ranks", "options"),
    [
        (heat2d(), 3, 1, {"split": [4, 7], "repeat": "A"}),
        (heat2d(), 2, 1, {"split": [0, 11], "repeat": "A"}),
        (heat2d(), 3, 2, {"split": {0: [0, 5], 1: [2, 4]}, "repeat": "A"}),
        (wave2d(9, 6), 3, 2, {"split": {1: [0, 5]}, "repeat": FIELDS}),
    ],
)
def test_steps(
    func: Any, steps: int, ranks: int, options: dict[str, Any], opened: list[WatchedDriver]
) -> None:
    check(func, opened, steps, ranks, devices=["opencl"], **options)


@pytest.mark.slow
def test_copies_where_they_are_wanted(opened: list[WatchedDriver]) -> None:
    arrays = random_arrays(blur())
    [expected] = run(compile(blur(), 1), arrays)
    for device in (Device("opencl", chunks=2), Device("opencl", in_place=False)):
        [found] = run(compile(blur(), devices=[device], split=[3, 10]), arrays)
        np.testing.assert_array_equal(found, expected)
        assert {what for what, _ in opened[-1].log} == {"in", "kernel", "out"}


@pytest.mark.slow
def test_measured(opened: list[WatchedDriver]) -> None:
    found = measure_split(blur(64, 32), ["opencl"])
    assert found.devices[0](64) > 0
    assert {what for driver in opened for what, _ in driver.log} == {"kernel"}


@pytest.mark.slow
def test_results_past_the_caches(opened: list[WatchedDriver]) -> None:
    """The caches cannot hold the rows, which begin anywhere: some vectors are aligned."""
    rows, columns = 2100, 8192 + 4
    a = te.placeholder((rows, columns), "float32", "A")
    func = te.create_prim_func([a, te.compute((rows, columns), lambda i, j: a[i, j] + 1, "B")])
    program = check(func, opened, devices=["opencl"], split=[1, rows - 1], target="znver3")
    [[share]] = program.shares.devices
    assert all("__builtin_nontemporal_store" in text for text in share.code.programs.values())


def test_explain() -> None:
    program = compile(heat2d(), devices=[Device("opencl", in_place=True)], split=[4, 7], repeat="A")
    assert "opencl:0 meanwhile: 4:11 in the memory of the host, " in program.explain()


def test_a_device_with_memory_of_its_own(
    opened: list[WatchedDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compile(blur(), devices=[Device("opencl", in_place=True)], split=[3, 10])
    monkeypatch.setattr(opencl_driver, "_shares_memory", lambda device: False)
    with pytest.raises(TargetError, match="does not share the host's memory; compile for it with"):
        program.alone()
    step = compile(heat2d(), devices=[Device("opencl", in_place=True)], split=[0, 11], repeat="A")
    with pytest.raises(InvalidInputError, match="do not stay on one device.* with in_place=False"):
        distributed.run_ranks(1, lambda world: step.on(world, gpu_aware=True))

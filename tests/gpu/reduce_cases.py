# SPDX-License-Identifier: Apache-2.0
"""Reductions for the tests of GPU kernels: functions, inputs, and what numpy makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
from tvm import te, tirx
from tvm.target import Target

from schedules.compute.coalesced_reduce import coalesced_reduce
from schedules.gpu import CoalescedReduce
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.plan.config import ReduceConfig, choose_sisters, tiles
from schedules.gpu.reduce.plan.configure import configure, read_configured, read_group
from schedules.gpu.reduce.plan.group_workload import GroupWorkload
from schedules.workload.reduce import FLOATS, INTEGERS, CanonicalLoops, ReduceWorkload
from schedules.workload.workspace_layout import HEADER_WORDS, PLACES, first_word

OPENCL = Target({"kind": "opencl"}, host="llvm")
CUDA = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")

Producer = Callable[[te.Tensor], te.Tensor]


class Case:
    """A reduction of one tensor, scheduled for a target.

    Attributes
    ----------
    func : tirx.PrimFunc
        The workspace if ``words`` is not 0, then the data, then the output.
    words : int
        Size of the workspace.
    """

    def __init__(
        self,
        operator: str,
        dtype: str,
        shape: Sequence[int | tirx.Var],
        axes: Sequence[int] | None,
        finish: str = "auto",
        target: Target = OPENCL,
        producer: Producer | None = None,
        keepdims: bool = False,
    ):
        data = te.placeholder(tuple(shape), dtype, name="data")
        source = data if producer is None else producer(data)
        self.workload = ReduceWorkload.create(
            operator, axes, len(source.shape), str(source.dtype), keepdims, finish=finish
        )
        self.loops = CanonicalLoops(tuple(source.shape), self.workload.axes)
        gpu = GPUInfo.from_target(target)
        plain = te.create_prim_func([data, coalesced_reduce(source, self.workload)])
        plain, self.config, self.words = configured(plain, gpu)
        schedule = CoalescedReduce().apply(plain, target, False)
        assert schedule is not None
        self.func = schedule.mod["main"]

    def arguments(self, data: np.ndarray, shape: Sequence[int]) -> list[np.ndarray]:
        """Workspace, data, and an output of ``shape`` that holds something else than the result."""
        workspace = [np.zeros(self.words, "int32")] if self.words else []
        return [*workspace, data, np.full(shape, 77, numpy_dtype(self.workload.out_dtype))]


def configured(func: tirx.PrimFunc, gpu: GPUInfo) -> tuple[tirx.PrimFunc, ReduceConfig, int]:
    """A function with its configuration, and the words of its workspace."""
    result = configure(func, gpu)
    found = read_configured(result, gpu)
    assert found is not None
    has_workspace = len(result.params) > len(func.params)
    return result, found[1], int(result.params[0].shape[0]) if has_workspace else 0


def choose(workload: ReduceWorkload, loops: CanonicalLoops, gpu: GPUInfo) -> ReduceConfig:
    """The configuration of one reduction by itself."""
    data = te.placeholder(loops.shape, workload.dtype, name="data")
    group = read_group(te.create_prim_func([data, coalesced_reduce(data, workload)]))
    assert group is not None
    return choose_sisters(GroupWorkload.of(group), gpu)


def numpy_dtype(dtype: str) -> np.dtype:
    """The type in numpy, which lacks bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def random_data(
    rng: np.random.Generator, operator: str, dtype: str, shape: Sequence[int]
) -> np.ndarray:
    """Values all over the type; factors near 1, so that products stay in range."""
    if dtype == "bool":
        return rng.random(shape) < rng.choice([0.01, 0.5, 0.99])
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        return values if rng.random() < 0.5 else (values % 2).astype(dtype)
    numbers = rng.standard_normal(shape)
    if operator == "prod":
        numbers = np.exp(numbers * 0.01)
    return numbers.astype(numpy_dtype(dtype))


def reference(operator: str, data: np.ndarray, axes: Sequence[int] | None) -> np.ndarray:
    """The result in float64, or exact in the type of integers."""
    kind = "float64" if data.dtype.kind not in "iub" else data.dtype
    values = data.astype(kind)
    axis = None if axes is None else tuple(axes)
    if operator in ("argmin", "argmax"):
        reduced = range(data.ndim) if axis is None else axis
        kept = [k for k in range(data.ndim) if k not in reduced]
        rows = values.transpose([*kept, *reduced]).reshape([data.shape[k] for k in kept] + [-1])
        return getattr(np, operator)(rows, axis=-1)
    with np.errstate(all="ignore"):
        return {
            "sum": lambda: values.sum(axis, kind),
            "mean": lambda: values.mean(axis),
            "sum_squares": lambda: (values * values).sum(axis, kind),
            "prod": lambda: values.prod(axis, kind),
            "min": lambda: values.min(axis),
            "max": lambda: values.max(axis),
            "and": lambda: (data != 0).all(axis),
            "or": lambda: (data != 0).any(axis),
        }[operator]()


def check(
    operator: str, got: np.ndarray, data: np.ndarray, wanted: np.ndarray, roundings: int = 1
) -> None:
    """Integers must agree; floats to a rounding that grows with the root of the terms.

    The output itself is rounded ``roundings`` times: once, or by each block if updates are atomic.
    """
    dtype = str(got.dtype)
    if dtype not in FLOATS:
        np.testing.assert_array_equal(got, wanted)
        return
    terms = max(1, data.size // max(1, got.size))
    epsilon = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10}.get(dtype, 2.0**-7)
    inner = max(epsilon if dtype in ("float64", "float32") else 2.0**-23, 2.0**-52)
    scale = 1.0 if operator in ("prod", "mean", "min", "max") else np.sqrt(terms)
    partial = {"sum": scale, "mean": 1 / np.sqrt(terms)}.get(operator, 0)  # terms of both signs
    np.testing.assert_allclose(
        got.astype("float64"),
        wanted,
        rtol=epsilon * np.sqrt(roundings) + 4 * inner * np.sqrt(terms),
        atol=4 * inner * scale * np.sqrt(terms)
        + (2 * epsilon * partial * np.sqrt(roundings) if roundings > 1 else 0),
    )


def check_workspace(config: ReduceConfig, loops: CanonicalLoops, workspace: np.ndarray) -> None:
    """Check that all slots are free, and that every launch has drawn all its tickets."""
    count = tiles(config, loops)
    assert not workspace[:HEADER_WORDS].any()
    tickets = workspace[HEADER_WORDS : first_word(count)].reshape(PLACES, -1)
    assert set(np.unique(tickets[:, :count])) <= {0, config.splits}
    assert not tickets[:, count:].any()

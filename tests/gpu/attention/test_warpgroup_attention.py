# SPDX-License-Identifier: Apache-2.0
"""Attention of warpgroups of sm_90a: numbers by emulation, machine code, and their choice."""

from __future__ import annotations

import re

import numpy as np
import pytest
from attention.test_attention_gpu import (
    OPENCL,
    Build,
    all_half,
    attend,
    in_half,
    module,
    scheduled,
)
from cuda_text import count, cuda_source, loops, opcodes, ptxas, sass
from graph_cases import numpy_dtype
from relax_on_opencl import RelaxOnOpenCL
from tvm import relax, tirx
from tvm.relax import op
from tvm.target import Target
from warpgroup_emulation import check_chained_protocol, emulate_warpgroups

from schedules import attributes
from schedules.gpu.attention.warpgroup_attention import WarpgroupAttentionTile
from schedules.gpu.core.machine import GPUInfo
from tvm_fusion.codegen.nvrtc import compile_cuda

F16, BF16, F32 = "float16", "bfloat16", "float32"
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"}, host="llvm")


def kernel_of(build: Build, *types: tuple[tuple, str], target: Target = HOPPER) -> tirx.PrimFunc:
    """The kernel of a graph that is one attention."""
    functions = scheduled(module(build, *types), target).functions.values()
    [func] = [func for func in functions if isinstance(func, tirx.PrimFunc)]
    return func.with_attr("global_symbol", "attention")


def rule_of(build: Build, *types: tuple[tuple, str], target: Target = HOPPER) -> str:
    return str(kernel_of(build, *types, target=target).attrs.get(attributes.RULE, "Attention"))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_warpgroups(monkeypatch)


def values(*shapes: tuple[int, ...], dtype: str = F16) -> list[np.ndarray]:
    rng = np.random.default_rng()
    return [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for shape in shapes]


def run(build: Build, *inputs: np.ndarray) -> np.ndarray:
    types = [(array.shape, str(array.dtype)) for array in inputs]
    assert rule_of(build, *types, target=OPENCL) == "Attention (warpgroups)"
    machine = RelaxOnOpenCL(scheduled(module(build, *types), OPENCL), OPENCL)
    [found] = machine(*inputs)
    assert [launch.kernel for launch in machine.launches] == ["attention_kernel"]
    return found


@pytest.mark.parametrize(
    ("m", "n"), [(140, 300), pytest.param(300, 140, marks=pytest.mark.slow)], ids=str
)
def test_numbers_of_a_causal_mask(m: int, n: int, emulated: None) -> None:
    """Odd lengths, several tiles; keys behind the last visible tile are not read."""
    query, key, value = values((2, m, 64), (2, n, 64), (2, n, 64))
    past = np.tri(m, n, max(n - m, 0), dtype=bool)[None]
    exact = attend(query, key, value, lambda scores: np.where(past, scores * 0.125, -np.inf))
    found = run(all_half(past, 0.125), query, key, value)
    np.testing.assert_allclose(found, exact, 0, 3e-3)


@pytest.mark.slow
def test_masked_rows_and_nan(emulated: None) -> None:
    """Rows of -inf and of NaN become NaN; other rows may begin or end with whole tiles of -inf."""
    query, key, value = values((1, 70, 40), (1, 261, 40), (1, 261, 24))
    mask = np.zeros((1, 70, 261), F32)
    mask[0, 3], mask[0, 4, :133], mask[0, 5, 7:] = -np.inf, -np.inf, -np.inf
    mask[0, 6, 9], mask[0, 7, 260], mask[0, 8] = np.nan, np.inf, np.finfo(F32).min
    found = run(in_half, query, key, value, mask)
    scores = query.astype("float64") @ key.astype("float64").transpose(0, 2, 1)
    with np.errstate(invalid="ignore"):
        powers = np.exp((mask + scores) - (mask + scores).max(-1, keepdims=True))
        exact = powers / powers.sum(-1, keepdims=True) @ value.astype("float64")
    exact[0, 8] = value.astype("float64").mean(1)  # float32 adds nothing to its least number
    assert (
        np.isnan(found[0, [3, 6, 7]]).all()
        and not np.isnan(np.delete(found[0], [3, 6, 7], 0)).any()
    )
    np.testing.assert_allclose(found, exact, 0, 5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "atol"), [(F16, 3e-3), (BF16, 3e-2)])
def test_numbers_of_long_heads(dtype: str, atol: float, emulated: None) -> None:
    query, key, value = values((1, 130, 128), (1, 97, 128), (1, 97, 128), dtype=dtype)
    [mask] = values((1, 1, 97), dtype=F32)
    exact = attend(query, key, value, lambda scores: scores + mask)
    found = run(in_half, query, key, value, mask)
    np.testing.assert_allclose(found, exact, 0, atol)


@pytest.mark.slow
def test_numbers_of_turned_factors(emulated: None) -> None:
    """Queries and values whose neighbours in memory are tokens, and heads as the second axis."""

    def build(query: relax.Expr, key: relax.Expr, value: relax.Expr) -> relax.Expr:
        block = relax.BlockBuilder.current()
        query, value = (block.emit(op.permute_dims(x, [0, 2, 1])) for x in (query, value))
        scores = block.emit(op.matmul(query, op.permute_dims(key, [0, 2, 1]), out_dtype=F32))
        weights = block.emit(op.astype(op.nn.softmax(scores), F16))
        return op.matmul(weights, value, out_dtype=F32)

    query, key, value = values((2, 64, 136), (2, 104, 64), (2, 64, 104))
    query /= 8
    exact = attend(query.transpose(0, 2, 1), key, value.transpose(0, 2, 1))
    np.testing.assert_allclose(run(build, query, key, value), exact, 0, 3e-3)


@pytest.mark.parametrize(
    ("shape", "dtype", "least", "most"),
    [
        ((16, 2048, 64), F16, {"64x128x16": 4, "64x64x16": 8}, 430),
        pytest.param(
            (16, 2048, 128), BF16, {"64x64x16": 8, "64x128x16": 4}, 420, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_machine_code(shape: tuple[int, ...], dtype: str, least: dict, most: int) -> None:
    """The softmax is between products that only two waits of a step are for."""
    build = all_half(None, 0.125) if dtype == F16 else in_half
    types = [(shape, dtype)] * 3 + [((1, 1, shape[1]), F32)] * (dtype == BF16)
    source = cuda_source(kernel_of(build, *types), "sm_90a")
    assert "wgmma" not in compile_cuda(source, "sm_90a").log.lower(), "ptxas serializes products"
    [used], [code] = ptxas(source, "sm_90a").values(), sass(source, "sm_90a").values()
    assert (used.stack_frame, used.spill_stores, used.spill_loads) == (0, 0, 0)
    assert used.registers <= 168  # Three warpgroups have all registers.
    main = max(loops(code), key=lambda each: count(each, "HGMMA"))
    assert {kind: count(main, f"HGMMA.{kind}") for kind in least} == least
    assert count(main, "WARPGROUP.DEPBAR") == 2 and len(main) <= most
    for slow in ("LDSM", "BAR", "MEMBAR", "STL", "LDL"):
        assert not count(main, slow)
    names = opcodes(code)
    assert not count(names, "HMMA") and count(names, "STG.E") == count(names, "STG.E.128") > 0


def test_each_side_waits_for_the_other() -> None:
    source = cuda_source(kernel_of(all_half(None, 0.125), *[((16, 1024, 64), F16)] * 3), "sm_90a")
    kernel = source[source.rindex('extern "C"') :]
    check_chained_protocol(kernel)
    for name in ("tvm_builtin_cuda_mbarrier_wait", "tvm_fusion_settle"):
        with pytest.raises(AssertionError):
            check_chained_protocol(re.sub(rf"{name}\w*\(", "nothing(", kernel))


@pytest.mark.slow
def test_only_sm_90a_has_it() -> None:
    types = [((16, 2048, 64), F16)] * 3
    assert rule_of(all_half(None, 0.125), *types) == "Attention (warpgroups)"
    for arch in ("sm_80", "sm_90", "sm_100a"):
        target = Target({"kind": "cuda", "arch": arch}, host="llvm")
        assert rule_of(all_half(None, 0.125), *types, target=target) == "Attention"


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 40, 64), F16),
        ((16, 2048, 60), F16),
        ((16, 2048, 64), F32),
        ((16, tirx.Var("past", "int64"), 64), F16),
    ],
    ids=["small", "no_multiple_of_16_bytes", "float32", "perhaps_no_key"],
)
def test_others_stay_where_they_were(shape: tuple, dtype: str) -> None:
    query = (shape[0], 2048, shape[2]) if isinstance(shape[1], tirx.Var) else shape
    types = [(query, dtype), (shape, dtype), (shape, dtype), ((1, 1, shape[1]), F32)]
    assert rule_of(in_half, *types) == "Attention"


def test_open_lengths() -> None:
    shape = (512, tirx.Var("tokens", "int64"), 64)
    types = [(shape, F16)] * 3 + [((1, 1, shape[1]), F32)]
    assert rule_of(in_half, *types) == "Attention (warpgroups)"


def test_predicted_cycles_grow_with_each_extent() -> None:
    gpu, tile = GPUInfo.from_target(HOPPER), WarpgroupAttentionTile(64, 64, F16)
    least = tile.cycles(64, 4096, 4096, gpu)
    for extents in ((128, 4096, 4096), (64, 8192, 4096), (64, 4096, 8192)):
        assert 1.5 * least < tile.cycles(*extents, gpu) < 2.5 * least
    assert tile.stages == WarpgroupAttentionTile(128, 128, F16).stages == 4

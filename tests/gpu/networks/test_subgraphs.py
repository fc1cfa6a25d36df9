# SPDX-License-Identifier: Apache-2.0
"""The paper's sub-graphs at full size: one kernel each, right, without spills, ONNX as Relax."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from cuda_text import cuda_source, ptxas
from reduce_cases import CUDA, OPENCL
from relax_on_opencl import RelaxOnOpenCL
from traffic import Traffic
from tvm import tirx
from tvm.target import Target

from examples import subgraphs
from examples.coalesced_reduction import lower
from examples.subgraphs import SUB_GRAPHS, SubGraph, kernels
from tests.selection import in_turns
from tvm_fusion.onnx.frontend import import_onnx

each = pytest.mark.parametrize("graph", SUB_GRAPHS, ids=lambda graph: f"{graph.number}")
EPSILON = np.finfo("float32").eps
TABLE = """
1 f32 [64,2] cast16 cast32 cast16 r_sum
2 f32 [1280,21128] cast16 r_sum
3 f16 [64,768] cast32 r_sum
4 f32 [1280,21128] mul r_sum
5 f32 [1280] neg mul r_sum
6 f32 [3072] mul mul r_sum
7 f32 [64,128,768] add mul r_sum
8 f32 [64,128,768] add mul r_sum add mul r_sum
9 f32 [8192,768] r_sum r_sum
10 f16 [64,128,12,64] reshape cast32 r_sum
11 f16 [64,128,768] reshape cast32 r_sum
12 f16 [64,20] reshape r_sum
"""


@functools.cache
def lowered(number: int, kind: str) -> tvm.IRModule:
    return lower(SUB_GRAPHS[number - 1].relax_module(), {"cuda": CUDA, "opencl": OPENCL}[kind])


def kernel_functions(mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    return {v.name_hint: f for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}


def test_they_are_those_of_the_table() -> None:
    rows = []
    for graph in SUB_GRAPHS:
        steps = [step for branch in graph.branches for step in (*branch.steps, "r_sum")]
        words = [re.sub(r"reshape.*", "reshape", step) for step in steps]
        words = [re.sub(r"cast float", "cast", word) for word in words]
        shape = ",".join(map(str, graph.shape))
        rows.append(" ".join([str(graph.number), f"f{graph.dtype[-2:]}", f"[{shape}]", *words]))
    assert rows == TABLE.strip().splitlines()


@pytest.mark.quick_cases(5)
@each
def test_onnx_and_relax_become_the_same_kernel(graph: SubGraph) -> None:
    imported = import_onnx(graph.onnx_model())
    assert [spec.name for spec in imported.inputs] == [f"x{i}" for i in range(graph.inputs)]
    assert [(s.shape, s.dtype) for s in imported.outputs] == graph.outputs
    ours, theirs = (
        sorted(
            sorted(map(str, (p.ty for p in func.params))) for func in kernel_functions(mod).values()
        )
        for mod in (lowered(graph.number, "opencl"), lower(imported.mod, OPENCL))
    )
    assert ours == theirs


@each
def test_it_is_one_kernel(graph: SubGraph) -> None:
    assert len(kernels(graph)) == 1


@pytest.mark.slow
@each
def test_numbers_at_full_size(graph: SubGraph, rng: np.random.Generator) -> None:
    run = RelaxOnOpenCL(lowered(graph.number, "opencl"), OPENCL)
    inputs = graph.random_inputs(rng)
    for _ in range(2):  # the second call meets what the first left in the workspace
        results = run(*inputs)
    assert len(run.launches) == 1
    imported = RelaxOnOpenCL(lower(import_onnx(graph.onnx_model()).mod, OPENCL), OPENCL)
    for ours, theirs in zip(results, imported(*inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for branch, terms, result, kind in zip(
        graph.branches, graph.terms(inputs), results, graph.outputs, strict=True
    ):
        assert (result.shape, result.dtype) == kind
        wanted = terms.sum(branch.axes)
        length = np.sqrt(np.square(terms).sum(branch.axes))
        chain = 4 * EPSILON * np.sqrt(terms.size / wanted.size) * np.hypot(wanted, length)
        allowed = chain + np.finfo(result.dtype).eps * np.abs(wanted)
        assert (np.abs(result.astype("float64") - wanted) <= allowed).all()


@pytest.mark.slow
@each
def test_every_element_is_moved_once(graph: SubGraph) -> None:
    """The least traffic: each input is read once, each output written once, by any kernel."""
    mod = lowered(graph.number, "cuda")
    moved, functions = 0, kernel_functions(mod)
    for name in kernels(graph):
        shapes = [(tuple(map(int, p.ty.shape)), str(p.ty.dtype)) for p in functions[name].params]
        traffic = Traffic(functions[name], CUDA, [np.empty(*shape) for shape in shapes])
        assert traffic.kernels == 1
        for (_, dtype), reads, writes in zip(shapes, traffic.reads, traffic.writes, strict=True):
            if dtype == "int32":  # partial results and tickets, which stay in the cache
                assert 4 * (reads.sum() + writes.sum()) < graph.bytes
                continue
            assert sorted([set(reads), set(writes)], key=max) == [{0}, {1}]
            moved += (reads.sum() + writes.sum()) * np.dtype(dtype).itemsize
    assert moved == graph.bytes


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("graph", "arch"), in_turns(SUB_GRAPHS, ["sm_90", "sm_80", "sm_70"], every=3)
)
def test_cuda_text_without_spills(graph: SubGraph, arch: str) -> None:
    target = Target({"kind": "cuda", "arch": arch}, host="llvm")
    functions = kernel_functions(lower(graph.relax_module(), target))
    named = {name: func.with_attr("global_symbol", name) for name, func in functions.items()}
    for name, used in ptxas(cuda_source(tvm.IRModule(named), arch), arch).items():
        # NVRTC 12 leaves four words of half precision in memory.
        assert used.spill_stores <= (16 if arch == "sm_70" else 0), name
        assert used.registers <= 128, name


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "three.onnx"
    assert subgraphs.main(["3", "-o", str(path)]) == 0
    assert onnx.load(path).graph.name == "panamera_3"
    assert subgraphs.main(["10"]) == 0
    line, kernel = capsys.readouterr().out.splitlines()
    assert "1 x float16[64, 128, 12, 64], 12.59 MB: reshape 8192 768, cast float32" in line
    assert re.fullmatch(r" +-> \w*reshape\w*coalesced_sum\w*", kernel)
    with pytest.raises(SystemExit):
        subgraphs.main(["-o", str(path)])
    assert "needs the number of a sub-graph" in capsys.readouterr().err

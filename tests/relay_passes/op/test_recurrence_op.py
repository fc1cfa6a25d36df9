# SPDX-License-Identifier: Apache-2.0
"""The op of recurrent layers: types, refusals, and no kernel for a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tvm
from tvm import relax
from tvm.target import Target

from relay_passes.op import recurrence
from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.loops.recurrent_cells import (
    LANES,
    ProductTile,
    RecurrentCell,
    product_tile,
    recurrent_cell,
)
from schedules.errors import OpError

TANH = ("Tanh", 0.0, 0.0)
CELL = RecurrentCell("GRU", 5, 2, 20, (("Sigmoid", 0.0, 0.0), TANH))
SHAPES = [(5, 2, 2 * 3 * LANES), (2, 3, 20, LANES), (2, 20), (2, 32), (2,), (2, 3 * LANES), (32,)]


def arguments() -> list[relax.Var]:
    """Arguments of the layer ``CELL``."""
    types = [relax.TensorType(s, "int32" if i == 4 else "float32") for i, s in enumerate(SHAPES)]
    return [relax.Var(f"a{i}", ty) for i, ty in enumerate(types)]


def module() -> tvm.IRModule:
    """A module that calls the op."""
    builder = relax.BlockBuilder()
    given = arguments()
    with builder.function("main", given):
        with builder.dataflow():
            result = builder.emit_output(recurrence(given, CELL))
        builder.emit_func_output(result)
    return builder.get()


def test_types_of_the_results() -> None:
    fields = module()["main"].ret_ty.fields
    shapes = [tuple(int(dim) for dim in field.shape) for field in fields]
    assert shapes == [(5, 2, 32), (2, 32), (2, 32)]


def test_legal_form_is_one_scheduled_function() -> None:
    with Target("llvm"):
        lowered = relax.transform.LegalizeOps()(module())
    functions = [f for _, f in lowered.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    assert len(functions) == 1
    assert functions[0].attrs["tirx.is_scheduled"]


def test_other_shapes_are_refused() -> None:
    given = arguments()
    given[2] = relax.Var("h", relax.TensorType((2, 19), "float32"))
    with pytest.raises(OpError, match=r"argument 2 is .*; expected float32 of shape \(2, 20\)"):
        recurrence(given, CELL)
    with pytest.raises(OpError, match="6 arguments; expected 7"):
        recurrence(given[:6], CELL)


def test_unknown_cells_are_refused() -> None:
    cpu = CPUInfo.from_target(Target("llvm"))
    with pytest.raises(OpError, match=r"recurrent cell 'GRU' with activations \['Swish'\]"):
        recurrent_cell(replace(CELL, activations=(("Swish", 0.0, 0.0), TANH)), cpu)


@pytest.mark.parametrize(
    ("mcpu", "batch", "gates", "tile"),
    [
        ("x86-64-v3", 1, 4, ProductTile(1, 4)),
        ("x86-64-v3", 8, 4, ProductTile(4, 1)),
        ("x86-64-v3", 7, 3, ProductTile(4, 1)),
        ("x86-64-v4", 8, 4, ProductTile(8, 2)),
        ("x86-64-v4", 8, 3, ProductTile(8, 3)),
        ("x86-64-v4", 32, 1, ProductTile(11, 1)),
    ],
)
def test_tiles_of_the_product(mcpu: str, batch: int, gates: int, tile: ProductTile) -> None:
    cpu = CPUInfo.from_target(Target({"kind": "llvm", "mcpu": mcpu, "num-cores": 2}))
    assert product_tile(batch, gates, "float32", cpu) == tile


def test_weights_beyond_the_caches_are_prefetched() -> None:
    cpu = CPUInfo.from_target(Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}))
    texts = [
        recurrent_cell(CELL, replace(cpu, l2_bytes=size)).script() for size in (1 << 10, 1 << 20)
    ]
    assert ["prefetch" in text for text in texts] == [True, False]


def test_graphics_processors_are_refused() -> None:
    target = Target({"kind": "opencl"}, host="llvm")
    with target, pytest.raises(Exception, match="the target is 'opencl'; recurrent layers are"):
        relax.transform.LegalizeOps()(module())

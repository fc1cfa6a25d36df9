# SPDX-License-Identifier: Apache-2.0
"""Small Relax graphs for the tests of the GPU rules: fused, scheduled, executed in OpenCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import tvm
from opencl import compile_opencl
from tvm import ir, relax, tirx
from tvm.relax import transform
from tvm.s_tir import dlight
from tvm.target import Target

from relay_passes import AnnotateGathers, PackWeights
from schedules.gpu import RULES
from schedules.tir.expression_walk import substitute

OPENCL = Target({"kind": "opencl"}, host="llvm")
CUDA = Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")

Shape = Sequence[int | tirx.Var]
Build = Callable[..., relax.Expr]


def numpy_dtype(dtype: str) -> np.dtype:
    """The type in numpy, which lacks bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def fused(
    build: Build,
    *inputs: tuple[Shape, str],
    target: Target = OPENCL,
    more: Sequence[tvm.transform.Pass] = (),
) -> tvm.IRModule:
    """The functions that TVM's fusion leaves of a graph.

    Parameters
    ----------
    build : Callable
        Function from Relax variables to the result.
    *inputs : tuple
        Shape and type of each.
    more : Sequence
        Passes at the end.
    """
    builder = relax.BlockBuilder()
    variables = [
        relax.Var(f"x{k}", relax.TensorType(list(shape), dtype))
        for k, (shape, dtype) in enumerate(inputs)
    ]
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(build(*variables)))
        builder.emit_func_output(result)
    passes = [
        transform.FuseTransposeMatmul(),
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        AnnotateGathers(),
        transform.FuseOps(),
        transform.FuseTIR(),
        transform.DeadCodeElimination(),
        *more,
    ]
    with target:
        return tvm.transform.Sequential(passes)(builder.get())


def scheduled(
    build: Build,
    *inputs: tuple[Shape, str],
    target: Target = OPENCL,
    more: Sequence[tvm.transform.Pass] = (),
) -> dict[str, tirx.PrimFunc]:
    """The functions of a graph after the project's rules, and no others.

    Raises
    ------
    AssertionError
        Where the rules leave one alone.
    """
    mod = fused(build, *inputs, target=target, more=more)
    with target:
        mod = dlight.ApplyDefaultSchedule(*RULES)(mod)
    found = functions(mod)
    for name, func in found.items():
        assert func.attrs.get("tirx.is_scheduled"), f"no rule takes {name}"
    return found


def functions(mod: tvm.IRModule) -> dict[str, tirx.PrimFunc]:
    """The PrimFuncs of a module by name."""
    return {
        var.name_hint: func.with_attr("global_symbol", var.name_hint)
        for var, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }


def run(
    build: Build,
    inputs: Sequence[np.ndarray],
    shapes: Sequence[Shape] | None = None,
    target: Target = OPENCL,
    more: Sequence[tvm.transform.Pass] = (),
) -> list[np.ndarray]:
    """Compute a graph in OpenCL by scheduled kernels, each with poisoned outputs.

    Parameters
    ----------
    build : Callable
        Function as in :func:`fused`.
    inputs : Sequence[numpy.ndarray]
        Values.
    shapes : Sequence | None
        Their shapes in the graph, where some are symbolic.
    target : Target
        An OpenCL target.
    more : Sequence
        Tensors as in :func:`fused`.
    """
    types = [
        (shape, str(array.dtype))
        for array, shape in zip(inputs, shapes or [a.shape for a in inputs], strict=True)
    ]
    mod = fused(build, *types, target=target, more=more)
    with target:
        mod = PackWeights()(dlight.ApplyDefaultSchedule(*RULES)(mod))
    kernels = functions(mod)
    for name, func in kernels.items():
        assert func.attrs.get("tirx.is_scheduled"), f"no rule takes {name}"
    main = mod["main"]
    extents: dict[tirx.Var, int] = {}
    for param, array in zip(main.params, inputs, strict=True):
        for extent, size in zip(param.ty.shape, array.shape, strict=True):
            if isinstance(extent, tirx.Var):
                extents[extent] = size
    values: dict[relax.Var, list[np.ndarray]] = {
        param: [array] for param, array in zip(main.params, inputs, strict=True)
    }
    last: list[np.ndarray] = []
    for block in main.body.blocks:
        for binding in block.bindings:
            last = _evaluate(binding.value, values, kernels, extents)
            values[binding.var] = last
    return last


def _evaluate(
    value: relax.Expr,
    values: dict[relax.Var, list[np.ndarray]],
    kernels: dict[str, tirx.PrimFunc],
    extents: dict[tirx.Var, int],
) -> list[np.ndarray]:
    if isinstance(value, relax.Var):
        return values[value]
    if isinstance(value, relax.Tuple):
        return [
            array for field in value.fields for array in _evaluate(field, values, kernels, extents)
        ]
    if isinstance(value, relax.TupleGetItem):
        return [values[value.tuple_value][value.index]]
    func = kernels[value.args[0].name_hint]
    arguments = [
        field.value.numpy() if isinstance(field, ir.Constant) else values[field][0]
        for field in value.args[1].fields
    ]
    types = value.ty_args[0]
    types = list(types.fields) if isinstance(types, relax.TupleType) else [types]
    outputs = []
    for ty in types:
        shape = [_size(extent, extents) for extent in ty.shape]
        poison = np.full(int(np.prod(shape)) * 16, 0xA5, np.uint8)
        dtype = numpy_dtype(str(ty.dtype))
        outputs.append(np.frombuffer(poison, dtype)[: int(np.prod(shape))].reshape(shape).copy())
    scalars = [_size(e, extents) for e in value.args[2].values] if len(value.args) > 2 else []
    compile_opencl(func, OPENCL).run(*(a.copy() for a in arguments), *outputs, *scalars)
    return outputs


def _size(extent: tirx.Expr, extents: dict[tirx.Var, int]) -> int:
    known = {var: tirx.const(size, "int64") for var, size in extents.items()}
    return int(tvm.sym.Analyzer().simplify(substitute(extent, known)))

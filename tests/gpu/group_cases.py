# SPDX-License-Identifier: Apache-2.0
"""Groups of reductions for the tests: whole Relax functions as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tvm
import tvm_ffi
from opencl import OpenCLKernels, compile_opencl
from reduce_cases import OPENCL
from tvm import relax, tirx
from tvm.ir import GenericConst
from tvm.relax.utils import copy_with_new_vars
from tvm.target import Target

from relay_passes import CoalesceReduction, ConfigureReductions
from schedules.gpu import CoalescedReduce
from schedules.gpu.core.machine import GPUInfo
from schedules.gpu.reduce.plan.configure import read_configured

Type = tuple[str, Sequence[int | tirx.Var]]
Build = Callable[..., "relax.Expr | list[relax.Expr]"]


class Group:
    """Result of ``build`` on its parameters, as one scheduled function.

    Attributes
    ----------
    plain, func : tirx.PrimFunc
        Functions before and after the rule.
    group : ReduceGroup
        What the kernel computes.
    config : ReduceConfig
        Its configuration.
    """

    def __init__(self, build: Build, *types: Type, target: Target = OPENCL):
        mod = _one_function(_build(build, types), target)
        main = mod["main"]
        [call] = [binding.value for binding in main.body.blocks[0].bindings][:1]
        self.plain = mod[call.args[0]]
        self._arguments = [
            argument if isinstance(argument, relax.Var) else argument.value.numpy()
            for argument in call.args[1].fields
        ]
        self._params = list(main.params)
        self.target = target
        found = read_configured(self.plain, GPUInfo.from_target(target))
        assert found is not None
        self.group, self.config = found
        schedule = CoalescedReduce().apply(self.plain, target, False)
        assert schedule is not None
        self.func = schedule.mod["main"].with_attr("global_symbol", "main")

    def compile(self, helpers: str = "") -> OpenCLKernels:
        """Compile for OpenCL, with text before the kernel."""
        return compile_opencl(self.func, self.target, helpers)

    def arguments(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """The workspace, inputs, and outputs that hold something else than results."""
        values = dict(zip(self._params, inputs, strict=True))
        given = [a.copy() if isinstance(a, np.ndarray) else values[a] for a in self._arguments]
        extents = _bind(self.func.params, given)
        outputs = [
            np.full([_number(extent, extents) for extent in param.shape], 77).astype(
                str(param.dtype)
            )
            for param in self.func.params[len(given) :]
        ]
        return [*given, *outputs]

    def run(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """The outputs of one kernel."""
        arguments = self.arguments(*inputs)
        kernels = self.compile()
        assert len(kernels.launches(*arguments)) == 1
        kernels.run(*arguments)
        return self.outputs(arguments)

    def outputs(self, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Those of the arguments that are results."""
        return list(arguments[len(self._arguments) :])


def _build(build: Build, types: Sequence[Type]) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    params = [
        relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, (dtype, shape) in enumerate(types)
    ]
    with builder.function("main", params):
        with builder.dataflow():
            results = build(*params)
            stored = results if isinstance(results, list) else [results]
            outputs = [builder.emit_output(value) for value in stored]
        builder.emit_func_output(outputs if len(outputs) > 1 else outputs[0])
    return builder.get()


def _one_function(mod: tvm.IRModule, target: Target) -> tvm.IRModule:
    """Legalize ``main`` and make one PrimFunc of it, called by a new ``main``."""
    with target:
        transform = relax.transform
        passes = [
            relax.transform.Normalize(),
            CoalesceReduction(),
            transform.LegalizeOps(),
            transform.AnnotateTIROpPattern(),
        ]
        mod = tvm.transform.Sequential(passes)(mod)
    inner = mod["main"]
    constants: dict[GenericConst, relax.Var] = {}

    def lift(constant: GenericConst) -> relax.Expr:
        if not isinstance(constant.ty, relax.TensorType):
            return constant
        return constants.setdefault(constant, relax.Var(f"c{len(constants)}", constant.ty))

    body = tvm_ffi.structural_map(inner.body, (GenericConst, lift))
    whole = relax.Function([*inner.params, *constants.values()], body, inner.ret_ty)
    whole = copy_with_new_vars(whole.with_attr("Primitive", True))
    del mod["main"]
    builder = relax.BlockBuilder(mod)
    fused = builder.add_func(whole, "group")
    with builder.function("main", list(inner.params)):
        with builder.dataflow():
            call = relax.Call(fused, [*inner.params, *constants])
            result = builder.emit_output(call)
        builder.emit_func_output(result)
    passes = [relax.transform.FuseTIR(), ConfigureReductions(target)]
    return tvm.transform.Sequential(passes)(builder.get())


def _bind(params, arrays) -> dict[str, int]:
    """Symbolic extents by name."""
    return {
        str(extent): size
        for param, array in zip(params, arrays, strict=False)
        for extent, size in zip(param.shape, array.shape, strict=True)
        if not isinstance(extent, tirx.IntImm)
    }


def _number(extent: tirx.Expr, extents: dict[str, int]) -> int:
    return int(extent) if isinstance(extent, tirx.IntImm) else extents[str(extent)]

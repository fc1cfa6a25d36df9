# SPDX-License-Identifier: Apache-2.0
"""Runs whole Relax modules for GPUs on the CPU: TVM's virtual machine, with kernels in OpenCL.

The module is lowered and built for the CPU as TVM's CUDA pipeline does it for a GPU: reshapes are
views, memory is planned, extents are computed on the host, constants lie in the executable and
keep what kernels write to them. Only the body of each function that launches kernels is another:
it calls back, and its kernels run by :mod:`opencl`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from opencl import POISON, OpenCLKernels, compile_opencl, opencl_context
from tvm import relax, tirx
from tvm.relax.backend.cuda import pipeline as stock
from tvm.target import Target

from schedules.errors import OpError
from tests.targets import compile_unchecked
from tvm_fusion.codegen.host_code import Launch

OPENCL = Target({"kind": "opencl"}, host="llvm")
_numbers = itertools.count()


class RelaxOnOpenCL:
    """A module whose functions are scheduled for OpenCL, ready to be called with numpy arrays.

    Parameters
    ----------
    mod : tvm.IRModule
        ``main`` and what it calls, as ``dlight.ApplyDefaultSchedule`` leaves it.
    target : tvm.target.Target
        The OpenCL target that it was scheduled for.

    Attributes
    ----------
    launches : list[Launch]
        Every launch of the last call, in order; names of kernels begin with that of their function.

    Raises
    ------
    OpError
        If a function neither launches kernels nor is marked for the host.
    """

    def __init__(self, mod: tvm.IRModule, target: Target = OPENCL) -> None:
        opencl_context()  # a skip cannot pass through TVM's virtual machine
        self._target = target
        self._functions: dict[str, _Function] = {}
        self._failure: Exception | None = None
        self.launches: list[Launch] = []
        self._entry = f"tests.relax_on_opencl.{next(_numbers)}"
        run = weakref.WeakMethod(self._run)  # else the registry would keep every module
        tvm_ffi.register_global_func(self._entry, lambda *given: run()(*given))  # type: ignore[misc]
        weakref.finalize(self, tvm_ffi.registry.remove_global_func, self._entry)
        inputs = _input_counts(mod)
        with target:
            lowered = _lower_to_vm(target)(mod)
        executable = compile_unchecked(
            self._with_calls_back(lowered, inputs), relax_pipeline=tvm.transform.Sequential([])
        )
        self._machine = relax.VirtualMachine(executable, tvm.cpu())

    @property
    def kernels(self) -> int:
        """Number of different kernels that the last call launched."""
        return len({launch.kernel for launch in self.launches})

    def __call__(self, *inputs: np.ndarray) -> list[np.ndarray]:
        """Call ``main`` once; its result, a tuple flattened.

        Raises
        ------
        OpError, InvalidInputError
            As :meth:`opencl.OpenCLKernels.run` raises them.
        """
        self.launches, self._failure = [], None
        try:
            result = self._machine["main"](*(tvm.runtime.tensor(array) for array in inputs))
        except Exception:
            if self._failure is not None:  # TVM gives it another type
                raise self._failure from None
            raise
        return _flatten(result)

    def _with_calls_back(self, mod: tvm.IRModule, inputs: dict[str, int]) -> tvm.IRModule:
        result = mod.clone()
        for var, func in mod.functions_items():
            if not isinstance(func, tirx.PrimFunc) or _is_for_host(func):
                continue
            name = str(var.name_hint)
            if not _launches(func):
                raise OpError(
                    f"{name} launches no kernel: no schedule rule took it; expected all functions "
                    "of the module scheduled for a GPU, or those of the host marked for it"
                )
            func = func.with_attr("global_symbol", name)
            self._functions[name] = _Function(func, inputs.get(name, len(func.params)))
            call = tirx.call_packed(self._entry, name, *func.params)
            back = tirx.PrimFunc(func.params, tirx.Evaluate(_of_bits(call)), func.ret_type)
            result.update_func(var, back.with_attr("global_symbol", name))
        return result

    def _run(self, name: str, *arguments: Any) -> int:
        try:
            self.launches += self._functions[str(name)].run(arguments, self._target)
        except Exception as error:
            self._failure = error
            raise
        return 0


class _Function:
    """A function that launches kernels; those behind the first ``inputs`` parameters it writes."""

    def __init__(self, func: tirx.PrimFunc, inputs: int) -> None:
        self._func = func
        self._inputs = inputs
        self._compiled: OpenCLKernels | None = None

    def run(self, arguments: Sequence[Any], target: Target) -> list[Launch]:
        """Run it once, into poisoned outputs; a workspace that it wrote is copied back, too."""
        if self._compiled is None:
            self._compiled = compile_opencl(self._func, target)
        given = [
            self._array(number, value) if isinstance(value, tvm.runtime.Tensor) else value
            for number, value in enumerate(arguments)
        ]
        session = self._compiled.session(*given)
        session.launch()
        for value, before, after in zip(arguments, given, session.read(), strict=True):
            if isinstance(before, np.ndarray) and before.tobytes() != after.tobytes():
                value.copyfrom(after.view("uint16") if value.dtype == "uint16" else after)
        return self._compiled.launches(*given)

    def _array(self, number: int, tensor: tvm.runtime.Tensor) -> np.ndarray:
        array = tensor.numpy().view(np.dtype(str(self._func.params[number].ty.dtype)))
        if number >= self._inputs:
            array.reshape(-1).view(np.uint8)[...] = POISON
        return array


def _of_bits(call: tvm.ir.Call) -> tvm.ir.Call:
    """The call with bfloat16 tensors as their bits; TVM's lowering would tell float32 of them."""

    def tell_bits(argument: tvm.ir.Expr) -> tvm.ir.Expr:
        name = getattr(getattr(argument, "op", None), "name", "")
        if name != "tirx.tvm_stack_make_array" or str(argument.args[4].ty.dtype) != "bfloat16":
            return argument
        fields = [*argument.args[:4], tirx.const(0, "uint16"), *argument.args[5:]]
        return tvm.ir.Call(argument.op, fields, ret_ty=argument.ty)

    return tvm.ir.Call(call.op, [tell_bits(argument) for argument in call.args], ret_ty=call.ty)


def _input_counts(mod: tvm.IRModule) -> dict[str, int]:
    """Number of tensors that each called function reads; outputs and sizes follow them."""
    counts: dict[str, int] = {}

    def note(call: relax.Call) -> None:
        if getattr(call.op, "name", "").startswith("relax.call_tir"):
            function, tensors = call.args[:2]
            counts[str(function.name_hint)] = len(tensors.fields)

    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            tvm_ffi.structural_walk(func.body, (relax.Call, note))
    return counts


def _is_for_host(func: tirx.PrimFunc) -> bool:
    attrs = func.attrs or {}
    target = attrs.get("target")
    return bool(attrs.get("tirx.is_host_func")) or (
        target is not None and target.kind.name in ("llvm", "c")
    )


def _launches(func: tirx.PrimFunc) -> bool:
    """Return whether a loop or a launch is bound to a thread axis."""
    found: list[bool] = []
    visit = [
        (tirx.AttrStmt, lambda attr: found.append(attr.attr_key == "thread_extent")),
        (tirx.For, lambda loop: found.append(loop.thread_binding is not None)),
    ]
    tvm_ffi.structural_walk(func.body, visit)
    return any(found)


def _lower_to_vm(target: Target) -> tvm.transform.Pass:
    """TVM's passes from scheduled functions to its virtual machine, as for CUDA."""
    return tvm.transform.Sequential(
        [*stock.dataflow_lower_passes(target), *stock.finalize_passes(target)]
    )


def _flatten(result: Any) -> list[np.ndarray]:
    if isinstance(result, tvm.runtime.Tensor):
        return [result.numpy()]
    return [array for part in result for array in _flatten(part)]

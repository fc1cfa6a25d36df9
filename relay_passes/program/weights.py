# SPDX-License-Identifier: Apache-2.0
"""Passes on weights: ``LiftWeights``, ``PackWeights``, and ``CaptureGraphs``, which knows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst, GlobalVar
from tvm.ir.transform import PassContext
from tvm.relax.expr_functor import PyExprMutator, mutator

from schedules import attributes
from schedules.workload.workspace_layout import is_workspace

from ..core.constants import array_of, tensor_constant
from ..core.expressions import op_name
from .buffers import sole_kernel

LEAST_BYTES = 4096
"""Bytes below which constants stay: as arguments they would cost more than they save."""

_TYPES = frozenset(
    ["float16", "float32", "float64"] + [f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64)]
)


@tvm.transform.module_pass(opt_level=0, name="LiftWeights")
class LiftWeights:
    """Turn the large constants of a program into additional parameters after its own.

    TVM's virtual machine reads constants from its program by copying them three times. A parameter
    can be read from a file once, into the memory where the kernels use it.

    Before::

        def main(x: R.Tensor((1, 64), "float32")):
            y = R.call_tir(cls.matmul, (x, metadata["relax.expr.Constant"][0]), ...)

    After, with the constant in the module's attribute ``tvm_fusion.weights``::

        def main(x: R.Tensor((1, 64), "float32"), weight0: R.Tensor((64, 64), "float32")):
            y = R.call_tir(cls.matmul, (x, weight0), ...)

    It runs last: in each call, the virtual machine checks the parameters that exist when
    ``VMShapeLower`` runs. Left alone: constants of less than 4096 bytes, unless the program is one
    kernel, which may then be called with the weights, or they have no element, since TVM cannot
    load those, or they are workspaces, which the host must reach; constants of types that numpy
    lacks, and other functions than those named.

    Parameters
    ----------
    functions : Sequence[str]
        The functions; each takes the weights of all of them, of which equal ones are one.
    """

    def __init__(self, functions: Sequence[str] = ("main",)) -> None:
        self.functions = tuple(functions)

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite the functions."""
        weights: dict[_Place, GenericConst] = {}
        seen = {}
        for name in self.functions:
            alone = sole_kernel(mod[name]) is not None
            lifter = _Lifter(mod, 0 if alone else LEAST_BYTES, weights)
            seen[name] = lifter.visit_expr(mod[name]), lifter.params
        if not weights:
            return mod
        mod = mod.clone()
        for name, (func, params) in seen.items():
            lifted = [
                params[place] if place in params else relax.Var(f"weight{number}", constant.ty)
                for number, (place, constant) in enumerate(weights.items())
            ]
            taken = [*func.params, *lifted]
            func = relax.Function(taken, func.body, func.ret_ty, func.is_pure, func.attrs)
            mod.update_func(mod.get_global_var(name), func)
        before = (
            list(mod.attrs[attributes.WEIGHTS])
            if mod.attrs and attributes.WEIGHTS in mod.attrs
            else []
        )
        return mod.with_attr(
            attributes.WEIGHTS, before + [constant.value for constant in weights.values()]
        )


_Place = tuple[int, str, tuple[int, ...]]
"""Address, type and shape of a tensor."""


@mutator
class _Lifter(PyExprMutator):
    """Replaces constants by parameters and collects them in ``weights``."""

    def __init__(
        self, mod: IRModule, least_bytes: int, weights: dict[_Place, GenericConst]
    ) -> None:
        super().__init__(mod)
        self._least_bytes = least_bytes
        self._weights = weights
        self.params: dict[_Place, relax.Var] = {}

    def visit_generic_const_(self, op: GenericConst) -> relax.Expr:
        """Use a parameter instead; one for all uses of a tensor."""
        tensor = op.value
        if not isinstance(tensor, tvm.runtime.Tensor):
            return op
        if str(tensor.dtype) not in _TYPES:
            return op
        if 0 < _bytes(tensor) < self._least_bytes and not is_workspace(np.from_dlpack(tensor)):
            return op
        place = (tensor.data_ptr(), str(tensor.dtype), tuple(int(size) for size in tensor.shape))
        self._weights.setdefault(place, op)
        if place not in self.params:
            number = list(self._weights).index(place)
            self.params[place] = relax.Var(f"weight{number}", op.ty)
        return self.params[place]


def _bytes(tensor: tvm.runtime.Tensor) -> int:
    size = tvm.DataType(str(tensor.dtype)).bits // 8
    for extent in tensor.shape:
        size *= extent
    return size


@tvm.transform.module_pass(opt_level=0, name="PackWeights")
class PackWeights:
    """Lay constant matrices out, and round constants, that schedule rules have marked.

    Before::

        @T.prim_func
        def matmul(x: T.Buffer((64, 512)), w: T.Buffer((16, 512, 16)), y):
            T.func_attr({"tvm_fusion.laid_out": [1, 1, 16]})
            ...

        y = R.call_tir(cls.matmul, (x, w), ...)                         # w: [512, 256]

    After, without the attribute::

        y = R.call_tir(cls.matmul, (x, w'), ...)                        # w': [16, 512, 16]

    with ``w'[j, k, lane] = w[k, 16 * j + lane]``. The attribute holds the position of the argument,
    the axis that is cut, and the number of lanes. The attribute ``tvm_fusion.rounded`` holds the
    position of a constant of float32 that is rounded to TF32: to 10 bits behind the point, ties
    away from zero, as ``cvt.rna.tf32.f32`` does. It runs after ``ApplyRules``. Left alone: all
    functions without these attributes. The pass is idempotent.
    """

    def transform_module(self, mod: IRModule, _: tvm.transform.PassContext) -> IRModule:
        """Rewrite the calls of every marked function."""
        marked = {
            name.name_hint: found
            for name, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and (found := _marks(func))
        }
        if not marked:
            return mod
        others = {
            name: func for name, func in mod.functions_items() if name.name_hint not in marked
        }
        packer = _Packer(IRModule(others), marked)
        for name, marks in marked.items():  # a name of a function has its type
            func = mod[name]
            for mark in marks:
                func = func.without_attr(mark)
            packer.add(name, func)
        for name, func in others.items():
            if isinstance(func, relax.Function):
                packer.builder_.update_func(name, packer.visit_expr(func))
        functions = dict(packer.builder_.get().functions_items())
        return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


_Marks = dict[str, list[int]]


def _marks(func: tirx.PrimFunc) -> _Marks:
    """Attributes of a function that say what is done to its constants: a position, and how."""
    attrs = func.attrs or {}
    names = (attributes.LAID_OUT, attributes.ROUNDED)
    return {name: [int(number) for number in attrs[name]] for name in names if name in attrs}


@mutator
class _Packer(PyExprMutator):
    """Replaces the constants of calls."""

    def __init__(self, mod: IRModule, marked: dict[str, _Marks]) -> None:
        super().__init__(mod)
        self._marked = marked
        self._packed: dict[tuple[int | str, ...], relax.Expr] = {}
        self._added: dict[str, GlobalVar] = {}

    def add(self, name: str, func: tirx.PrimFunc) -> None:
        """Add a function in its new form."""
        self._added[name] = self.builder_.add_func(func, name)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """Give a marked function its constant in the wanted layout."""
        name = call.args[0].name_hint if op_name(call) == "relax.call_tir" else ""
        if name not in self._marked:
            return super().visit_call_(call)
        fields = list(call.args[1].fields)
        for mark, (place, *how) in self._marked[name].items():
            fields[place] = self._pack(fields[place], mark, how)
        arguments = [self._added[name], relax.Tuple(fields), *call.args[2:]]
        return super().visit_call_(relax.Call(call.op, arguments, call.attrs, call.ty_args))

    def _pack(self, matrix: GenericConst, mark: str, how: list[int]) -> relax.Expr:
        """A constant in its new form; the same one for all calls with these elements."""
        tensor = matrix.value
        key = (tensor.data_ptr(), *map(int, tensor.shape), mark, *how)
        if key not in self._packed:
            change = _laid_out if mark == attributes.LAID_OUT else _rounded
            self._packed[key] = tensor_constant(change(array_of(matrix), *how), matrix.ty.dtype)
        return self._packed[key]


def _laid_out(matrix: np.ndarray, axis: int, lanes: int) -> np.ndarray:
    values = np.moveaxis(matrix, axis, 1)
    depth, width = values.shape
    return values.reshape(depth, width // lanes, lanes).transpose(1, 0, 2)


def _rounded(values: np.ndarray) -> np.ndarray:
    """Numbers with the bits of TF32; NaN, whose bits might be dropped or carried, as one NaN."""
    values = np.where(np.isnan(values), np.float32(np.nan), values)
    return ((values.view("uint32") + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view("float32")


_OPTION = "relax.backend.use_cuda_graph"


@tvm.transform.module_pass(opt_level=0, name="CaptureGraphs")
class CaptureGraphs:
    """Make TVM capture the kernels whose tensors keep their addresses from call to call.

    That is TVM's own pass ``RewriteCUDAGraph``, with the weights as tensors that stay where they
    are, like the planned memory of intermediate results. Kernels that read an input or write an
    output of the program, and those of unknown sizes, are launched one by one as before.

    Before::

        def main(x, weight0):
            cls.first(x, weight0, a)
            cls.second(a, b)
            cls.third(b, c)
            cls.last(c, y)

    After; the function is captured in the first call, and replayed in all others::

        def main(x, weight0):
            cls.first(x, weight0, a)
            vm.builtin.cuda_graph.run_or_capture(cls.cuda_graph_capture, (a, b, c), 0)
            cls.last(c, y)

    It runs after ``StaticPlanBlockMemory`` and :class:`.LiftWeights`, and before tensors are
    allocated by the virtual machine. The caller passes the same weights in every call.

    Parameters
    ----------
    functions : Sequence[str]
        The programs of the module, each of which takes all weights.
    """

    def __init__(self, functions: Sequence[str] = ("main",)) -> None:
        self.functions = tuple(functions)

    def transform_module(self, mod: IRModule, ctx: PassContext) -> IRModule:
        """Return the module with captured functions."""
        weights = (
            mod.attrs[attributes.WEIGHTS] if mod.attrs and attributes.WEIGHTS in mod.attrs else ()
        )
        mod = mod.clone()
        for name in self.functions:
            func = mod[name]
            known = func.with_attr("num_input", len(func.params) - len(weights))
            mod.update_func(mod.get_global_var(name), known)
        with PassContext(opt_level=ctx.opt_level, config={**ctx.config, _OPTION: True}):
            return relax.transform.RewriteCUDAGraph()(mod)

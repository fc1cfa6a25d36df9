# SPDX-License-Identifier: Apache-2.0
"""Pass ``PackLayout``: activations in NCHW[x]c from the first convolution to the last."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import tvm
from tvm import relax
from tvm.ir import IRModule, Op
from tvm.target import Target

from schedules.cpu.core.machine import CPUInfo
from schedules.cpu.cost.conv2d_knobs import suits_mmla
from schedules.cpu.cost.tile_conv2d_knobs import fastest_blocks, tile_groups
from schedules.errors import OpError
from schedules.gpu.conv2d.tensor_core_pair import takes_pair
from schedules.gpu.core.machine import KINDS, GPUInfo, gpu_target
from schedules.gpu.core.tensor_core import CHUNK
from schedules.gpu.gemm.implicit_gemm import LANES
from schedules.gpu.gemm.matmul.tensor_core_tile import DTYPES as HALF
from schedules.workload.conv2d import WORDS, ChannelBlocks, Conv2DKernel

from ..core.expressions import Value
from ..core.graph import pass_target
from ..op.channels import unpack
from .packed import RULES
from .packed.channels import CHANNEL_RULES
from .packed.consumers import Uses, find_uses
from .packed.convolution import CONVOLUTION_RULES, is_cut, kernel_of, read_convolution
from .packed.packing_state import Packed, Result, Scope, Takes

_PACK = "relax.tvm_fusion.pack"
_UNPACK = "relax.tvm_fusion.unpack"
_RESHAPE = "relax.reshape"


@tvm.transform.module_pass(opt_level=0, name="PackLayout")
class PackLayout:
    """Keep activations in blocks of ``x`` channel lanes between convolutions.

    Before::

        lv = R.tvm_fusion.conv2d(x, w1, b1, ...)      # x: [1, 3, 8, 8]
        lv1 = R.nn.max_pool2d(lv, ...)
        lv2 = R.tvm_fusion.conv2d(lv1, w2, b2, ...)
        gv = R.nn.softmax(lv2, axis=1)

    After, with ``x = 8``::

        lv = R.tvm_fusion.conv2d(x, w1p, b1p, ..., data_layout="NCHW", out_layout="NCHW8c")
        lv1 = R.nn.max_pool2d(lv, ..., layout="NCHW8c")
        lv2 = R.tvm_fusion.conv2d(lv1, w2p, b2p, ..., data_layout="NCHW8c", out_layout="NCHW8c")
        lv3 = R.tvm_fusion.unpack(lv2, channels=...)
        gv = R.nn.softmax(lv3, axis=1)

    Weights and biases that are constants are packed here, others by calls in the function. A
    reshape reads past those before it, so that it is a view. On a GPU blocks are 16 bytes. Left
    alone there: convolutions of float32 whose groups cross block boundaries, and those of 16-bit
    floats and of bytes with open sizes or without tensor cores. Left alone everywhere: ops that are
    in no table of ``relay_passes/layout/packed``, ops whose operands would be packed or unpacked
    for them alone, convolutions that are packed already, and functions without any of our
    convolutions or packed tensors.

    Parameters
    ----------
    target : Target | None
        Gives the number of lanes: the vectors of a CPU, or the rows of its tile registers, which
        tensors of few channels do not fill; 16 bytes on a GPU. None stands for the current target.
    block : int | None
        The number of lanes, whatever the target.
    tf32 : bool
        Whether, on a GPU, dense convolutions and pairs run on tensor cores: then their weights have
        the input lanes of a block last.
    """

    def __init__(
        self, target: Target | None = None, block: int | None = None, tf32: bool = False
    ) -> None:
        if block is not None and (
            isinstance(block, bool) or not isinstance(block, int) or block < 2
        ):
            raise OpError(f"PackLayout: block is {block!r}; expected an integer of at least 2")
        self.target = target
        self.block = block
        self.tf32 = tf32

    def transform_module(self, mod: IRModule, ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite every Relax function of ``mod``."""
        if self.block:
            blocks = ChannelBlocks(self.block, self.block)
        else:
            blocks = _channel_blocks(mod, pass_target(self.target, "PackLayout"))
        target, takes, cpu, chunks = gpu_target(self.target), _takes_on_cpu, None, _takes_none
        if target is not None:
            gpu = GPUInfo.from_target(target)
            takes = partial(_takes_on_gpu, lanes=blocks.most)
            if gpu.has_tensor_cores:
                mod = self._pack_bytes(self._pack_halves(mod))
                if self.tf32 and blocks.most == LANES:
                    chunks = partial(_is_tf32, gpu=gpu)
        elif current := self.target or Target.current(allow_none=True):
            cpu = CPUInfo.from_target(current)
        return _Packer(mod, blocks, takes, cpu, chunks).rewrite_module(mod)

    def _pack_halves(self, mod: IRModule) -> IRModule:
        """The module with convolutions of 16-bit floats packed."""
        block = self.block or CHUNK // 2
        packer = _Packer(mod, ChannelBlocks(block, block), _takes_half, chunks=_is_pair)
        return packer.rewrite_module(mod)

    def _pack_bytes(self, mod: IRModule) -> IRModule:
        """The module with convolutions of bytes packed, of 16 bytes each."""
        blocks = ChannelBlocks(CHUNK, CHUNK)
        return _Packer(mod, blocks, _takes_bytes, chunks=_is_dense).rewrite_module(mod)


def _channel_blocks(mod: IRModule, target: Target) -> ChannelBlocks:
    """Channels in a block.

    On a CPU those of float32 fill a vector register; more fill the rows of tile registers, where
    these compute all dense convolutions. On a GPU they are 4, the 16 bytes that a thread loads at
    once, while neighbouring threads process neighbouring pixels.
    """
    if target.kind.name in KINDS:
        return ChannelBlocks(LANES, LANES)
    cpu = CPUInfo.from_target(target)
    lanes = cpu.lanes("float32")
    functions = [func for func in mod.functions.values() if isinstance(func, relax.Function)]
    calls = [call for func in functions for call in _calls_of(func)] if cpu.tiles else []
    found = [kernel for kernel in map(kernel_of, calls) if kernel is not None]
    joined = any(_calls(call, name) for call in calls for name in CHANNEL_RULES)
    return fastest_blocks(found, cpu, are_equal=joined) or ChannelBlocks(lanes, lanes)


def _calls_of(func: relax.Function) -> list[relax.Call]:
    calls: list[relax.Call] = []

    def look(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call):
            calls.append(expr)

    relax.analysis.post_order_visit(func, look)
    return calls


def _takes_on_cpu(kernel: Conv2DKernel) -> bool:
    return not (kernel.is_quantized and _is_pair(kernel))


def _takes_none(_: Conv2DKernel) -> bool:
    return False


def _takes_on_gpu(kernel: Conv2DKernel, lanes: int) -> bool:
    is_float32 = kernel.dtype == "float32"
    return is_float32 and not any(is_cut(layer, lanes) for layer in kernel.layers)


def _takes_half(kernel: Conv2DKernel) -> bool:
    return kernel.dtype in HALF and _is_sized(kernel)


def _takes_bytes(kernel: Conv2DKernel) -> bool:
    return (kernel.is_quantized or kernel.data_dtype == "uint8") and _is_sized(kernel)


def _is_sized(kernel: Conv2DKernel) -> bool:
    """Return whether images are of a known size."""
    return None not in (kernel.height, kernel.width)


def _is_pair(kernel: Conv2DKernel) -> bool:
    return len(kernel.layers) == 2


def _is_dense(kernel: Conv2DKernel) -> bool:
    return all(layer.groups == 1 for layer in kernel.layers)


def _is_tf32(kernel: Conv2DKernel, gpu: GPUInfo) -> bool:
    """Return whether tensor cores take a kernel of float32."""
    return takes_pair(kernel, gpu, tf32=True) if _is_pair(kernel) else _is_dense(kernel)


@relax.expr_functor.mutator
class _Packer(relax.PyExprMutator):
    """Binds the packed twin of each tensor beside its NCHW form; then removes unused bindings."""

    def __init__(
        self,
        mod: IRModule,
        blocks: ChannelBlocks,
        takes: Takes,
        cpu: CPUInfo | None = None,
        chunks: Takes = _takes_none,
    ) -> None:
        super().__init__(mod)
        self.blocks = blocks
        visits = self.builder_.emit, self.visit_expr, self._bound
        self.scope = Scope(blocks, Uses(), *visits, takes, chunks=chunks)
        if cpu is not None:
            self.scope.pairs = cpu.word_channels == WORDS["int16"]
            self.scope.shifts = cpu.shifts_bytes
            self.scope.tile_groups = partial(tile_groups, blocks=blocks, cpu=cpu)
            self.scope.mmla = partial(suits_mmla, cpu=cpu)

    def rewrite_module(self, mod: IRModule) -> IRModule:
        """The module with every Relax function rewritten that is concerned."""
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function) and self.is_concerned(func):
                self.builder_.update_func(name, self.rewrite(func))
        return self.builder_.get()

    def is_concerned(self, func: relax.Function) -> bool:
        """Return whether ``func`` holds a convolution to pack, or an unpacked packed tensor."""
        return any(self._is_sink(call) or _calls(call, _UNPACK) for call in _calls_of(func))

    def rewrite(self, func: relax.Function) -> relax.Function:
        """``func`` with everything packed that should be."""
        func = relax.analysis.remove_all_unused(func)
        uses = find_uses(func, self._is_sink, self._can_stay_packed)
        self.scope = replace(self.scope, uses=uses, packed={}, tuples={})
        return relax.analysis.remove_all_unused(self.visit_expr(func))

    def visit_seq_expr_(self, op: relax.SeqExpr) -> relax.Expr:
        """Forget the packed tensors of a body at its end."""
        saved = dict(self.scope.packed), dict(self.scope.tuples)
        result = super().visit_seq_expr_(op)
        self.scope.packed, self.scope.tuples = saved
        return result

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> relax.BindingBlock:
        """Forget the packed tensors of a block at its end; they are local to it."""
        saved = dict(self.scope.packed), dict(self.scope.tuples)
        result = super().visit_dataflow_block_(block)
        self.scope.packed, self.scope.tuples = saved
        return result

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Rewrite one binding by the rule of its op."""
        value = binding.value
        if isinstance(value, relax.Call) and isinstance(value.op, Op):
            self._visit_call_binding(binding)
        elif isinstance(value, relax.Var) and value in self.scope.packed:
            self._bind(binding, self.scope.packed[value])
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in self.scope.tuples:
            self._bind(binding, self.scope.tuples[value.tuple_value][value.index])
        else:
            super().visit_var_binding_(binding)

    def _visit_call_binding(self, binding: relax.VarBinding) -> None:
        call = binding.value
        if _calls(call, _UNPACK):
            self._remember_unpacked(binding)
        elif self._is_pack(call):
            self._visit_pack_binding(binding)
        elif _calls(call, _RESHAPE) and self._is_reshaped(call.args[0]):
            self._bind(binding, self.scope.reshape(*call.args))
        else:
            rule = RULES.get(call.op.name)
            self._bind(binding, rule(self.scope, binding) if rule else None)

    def _is_reshaped(self, expr: relax.Expr) -> bool:
        """Return whether a tensor has the elements of another one in another shape."""
        value = self._bound(self.visit_expr(expr))
        return isinstance(value, relax.Call) and _calls(value, _RESHAPE)

    def _bind(self, binding: relax.VarBinding, result: Result) -> None:
        """Bind the result of a rule, with its NCHW form under the name of the original."""
        if result is None:
            super().visit_var_binding_(binding)
        elif isinstance(result, Packed):
            if not isinstance(result.expr, relax.Var):
                result = replace(result, expr=self.builder_.emit(result.expr, binding.var.name))
            self._replace(binding, unpack(result.expr, result.channels))
            self.scope.packed[binding.var] = result
        elif isinstance(result, tuple):
            fields = [self.builder_.emit(unpack(part.expr, part.channels)) for part in result]
            self._replace(binding, relax.Tuple(fields))
            self.scope.tuples[binding.var] = result
        else:
            self._replace(binding, result)

    def _replace(self, binding: relax.VarBinding, value: relax.Expr) -> None:
        """Bind the original variable to another value, made of variables of the new function."""
        super().visit_var_binding_(relax.VarBinding(binding.var, value))

    def _visit_pack_binding(self, binding: relax.VarBinding) -> None:
        """Drop a pack of an already packed tensor, else remember it."""
        source = binding.value.args[0]
        packed = self.scope.lookup(source)
        local = isinstance(binding.var, relax.DataflowVar)
        if packed is None:
            super().visit_var_binding_(binding)
            if isinstance(source, relax.Var):
                twin = Packed(self.visit_expr(binding.var), int(source.ty.shape.values[1]))
                self.scope.packed[source] = twin
        elif local or not isinstance(packed.expr, relax.DataflowVar):
            self.set_var_remap(binding.var, packed.expr)
        else:
            # The block's output has to be bound in it, to a name that may leave it.
            self._replace(binding, packed.expr)

    def _remember_unpacked(self, binding: relax.VarBinding) -> None:
        """Remember the packed twin of a tensor that the function itself unpacks."""
        super().visit_var_binding_(binding)
        packed = self.visit_expr(binding.value.args[0])
        channels = int(binding.value.attrs["channels"])
        block = self.blocks.of(channels)
        if isinstance(packed, relax.Var) and int(packed.ty.shape.values[4]) == block:
            bound = 0.0 if channels % block == 0 else math.inf
            self.scope.packed[binding.var] = Packed(packed, channels, bound)

    def _bound(self, expr: relax.Expr) -> Value:
        return self.lookup_binding(expr) if isinstance(expr, relax.Var) else None

    def _is_pack(self, call: relax.Call) -> bool:
        if not _calls(call, _PACK):
            return False
        channels = int(call.args[0].ty.shape.values[1])
        return int(call.attrs["block"]) == self.blocks.of(channels)

    def _is_sink(self, call: relax.Call) -> bool:
        kernel = read_convolution(call, self.blocks, self.scope.takes)
        return self._is_pack(call) or kernel is not None

    def _can_stay_packed(self, call: relax.Call) -> bool:
        # A convolution that is no sink has no packed form, or has it already.
        return (
            isinstance(call.op, Op)
            and call.op.name in RULES
            and call.op.name not in CONVOLUTION_RULES
        )


def _calls(call: relax.Call, name: str) -> bool:
    return isinstance(call.op, Op) and call.op.name == name

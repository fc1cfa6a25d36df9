# SPDX-License-Identifier: Apache-2.0
"""Pass ``FuseConv2D``: fusion of two neighbouring convolutions into one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import IRModule, relax, tirx
from tvm.ir import GenericConst
from tvm.target import Target

from schedules.cpu.cost.fused_conv2d_limits import unsupported
from schedules.errors import OpError
from schedules.gpu.core.machine import KINDS
from schedules.gpu.gemm.matmul.tensor_core_tile import DTYPES as TENSOR_DTYPES
from schedules.tuning.records import Records
from schedules.workload.conv2d import FusedConv2DWorkload

from .. import op as ops
from ..core.expressions import op_name
from ..core.graph import pass_target
from ..op.quantized_conv2d import QUANTIZED_CONV2D, read_quantized
from .chain_rewriter import Rewrites, rewrite_chains
from .conv_chain import ConvChain, Users, find_chains, find_users
from .fusion_decision import decide, recorded_decision
from .fusion_report import Entry, cost_fields, merge_reports, read_fusion_report, write_report
from .gpu_fusion_decision import gpu_obstacle
from .pair_decision import Decision
from .winograd_decision import check_mode

Chooser = Callable[[FusedConv2DWorkload, Target], "bool | Decision"]
_MODES = ("auto", "all", "none")
_BYTES = "uint8"


@tvm.transform.module_pass(opt_level=0, name="FuseConv2D")
class FuseConv2D:
    """Replace pairs of convolutions, with their epilogues, by one call each.

    Before::

        lv0 = R.nn.conv2d(x, weight1, padding=[1, 1, 1, 1], groups=32)
        lv1 = R.add(lv0, bias1)                   # [1, 32, 1, 1]
        lv2 = R.nn.relu(lv1)
        lv3 = R.nn.conv2d(lv2, weight2)
        lv4 = R.add(lv3, bias2)                   # [1, 64, 1, 1]
        lv5 = R.add(lv4, residual)

    After::

        lv5 = R.tvm_fusion.fused_conv2d(
            x, weight1, bias1, weight2, bias2, residual,
            padding1=[1, 1, 1, 1], groups1=32, activation1="relu",
        )

    Pairs of ``R.tvm_fusion.quantized_conv2d`` become ``R.tvm_fusion.fused_quantized_conv2d`` on a
    GPU. Of three convolutions in a row two are fused: those of the greatest predicted gain,
    depthwise with the pointwise one after it before any other pair. Left alone: pairs whose
    intermediate has a second consumer or leaves its dataflow block, a first convolution that ends
    with a residual addition, symbolic heights and widths, pairs that the schedule of fused kernels
    does not support, and all that ``FuseEpilogue`` leaves alone but, on a GPU, convolutions of
    float16 or bfloat16 whose results are rounded to it. Every candidate is recorded with its
    decision and the reason in the module's attribute ``tvm_fusion.fusion_report``, a JSON list;
    where the batch is symbolic, its numbers are those of one image.

    Parameters
    ----------
    fuse : str | Callable[[FusedConv2DWorkload, Target], bool | Decision]
        ``auto`` asks :func:`relay_passes.conv2d.fusion_decision.decide`, ``all`` fuses every pair
        that can be, ``none`` only reports; a callable decides for itself.
    target : Target | str | dict | None
        Target of the module, a CPU or a GPU; None takes the current target.
    winograd : str
        Choice as in :class:`relay_passes.ChooseWinograd`, used on CPUs only. Unless it is
        ``never``, a pair has to be faster than its separate layers, of which those with constant
        weights may be computed by that algorithm.
    records : Records | None
        Winners of tuning jobs, which ``auto`` follows before all predictions. Where all pairs of a
        chain have records, those are fused that together save the most measured time.
    tf32 : bool
        Whether, on a GPU, convolutions and pairs of float32 may run on tensor cores.
    """

    def __init__(
        self,
        fuse: str | Chooser = "auto",
        target: Target | str | dict[str, object] | None = None,
        winograd: str = "auto",
        records: Records | None = None,
        tf32: bool = False,
    ) -> None:
        check_fuse(fuse, "FuseConv2D")
        check_mode(winograd, "FuseConv2D")
        self.fuse = fuse
        self.winograd = winograd
        self.records = records or Records()
        self.tf32 = tf32
        self.target = None if target is None else Target(target)

    def transform_module(self, mod: IRModule, _ctx: tvm.transform.PassContext) -> IRModule:
        """Rewrite all Relax functions and update the report."""
        target = pass_target(self.target, "FuseConv2D")
        entries: list[Entry] = []

        judge = _Judge(self.fuse, target, self.winograd != "never", self.records, self.tf32)
        dtypes = ("float32", *TENSOR_DTYPES, _BYTES) if target.kind.name in KINDS else ("float32",)

        def plan(name: str, block: relax.DataflowBlock) -> Rewrites:
            pairs = [pair for dtype in dtypes for pair in _pairs(block, dtype)]
            candidates = _choose([judge(pair) for pair in pairs])
            entries.extend(candidate.report(name) for candidate in candidates)
            return _rewrites(candidates)

        result = rewrite_chains(mod, plan)
        return write_report(result, merge_reports(read_fusion_report(mod), entries))


def check_fuse(fuse: str | Chooser, name: str) -> None:
    """Check the choice of pairs of the pass ``name``; else OpError."""
    if not callable(fuse) and fuse not in _MODES:
        raise OpError(
            f"{name}: fuse is {fuse!r}; expected one of {', '.join(_MODES)} or a callable"
        )


def asked_decision(
    name: str,
    fuse: str | Chooser,
    workload: FusedConv2DWorkload,
    target: Target,
    predicted: Callable[[], Decision],
) -> Decision:
    """The decision on a pair by the user's choice, or by a prediction of the pass ``name``."""
    if fuse == "none":
        return Decision(False, "fusion is switched off")
    decision = predicted()
    if not callable(fuse):
        if fuse == "auto" or decision.fuse:
            return decision
        return Decision(True, f"every pair was requested; {decision.reason}", decision.gain)
    answer = fuse(workload, target)
    if isinstance(answer, Decision):
        return answer
    if not isinstance(answer, bool):
        raise OpError(f"{name}: the callable returned {answer!r}; expected bool or Decision")
    return Decision(answer, "the caller's choice", decision.gain)


@dataclass(frozen=True)
class _Pair:
    """Two chains, the second of which is the only reader of the first.

    ``plain_data`` and ``plain_out`` say whether the data comes from outside the block, and whether
    the result leaves it.
    """

    first: ConvChain
    second: ConvChain
    plain_data: bool
    plain_out: bool

    def input_shape(self) -> list[int | str]:
        """The shape of the data, symbolic extents as text."""
        extents = self.first.data.ty.shape.values
        return [int(value) if isinstance(value, tirx.IntImm) else str(value) for value in extents]

    def workload(self) -> FusedConv2DWorkload | None:
        """The pair's shapes, those of one image if the batch is symbolic; else None."""
        batch, _, height, width = self.input_shape()
        if not isinstance(height, int) or not isinstance(width, int):
            return None
        return FusedConv2DWorkload(
            batch=batch if isinstance(batch, int) else 1,
            height=height,
            width=width,
            layer1=self.first.layer,
            layer2=self.second.layer,
            residual=self.second.residual is not None,
            dtype=str(self.first.data.ty.dtype),
            plain_data=self.plain_data,
            plain_out=self.plain_out,
        )

    def to_call(self) -> relax.Call:
        """The pair as one call; OpError if the op rejects it."""
        first, second = self.first, self.second
        if first.scale is not None:
            return self._to_call_of_bytes()
        return ops.fused_conv2d(
            first.data,
            first.weight,
            first.bias,
            second.weight,
            second.bias,
            second.residual,
            **first.layer.to_attrs("1"),
            **second.layer.to_attrs("2"),
        )

    def _to_call_of_bytes(self) -> relax.Call:
        first, second = self.first, self.second
        operands = [
            *(first.data, first.weight, first.bias, first.scale),
            *(second.weight, second.bias, second.scale, second.residual),
        ]
        attrs = first.layer.to_attrs("1") | second.layer.to_attrs("2")
        del attrs["groups1"], attrs["groups2"]
        return ops.fused_quantized_conv2d(
            *operands, **attrs, out_dtype=str(second.out_dtype), addition=second.addition
        )


@dataclass(frozen=True)
class _Candidate:
    """A pair with the decision on it; no call where the pair cannot be fused."""

    pair: _Pair
    call: relax.Call | None
    decision: Decision

    def priority(self) -> tuple[bool, float]:
        """Sort key; the smallest is fused first."""
        first, second = self.pair.first.layer, self.pair.second.layer
        return (not (first.is_depthwise and second.is_pointwise), -self.decision.gain)

    def report(self, function: str) -> Entry:
        """The candidate's entry in the module's report."""
        first, second = self.pair.first, self.pair.second
        return {
            "function": function,
            "first": first.output.name,
            "second": second.output.name,
            "input_shape": self.pair.input_shape(),
            "layer1": str(first.layer),
            "layer2": str(second.layer),
            "fused": self.decision.fuse,
            "reason": self.decision.reason,
            **({"record": self.decision.record} if self.decision.record else {}),
            **cost_fields(self.pair.workload()),
        }


def _pairs(block: relax.DataflowBlock, dtype: str) -> Iterator[_Pair]:
    """All pairs of an element type in a block, in the order of their first convolutions."""
    users = find_users(block)
    is_bytes = dtype == _BYTES
    chains = _find_byte_chains(block) if is_bytes else find_chains(block, users, dtype)
    bound = {binding.var for binding in block.bindings}
    by_convolution = {chain.bindings[0].var: chain for chain in chains}
    for first in chains:
        readers = users.get(first.output, [])
        if not isinstance(first.output, relax.DataflowVar) or len(readers) != 1:
            continue  # the intermediate is needed elsewhere
        second = by_convolution.get(readers[0].var)
        if second is None or (second.out_dtype is not None and not is_bytes):
            continue
        adds_it = second.residual is not None and second.residual.same_as(first.output)
        if second.data.same_as(first.output) and not adds_it:
            yield _Pair(first, second, first.data not in bound, _leaves(second.output, users))


def _leaves(var: relax.Var, users: Users) -> bool:
    """Return whether a block returns the variable itself."""
    return not isinstance(var, relax.DataflowVar) or any(
        binding.value.same_as(var) and not isinstance(binding.var, relax.DataflowVar)
        for binding in users.get(var, [])
    )


@dataclass(frozen=True)
class _Judge:
    """Decides on one pair, regardless of its neighbours."""

    fuse: str | Chooser
    target: Target
    winograd: bool
    records: Records
    tf32: bool

    def __call__(self, pair: _Pair) -> _Candidate:
        workload = pair.workload()
        obstacle = _obstacle(pair, workload, self.target, self.tf32)
        if workload is None or obstacle:
            refusal = Decision(False, obstacle or "height or width is symbolic")
            return _Candidate(pair, None, refusal)
        try:
            call = pair.to_call()
        except OpError as error:
            return _Candidate(pair, None, Decision(False, str(error)))
        return _Candidate(pair, call, self._ask(pair, workload))

    def _ask(self, pair: _Pair, workload: FusedConv2DWorkload) -> Decision:
        allowed = self._allowed(pair)
        if self.fuse == "auto":
            found = recorded_decision(workload, self.target, self.records, allowed)
            if found is not None:
                return found

        def predicted() -> Decision:
            return decide(workload, self.target, allowed, self.tf32)

        return asked_decision("FuseConv2D", self.fuse, workload, self.target, predicted)

    def _allowed(self, pair: _Pair) -> tuple[bool, bool]:
        """Layers that, as separate kernels, may be computed by Winograd's algorithm."""
        first, second = (
            self.winograd and isinstance(chain.weight, GenericConst)
            for chain in (pair.first, pair.second)
        )
        return first, second


def _obstacle(
    pair: _Pair, workload: FusedConv2DWorkload | None, target: Target, tf32: bool
) -> str | None:
    """Reason why no kernel can take the pair, or None."""
    if pair.first.residual is not None:
        return "the first convolution ends with a residual addition"
    if target.kind.name in KINDS:
        return None if workload is None else gpu_obstacle(workload, target, tf32)
    if target.kind.name != "llvm":
        return f"no fused convolution kernel for target kind {target.kind.name!r}"
    return unsupported(pair.second.layer)


def _choose(candidates: list[_Candidate]) -> list[_Candidate]:
    """Withdraw candidates that share a convolution with a better one."""
    chosen: dict[relax.Var, _Candidate] = {}
    result = list(candidates)
    gaining = [index for index, candidate in enumerate(candidates) if candidate.decision.fuse]
    measured = _best_by_records(candidates, gaining)

    def rank(index: int) -> tuple[Any, ...]:
        return index not in measured, candidates[index].priority(), index

    for index in sorted(gaining, key=rank):
        candidate = candidates[index]
        ends = (candidate.pair.first.output, candidate.pair.second.output)
        rival = next((chosen[end] for end in ends if end in chosen), None)
        if rival is None:
            chosen.update(dict.fromkeys(ends, candidate))
            continue
        names = f"{rival.pair.first.output.name} and {rival.pair.second.output.name}"
        reason = f"{names} are fused with each other"
        if any(candidates[other] is rival for other in measured):
            reason += ", which saves more time by record"
        refusal = replace(candidate.decision, fuse=False, reason=reason)
        result[index] = replace(candidate, decision=refusal)
    return result


def _best_by_records(candidates: list[_Candidate], gaining: list[int]) -> set[int]:
    """Pairs without a common convolution that save the most measured time.

    Those of chains without a record for one of their pairs are left out.
    """
    by_first = {candidates[index].pair.first.output: index for index in gaining}
    later = {candidates[index].pair.second.output for index in gaining}
    best: set[int] = set()
    for index in gaining:
        if candidates[index].pair.first.output in later:
            continue  # not the first of its chain
        here: int | None = index
        last: tuple[float, list[int]] = (0.0, [])
        total = last
        while here is not None:
            saved = candidates[here].decision.saved
            if saved is None:
                total = last = (0.0, [])
                break
            total, last = max(total, (last[0] + saved, [*last[1], here])), total
            here = by_first.get(candidates[here].pair.second.output)
        best.update(total[1])
    return best


def _rewrites(candidates: list[_Candidate]) -> Rewrites:
    rewrites = Rewrites()
    for candidate in candidates:
        if candidate.decision.fuse and candidate.call is not None:
            first, second = candidate.pair.first, candidate.pair.second
            rewrites.calls[second.output] = candidate.call
            rewrites.dead.update((*first.dead, first.output, *second.dead))
    return rewrites


def _find_byte_chains(block: relax.DataflowBlock) -> list[ConvChain]:
    """All convolutions of bytes in NCHW of a block: the epilogues are part of their calls."""
    return [
        chain for binding in block.bindings for chain in [_byte_chain(binding)] if chain is not None
    ]


def _byte_chain(binding: relax.Binding) -> ConvChain | None:
    call = binding.value
    if not isinstance(binding, relax.VarBinding) or op_name(call) != QUANTIZED_CONV2D.name:
        return None
    kernel = read_quantized(call)
    if kernel.out_layout != "NCHW":
        return None
    data, weight, bias, scale, *residual = call.args
    [layer] = kernel.layers
    operands = data, weight, bias, residual[0] if residual else None
    given = str(kernel.out_dtype), scale
    return ConvChain(layer, *operands, (binding,), *given, addition=kernel.addition)

# SPDX-License-Identifier: Apache-2.0
"""Counting the kernels that functions launch, and how often a model calls them."""

from __future__ import annotations

import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from schedules import attributes
from tvm_fusion.compiler.launches import KernelUse, kernel_uses, launches


@T.prim_func(s_tir=True)
def two_kernels(a: T.handle, b: T.handle):
    A, B = T.match_buffer(a, (64,), "float32"), T.match_buffer(b, (64,), "float32")
    for bx in T.thread_binding(2, thread="blockIdx.x"):
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            with T.sblock("copy"):
                v = T.axis.spatial(64, bx * 32 + tx)
                B[v] = A[v]
    for tx in T.thread_binding(64, thread="threadIdx.x"):
        with T.sblock("double"):
            v = T.axis.spatial(64, tx)
            B[v] = B[v] * T.float32(2)


@T.prim_func(s_tir=True)
def host_loop(a: T.handle):
    A = T.match_buffer(a, (64,), "float32")
    with T.sblock("root"):
        for _ in range(5):
            with T.launch_thread("blockIdx.x", 2) as bx:
                tx = T.launch_thread("threadIdx.x", 32)
                A[bx * 32 + tx] = A[bx * 32 + tx] + T.float32(1)


@T.prim_func(s_tir=True)
def no_kernel(a: T.handle):
    A = T.match_buffer(a, (64,), "float32")
    for i in range(64):
        A[i] = T.float32(0)


def loops(func: tirx.PrimFunc) -> list[tirx.For]:
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, found.append))
    return found


def test_kernels_are_the_outermost_bindings() -> None:
    assert launches(two_kernels.body) == 2
    assert launches(no_kernel.body) == 0


def test_a_loop_of_the_host_launches_as_often_as_it_runs() -> None:
    assert launches(host_loop.body) == 5
    (loop,) = loops(host_loop)
    for extent, expected in ((0, 0), (-4, 0), (tirx.Var("n", "int32"), 1)):
        changed = tirx.For(loop.loop_var, loop.min, extent, loop.kind, loop.body)
        assert launches(changed) == expected


@I.ir_module
class Calls:
    @R.function
    def main(x: R.Tensor((64,), "float32")):
        cls = Calls
        with R.dataflow():
            a = R.call_tir(cls.two, (x,), out_ty=R.Tensor((64,), "float32"))
            b = R.call_tir(cls.two, (a,), out_ty=R.Tensor((64,), "float32"))
            c = R.call_tir(cls.one, (b,), out_ty=R.Tensor((64,), "float32"))
            d = R.add(c, c)
            R.output(d)
        return d

    @T.prim_func(private=True, s_tir=True)
    def one(a: T.handle, b: T.handle):
        A, B = T.match_buffer(a, (64,), "float32"), T.match_buffer(b, (64,), "float32")
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("copy"):
                v = T.axis.spatial(64, tx)
                B[v] = A[v]

    @T.prim_func(private=True, s_tir=True)
    def two(a: T.handle, b: T.handle):
        T.func_attr({"tvm_fusion.rule": "Twice"})
        A, B = T.match_buffer(a, (64,), "float32"), T.match_buffer(b, (64,), "float32")
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("copy"):
                v = T.axis.spatial(64, tx)
                B[v] = A[v]
        for tx in T.thread_binding(64, thread="threadIdx.x"):
            with T.sblock("double"):
                v = T.axis.spatial(64, tx)
                B[v] = B[v] * T.float32(2)


def test_uses_are_listed_in_the_order_of_the_model() -> None:
    assert kernel_uses(Calls) == [KernelUse("two", "Twice", 2, 4), KernelUse("one", "none", 1, 1)]
    assert attributes.RULE == "tvm_fusion.rule"
    assert kernel_uses(tvm.IRModule({"two": two_kernels})) == []


@pytest.mark.parametrize(
    ("marks", "why"),
    [
        ({attributes.RULE: "Fallback", "tirx.is_scheduled": True}, "no other rule takes it"),
        ({attributes.RULE: "dlight.GEMV", "tirx.is_scheduled": True}, "none of our rules takes it"),
        (
            {attributes.RULE: "Dense", attributes.FAILED_RULES: '{"A": "b", "C": "d"}'},
            "A failed: b; C failed: d",
        ),
        ({}, "no rule takes it"),
        ({attributes.RULE: "Dense"}, ""),
        ({"tirx.is_scheduled": True}, ""),
        ({"tirx.is_host_func": True}, ""),
    ],
)
def test_what_is_likely_to_be_slow_says_why(marks: dict[str, object], why: str) -> None:
    mod = tvm.IRModule(dict(Calls.functions_items()))
    mod["one"] = no_kernel.with_attrs(marks) if marks else no_kernel
    assert kernel_uses(mod)[1].slow == why

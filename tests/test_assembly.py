# SPDX-License-Identifier: Apache-2.0
"""The reader of assembly text, on a few hand-written functions."""

from __future__ import annotations

import pytest

from examples.benchmarks.assembly import Instruction, Loop, functions, loops

X86 = """
\t.text
\t.type\tf_compute_,@function
f_compute_:                             # @f_compute_
\t.cfi_startproc
# %bb.0:
\tpushq\t%rbp
\tmovq\t%rsp, %rbp
\tleaq\t.L__tvm_parallel_lambda(%rip), %rdi
\tretq
\t.type\t.L__tvm_parallel_lambda,@function
.L__tvm_parallel_lambda:
\tvmovaps\t%zmm9, 64(%rsp)              # 64-byte Spill
\tjmp\t.LBB1_1
.LBB1_9:                                # what is never reached must not hide the loops
\tnop
.LBB1_1:                                # =>This Loop Header: Depth=1
\tvmulps\t(%rdx), %zmm1, %zmm2
.LBB1_2:                                #   Parent Loop BB1_1 Depth=1
\tprefetcht1\t65536(%r10,%rdi)
\tvbroadcastss\t128(%rax,%rdi), %zmm0
\tvfmadd231ps\t%zmm30, %zmm0, %zmm22    # zmm22 = (zmm0 * zmm30) + zmm22
\tvfmadd231ps\t(%rax,%rdi){1to16}, %zmm30, %zmm21
\tvfmadd231ps\t64(%rsp), %zmm30, %zmm20
\tvmovups\t%zmm20, (%rcx)
\tvfmadd231ss\t(%rax), %xmm3, %xmm4
\ttestb\t$1, %bl
\tjne\t.LBB1_2
# %bb.3:
\tvmovaps\t%zmm20, 128(%rsp)
\tvmovaps\t%ymm20, 128(%rbp)
\tcmpq\t$3, %rcx
\tjb\t.LBB1_1
\tretq
"""

AARCH64 = """
\t.type\tg,@function
g:                                      // @g
\tadrp\tx0, .LCPI0_0
.LBB0_1:                                // =>This Inner Loop Header: Depth=1
\tadd\tx23, x10, x14, asr #30
\tprfm\tpldl2keep, [x9, x21]
\tsubs\tx24, x24, #1
\tld1r\t{ v0.4s }, [x26], #4
\tldp\tq11, q12, [x9]
\tldp\ts2, s6, [x23, #48]
\tldp\tx2, x6, [x23, #48]
\tfmla\tv25.4s, v11.4s, v2.s[0]
\tfmla\tv24.4s, v12.4s, v0.4s
\tfmadd\ts1, s2, s3, s4
\tfmul\tv1.4s, v2.4s, v3.4s
\tstr\tq1, [sp, #96]                    // 16-byte Folded Spill
\tstp\tq1, q2, [x5]
\tldr\tq1, [sp, #96]                    // 16-byte Folded Reload
\tcbz\tx3, .LBB0_3
\tb\t.LBB0_2
.LBB0_2:
\tb.ne\t.LBB0_1
.LBB0_3:
\tret
"""


def test_functions_without_directives_and_comments():
    found = functions(X86)
    assert list(found) == ["f_compute_", ".L__tvm_parallel_lambda"]
    assert found["f_compute_"][0] == "\tpushq\t%rbp"
    assert found[".L__tvm_parallel_lambda"][0] == "\tvmovaps\t%zmm9, 64(%rsp)"
    assert "\tsubs\tx24, x24, #1" in functions(AARCH64)["g"]
    assert "\tstr\tq1, [sp, #96]" in functions(AARCH64)["g"]


def test_loops_of_x86():
    outer, inner = sorted(loops(X86), key=lambda loop: loop.innermost)
    assert {outer.function, inner.function} == {"f"}
    assert (inner.fmas, inner.sums, inner.loads, inner.stores) == (3, 0, 4, 1)
    assert (inner.stack_loads, inner.stack_stores) == (1, 0)
    # The loop's own instructions are counted, not those of the loop in it.
    assert (outer.fmas, outer.sums, outer.loads, outer.stores) == (0, 1, 1, 2)
    assert outer.stack_stores == 1  # without "movq %rsp, %rbp", rbp is a register like others
    assert "3 multiply-adds" in str(inner) and "1 loads and 0 stores touch the stack" in str(inner)


def test_a_frame_pointer_points_into_the_stack():
    text = X86.replace("\tjmp\t.LBB1_1\n", "\tmovq\t%rsp, %rbp\n\tjmp\t.LBB1_1\n")
    assert sum(loop.stack_stores for loop in loops(text)) == 2


def test_loops_of_aarch64():
    (loop,) = loops(AARCH64)
    assert loop.function == "g" and loop.innermost
    assert (loop.fmas, loop.sums, loop.loads, loop.stores) == (2, 1, 6, 3)
    assert (loop.stack_loads, loop.stack_stores) == (1, 1)


def test_a_loop_whose_condition_stands_above_its_body():
    text = """
\t.type\th,@function
h:
\tjmp\t.LBB0_2
.LBB0_1:
\tvaddps\t(%rax), %ymm0, %ymm0
.LBB0_2:
\tcmpq\t$3, %rcx
\tjb\t.LBB0_1
\tretq
"""
    (loop,) = loops(text)
    assert (loop.sums, loop.loads) == (1, 1)


def test_code_without_a_loop_has_none():
    assert loops("\t.type\th,@function\nh:\n\tvaddps\t%ymm1, %ymm0, %ymm0\n\tretq\n") == []
    assert loops("") == []


@pytest.mark.parametrize(
    ("text", "loads", "stores"),
    [
        ("vmovss\t%xmm1, (%rax)", 0, 1),
        ("vmovups\t%zmm1, (%rax) {%k1}", 0, 1),
        ("vmovups\t(%rax), %zmm1 {%k1} {z}", 1, 0),
        ("vcmpltps\t(%rax), %zmm1, %k1", 1, 0),
        ("vextractf128\t$1, %ymm1, 16(%rax)", 0, 1),
        ("movq\t%rax, 8(%rsp)", 0, 0),
        ("leaq\t8(%rsp), %rax", 0, 0),
        ("vaddps\t.LCPI0_0(%rip){1to8}, %ymm1, %ymm2", 1, 0),
        ("ldr\tx1, [sp, #8]", 0, 0),
        ("ldr\tq1, [sp, #8]", 1, 0),
        ("ld1\t{ v0.4s, v1.4s }, [x0]", 2, 0),
        ("st1\t{ v0.4s }, [x0], #16", 0, 1),
        ("mov\tv1.s[1], v2.s[0]", 0, 0),
        ("fmla\tv1.4s, v2.4s, v3.s[0]", 0, 0),
    ],
)
def test_loads_and_stores(text, loads, stores):
    found = Instruction(text)
    assert (found.loads, found.stores) == (loads, stores)


@pytest.mark.parametrize(
    ("text", "fma", "add"),
    [
        ("vfmadd213ps\t%ymm1, %ymm2, %ymm3", True, False),
        ("vfnmadd231pd\t%ymm1, %ymm2, %ymm3", True, False),
        ("vfmadd231ss\t%xmm1, %xmm2, %xmm3", False, False),
        ("vpmaddwd\t%ymm1, %ymm2, %ymm3", True, False),
        ("vpmaddwd\t%xmm1, %xmm2, %xmm3", False, False),
        ("vmaxps\t%ymm1, %ymm2, %ymm3", False, True),
        ("vaddss\t%xmm1, %xmm2, %xmm3", False, False),
        ("fmla\tv1.4s, v2.4s, v3.s[0]", True, False),
        ("fmls\tv1.2d, v2.2d, v3.2d", True, False),
        ("fmadd\ts1, s2, s3, s4", False, False),
        ("fadd\tv1.4s, v2.4s, v3.4s", False, True),
        ("fcmgt\tv1.4s, v2.4s, v3.4s", False, True),
        ("fadd\ts1, s2, s3", False, False),
    ],
)
def test_arithmetic_of_vectors(text, fma, add):
    loop = Loop("f", [Instruction(text)], True)
    assert (loop.fmas, loop.sums) == (fma, add)

# SPDX-License-Identifier: Apache-2.0
"""Pass ``LegalizeCalls``: as TVM's, but for errors, after which nothing is printed."""

from __future__ import annotations

import pytest
import tvm
from op_calls import module_of
from tvm import relax, tirx

from relay_passes import LegalizeCalls


def norm(dtype: str) -> tvm.IRModule:
    types = [relax.TensorType(shape, dtype) for shape in ((2, 8), (8,), (8,))]
    data, gamma, beta = (relax.Var(f"v{i}", ty) for i, ty in enumerate(types))
    total = relax.op.add(data, data)
    return module_of(relax.op.nn.layer_norm(total, gamma, beta, axes=[-1]), [data, gamma, beta])


def test_calls_become_kernels_as_by_the_pass_of_tvm() -> None:
    legal = LegalizeCalls()(norm("float32"))
    tvm.ir.assert_structural_equal(legal, relax.transform.LegalizeOps()(norm("float32")))
    tvm.ir.assert_structural_equal(LegalizeCalls()(legal), legal)


def test_calls_without_a_kernel_of_their_own_stay() -> None:
    data = relax.Var("v", relax.TensorType((2, tirx.Var("n", "int64")), "float32"))
    mod = module_of(relax.op.shape_of(data), [data])
    tvm.ir.assert_structural_equal(LegalizeCalls()(mod), mod)


def test_own_rules_come_first() -> None:
    kept = LegalizeCalls({"relax.add": lambda builder, call: call})(norm("float32"))
    names = {var.name_hint for var in kept.get_global_vars()}
    assert "layer_norm" in names and "add" not in names


def test_an_op_without_a_kernel_is_an_error_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(Exception, match="only support float32"):
        LegalizeCalls()(norm("bfloat16"))
    assert capfd.readouterr() == ("", "")

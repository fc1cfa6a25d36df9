# SPDX-License-Identifier: Apache-2.0
"""Rule ``reshape_rms_norm``: norms over all axes, which TVM cannot lower as they are."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from simplify_checks import check, check_unchanged, simplify
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from tests.targets import compile_unchecked


def test_all_axes_get_one_in_front():
    @I.ir_module
    class Before:
        @R.function
        def main(x: R.Tensor((3, 4), "float32"), w: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                gv = R.nn.rms_norm(x, w, axes=[-2, -1], epsilon=0.5)
                R.output(gv)
            return gv

    @I.ir_module
    class Expected:
        @R.function
        def main(x: R.Tensor((3, 4), "float32"), w: R.Tensor((3, 4), "float32")):
            with R.dataflow():
                lv = R.reshape(x, (1, 3, 4))
                lv1 = R.nn.rms_norm(lv, w, axes=[1, 2], epsilon=0.5)
                gv = R.reshape(lv1, (3, 4))
                R.output(gv)
            return gv

    check(Before, Expected)


def test_other_axes_stay():
    @I.ir_module
    class Others:
        @R.function
        def main(x: R.Tensor((3, 4), "float32"), w: R.Tensor((4,), "float32")):
            with R.dataflow():
                gv = R.nn.rms_norm(x, w, axes=[-1], epsilon=0.5)
                R.output(gv)
            return gv

    check_unchanged(Others)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_numbers(shape):
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name in "xw")
    with builder.function("main", [x, w]):
        norm = relax.op.nn.rms_norm(x, w, list(range(len(shape))), 1e-5)
        builder.emit_func_output(builder.emit(norm))
    executable = compile_unchecked(simplify(builder.get()))
    generator = np.random.default_rng(0)
    data, weight = (generator.standard_normal(shape, dtype="float32") for _ in range(2))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    found = machine["main"](tvm.runtime.tensor(data), tvm.runtime.tensor(weight)).numpy()
    wanted = data / np.sqrt(np.mean(data.astype("float64") ** 2) + 1e-5) * weight
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)

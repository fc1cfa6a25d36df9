# SPDX-License-Identifier: Apache-2.0
"""Compiled models made of small Relax functions, without a front end and without our pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_fusion.compiler.compile_model import fresh_outputs
from tvm_fusion.compiler.pipeline import build_apart
from tvm_fusion.compiler.targets import arch_of, required_features, resolve
from tvm_fusion.runtime.artifact import Description, current_versions
from tvm_fusion.runtime.compiled_model import CompiledModel
from tvm_fusion.runtime.host_arrays import TensorSpec
from tvm_fusion.runtime.weights import weight_specs

WEIGHT = np.random.default_rng(0).standard_normal((8, 6)).astype("float32")

RECORD = {"first": "conv0", "second": "conv1", "fused": False, "reason": "too few rows"}


@I.ir_module
class Dense:
    @R.function
    def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 6), "float32")):
        with R.dataflow():
            y = R.nn.relu(R.matmul(x, w))
            R.output(y)
        return y


@I.ir_module
class Many:
    """Outputs of every kind: new, new twice, an input, a constant, a scalar, a bool."""

    @R.function
    def main(
        x: R.Tensor((3, 5), "float32"), flag: R.Tensor((3,), "bool"), s: R.Tensor((), "int64")
    ):
        with R.dataflow():
            y = R.add(x, x)
            n = R.logical_not(flag)
            t = R.add(s, R.const(1, "int64"))
            R.output(y, n, t)
        return (y, y, x, R.const([1.0, 2.0], "float32"), n, t)


@I.ir_module
class Symbolic:
    @R.function
    def main(a: R.Tensor(("n", 2), "float32"), b: R.Tensor(("n", 2), "float32")):
        n = T.int64()
        with R.dataflow():
            y: R.Tensor((n, 2), "float32") = R.add(a, b)
            R.output(y)
        return y


@I.ir_module
class Dependent:
    """The second input is twice as long as the first."""

    @R.function
    def main(a: R.Tensor(("n",), "float32"), b: R.Tensor(("n * 2",), "float32")):
        with R.dataflow():
            y = R.add(a, a)
            R.output(y)
        return y


@I.ir_module
class Identity:
    @R.function
    def main(x: R.Tensor((2, 3), "float32")):
        return x


def dense(target: Any = "native", threads: int = 1) -> CompiledModel:
    """relu(x @ WEIGHT), with the weight as a constant of the model."""
    return compiled(_bound_dense(), ["x"], ["y"], target, threads)


def lifted_dense() -> CompiledModel:
    """The same of our own lowering, which writes the output where it is told."""
    return lifted(_bound_dense(), ["x"], ["y"])


def _bound_dense() -> tvm.IRModule:
    return relax.transform.BindParams("main", {"w": tvm.runtime.tensor(WEIGHT)})(Dense)


def dense_reference(x: np.ndarray) -> np.ndarray:
    return np.maximum(x.astype("float64") @ WEIGHT.astype("float64"), 0)


def assert_dense(y: np.ndarray, x: np.ndarray) -> None:
    """Check a result of :func:`dense` against float64."""
    np.testing.assert_allclose(y, dense_reference(x), rtol=1e-5, atol=1e-6)


def many() -> CompiledModel:
    return compiled(Many, ["x", "flag", "s.1"], ["y", "y2", "same", "constant", "not", "next"])


def symbolic() -> CompiledModel:
    return compiled(Symbolic, ["a", "b"], ["y"])


def dependent() -> CompiledModel:
    return compiled(Dependent, ["a", "b"], ["y"])


def compiled(
    mod: tvm.IRModule,
    inputs: list[str],
    outputs: list[str],
    target: Any = "native",
    threads: int = 1,
) -> CompiledModel:
    """Build with TVM's own pipeline; names are given in order."""
    resolved = resolve(target)
    mod, about = _described(mod, inputs, outputs, resolved)
    return CompiledModel(tvm.compile(mod, resolved), about, threads)


def lifted(mod: tvm.IRModule, inputs: list[str], outputs: list[str]) -> CompiledModel:
    """Build with the weights apart, for one thread of this machine."""
    resolved = resolve("native")
    mod, about = _described(mod, inputs, outputs, resolved)
    built = build_apart(mod, resolved)
    about = replace(
        about,
        weights=weight_specs(built.weights),
        kernel=built.kernel,
        lifted=built.lifted,
        alignment=built.alignment,
    )
    return CompiledModel(built.executable, about, 1, built.weights)


def _described(
    mod: tvm.IRModule, inputs: list[str], outputs: list[str], resolved: tvm.target.Target
) -> tuple[tvm.IRModule, Description]:
    with resolved:
        mod = relax.transform.LegalizeOps()(mod)
    main = mod["main"]
    result = main.ret_ty
    fields = list(result.fields) if isinstance(result, relax.TupleType) else [result]
    about = Description(
        target=str(resolved),
        arch=arch_of(resolved),
        features=required_features(resolved),
        inputs=tuple(map(_spec, inputs, [param.ty for param in main.params])),
        outputs=tuple(map(_spec, outputs, fields)),
        fresh=fresh_outputs(mod),
        fused=(RECORD,),
        versions=current_versions(),
    )
    return mod, about


def _spec(name: str, ty: relax.TensorType) -> TensorSpec:
    shape = tuple(int(d) if isinstance(d, tvm.tirx.IntImm) else str(d) for d in ty.shape)
    return TensorSpec(name, shape, str(ty.dtype))

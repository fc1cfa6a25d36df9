# SPDX-License-Identifier: Apache-2.0
"""Use of tvm-fusion's passes on a hand-written Relax module: one by one, and as a pipeline.

    python examples/relay_pipeline.py

No ONNX is needed: the passes take any Relax module, and work in any ``tvm.transform.Sequential``.
"""

# mypy: disable-error-code="valid-type, misc"
# The annotations of TVMScript are no types of Python.

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I  # noqa: N812  (TVMScript's own names)
from tvm.script import relax as R  # noqa: N812

import tvm_fusion.pipeline  # registers it as "tvm_fusion"
from relay_passes import FuseConv2D, FuseEpilogue, PackLayout, SimplifyInference
from tvm_fusion.compiler.targets import resolve


@I.ir_module
class Block:
    """A block of MobileNet-V2: 1x1 with ReLU6, depthwise 3x3 with ReLU6, 1x1, sum with input."""

    @R.function
    def main(  # noqa: D102  (TVMScript takes no docstring)
        x: R.Tensor((1, 32, 28, 28), "float32"),
        expand: R.Tensor((96, 32, 1, 1), "float32"),
        depthwise: R.Tensor((96, 1, 3, 3), "float32"),
        gamma: R.Tensor((96,), "float32"),
        beta: R.Tensor((96,), "float32"),
        mean: R.Tensor((96,), "float32"),
        variance: R.Tensor((96,), "float32"),
        project: R.Tensor((32, 96, 1, 1), "float32"),
        bias: R.Tensor((1, 32, 1, 1), "float32"),
    ) -> R.Tensor((1, 32, 28, 28), "float32"):
        with R.dataflow():
            y = R.clip(R.nn.conv2d(x, expand), 0, 6)
            y = R.nn.conv2d(y, depthwise, padding=[1, 1], groups=96)
            y = R.nn.batch_norm(y, gamma, beta, mean, variance, axis=1, training=False)[0]
            y = R.nn.conv2d(R.clip(y, 0, 6), project)
            y = R.add(R.add(y, bias), x)
            R.output(y)
        return y


def block_with_weights(seed: int = 0) -> tvm.IRModule:
    """Return the block with random constants in place of its parameters, as after training."""
    generator = np.random.default_rng(seed)
    weights = {
        param.name: generator.uniform(0.1, 1, [int(size) for size in param.ty.shape])
        for param in Block["main"].params[1:]
    }
    constants = {name: value.astype("float32") for name, value in weights.items()}
    return relax.transform.BindParams("main", constants)(Block)


def calls(mod: tvm.IRModule) -> list[str]:
    """Return the operators that ``main`` calls, in order."""
    names = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call):
            names.append(str(expr.op.name if isinstance(expr.op, tvm.ir.Op) else expr.op))

    relax.analysis.post_order_visit(mod["main"], visit)
    return names


def main() -> int:
    """Show what each pass does, then build the module with the whole pipeline and run it."""
    mod = block_with_weights()
    target = resolve("native")
    print(f"{'the module':<18}", *calls(mod))
    with target:
        for step in (SimplifyInference(), FuseConv2D(fuse="all"), FuseEpilogue(), PackLayout()):
            mod = tvm.transform.Sequential([step])(mod)
            print(f"{type(step).__name__:<18}", *calls(mod))

    with target:
        executable = tvm.compile(
            block_with_weights(), target, relax_pipeline=relax.get_pipeline("tvm_fusion")
        )
        plain = tvm.compile(
            block_with_weights(), target, relax_pipeline=relax.get_default_pipeline(target)
        )
    x = np.random.default_rng(1).standard_normal((1, 32, 28, 28), dtype=np.float32)
    got, want = (
        relax.VirtualMachine(one, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
        for one in (executable, plain)
    )
    error = np.abs(got - want).max() / np.abs(want).max()
    print(f"tvm-fusion {tvm_fusion.__version__} against stock TVM: relative error {error:.1e}")
    return 0 if error < 1e-4 else 1


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""Pass ``SeparatePairs``: the pairs that become two convolutions, with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax

from relay_passes import SeparatePairs, op

LAYOUTS = {"data_layout": "NCHW8c", "out_layout": "NCHW8c"}
FIRST = {"padding": [1, 1, 1, 1], "strides": [2, 2], "activation": "relu"}
SECOND = {"activation": "clip", "low": -1.0, "high": 1.0}


def constant(seed: int, *shape: int) -> relax.Expr:
    return relax.const(np.random.default_rng(seed).standard_normal(shape).astype("float32") / 9)


WEIGHTS = constant(1, 4, 2, 3, 3, 8, 8), constant(2, 4, 8), constant(3, 3, 4, 1, 1, 8, 8)
BIAS = constant(4, 3, 8)


def module(build: Callable[..., relax.Expr], size: int) -> tvm.IRModule:
    shapes = (1, 2, 2 * size, 2 * size, 8), (1, 3, size, size, 8)
    x, y = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in zip("xy", shapes, strict=True)
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        with builder.dataflow():
            result = builder.emit_output(build(builder, x, y))
        builder.emit_func_output(result)
    return builder.get()


def pair(_: relax.BlockBuilder, x: relax.Var, y: relax.Var) -> relax.Expr:
    channels = {"in_channels": 16, "mid_channels": 32, "out_channels": 24}
    layers = {f"{k}1": v for k, v in FIRST.items()} | {f"{k}2": v for k, v in SECOND.items()}
    return op.fused_conv2d(x, *WEIGHTS, BIAS, y, **layers, **channels, **LAYOUTS)


def apart(builder: relax.BlockBuilder, x: relax.Var, y: relax.Var) -> relax.Expr:
    channels = {"in_channels": 16, "out_channels": 32}
    first = builder.emit(op.conv2d(x, *WEIGHTS[:2], **FIRST, **channels, **LAYOUTS))
    channels = {"in_channels": 32, "out_channels": 24}
    return op.conv2d(first, WEIGHTS[2], BIAS, y, **SECOND, **channels, **LAYOUTS)


@pytest.mark.slow
def test_a_pair_with_large_weights(run_module: Callable[..., np.ndarray]) -> None:
    before, expected = module(pair, 3), module(apart, 3)
    after = SeparatePairs()(before)
    tvm.ir.assert_structural_equal(after, expected, map_free_vars=True)
    tvm.ir.assert_structural_equal(SeparatePairs()(after), after)
    shapes = [param.ty.shape.values for param in before["main"].params]
    arrays = [np.ones([int(n) for n in shape], "float32") for shape in shapes]
    np.testing.assert_array_equal(run_module(after, *arrays), run_module(before, *arrays))


def test_pairs_that_stay() -> None:
    large = module(pair, 16)
    tvm.ir.assert_structural_equal(SeparatePairs()(large), large)

    def depthwise(_: relax.BlockBuilder, x: relax.Var, y: relax.Var) -> relax.Expr:
        return op.fused_conv2d(
            *(x, constant(1, 2, 3, 3, 8), constant(2, 2, 8), constant(3, 3, 2, 1, 1, 8, 8), BIAS),
            groups1=16,
            padding1=[1, 1, 1, 1],
            **{"in_channels": 16, "mid_channels": 16, "out_channels": 24},
            **LAYOUTS,
        )

    small = module(depthwise, 1)
    tvm.ir.assert_structural_equal(SeparatePairs()(small), small)


def test_modules_without_main_stay() -> None:
    mod = tvm.IRModule({"part_0": module(pair, 3)["main"].with_attr("global_symbol", "part_0")})
    assert SeparatePairs()(mod).same_as(mod)

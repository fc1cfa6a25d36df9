# SPDX-License-Identifier: Apache-2.0
"""Op ``relax.tvm_fusion.fused_quantized_conv2d``: types, errors, TVMScript, numbers."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_fusion.pipeline  # noqa: F401  registers it
from relay_passes.op import fused_quantized_conv2d
from schedules.errors import OpError
from schedules.workload.conv2d import ByteAddition
from tests.targets import compile_unchecked


@I.ir_module
class Module:
    @R.function
    def main(
        x: R.Tensor((1, 3, 6, 6), "uint8"),
        w1: R.Tensor((8, 3, 3, 3), "int8"),
        b1: R.Tensor((8,), "float32"),
        s1: R.Tensor((8,), "float32"),
        w2: R.Tensor((5, 8, 1, 1), "int8"),
        b2: R.Tensor((5,), "float32"),
        s2: R.Tensor((5,), "float32"),
    ) -> R.Tensor((1, 5, 4, 4), "float32"):
        with R.dataflow():
            gv = R.tvm_fusion.fused_quantized_conv2d(
                x, w1, b1, s1, w2, b2, s2, low1=-3.0, high1=252.0, activation2="relu"
            )
            R.output(gv)
        return gv


def var(name: str, shape: tuple[object, ...], dtype: str) -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


def operands(**others: relax.Var) -> list[relax.Var]:
    given = {
        "data": var("x", (1, 3, 6, 6), "uint8"),
        "weight1": var("w", (8, 3, 3, 3), "int8"),
        "bias1": var("b", (8,), "float32"),
        "scale1": var("s", (8,), "float32"),
        "weight2": var("w", (5, 8, 1, 1), "int8"),
        "bias2": var("b", (5,), "float32"),
        "scale2": var("s", (5,), "float32"),
    }
    return list((given | others).values())


DEEP = {
    "data": var("x", (1, 9000, 6, 6), "uint8"),
    "weight1": var("w", (8, 9000, 3, 3), "int8"),
}


def test_script_reads_what_it_prints():
    tvm.ir.assert_structural_equal(tvm.script.from_source(Module.script()), Module)


def test_types_of_bytes_and_with_an_open_batch():
    batch = tvm.tirx.Var("n", "int64")
    data = var("x", (batch, 3, 7, 7), "uint8")
    rounding = {"activation2": "round_clip", "high2": 255, "out_dtype": "uint8"}
    call = fused_quantized_conv2d(*operands(data=data), strides1=(2, 2), **rounding)
    expected = relax.TensorType((batch, 5, 3, 3), "uint8")
    tvm.ir.assert_structural_equal(relax.BlockBuilder().normalize(call).ty, expected)


def test_types_in_blocks_of_channels():
    """Weights are in words of a block; sums are rounded after a residual is added."""
    layout, channels = "NCHW16c", {"in_channels": 3, "mid_channels": 24, "out_channels": 20}
    given = operands(
        data=var("x", (1, 1, 6, 6, 16), "uint8"),
        weight1=var("w", (2, 1, 3, 3, 1, 16, 16), "int8"),
        weight2=var("w", (2, 2, 1, 1, 1, 16, 16), "int8"),
        **{name: var("b", (2, 16), "float32") for name in ("bias1", "scale1", "bias2", "scale2")},
        residual=var("r", (1, 2, 4, 4, 16), "uint8"),
    )
    rounding = {"out_dtype": "uint8", "addition": ByteAddition(1.0, 0.5, 0.0, 0.25, 0.0, 255.0)}
    call = fused_quantized_conv2d(*given, data_layout=layout, **channels, **rounding)
    expected = relax.TensorType((1, 2, 4, 4, 16), "uint8")
    tvm.ir.assert_structural_equal(relax.BlockBuilder().normalize(call).ty, expected)
    given[1] = var("w", (2, 1, 3, 3, 16, 16), "int8")
    with pytest.raises(OpError, match="weight1 has rank 6; expected 7"):
        fused_quantized_conv2d(*given, data_layout=layout, **channels, **rounding)


@pytest.mark.parametrize(
    ("others", "attrs", "text"),
    [
        ({"data": var("x", (1, 3, 6, 6), "int8")}, {}, "data is of int8; expected uint8"),
        ({"data": var("x", (3, 6, 6), "uint8")}, {}, "data has rank 3 with layouts NCHW, NCHW"),
        ({"weight2": var("w", (5, 8), "int8")}, {}, "weight2 has rank 2; expected 4"),
        ({"weight2": var("w", (5, 7, 1, 1), "int8")}, {}, "layer 1 has 8 output channels and"),
        ({"scale1": var("s", (7,), "float32")}, {}, r"scale1 has shape \(7,\); expected \(8,\)"),
        ({}, {"activation1": "relu"}, "out_dtype is 'uint8' after relu; expected 'uint8' after a"),
        ({}, {"out_dtype": "uint8"}, "out_dtype is 'uint8' after none"),
        ({}, {"padding2": (-1, 0, 0, 0)}, "padding2 is"),
        ({}, {"dilation1": (6, 6)}, "expected the padded input to hold the kernel"),
        (DEEP, {}, "9000 x 9 products a sum; expected at most 65793"),
    ],
)  # fmt: skip
def test_what_is_refused(others, attrs, text):
    with pytest.raises(OpError, match=text):
        fused_quantized_conv2d(*operands(**others), **attrs)


def test_numbers_of_its_function():
    """The pipeline of CPUs compiles it, though it makes no such pair."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (1, 3, 6, 6)).astype("uint8")
    w1, w2 = (random.integers(-128, 128, s).astype("int8") for s in ((8, 3, 3, 3), (5, 8, 1, 1)))
    b1, b2 = (random.integers(-9, 9, n).astype("float32") for n in (8, 5))
    s1, s2 = (np.full(n, 2.0**-6, "float32") for n in (8, 5))
    sums = np.zeros((1, 8, 4, 4))
    for kh, kw in np.ndindex(3, 3):
        seen = x[:, :, kh : kh + 4, kw : kw + 4].astype("int64")
        sums += np.einsum("nihw,oi->nohw", seen, w1[:, :, kh, kw].astype("int64"))
    mid = np.clip(np.rint(sums / 64 + b1[:, None, None]), -3, 252) + 3
    wanted = np.einsum("nihw,oi->nohw", mid, w2[:, :, 0, 0]) / 64 + b2[:, None, None]
    pipeline = relax.get_pipeline("tvm_fusion")
    machine = relax.VirtualMachine(compile_unchecked(Module, relax_pipeline=pipeline), tvm.cpu())
    arrays = (x, w1, b1, s1, w2, b2, s2)
    found = machine["main"](*(tvm.runtime.tensor(array) for array in arrays)).numpy()
    np.testing.assert_allclose(found, np.maximum(wanted, 0), rtol=1e-6, atol=1e-4)

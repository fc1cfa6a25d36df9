# SPDX-License-Identifier: Apache-2.0
"""Pass ``DropPragmaScopes``: the annotation goes, everything else stays, and nothing is printed."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from onnx import parser
from tvm.script import ir as I
from tvm.script import tirx as T

import tvm_fusion
from relay_passes import DropPragmaScopes


def module(with_pragma: bool) -> tvm.IRModule:
    if with_pragma:

        @I.ir_module
        class Before:
            @T.prim_func(private=True, s_tir=True)
            def fill(y: T.Buffer((9,), "float32")):
                T.attr(0, "pragma_scope", "seq")
                for i in T.parallel(9):
                    y[i] = T.float32(1)

        return Before

    @I.ir_module
    class After:
        @T.prim_func(private=True, s_tir=True)
        def fill(y: T.Buffer((9,), "float32")):
            for i in T.parallel(9):
                y[i] = T.float32(1)

    return After


def test_the_annotation_goes() -> None:
    once = DropPragmaScopes()(module(True))
    tvm.ir.assert_structural_equal(once, module(False))
    tvm.ir.assert_structural_equal(DropPragmaScopes()(once), once)


def test_a_scatter_compiles_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[3,3] x, int64[2,3] i, float[2,3] u) => (float[3,3] y) {
            y = ScatterElements (x, i, u) }"""
    )
    x, u = np.zeros((3, 3), "float32"), np.arange(1, 7, dtype="float32").reshape(2, 3)
    y = tvm_fusion.compile(model, threads=1)(x, np.array([[1, 0, 2], [0, 2, 1]]), u)
    assert y.tolist() == [[4, 2, 0], [1, 0, 6], [0, 5, 3]]
    assert capfd.readouterr() == ("", "")

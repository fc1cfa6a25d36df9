# SPDX-License-Identifier: Apache-2.0
"""The table of operators: what each entry promises is there, and no operator is forgotten."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper
from onnx_cases import onnx_model
from tvm.relax.frontend.onnx import onnx_frontend

from tvm_fusion.errors import UnsupportedOperatorError
from tvm_fusion.onnx.frontend import import_onnx
from tvm_fusion.onnx.operators.operator import Operator
from tvm_fusion.onnx.operators.table import TABLE

WITHOUT_ENTRY = {
    *("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
    *("ImageDecoder", "SequenceMap"),
}
"""Operators of ONNX that read text or files, and a function of sequences."""


def _is_replaced(operator: Operator) -> bool:
    """Whether nodes of an operator never reach the translation."""
    is_written = operator.expand is not None or operator.is_defined
    return is_written or operator.refuse is not None or operator.name in ("If", "Loop", "Scan")


def test_entries_lead_to_a_translation() -> None:
    of_tvm = onnx_frontend._get_convert_map()
    lost = [
        key
        for key, operator in TABLE.items()
        if not (operator.translate or _is_replaced(operator) or operator.name in of_tvm)
    ]
    # The reference of onnx computes it of constants, which its inputs must be.
    assert lost == [("", "MelWeightMatrix")]
    foreign = [operator for operator in TABLE.values() if operator.domain]
    assert foreign and all(map(_is_replaced, foreign))


def test_all_operators_of_onnx() -> None:
    schemas = onnx.defs.get_all_schemas()
    known = {each.name for each in schemas if not each.domain and not each.deprecated}
    assert known - {name for domain, name in TABLE if not domain} == WITHOUT_ENTRY


@pytest.mark.parametrize("name", ["FastGelu", "tvm_fusion.Nothing"])
def test_operators_that_only_tvm_knows_are_refused(name: str) -> None:
    node = helper.make_node(name, ["x"], ["y"], name="op")
    model = onnx_model([node], {"x": (2, 3)}, ["y"])
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
    with pytest.raises(UnsupportedOperatorError, match=f"'op': {name} of ai.onnx.*no translation"):
        import_onnx(model)

# SPDX-License-Identifier: Apache-2.0
"""Import whole models: what comes out, from which sources, and which are refused how."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx_cases import (
    assert_same_as_onnx_runtime,
    int64,
    normal,
    one_node,
    onnx_model,
    relax_ops,
    run_relax,
)

from examples.models import MODELS
from tvm_fusion import errors
from tvm_fusion.errors import InvalidModelError, TVMFusionError, UnsupportedOperatorError
from tvm_fusion.onnx import frontend
from tvm_fusion.onnx.frontend import import_onnx
from tvm_fusion.runtime.host_arrays import TensorSpec

LIGHT = Path(onnx.backend.test.__file__).parent / "data" / "light"


def _conv_model(batch: int | str = 1) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["a"], name="first", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"], name="second"),
        helper.make_node("GlobalAveragePool", ["b"], ["mean"], name="third"),
    ]
    return onnx_model(nodes, {"image": (batch, 3, 8, 8)}, ["mean", "b"], {"w": normal(4, 3, 3, 3)})


def test_all_sources_give_the_same(tmp_path: Path) -> None:
    model = _conv_model()
    before = model.SerializeToString()
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    first = import_onnx(model)
    for source in (path, str(path), before, bytearray(before)):
        other = import_onnx(source)
        tvm.ir.assert_structural_equal(first.mod, other.mod)
        assert (first.inputs, first.outputs) == (other.inputs, other.outputs)
    assert model.SerializeToString() == before


def test_names_shapes_and_order() -> None:
    imported = assert_same_as_onnx_runtime(_conv_model())
    assert imported.inputs == (TensorSpec("image", (1, 3, 8, 8), "float32"),)
    assert imported.outputs == (
        TensorSpec("mean", (1, 4, 1, 1), "float32"),
        TensorSpec("b", (1, 4, 8, 8), "float32"),
    )
    assert list(imported.mod.functions)[0].name_hint == "main"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_networks(name: str) -> None:
    imported = import_onnx(MODELS[name](batch="N", image_size=64), {"N": 2})
    assert imported.inputs == (TensorSpec("input", (2, 3, 64, 64), "float32"),)
    assert imported.outputs == (TensorSpec("output", (2, 1000), "float32"),)
    assert len(imported.mod["main"].params) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("bvlc_alexnet", (1, 1000)),
        ("densenet121", (1, 1000, 1, 1)),
        pytest.param("inception_v1", (1, 1000), marks=pytest.mark.slow),
        ("inception_v2", (1, 1000)),
        pytest.param("resnet50", (1, 1000), marks=pytest.mark.slow),
        ("shufflenet", (1, 1000)),
        ("squeezenet", (1, 1000, 1, 1)),
        pytest.param("vgg19", (1, 1000), marks=pytest.mark.slow),
        pytest.param("zfnet512", (1, 1000), marks=pytest.mark.slow),
    ],
)
def test_light_models_of_onnx(name: str, result: tuple[int, ...]) -> None:
    """Opset 9, IR 3, weights made by nodes: all of them become constants of the module."""
    imported = import_onnx(LIGHT / f"light_{name}.onnx")
    assert [spec.shape for spec in imported.inputs] == [(1, 3, 224, 224)]
    assert [spec.shape for spec in imported.outputs] == [result]
    left_over = {"relax.broadcast_to", "relax.nn.dropout", "relax.stack", "relax.full"}
    assert not relax_ops(imported) & left_over


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (one_node("Relu", (2, 5)), r"float32 of shape \(2, 5\)"),
        (one_node("Relu", (2, 3, 1)), r"float32 of shape \(2, 3, 1\)"),
        (one_node("Cast", (2, 3), to=TensorProto.INT64), r"int64 of shape \(2, 3\)"),
    ],
)
def test_outputs_that_are_not_what_onnx_infers(
    other: onnx.ModelProto, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The importer seems to have translated another model."""
    other.graph.output[0].type.tensor_type.elem_type = (
        TensorProto.INT64 if "int64" in found else TensorProto.FLOAT
    )
    translated = import_onnx(other).mod
    monkeypatch.setattr(frontend, "translate", lambda proto, weights: translated)
    message = rf"output 'y' is imported as {found}; ONNX infers float32 of shape \(2, 3\)"
    with pytest.raises(UnsupportedOperatorError, match=message):
        import_onnx(one_node("Relu", (2, 3)))


def test_symbolic_dimension_is_kept_if_asked() -> None:
    imported = import_onnx(_conv_model(batch="N"), {"N": "images"})
    assert imported.inputs[0].shape == ("images", 3, 8, 8)
    assert imported.outputs[0].shape == ("images", 4, 1, 1)


def test_external_data(tmp_path: Path) -> None:
    model = _conv_model()
    path = tmp_path / "model.onnx"
    options = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save(_conv_model(), path, **options)
    assert (tmp_path / "weights.bin").stat().st_size >= 4 * 3 * 9 * 4
    data = normal(1, 3, 8, 8)
    expected = run_relax(import_onnx(model), [data])
    for result, reference in zip(run_relax(import_onnx(path), [data]), expected, strict=True):
        np.testing.assert_array_equal(result, reference)


def test_errors_are_one_family() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), TVMFusionError | UserWarning)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"this is no model, whatever its name says", "the model is not ONNX, or is damaged"),
        (b"", "the model is not ONNX: it holds no graph with an output"),
        (42, "the model is a int; expected a path, bytes or onnx.ModelProto"),
        ("missing/model.onnx", "cannot read model 'missing/model.onnx': No such file"),
        (".", r"cannot read model '\.': it is not a regular file"),
        ("/dev/zero", "cannot read model '/dev/zero': it is not a regular file"),
    ],
)
def test_not_a_model(source: object, message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        import_onnx(source)  # type: ignore[arg-type]


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    """To open it would wait for somebody to write."""
    pipe = tmp_path / "model.onnx"
    os.mkfifo(pipe)
    with pytest.raises(InvalidModelError, match="model.onnx': it is not a regular file"):
        import_onnx(pipe)


def test_other_messages_are_no_models() -> None:
    tensor = onnx.numpy_helper.from_array(normal(64), "weights")
    with pytest.raises(InvalidModelError, match="the model is not ONNX"):
        import_onnx(tensor.SerializeToString())


@settings(max_examples=settings.default.max_examples // 2, derandomize=True)
@given(st.data())
def test_damaged_models_never_raise_anything_else(data: st.DataObject) -> None:
    content = bytearray(_conv_model().SerializeToString())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        import_onnx(bytes(content))
    except TVMFusionError as error:
        assert str(error)


def test_names_that_are_no_text() -> None:
    content = _conv_model().SerializeToString().replace(b"image", b"im\xffge")
    with pytest.raises(InvalidModelError, match="the model holds invalid text: .*utf-8"):
        import_onnx(content)


def test_every_cut_is_refused() -> None:
    content = _conv_model().SerializeToString()
    for length in range(0, len(content) - 1, 37):
        with pytest.raises(InvalidModelError, match=r"\w"):
            import_onnx(content[:length])


@pytest.mark.parametrize("opset", [0, 999])
def test_unknown_opset(opset: int) -> None:
    model = _conv_model()
    model.opset_import[0].version = opset
    with pytest.raises(InvalidModelError, match=rf"uses opset {opset}; onnx .* knows 1 to \d+"):
        import_onnx(model)


def test_no_opset() -> None:
    model = _conv_model()
    model.opset_import[0].domain = "ai.onnx.ml"
    with pytest.raises(InvalidModelError, match="imports no version of the ai.onnx operators"):
        import_onnx(model)


def test_ancient_ir_version() -> None:
    model = _conv_model()
    model.ir_version = 2
    with pytest.raises(InvalidModelError, match="has IR version 2; expected 3 or newer"):
        import_onnx(model)


def test_checker_failure() -> None:
    model = _conv_model()
    model.graph.node[1].input[0] = "nowhere"
    with pytest.raises(InvalidModelError, match="onnx.checker refuses the model: .*nowhere"):
        import_onnx(model)


def test_contradicting_shapes() -> None:
    node = helper.make_node("Add", ["x", "c"], ["y"], name="sum")
    model = onnx_model([node], {"x": (2, 3)}, ["y"], {"c": normal(4)})
    with pytest.raises(InvalidModelError, match="shapes do not fit together: .*Add"):
        import_onnx(model)


def test_weights_that_do_not_fill_their_shape() -> None:
    model = _conv_model()
    model.graph.initializer[0].dims[0] = 50
    with pytest.raises(InvalidModelError, match=r"tensor 'w' of shape \(50, 3, 3, 3\) holds othe"):
        import_onnx(model)


def test_all_unsupported_operators_in_one_error() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="fine"),
        helper.make_node("Bernoulli", ["a"], ["b"], name="once"),
        helper.make_node("Magic", ["b"], ["c"], domain="com.example"),
        helper.make_node("RandomUniformLike", ["c"], ["y"], name="draw"),
    ]
    model = onnx_model(nodes, {"x": (2, 3)}, ["y"], opset=15)
    model.opset_import.append(helper.make_operatorsetid("com.example", 4))
    with pytest.raises(UnsupportedOperatorError) as caught:
        import_onnx(model)
    reason = "this operator has no translation; export the model with other operators"
    drawn = (
        "its numbers are drawn at random; make them an input of the model and draw them by numpy: "
        "export it with the noise as an argument, or delete this node and list its output as a "
        "graph input"
    )
    assert str(caught.value).splitlines() == [
        "3 nodes of the model cannot be imported:",
        f"  node 'once': Bernoulli of ai.onnx, opset 15: {drawn}",
        f"  the unnamed node that computes 'c': Magic of com.example, opset 4: {reason}",
        f"  node 'draw': RandomUniformLike of ai.onnx, opset 15: {drawn}",
    ]


def test_operator_that_no_opset_knows_is_named() -> None:
    model = one_node("ConstantFill", (2, 3))
    with pytest.raises(UnsupportedOperatorError, match="node 'op': ConstantFill of ai.onnx"):
        import_onnx(model)


def test_unsupported_operator_inside_of_a_branch_is_named() -> None:
    def branch(op_type: str) -> onnx.GraphProto:
        node = helper.make_node(op_type, ["x"], ["r"], name=f"inner_{op_type}")
        return helper.make_graph(
            [node], op_type, [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, None)]
        )

    branches = {"then_branch": branch("Relu"), "else_branch": branch("Bernoulli")}
    node = helper.make_node("If", ["c"], ["y"], name="choice", **branches)
    model = onnx_model([node], {"x": (2, 2)}, ["y"], {"c": np.array(True)})
    with pytest.raises(UnsupportedOperatorError, match="node 'inner_Bernoulli': Bernoulli of"):
        import_onnx(model)


def test_failure_of_the_importer_names_the_node() -> None:
    model = one_node("Pad", (1, 1, 4, 4), int64(0, 0, 1, 1, 0, 0, 1, 1), mode="wrap", opset=18)
    with pytest.raises(
        UnsupportedOperatorError, match=r"node 'op' \(Pad\) cannot be imported: .*wrap"
    ) as r:
        import_onnx(model)
    assert "specialize" not in str(r.value)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    with pytest.raises(
        UnsupportedOperatorError, match="the sizes rows are open: bind them by shapes=, or"
    ):
        import_onnx(model, {"rows": "rows"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, (2, 3)),
            "input 'x' is sequence type; expected a tensor",
        ),
        (
            helper.make_tensor_value_info("x", TensorProto.STRING, (2, 3)),
            "input 'x' holds elements of STRING; expected one of BFLOAT16, BOOL, DOUBLE, FLOAT,",
        ),
    ],
)
def test_inputs_that_are_no_numbers(value: onnx.ValueInfoProto, message: str) -> None:
    model = one_node("Identity", (2, 3))
    model.graph.input[0].CopyFrom(value)
    with pytest.raises(UnsupportedOperatorError, match=message):
        import_onnx(model)


def test_sparse_weights_are_refused() -> None:
    model = one_node("Identity", (2, 3))
    values = onnx.numpy_helper.from_array(normal(1), "sparse")
    indices = onnx.numpy_helper.from_array(int64(1), "indices")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    with pytest.raises(UnsupportedOperatorError, match="initialiser 'sparse' is sparse"):
        import_onnx(model)


@pytest.mark.parametrize("opset", [11, 17])
def test_sparse_constants_are_refused(opset: int) -> None:
    values = onnx.numpy_helper.from_array(normal(1), "sparse")
    indices = onnx.numpy_helper.from_array(int64(1), "indices")
    sparse = helper.make_sparse_tensor(values, indices, [4])
    nodes = [
        helper.make_node("Constant", [], ["c"], name="op", sparse_value=sparse),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    model = onnx_model(nodes, {"x": (4,)}, ["y"], opset=opset)
    with pytest.raises(UnsupportedOperatorError, match="node 'op': .* its value is sparse"):
        import_onnx(model)

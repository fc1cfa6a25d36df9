# SPDX-License-Identifier: Apache-2.0
"""External data of a model are read from its folder and from nowhere else."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import helper
from onnx_cases import int64, normal, onnx_model

from tvm_fusion.errors import InvalidModelError
from tvm_fusion.frontend import import_onnx


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, with a file outside that is none of its business."""
    inside = tmp_path / "model"
    inside.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(4 * 512))
    (inside / "weights.bin").write_bytes(normal(512).tobytes())
    return inside


def _save(folder: Path, location: str, **entries: str) -> Path:
    """A model whose one weight, 512 floats, lies at ``location``."""
    model = onnx_model(
        [helper.make_node("Add", ["x", "w"], ["y"])], {"x": (512,)}, ["y"], {"w": normal(512)}
    )
    _externalize(model.graph.initializer[0], location, **entries)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _externalize(tensor: onnx.TensorProto, location: str, **entries: str) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=value)


def test_data_beside_the_model(folder: Path) -> None:
    assert import_onnx(_save(folder, "weights.bin")).outputs[0].shape == (512,)


def test_data_below_the_model_with_offset(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "w.bin").write_bytes(bytes(64) + normal(512).tobytes())
    path = _save(folder, "sub/w.bin", offset="64", length="2048")
    assert import_onnx(path).outputs[0].shape == (512,)


@pytest.mark.parametrize(
    "location", ["../secret.bin", "sub/../../secret.bin", r"..\secret.bin", "C:secret.bin", ""]
)
def test_paths_that_leave_the_folder(folder: Path, location: str) -> None:
    message = "tensor 'w' has external data at .*; expected a relative path inside the model's"
    with pytest.raises(InvalidModelError, match=message):
        import_onnx(_save(folder, location))


def test_absolute_path(folder: Path) -> None:
    with pytest.raises(InvalidModelError, match="expected a relative path inside the model's"):
        import_onnx(_save(folder, str(folder / "weights.bin")))


def test_link_that_leaves_the_folder(folder: Path) -> None:
    (folder / "link.bin").symlink_to(folder.parent / "secret.bin")
    with pytest.raises(InvalidModelError, match="a link that leaves the model's folder"):
        import_onnx(_save(folder, "link.bin"))


def test_folder_link_that_leaves_the_folder(folder: Path) -> None:
    (folder / "up").symlink_to(folder.parent, target_is_directory=True)
    with pytest.raises(InvalidModelError, match="a link that leaves the model's folder"):
        import_onnx(_save(folder, "up/secret.bin"))


def test_missing_file(folder: Path) -> None:
    with pytest.raises(InvalidModelError, match="'gone.bin'; there is no such file"):
        import_onnx(_save(folder, "gone.bin"))


@pytest.mark.parametrize(
    "entries", [{"length": "4000"}, {"offset": "2044"}, {"offset": "-4"}, {"offset": "far"}]
)
def test_data_that_do_not_fill_the_tensor(folder: Path, entries: dict[str, str]) -> None:
    with pytest.raises(InvalidModelError, match="tensor 'w'"):
        import_onnx(_save(folder, "weights.bin", **entries))


def test_bytes_have_no_folder(folder: Path) -> None:
    content = _save(folder, "weights.bin").read_bytes()
    for source in (content, onnx.ModelProto.FromString(content)):
        with pytest.raises(InvalidModelError, match="has no folder; pass the path of its file"):
            import_onnx(source)


def test_attributes_are_checked_too(folder: Path) -> None:
    tensor = onnx.numpy_helper.from_array(int64(1, 2), "inner")
    node = helper.make_node("Constant", [], ["w"], value=tensor)
    _externalize(node.attribute[0].t, "../secret.bin")
    model = onnx_model([node, helper.make_node("Identity", ["w"], ["y"])], {"x": (1,)}, ["y"])
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InvalidModelError, match="tensor 'inner' has external data"):
        import_onnx(path)


def test_tensors_of_nested_graphs_are_checked_too(folder: Path) -> None:
    tensor = onnx.numpy_helper.from_array(normal(4), "nested")
    _externalize(tensor, "../secret.bin")
    result = helper.make_tensor_value_info("nested", onnx.TensorProto.FLOAT, (4,))
    branch = helper.make_graph([], "branch", [], [result], [tensor])
    node = helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch)
    model = onnx_model([node], {"x": ()}, ["y"], dtype=onnx.TensorProto.BOOL)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InvalidModelError, match="tensor 'nested' has external data"):
        import_onnx(path)

# SPDX-License-Identifier: Apache-2.0
"""External data of a model are read from its folder and from nowhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_cases import int64, normal, onnx_model, run_relax

from tvm_fusion.errors import InvalidModelError
from tvm_fusion.onnx.frontend import import_onnx
from tvm_fusion.onnx.model.loader import check_external_data


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
    "location",
    ["../secret.bin", "sub/../../secret.bin", r"..\secret.bin", "C:secret.bin", "", "a\0b"],
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


def _in_a_cache(folder: Path, location: str) -> Path:
    """A model as caches of downloads have it: links, whose files are in a folder of blobs."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "0f"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    _save(folder, location).rename(blobs / "c6ed")
    (folder / "weights.bin").rename(blobs / "b879")
    (snapshot / "model.onnx").symlink_to("../../blobs/c6ed")
    return snapshot / "model.onnx"


def test_links_to_the_folder_of_the_models_own_file(folder: Path) -> None:
    path = _in_a_cache(folder, "model.onnx_data")
    path.with_name("model.onnx_data").symlink_to("../../blobs/b879")
    found = run_relax(import_onnx(path), [normal(512)])[0]
    np.testing.assert_array_equal(found, 2 * normal(512))


@pytest.mark.parametrize("target", ["../../../secret.bin", "../../blobs/../../secret.bin"])
def test_other_links_beside_a_link(folder: Path, target: str) -> None:
    path = _in_a_cache(folder, "model.onnx_data")
    path.with_name("model.onnx_data").symlink_to(target)
    with pytest.raises(InvalidModelError, match="a link that leaves the model's folder"):
        import_onnx(path)


def test_missing_file(folder: Path) -> None:
    with pytest.raises(InvalidModelError, match="'gone.bin'; there is no such file"):
        import_onnx(_save(folder, "gone.bin"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"length": "4000"}, "of length 4000; its shape and type take 2048 bytes"),
        ({"offset": "2044"}, "2048 bytes from offset 2044; the file has 2048 bytes"),
        ({"offset": "-4"}, "2048 bytes from offset -4; the file has 2048 bytes"),
        ({"offset": "far"}, "whose offset or length is not a number: .*'far'"),
    ],
)
def test_data_that_do_not_fill_the_tensor(
    folder: Path, entries: dict[str, str], message: str
) -> None:
    with pytest.raises(InvalidModelError, match=f"tensor 'w' has external data at .*{message}"):
        import_onnx(_save(folder, "weights.bin", **entries))


def test_no_more_is_read_than_the_tensor_takes(folder: Path) -> None:
    """A hole of a terabyte takes no space on the disk, but would take it in memory."""
    with (folder / "weights.bin").open("ab") as file:
        file.truncate(2**40)
    path = _save(folder, "weights.bin")
    zeros = np.zeros(512, np.float32)
    np.testing.assert_array_equal(run_relax(import_onnx(path), [zeros])[0], normal(512))


@pytest.mark.parametrize(
    ("kind", "count"), [("INT4", 3), ("UINT2", 5), ("FLOAT6E2M3", 2), ("DOUBLE", 1)]
)
def test_packed_elements_share_bytes(folder: Path, kind: str, count: int) -> None:
    tensor = onnx.TensorProto(name="w", data_type=onnx.TensorProto.DataType.Value(kind))
    tensor.dims.append(count)
    _externalize(tensor, "weights.bin")
    model = onnx_model([helper.make_node("Relu", ["x"], ["y"])], {"x": (1,)}, ["y"])
    model.graph.initializer.append(tensor)
    check_external_data(model, folder / "model.onnx")
    length = {entry.key: entry.value for entry in model.graph.initializer[0].external_data}
    assert length["length"] == ("8" if kind == "DOUBLE" else "2")


def test_elements_of_an_unknown_type(folder: Path) -> None:
    path = _save(folder, "weights.bin")
    model = onnx.ModelProto.FromString(path.read_bytes())
    model.graph.initializer[0].data_type = 99
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InvalidModelError, match="'w' holds elements of the unknown type 99"):
        import_onnx(path)


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

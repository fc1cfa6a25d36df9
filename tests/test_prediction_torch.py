# SPDX-License-Identifier: Apache-2.0
"""Parts of the benchmark of whole models of eager PyTorch, on a small one."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import tvm_fusion  # noqa: E402
from examples.benchmarks import predict_torch  # noqa: E402
from examples.torch_zoo import Sample  # noqa: E402


@pytest.fixture
def sample():
    layers = [torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU6()]
    module = torch.nn.Sequential(*layers).eval()
    with torch.inference_mode():
        yield Sample(module, {"image": torch.randn(1, 3, 16, 16)})


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_predicted_as_pytorch_runs_it(sample):
    model = predict_torch.exported(sample)
    assert [node.op_type for node in model.graph.node].count("BatchNormalization") == 1
    found = tvm_fusion.predict(model, machine="znver4", engine="pytorch")
    assert [row.op for row in found.kernels] == ["conv2d", "batch_norm", "clip"]
    kinds = predict_torch.predicted_kinds(found)
    assert kinds.keys() == {"convolutions", "norms, softmax", "others"}
    assert sum(kinds.values()) == pytest.approx(found.kernel_seconds * 1e3)


def test_a_model_is_measured(sample):
    assert predict_torch.measured_seconds(sample, rounds=1, runs=2) > 0
    assert predict_torch.page_faults(sample) >= 0
    kinds = predict_torch.measured_kinds(sample)
    assert kinds.keys() == {"convolutions", "norms, softmax", "others"}

# SPDX-License-Identifier: Apache-2.0
"""Public names lie in the package itself, and cost nothing until they are used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import onnx.parser
import pytest
from without_torch import WITHOUT_TORCH

import tvm_fusion
from tests.selection import one_test
from tvm_fusion import distributed

MODEL = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
).SerializeToString()
ROOT = Path(__file__).resolve().parents[2]


@one_test(tvm_fusion.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(tvm_fusion, name) is not None
    assert name in dir(tvm_fusion)


def test_no_name_is_also_a_module() -> None:
    """A submodule, once imported, would take the place of a function."""
    modules = {path.stem for path in Path(tvm_fusion.__file__).parent.iterdir()} - {"errors"}
    assert not modules & set(tvm_fusion.__all__)


def test_unknown_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="'tvm_fusion' has no attribute 'melt'"):
        _ = tvm_fusion.melt


def test_names_do_not_import_the_compiler() -> None:
    code = (
        "import json, sys, tvm_fusion; dir(tvm_fusion); tvm_fusion.load, tvm_fusion.race; "
        "before = 'tvm' in sys.modules; tvm_fusion.resolve_target('x86-64-v3'); "
        "print(json.dumps([before, 'tvm' in sys.modules]))"
    )
    command = [sys.executable, "-c", WITHOUT_TORCH + code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout) == [False, True]


@pytest.mark.slow
def test_loading_and_compiling_do_not_import_pytorch() -> None:
    pytest.importorskip("torch")
    code = (
        "import sys, tvm_fusion; tvm_fusion.load; assert 'tvm_ffi' in sys.modules; "
        f"tvm_fusion.compile({MODEL!r}, threads=1, check=True); assert 'tvm' in sys.modules; "
        "[getattr(tvm_fusion, name) for name in [*tvm_fusion.__all__, 'pipeline']]; "
        "tvm_fusion.compiler.registry.rank_compiler(); "
        "assert 'torch' not in sys.modules; import torch, tvm_ffi; "
        "assert tvm_ffi.from_dlpack(torch.zeros(3)).shape == (3,)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.slow
def test_other_threads_import_pytorch_meanwhile() -> None:
    pytest.importorskip("torch")
    code = (
        "import sys, threading\nfrom tvm_fusion import plugin\n"
        "other = threading.Thread(target=__import__, args=('torch',))\n"
        "with plugin.without_torch():\n"
        "    try:\n        import torch\n"
        "    except ImportError:\n        other.start(), other.join()\n"
        "assert hasattr(sys.modules['torch'], 'zeros')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_ranks_begin_without_the_compiler() -> None:
    code = (
        "import sys\nfrom tvm_fusion import distributed\n"
        "distributed.session, distributed.load, distributed.World, dir(distributed)\n"
        "assert 'tvm' not in sys.modules and distributed.session.__module__ in sys.modules"
    )
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH + code], check=True, cwd=ROOT)


def test_names_of_ranks() -> None:
    for name in distributed.__all__:
        assert getattr(distributed, name).__name__ == name and name in dir(distributed)
    with pytest.raises(AttributeError, match="has no attribute 'melt'"):
        _ = distributed.melt

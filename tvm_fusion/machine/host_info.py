# SPDX-License-Identifier: Apache-2.0
"""Description of the machine and the software of a measurement."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from .host import physical_cores

PACKAGES = ("apache-tvm", "onnx", "numpy", "onnxruntime", "openvino", "torch", "torchvision")


def host_info() -> dict[str, Any]:
    """Return the processor, the system, and the versions of installed packages."""
    return {
        "cpu": cpu_name(),
        "physical_cores": physical_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
    }


def cpu_name() -> str:
    """Return the processor's name as its maker spells it."""
    name = ""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    else:
        lines = Path("/proc/cpuinfo")
        text = lines.read_text() if lines.exists() else ""
        fields = (line.partition(":") for line in text.splitlines())
        name = next((value for key, _, value in fields if key.strip() == "model name"), "")
    return name.strip() or platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

# SPDX-License-Identifier: Apache-2.0
"""GPU and software of a measurement, and the measured memory bandwidth."""

from __future__ import annotations

import re
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm_fusion.codegen.nvrtc import compiler
from tvm_fusion.errors import EngineError
from tvm_fusion.machine.host import host_info

from .clock import Clock
from .engine import module, version
from .torch_eager import TorchEager

PACKAGES = ("tvm", "torch", "triton", "cupy", "jax")
QUERIES = ("name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
LIMIT_BYTES = 1 << 30
LIMIT_SAMPLES = 20


@dataclass(frozen=True)
class Limits:
    """Measured bytes a second of device memory; ``read`` is what a peer reaches, no upper bound.

    Parameters
    ----------
    copy : float
        Bandwidth of a copy from device to device, read and written bytes counted.
    read : float
        Bandwidth of the fastest of PyTorch's reductions of one large tensor to one number.
    """

    copy: float
    read: float

    @property
    def best(self) -> float:
        """Reference bandwidth of a reduction."""
        return max(self.copy, self.read)


def find_gpu() -> str:
    """Reason why nothing can be measured here; an empty text if PyTorch finds a GPU."""
    try:
        torch = module("torch")
    except EngineError as error:
        return f"no GPU can be used: PyTorch, which allocates and times, is missing ({error})"
    if not torch.cuda.is_available():
        return f"no CUDA GPU was found (PyTorch {torch.__version__} sees none)"
    return ""


def describe() -> dict[str, Any]:
    """The machine and the software, for the record."""
    torch = module("torch")
    properties = torch.cuda.get_device_properties(0)
    return {
        "host": host_info(),
        "gpu": gpu_state(),
        "arch": arch(),
        "multiprocessors": properties.multi_processor_count,
        "cache_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "compiler": compiler(),
        "versions": {name: found for name in PACKAGES if (found := version(name))},
    }


def arch() -> str:
    """Architecture of the first GPU, such as ``sm_90``."""
    major, minor = module("torch").cuda.get_device_capability(0)
    return f"sm_{major}{minor}"


def folder_name(device: str) -> str:
    """Name of the folder with the results of a device: ``h200`` of ``NVIDIA H200``."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    models = [place for place, word in enumerate(words) if re.search(r"\d", word)]
    if not models:
        return "-".join(words) or "gpu"
    word = words[models[0]]
    return words[models[0] - 1] + word if word.isdigit() and models[0] else word


def gpu_state() -> dict[str, str]:
    """State from the driver's tool: name, driver, clocks (MHz), temperature (C), power (W)."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"name": str(module("torch").cuda.get_device_name(0))}
    return parse_state(done.stdout)


def parse_state(text: str) -> dict[str, str]:
    """Fields of the first line of the driver's answer."""
    values = [value.strip() for value in text.strip().splitlines()[0].split(",")]
    return dict(zip(QUERIES, values, strict=False))


def measure_limits(clock: Clock) -> Limits:
    """Time a copy and pure reads of a gibibyte, far beyond the cache."""
    torch = module("torch")
    source = torch.randn(LIMIT_BYTES // 4, device=clock.device)
    target = torch.empty_like(source)
    copies = _median(clock, lambda: target.copy_(source))
    reads = [
        _median(clock, lambda reduce=reduce: reduce(source))  # type: ignore[misc]
        for reduce in (torch.sum, torch.amax)
    ]
    return Limits(2 * LIMIT_BYTES / copies, LIMIT_BYTES / min(reads))


def _median(clock: Clock, work: Callable[[], object]) -> float:
    with clock.scope(TorchEager()):
        work()
        clock.wait()
        return statistics.median(clock.seconds(work) for _ in range(LIMIT_SAMPLES))

# SPDX-License-Identifier: Apache-2.0
"""Measured times of kernels on GPUs, as the training and the checks of the kernel models read them.

``PREDICT_DATA`` names a folder with ``gpu_kernels`` (from sitar-lab/NeuSight), ``gemm_fp16`` (from
microsoft/vidur), and ``gpu_16bit`` (from ai-dynamo/aiconfigurator); what is missing there is left
out.
"""

from __future__ import annotations

import csv
import gzip
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from schedules.cost.gemm import HARNESSES

MACHINES = {
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA L4": "l4",
    "Tesla P100-PCIE-16GB": "p100",
    "Tesla P4": "p4",
    "Tesla T4": "t4",
    "Tesla V100-PCIE-32GB": "v100",
    "a100": "a100-80",
    "a40": "a40",
    "h100": "h100",
    "a100_sxm": "a100-sxm-80",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
}
"""Machine by the name that the data give the device."""

NEUSIGHT = "sitar-lab/NeuSight, commit 6945927 (MIT)"
VIDUR = "microsoft/vidur, commit 7d47513 (MIT)"
DYNAMO = "ai-dynamo/aiconfigurator, commit 095f58a51 (Apache-2.0)"

OPS = {
    "add": ("add", 3),
    "mul": ("mul", 3),
    "div": ("div", 3),
    "pow": ("pow", 3),
    "addu": ("add_scalar", 2),
    "mulu": ("mul_scalar", 2),
    "divu": ("div_scalar", 2),
    "powu": ("pow_scalar", 2),
    "relu": ("relu", 2),
    "gelu": ("gelu", 2),
    "tanh": ("tanh", 2),
}
"""Our operator, and tensors that it reads and writes, by the name in ``rows.csv.gz``."""

BLOCKS = 40
"""Blocks of the rows of a sweep whose least times are compared."""
LEAST = 0.02
"""Share of the times of a block that lie below what counts as its least."""

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sweep:
    """Launches of one kernel in one dtype.

    Parameters
    ----------
    kernel, dtype : str
        Which.
    machine : np.ndarray
        (launches,) names.
    sizes : dict[str, np.ndarray]
        (launches,) each.
    seconds : np.ndarray
        (launches,).
    part : np.ndarray
        (launches,) names by which errors are told apart: operator, or language model.
    source : str
        Repository and licence.
    drift : np.ndarray, optional
        (launches,) seconds of each that the harness takes more than at the begin of its sweep.
    measured : np.ndarray, optional
        (launches,) seconds before the drift was taken out of them.
    place : np.ndarray, optional
        (launches,) share of the launches of its machine that were measured before.
    """

    kernel: str
    dtype: str
    machine: np.ndarray
    sizes: Columns
    seconds: np.ndarray
    part: np.ndarray
    source: str
    drift: np.ndarray | None = None
    measured: np.ndarray | None = None
    place: np.ndarray | None = None

    def __getitem__(self, which: np.ndarray) -> Sweep:
        """Launches that a mask or indices choose."""
        sizes = {name: values[which] for name, values in self.sizes.items()}
        chosen = self.machine[which], sizes, self.seconds[which], self.part[which]
        rest = (self.drift, self.measured, self.place)
        extra = (None if each is None else each[which] for each in rest)
        return Sweep(self.kernel, self.dtype, *chosen, self.source, *extra)

    def held_out(self) -> np.ndarray:
        """Mask of a fifth of the sizes, the same on all machines."""
        rows = np.stack([values.astype(np.int64) for values in self.sizes.values()], axis=1)
        return np.array([zlib.crc32(row.tobytes()) % 5 == 0 for row in np.ascontiguousarray(rows)])


DATA = ("gpu_kernels", "gemm_fp16", "gpu_16bit", "collectives")
"""Folders of measurements."""


def data_folder() -> Path | None:
    """Folder that ``PREDICT_DATA`` names, or None; ends the program where it holds no data."""
    folder = os.environ.get("PREDICT_DATA")
    if not folder:
        return None
    if not any((Path(folder) / name).is_dir() for name in DATA):
        raise SystemExit(f"PREDICT_DATA is {folder!r}; expected a folder with {', '.join(DATA)}")
    return Path(folder)


def read_columns(path: Path) -> Columns:
    """Columns of a packed CSV file, numbers where all entries are."""
    with gzip.open(path, "rt", newline="") as file:
        header, *rows = csv.reader(file)
    columns = {}
    for at, name in enumerate(header):
        entries = [row[at] for row in rows]
        try:
            columns[name] = np.array(entries, float)
        except ValueError:
            columns[name] = np.array(entries)
    return columns


def _tables(folder: Path, *names: str) -> Columns | None:
    tables = [read_columns(folder / name) for name in names if (folder / name).is_file()]
    if not tables:
        return None
    return {name: np.concatenate([t[name] for t in tables]) for name in tables[0]}


def _machines(column: np.ndarray) -> np.ndarray:
    return np.array([MACHINES.get(name, name) for name in column.tolist()])


def gemm_sweep(folder: Path) -> Sweep | None:
    """Linear layers and batched products in float32."""
    table = _tables(folder / "gpu_kernels", "gemm.csv.gz", "gemm_larger.csv.gz")
    if table is None:
        return None
    sizes = {name: table[name] for name in "BMNK"}
    sizes["batched"] = (table["op"] == "bmm").astype(float)
    machine = _machines(table["device"])
    return Sweep("gemm", "float32", machine, sizes, table["ms"] / 1e3, table["op"], NEUSIGHT)


def gemm_fp16_sweep(folder: Path) -> Sweep | None:
    """Linear layers of language models in float16."""
    table = _tables(folder / "gemm_fp16", "gemm_fp16.csv.gz")
    if table is None:
        return None
    machine, seconds = _machines(table["gpu"]), table["us"] / 1e6
    return Sweep("gemm", "float16", machine, _linear(table), seconds, table["model"], VIDUR)


def gemm_bf16_sweep(folder: Path) -> Sweep | None:
    """Products in bfloat16, replayed as a graph of launches."""
    table = _tables(folder / "gpu_16bit", "gemm_bf16.csv.gz")
    if table is None:
        return None
    machine, seconds = _machines(table["device"]), table["us"] / 1e6
    return Sweep("gemm", "bfloat16", machine, _linear(table), seconds, machine, DYNAMO)


def _linear(table: Columns) -> dict[str, np.ndarray]:
    """Sizes of products that are not batched."""
    count = len(table["M"])
    sizes = {"B": np.ones(count), **{name: table[name] for name in "MNK"}}
    return sizes | {"batched": np.zeros(count)}


def joint_gemm_sweeps(folder: Path) -> list[Sweep]:
    """Products of all types, each with the number of its harness (``HARNESSES``)."""
    joint = []
    for number, sweep in enumerate(
        (gemm_sweep(folder), gemm_fp16_sweep(folder), gemm_bf16_sweep(folder))
    ):
        if sweep is not None:
            batched = sweep.sizes["batched"]
            harness = batched if number == 0 else np.full(len(batched), 1.0 + number)
            part = np.array(HARNESSES)[harness.astype(int)]
            joint.append(replace(sweep, sizes={**sweep.sizes, "harness": harness}, part=part))
    return joint


def attention_sweeps(folder: Path) -> list[Sweep]:
    """Attention in bfloat16: prefills of whole sequences, and steps of decoders."""
    table = _tables(folder / "gpu_16bit", "attention_bf16.csv.gz")
    if table is None:
        return []
    names = {"B": "batch", "L": "length", "H": "heads", "KV": "kv_heads", "D": "head_size"}
    sizes = {ours: table[name] for ours, name in names.items()}
    sizes["S"] = table["length"] + table["step"]
    machine, seconds = _machines(table["device"]), table["us"] / 1e6
    return [Sweep("attention", "bfloat16", machine, sizes, seconds, table["phase"], DYNAMO)]


def conv2d_sweep(folder: Path) -> Sweep | None:
    """Convolutions 3 x 3 in float32; the harness takes as long as in the middle of the sweep."""
    table = _tables(folder / "gpu_kernels", "conv2d.csv.gz")
    if table is None:
        return None
    side, kernel = table["size"], table["kernel"]
    out = np.floor((side + 2 * table["padding"] - kernel) / table["stride"]) + 1
    sizes = {"B": table["B"], "IC": table["in_channels"], "OC": table["out_channels"]}
    sizes |= {"H": side, "W": side, "FH": kernel, "FW": kernel, "OH": out, "OW": out}
    sizes["groups"] = np.ones(len(side))
    part = np.full(len(side), "conv2d")
    machine, seconds = _machines(table["device"]), table["ms"] / 1e3
    sweep = Sweep("conv2d", "float32", machine, sizes, seconds, part, NEUSIGHT)
    taught, steady = ~sweep.held_out(), seconds.copy()
    drift, place = np.zeros((2, len(seconds)))
    for name in np.unique(machine):
        own = machine == name
        place[own] = places(int(own.sum()))
        steady[own], drift[own] = without_drift(seconds[own], taught[own])
    return replace(sweep, seconds=steady, drift=drift, measured=seconds, place=place)


def places(count: int) -> np.ndarray:
    """Share of the rows of a sweep that come before each."""
    return np.arange(count) / max(count, 1)


def without_drift(seconds: np.ndarray, taught: np.ndarray) -> tuple[np.ndarray, float]:
    """Times of a sweep as in its middle, from those of a harness that slows down as it goes on.

    The shortest convolutions take 0.1 ms in the first rows of a file and 0.3 to 0.8 in the last
    ones, on every GPU, while the sizes are drawn alike all along. The slope is the median one
    between the least times of blocks of rows, held-out ones apart. No time gets shorter than the
    shortest of all would be there. A sweep of few rows stays as it is.

    Returns
    -------
    np.ndarray, float
        Times, and how much of each the harness takes more there than at the begin.
    """
    place = places(len(seconds))
    block = (place * BLOCKS).astype(int)
    parts = [taught & (block == each) for each in range(BLOCKS)]
    if len(seconds) < 10 * BLOCKS or not all(part.any() for part in parts):
        return seconds, 0.0
    at = np.array([place[part].mean() for part in parts])
    least = np.array([np.quantile(seconds[part], LEAST) for part in parts])
    one, other = np.triu_indices(BLOCKS, 1)
    slope = max(float(np.median((least[other] - least[one]) / (at[other] - at[one]))), 0.0)
    steady = seconds + slope * (0.5 - place)
    return np.maximum(steady, seconds[taught].min() + slope / 2), slope / 2


def row_sweeps(folder: Path) -> dict[str, Sweep]:
    """Operators on B x H float32 elements, by our name of the operator."""
    table = _tables(folder / "gpu_kernels", "rows.csv.gz", "rows_larger.csv.gz")
    if table is None:
        return {}
    machine, sweeps = _machines(table["device"]), {}
    ours = {"softmax": "softmax", "ln": "layer_norm", **{op: name for op, (name, _) in OPS.items()}}
    for op, name in ours.items():
        is_op = table["op"] == op
        sizes = {"B": table["B"][is_op], "H": table["H"][is_op]}
        seconds, part = table["ms"][is_op] / 1e3, np.full(int(is_op.sum()), name)
        sweeps[name] = Sweep(name, "float32", machine[is_op], sizes, seconds, part, NEUSIGHT)
    return sweeps


def errors(measured: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """GMAE and MAPE in per cent, and the count.

    GMAE is exp(mean ln(|e| + 4e-4)), which counts a perfect prediction as 0.04 %.
    """
    relative = np.abs(predicted / measured - 1)
    gmae = float(np.exp(np.log(relative + 4e-4).mean())) if len(relative) else float("nan")
    return {
        "gmae": round(100 * gmae, 2),
        "mape": round(100 * float(relative.mean()), 2),
        "count": len(relative),
    }

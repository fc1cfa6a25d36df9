# SPDX-License-Identifier: Apache-2.0
"""Measured runs of language models beside the sum of their predicted kernels and collectives."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from examples.benchmarks.prediction.data import MACHINES, OPS, read_columns
from schedules.cost.decisions import predict
from schedules.cost.kernel_call import KernelCall
from schedules.cost.machine import load_machine

MICRO_BATCHES = {"pp4_1": 1, "pp4_4": 4}
RANKS = 4

LAYERS = {"bert_large": 24, "gpt2_large": 36, "gpt3_27": 32, "gpt3_xl": 24, "opt_13": 24}
"""Layers of the models, which the runs on four GPUs do not say."""

TRAINING = ("forward", "backward", "accumulate")

SESSIONS = 0.9
"""Share of the runs of a machine, and of the machines, whose error widened intervals hold."""

Transfer = Callable[[str, float], float]
"""Seconds of a collective from its name and the bytes on each rank."""


@dataclass(frozen=True)
class Run:
    """One measured run.

    Parameters
    ----------
    machine, graph, mode, option : str
        Which: ``mode`` is ``inf`` or ``train``; ``option`` ``fusion``, ``dp4``, ``tp4``, ``pp4_1``,
        ``pp4_4`` or empty.
    layers : int
        How often the layer of the graph runs.
    seconds : float
        Measured.
    """

    machine: str
    graph: str
    mode: str
    option: str
    layers: int
    seconds: float


def read_runs(folder: Path) -> list[Run]:
    """Measured runs."""
    with (folder / "gpu_kernels" / "model_times.csv").open(newline="") as file:
        return [
            Run(
                MACHINES[row["device"]],
                row["graph"],
                row["mode"],
                row["option"],
                int(row["layers"]) or LAYERS[row["model"]],
                float(row["ms"]) / 1e3,
            )
            for row in csv.DictReader(file)
        ]


def read_graphs(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Graphs by name."""
    with gzip.open(folder / "gpu_kernels" / "model_graphs.json.gz") as file:
        return json.load(file)


def kernel_call(op: str, sizes: list[Any]) -> KernelCall:
    """Launch of one entry of a graph."""
    if op == "MEM":
        elements = sum(math.prod(shape) for shape in sizes)
        written = math.prod(sizes[-1])
        return KernelCall("copy", {}, "float32", 0, 4.0 * (elements - written), 4.0 * written)
    if op == "Linear":
        m, k, n = sizes
        return KernelCall("gemm", {"B": 1, "M": m, "N": n, "K": k})
    if op == "BMM":
        b, m, k, n = sizes
        return KernelCall("bmm", {"B": b, "M": m, "N": n, "K": k})
    b, h = sizes
    name = op.removeprefix("VEC")
    if name in ("softmax", "ln"):
        return KernelCall("softmax" if name == "softmax" else "layer_norm", {"B": b, "H": h})
    ours, tensors = OPS[name]
    return KernelCall(ours, {}, "float32", 0, 4.0 * (tensors - 1) * b * h, 4.0 * b * h)


@cache
def _times(machine: str, call: KernelCall, moved: float) -> tuple[float, float, float]:
    # The bytes are part of the key: calls are equal without them.
    found = predict(call, load_machine(machine))
    alone = found.device_seconds
    return alone, alone * found.low / found.seconds, alone * found.high / found.seconds


@dataclass(frozen=True)
class Predictor:
    """Times of graphs on one machine.

    Parameters
    ----------
    machine : str
        Name.
    transfer : Callable
        Seconds of ``all_reduce`` or ``send_recv`` from its bytes on each rank.
    """

    machine: str
    transfer: Transfer

    def entry(self, entry: list[Any]) -> np.ndarray:
        """Time and interval of one kernel."""
        op, sizes = entry
        if op.startswith(("ALLREDUCE", "SENDRECV")):
            name = "send_recv" if op == "SENDRECV" else "all_reduce"
            return np.full(3, self.transfer(name, 4.0 * sizes[0]))
        call = kernel_call(op, sizes)
        return np.array(_times(self.machine, call, call.moved_bytes))

    def node(self, node: dict[str, Any], direction: str) -> np.ndarray:
        """Time and interval of one op; views take none, a fused one streams its operands."""
        if node["op"] == "getitem":
            return np.zeros(3)
        if node["op"] == "fused" and direction == "forward":
            return self.entry(["MEM", [*node["in"], node["out"]]])
        return sum((self.entry(entry) for entry in node.get(direction) or ()), np.zeros(3))

    def total(self, nodes: list[dict[str, Any]], direction: str, layers: float) -> np.ndarray:
        """Time and interval of all ops, those of the layer as often as it runs."""
        times = [self.node(node, direction) * (layers if node["in_layer"] else 1) for node in nodes]
        return np.sum(times, axis=0)

    def run(self, run: Run, nodes: list[dict[str, Any]]) -> np.ndarray:
        """Time of a whole run, and interval by its kernels."""
        if run.mode == "inf":
            return self.total(nodes, "forward", run.layers)
        if run.option == "dp4":
            return self._data_parallel(nodes, run.layers)
        if run.option in MICRO_BATCHES:
            return self._pipeline(nodes, run.layers, MICRO_BATCHES[run.option])
        return sum((self.total(nodes, d, run.layers) for d in TRAINING), np.zeros(3))

    def _data_parallel(self, nodes: list[dict[str, Any]], layers: int) -> np.ndarray:
        """Backward from the last op on, each all-reduce as soon as its gradient is there."""
        forward = self.total(nodes, "forward", layers)
        compute, network = np.zeros(3), np.zeros(3)
        for node in reversed(_unrolled(nodes, layers)):
            entries = node.get("backward") or ()
            if any(op == "ALLREDUCE_ASYNC" for op, _ in entries):
                network = np.maximum(network, compute) + self.node(node, "backward")
            else:
                compute = compute + self.node(node, "backward")
        return forward + np.maximum(compute, network) + self.total(nodes, "accumulate", layers)

    def _pipeline(self, nodes: list[dict[str, Any]], layers: int, batches: int) -> np.ndarray:
        """One micro-batch after the other through stages of equal layers (GPipe)."""
        transfers = [node for node in nodes if node["op"] == "sendrecv"]
        work = [node for node in nodes if node["op"] != "sendrecv"]
        whole = np.zeros(3)
        for direction in TRAINING:
            through = self.total(work, direction, layers)
            layer = [node for node in work if node["in_layer"]]
            stage = self.total(layer, direction, layers) / RANKS
            link = self.total(transfers, direction, 1)
            whole = whole + through + (RANKS - 1) * link + (batches - 1) * (stage + link)
        return whole


def session_spread(errors: Mapping[str, Sequence[float]]) -> float:
    """Ratio by which whole runs differ from the times of their kernels, measured another day.

    Clocks under load, the card and the harness differ between a sweep of kernels and a run. Which
    of the two is faster is chance, so that errors count without their sign. Runs of one machine err
    alike: it is a percentile over the machines of the same percentile of each.

    Parameters
    ----------
    errors : Mapping of str to Sequence of float
        Logarithms of measured over predicted times, by machine.
    """
    each = [np.quantile(np.abs(runs), SESSIONS) for runs in errors.values()]
    return float(np.exp(np.quantile(each, SESSIONS)))


def _unrolled(nodes: list[dict[str, Any]], layers: int) -> list[dict[str, Any]]:
    at = [index for index, node in enumerate(nodes) if node["in_layer"]]
    layer = [nodes[index] for index in at]
    return nodes[: at[0]] + layer * layers + nodes[at[-1] + 1 :]


def interpolated_transfers(folder: Path, node: str) -> Transfer:
    """Seconds of collectives of four ranks, interpolated between measured sizes.

    Straight lines on logarithmic scales; beyond the largest message, at its bandwidth.
    """
    return lambda collective, size: _transfer(_curves(folder, node)[collective], size)


@cache
def _curves(folder: Path, node: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Logarithms of sizes and times, by collective; read once, where a run needs them."""
    table = read_columns(folder / "collectives" / "collectives.csv.gz")
    curves = {}
    for collective, ranks in (("all_reduce", RANKS), ("send_recv", 2)):
        chosen = (table["collective"] == collective) & (table["ranks"] == ranks)
        chosen &= (table["per_node"] == ranks) & np.char.startswith(table["node"], node)
        sizes = np.unique(table["bytes"][chosen])
        times = [np.median(table["us"][chosen & (table["bytes"] == size)]) for size in sizes]
        curves[collective] = np.log(sizes), np.log(np.array(times) * 1e-6)

    return curves


def _transfer(curve: tuple[np.ndarray, np.ndarray], size: float) -> float:
    sizes, times = curve
    beyond = max(0.0, math.log(size) - sizes[-1])
    return float(np.exp(np.interp(math.log(size), sizes, times) + beyond))

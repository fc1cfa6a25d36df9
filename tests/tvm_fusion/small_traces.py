# SPDX-License-Identifier: Apache-2.0
"""Small Kineto and execution traces, written as PyTorch's profiler and observer write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HOST, AUTOGRAD = 100, 200


class Kineto:
    """Events of one rank; times in microseconds."""

    def __init__(self, rank: int | None = None, world: int = 2, device: str = "Tesla V100") -> None:
        self.data: dict[str, Any] = {"schemaVersion": 1, "traceEvents": []}
        if rank is not None:
            self.data["distributedInfo"] = {"rank": rank, "world_size": world}
        if device:
            self.data["deviceProperties"] = [{"id": 0, "name": device}]
        self.correlation = 1
        self.external = 1

    def event(self, cat: str, name: str, ts: float, dur: float, tid: Any, **args) -> None:
        self.data["traceEvents"].append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur}
            | {"args": args}
        )

    def op(self, name: str, ts: float, dur: float, tid: int = HOST, **args) -> None:
        self.external += 1
        args = {"External id": self.external} | args
        self.event("cpu_op", name, ts, dur, tid, **args)

    def call(self, name: str, ts: float, dur: float, tid: int = HOST) -> None:
        self.correlation += 1
        self.event("cuda_runtime", name, ts, dur, tid, correlation=self.correlation)

    def launch(
        self,
        ts: float,
        dur: float,
        start: float,
        length: float,
        name: str = "kernel",
        stream: int = 7,
        call: str = "cudaLaunchKernel",
        cat: str = "kernel",
        tid: int = HOST,
        **args,
    ) -> None:
        """Runtime call and the kernel that it launches."""
        self.call(call, ts, dur, tid)
        args = {"stream": stream, "correlation": self.correlation} | args
        self.event(cat, name, start, length, stream, **args)

    def write(self, path: Path) -> Path:
        text = json.dumps(self.data)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path


def training_step(rank: int | None = None, late: float = 0.0, device: str = "Tesla V100") -> Kineto:
    """Forward, backward on a second thread with an all-reduce, a wait for it, and the update.

    Base 1000. The all-reduce of rank 0 waits for the rank that is late.
    """
    prefix = "hip" if "Instinct" in device else "cuda"
    trace = Kineto(rank, device=device)
    at = 1000 + (late if rank else 0)
    meet = 1050 + late
    shapes = {"Input Dims": [[32, 64], [64, 16]], "Input type": ["float", "float"]}
    trace.op("aten::linear", at, 30, **shapes)
    trace.op("aten::mm", at + 5, 20, **shapes)
    launch = f"{prefix}LaunchKernel"
    trace.launch(at + 10, 5, at + 15, 10, "gemm", call=launch)
    trace.op("MmBackward", at + 40, 20, AUTOGRAD)
    trace.op("c10d::allreduce_", at + 42, 16, AUTOGRAD)
    reduced = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1024}
    trace.op("record_param_comms", at + 43, 13, AUTOGRAD, **reduced)
    trace.call(f"{prefix}StreamWaitEvent", at + 44, 1, AUTOGRAD)
    trace.launch(
        at + 46, 4, at + 50, meet - at + 30, "ncclKernel_AllReduce", 9, launch, tid=AUTOGRAD
    )
    trace.op("aten::item", at + 70, meet + 40 - at)
    trace.call(f"{prefix}StreamWaitEvent", at + 71, 1)
    trace.launch(
        at + 72,
        4,
        meet + 81,
        2,
        "Memcpy DtoH (Device -> Pageable)",
        7,
        f"{prefix}MemcpyAsync",
        "gpu_memcpy",
        bytes=4,
    )
    trace.call(f"{prefix}StreamSynchronize", at + 78, meet + 90 - at - 78)
    return trace


def node(id_: int, parent: int, name: str, schema: str, thread: int = 1, **more) -> dict:
    """Node of an execution trace in the form of a schema."""
    rf_id, inputs, outputs = more.pop("rf_id", id_), more.pop("inputs", []), more.pop("outputs", [])
    shapes, types = more.pop("shapes", []), more.pop("types", [])
    if schema == "1.0.1":
        return {
            "name": name,
            "id": id_,
            "rf_id": rf_id,
            "parent": parent,
            "tid": thread,
            "inputs": inputs,
            "input_shapes": shapes,
            "input_types": types,
            "outputs": outputs,
            "output_shapes": [],
            "output_types": [],
        }
    attributes = {"rf_id": rf_id, "tid": thread, "op_schema": ""} | more
    result: dict[str, Any] = {
        "id": id_,
        "name": name,
        "ctrl_deps": parent,
        "inputs": {"values": inputs, "shapes": shapes, "types": types},
        "outputs": {"values": outputs, "shapes": [], "types": []},
        "attrs": [
            {"name": key, "type": "uint64", "value": value} for key, value in attributes.items()
        ],
    }
    if schema.startswith("1.1.1"):
        result["inputs"]["strides"] = result["outputs"]["strides"] = []
    return result


def execution_trace(path: Path, schema: str, nodes: list[dict]) -> Path:
    path.write_text(json.dumps({"schema": schema, "pid": 1, "time": "", "nodes": nodes}))
    return path

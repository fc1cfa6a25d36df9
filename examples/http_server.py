# SPDX-License-Identifier: Apache-2.0
"""A compiled model behind HTTP, by FastAPI.

    pip install fastapi uvicorn
    tvm-fusion compile model.onnx -o model.so
    python examples/http_server.py model.so --streams 2
    curl localhost:8000/predict -H "Content-Type: application/json" -d '{"image": [[...]]}'

A model computes one call at a time, so each stream loads the file once more; all share its weights,
also with other processes that serve it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException

import tvm_fusion


def create_app(path: str | Path, streams: int = 1, threads: int = 1) -> FastAPI:
    """A server for a saved model.

    Parameters
    ----------
    path : str or Path
        What ``CompiledModel.save`` wrote.
    streams : int
        Requests that are computed at once; others wait.
    threads : int
        Threads of each.

    Returns
    -------
    FastAPI
        ``GET /`` describes the inputs and outputs; ``POST /predict`` takes a JSON object from the
        names of the inputs to nested lists, and returns one of the outputs.
    """
    free: SimpleQueue[tvm_fusion.CompiledModel] = SimpleQueue()
    for _ in range(streams):
        model = tvm_fusion.load(path, threads=threads)
        free.put(model)
    inputs, outputs = model.inputs, model.outputs
    app = FastAPI(title="tvm-fusion")

    @app.get("/")
    def describe() -> dict[str, Any]:
        sides = {"inputs": inputs, "outputs": outputs}
        return {
            side: [{"name": s.name, "shape": s.shape, "dtype": s.dtype} for s in specs]
            for side, specs in sides.items()
        }

    @app.post("/predict")
    def predict(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
        types = {spec.name: spec.dtype for spec in inputs}
        try:
            arrays = {name: np.array(value, types.get(name)) for name, value in values.items()}
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        model = free.get()
        try:
            results = model(arrays)
        except tvm_fusion.errors.InvalidInputError as error:
            raise HTTPException(422, str(error)) from error
        finally:
            free.put(model)
        every = results if isinstance(results, tuple) else (results,)
        return {spec.name: y.tolist() for spec, y in zip(outputs, every, strict=True)}

    return app


def main() -> None:
    """Run the command."""
    import uvicorn

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    uvicorn.run(create_app(given.model, given.streams, given.threads), port=given.port)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Builder of Wide & Deep as an ONNX model, with the features of the Criteo data set.

Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016): a linear model of crossed
features beside a network of ReLU layers (1024, 512, 256) over 32-dimensional embeddings. The data
are those of Criteo's Display Advertising Challenge, 13 numbers and 26 categories a row.
"""

from __future__ import annotations

import math

import numpy as np
import onnx

from examples.onnx_builder import ModelBuilder

CATEGORIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Values of each category in Criteo's data, as DLRM counts them
(github.com/facebookresearch/dlrm, table sizes of the Kaggle set)."""

NUMBERS = 13


def wide_and_deep(
    batch: int | str = 1,
    seed: int = 0,
    *,
    rows: int = 100_000,
    embedding: int = 32,
    layers: tuple[int, ...] = (1024, 512, 256),
    crosses: int = 40,
    weights: bool = True,
) -> onnx.ModelProto:
    """The probability of a click.

    Parameters
    ----------
    batch : int or str
        Rows of data at a time, or the name of a symbolic size.
    seed : int
        Seed of the weights.
    rows : int
        Most rows of a table: keys of larger categories, and of crossed features, are hashed.
    embedding : int
        Dimensions of an embedding.
    layers : tuple of int
        Outputs of the ReLU layers.
    crosses : int
        Crossed features a row of data.
    weights : bool
        Whether weights are stored, 29 million in full size; else they are inputs.

    Returns
    -------
    onnx.ModelProto
        From ``numbers`` float32 (batch, 13), ``categories`` int64 (batch, 26) and ``crosses`` int64
        (batch, crosses), to ``probability`` (batch, 1). Keys are below ``rows``, those of a smaller
        category below its number of values.
    """
    net = ModelBuilder("wide_and_deep", seed, weights)
    numbers = net.add_input("numbers", (batch, NUMBERS))
    tables = [min(values, rows) for values in CATEGORIES]
    categories = net.add_input("categories", (batch, len(tables)), *tables)
    crossed = net.add_input("crosses", (batch, crosses), rows)
    deep = _deep(net, numbers, categories, tables, embedding, layers)
    logit = net.op("Add", _wide(net, crossed, rows, crosses), deep)
    return net.model({"probability": (net.op("Sigmoid", logit), (batch, 1))})


def _wide(net: ModelBuilder, crossed: str, rows: int, crosses: int) -> str:
    """Append the bag of an embedding with one dimension: the sum of the selected rows."""
    table = net.weight("wide.weight", net.normal((rows, 1), crosses**-0.5))
    axis = net.constant("one", np.array([1], np.int64))
    return net.op("ReduceSum", net.op("Gather", table, crossed, axis=0), axis, keepdims=0)


def _deep(
    net: ModelBuilder,
    numbers: str,
    categories: str,
    tables: list[int],
    embedding: int,
    layers: tuple[int, ...],
) -> str:
    """Append the embeddings of the categories beside the numbers, and fully connected layers."""
    parts = [numbers]
    for index, rows in enumerate(tables):
        which = net.constant(f"column.{index}", np.array(index, np.int64))
        key = net.op("Gather", categories, which, axis=1)
        table = net.weight(f"embedding.{index}.weight", net.normal((rows, embedding), 1.0))
        parts.append(net.op("Gather", table, key, axis=0))
    x = net.op("Concat", *parts, axis=1)
    features = NUMBERS + len(tables) * embedding
    for index, outputs in enumerate(layers):
        x = net.op("Relu", _linear(net, x, f"deep.{index}", features, outputs, 2.0))
        features = outputs
    return _linear(net, x, "deep.logit", features, 1, 1.0)


def _linear(net: ModelBuilder, x: str, name: str, inputs: int, outputs: int, gain: float) -> str:
    weight = net.weight(f"{name}.weight", net.normal((outputs, inputs), math.sqrt(gain / inputs)))
    bias = net.weight(f"{name}.bias", net.normal((outputs,), 0.1))
    return net.op("Gemm", x, weight, bias, transB=1)

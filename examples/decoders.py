# SPDX-License-Identifier: Apache-2.0
"""Steps of decoders as ONNX models: one token, with the keys and values of those before it.

``gpt2_step`` is GPT-2 (Radford et al., 2019), ``llama_step`` a smaller Llama (Touvron et al., 2023)
with grouped queries, rotary positions and gated layers. :func:`in_few_bits` stores the matrices and
embeddings of a model in 8 or 4 bits, in the operators of ONNX Runtime's quantiser.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import helper, numpy_helper

from examples.transformers import TransformerBuilder, tanh_gelu

VOCABULARY = 32000
"""Tokens of the smaller Llama."""

BLOCK = 32
"""Numbers of a line that share a scale in 8 or 4 bits."""
LEAST_TABLE = 1 << 18
"""Numbers of a table from which :func:`in_few_bits` stores it so."""


class DecoderBuilder(TransformerBuilder):
    """Adds what steps of decoders have; sequences are one token long."""

    def __init__(
        self, name: str, width: int, heads: int, groups: int, layers: int, past: int, seed: int
    ) -> None:
        super().__init__(name, 1, 1, width, heads, layers, 1e-5, seed, True)
        self.groups, self.past = groups, past
        self.head = width // heads
        self.outputs: dict[str, tuple[str, tuple[int, ...]]] = {}

    def linear(self, x: str, name: str, inputs: int, outputs: int, bias: bool = True) -> str:
        """Append a product with a matrix."""
        product = self.op("MatMul", x, self.matrix(name, inputs, outputs))
        return self.op("Add", product, self.vector(name, outputs)) if bias else product

    def with_past(self, x: str, number: int, kind: str) -> str:
        """Append the keys or values of the new token, [1, groups, 1, head], to those before."""
        shape = (1, self.groups, self.past, self.head)
        before = self.add_input(f"past_key_values.{number}.{kind}", shape)
        joined = self.op("Concat", before, x, axis=2)
        grown = (1, self.groups, self.past + 1, self.head)
        self.outputs[f"present.{number}.{kind}"] = (joined, grown)
        return joined

    def heads_of(self, x: str, count: int) -> str:
        """Append the heads, [1, count, 1, head], of a token's features."""
        return self.op("Transpose", self.reshape(x, count, self.head), perm=[0, 2, 1, 3])

    def attend(self, query: str, key: str, value: str, number: int) -> str:
        """Append attention of heads, [1, heads, 1, head]; those of a group read the same keys."""
        key, value = (
            self.with_past(x, number, kind) for x, kind in ((key, "key"), (value, "value"))
        )
        each = self.heads // self.groups
        query = self.op("Reshape", query, self.integers([1, self.groups, each, self.head]))
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.op("Div", scores, self.number(math.sqrt(self.head), "sqrt_head"))
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        return self.reshape(mixed, self.width)

    def rms_norm(self, x: str, name: str) -> str:
        """Append the division by the root of the mean square, as the exporter writes it."""
        square = self.op("ReduceMean", self.op("Pow", x, self.number(2, "two")), axes=[-1])
        root = self.op("Sqrt", self.op("Add", square, self.number(1e-6, "epsilon")))
        gamma = self.weight(f"{name}.weight", 1 + self.normal((self.width,), 0.1))
        return self.op("Mul", gamma, self.op("Mul", x, self.op("Reciprocal", root)))

    def rotated(self, x: str, cosine: str, sine: str) -> str:
        """Append the rotation of heads, [1, heads, 1, head], by the token's position."""
        low, high = self.append("Split", [x], 2, axis=-1)
        turned = self.op("Concat", self.op("Neg", high), low, axis=-1)
        return self.op("Add", self.op("Mul", x, cosine), self.op("Mul", turned, sine))


def gpt2_step(past: int = 128, seed: int = 0, *, layers: int = 12) -> onnx.ModelProto:
    """A step of GPT-2 small, with 163 million weights, as its last matrix is not its embedding.

    Parameters
    ----------
    past : int
        Tokens before.
    seed : int
        Seed of the weights.
    layers : int
        Layers.

    Returns
    -------
    onnx.ModelProto
        From ``input_ids`` and ``position_ids``, int64 [1, 1], and ``past_key_values.N.key`` and
        ``.value`` [1, 12, past, 64] to ``logits`` [1, 1, 50257] and ``present.N.key`` and
        ``.value``.
    """
    width, vocabulary = 768, 50257
    net = DecoderBuilder("gpt2_step", width, 12, 12, layers, past, seed)
    token = net.add_input("input_ids", (1, 1), vocabulary)
    position = net.add_input("position_ids", (1, 1), 1024)
    embedding = net.op("Gather", net.table("wte", vocabulary), token)
    x = net.op("Add", embedding, net.op("Gather", net.table("wpe", 1024), position))
    for number in range(layers):
        name = f"h.{number}"
        joined = net.linear(net.layer_norm(x, f"{name}.ln_1"), f"{name}.attn", width, 3 * width)
        parts = net.append("Split", [joined], 3, axis=-1)
        query, key, value = (net.heads_of(part, net.heads) for part in parts)
        mixed = net.attend(query, key, value, number)
        x = net.op("Add", x, net.linear(mixed, f"{name}.proj", width, width))
        wide = net.linear(net.layer_norm(x, f"{name}.ln_2"), f"{name}.fc", width, 4 * width)
        x = net.op("Add", x, net.linear(tanh_gelu(net, wide), f"{name}.down", 4 * width, width))
    logits = net.linear(net.layer_norm(x, "ln_f"), "lm_head", width, vocabulary, bias=False)
    return net.model({"logits": (logits, (1, 1, vocabulary)), **net.outputs})


def llama_step(past: int = 128, seed: int = 0, *, layers: int = 16) -> onnx.ModelProto:
    """A step of a Llama with 150 million weights, 4 groups of 3 query heads each.

    Parameters
    ----------
    past : int
        Tokens before.
    seed : int
        Seed of the weights.
    layers : int
        Layers.

    Returns
    -------
    onnx.ModelProto
        As that of :func:`gpt2_step`, with keys and values of [1, 4, past, 64].
    """
    width, heads, groups, inner = 768, 12, 4, 2048
    net = DecoderBuilder("llama_step", width, heads, groups, layers, past, seed)
    token = net.add_input("input_ids", (1, 1), VOCABULARY)
    position = net.add_input("position_ids", (1, 1), 2048)
    angles = np.outer(np.arange(2048), 10000.0 ** (-np.arange(0, net.head, 2) / net.head))
    angles = np.concatenate([angles, angles], axis=1)
    cosine, sine = (
        net.op("Unsqueeze", net.op("Gather", net.constant(name, table), position), "axis_one")
        for name, table in (
            ("cos", np.cos(angles).astype(np.float32)),
            ("sin", np.sin(angles).astype(np.float32)),
        )
    )
    net.constant("axis_one", np.array([1]))
    x = net.op("Gather", net.table("embed_tokens", VOCABULARY), token)
    for number in range(layers):
        name = f"layers.{number}"
        normed = net.rms_norm(x, f"{name}.input_layernorm")
        split = []
        for part, count in (("q", heads), ("k", groups), ("v", groups)):
            made = net.linear(normed, f"{name}.{part}_proj", width, count * net.head, bias=False)
            split.append(net.heads_of(made, count))
        query, key = (net.rotated(part, cosine, sine) for part in split[:2])
        mixed = net.attend(query, key, split[2], number)
        x = net.op("Add", x, net.linear(mixed, f"{name}.o_proj", width, width, bias=False))
        normed = net.rms_norm(x, f"{name}.post_attention_layernorm")
        gate, up = (
            net.linear(normed, f"{name}.{part}_proj", width, inner, bias=False)
            for part in ("gate", "up")
        )
        gated = net.op("Mul", net.op("Mul", gate, net.op("Sigmoid", gate)), up)
        x = net.op("Add", x, net.linear(gated, f"{name}.down_proj", inner, width, bias=False))
    logits = net.linear(net.rms_norm(x, "norm"), "lm_head", width, VOCABULARY, bias=False)
    return net.model({"logits": (logits, (1, 1, VOCABULARY)), **net.outputs})


STEPS = {"gpt2_step": gpt2_step, "llama_step": llama_step}


def in_few_bits(model: onnx.ModelProto, bits: int, accuracy_level: int = 0) -> onnx.ModelProto:
    """Store the constant matrices of a model's products, and its embeddings, in ``bits``.

    Blocks have 32 rows of a matrix, or 32 numbers of a row of an embedding. Tables of less than
    :data:`LEAST_TABLE` numbers, as sines of positions, stay.

    Parameters
    ----------
    model : onnx.ModelProto
        Changed in place, and returned.
    bits : int
        8 or 4.
    accuracy_level : int
        Attribute of MatMulNBits: 4 allows the other operand to be rounded to 8 bits.

    Returns
    -------
    onnx.ModelProto
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        place = {"MatMul": 1, "Gather": 0}.get(node.op_type)
        if place is None or node.input[place] not in constants:
            continue
        tensor = constants[node.input[place]]
        matrix = numpy_helper.to_array(tensor)
        attributes = {"bits": bits, "block_size": BLOCK}
        if node.op_type == "MatMul":
            matrix = matrix.T
            stored = _store(model.graph, tensor, matrix, bits, (len(matrix), -1, BLOCK * bits // 8))
            names = [node.input[0], *stored]
            node.op_type = "MatMulNBits"
            attributes |= {"K": matrix.shape[1], "N": len(matrix), "accuracy_level": accuracy_level}
        elif matrix.ndim == 2 and matrix.size >= LEAST_TABLE:
            integers, scales = _store(model.graph, tensor, matrix, bits, (len(matrix), -1))
            names = [integers, node.input[1], scales]
            node.op_type = "GatherBlockQuantized"
            attributes |= {"gather_axis": 0, "quantize_axis": 1}
            del node.attribute[:]
        else:
            continue
        node.domain = "com.microsoft"
        node.input[:] = names
        node.attribute.extend(helper.make_attribute(key, n) for key, n in attributes.items())
    model.opset_import.append(helper.make_operatorsetid("com.microsoft", 1))
    return model


def _store(
    graph: onnx.GraphProto,
    tensor: onnx.TensorProto,
    lines: np.ndarray,
    bits: int,
    shape: tuple[int, ...],
) -> tuple[str, str]:
    """Replace a tensor by integers and scales of blocks of its lines; return their names."""
    blocks = lines.reshape(len(lines), -1, BLOCK)
    places = np.abs(blocks).argmax(2)[..., None]
    largest = np.take_along_axis(blocks, places, 2)
    scale = np.abs(largest) / 127 if bits == 8 else largest / -8
    middle = 1 << (bits - 1)
    integers = np.clip(np.rint(blocks / scale) + middle, 0, 2 * middle - 1).astype(np.uint8)
    if bits == 4:
        integers = integers[..., 0::2] | integers[..., 1::2] << 4
    names = f"{tensor.name}.integers", f"{tensor.name}.scales"
    graph.initializer.remove(tensor)
    arrays = integers.reshape(shape), scale[..., 0].astype(np.float32)
    graph.initializer.extend(map(numpy_helper.from_array, arrays, names))
    return names

# SPDX-License-Identifier: Apache-2.0
"""Builder of BERT and GPT-2 as ONNX models, in the nodes of PyTorch's exporter.

The exporter keeps LayerNormalization and Softmax whole, writes GELU out, and computes shapes from
the input where the batch is symbolic. Weights are drawn so that every matrix keeps the mean square
of its input; the last matrix of a residual branch is scaled down by the number of branches.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx

from examples.onnx_builder import ModelBuilder

NEGATIVE = float(np.finfo(np.float32).min)
"""Score of masked tokens, added or as a replacement."""


class TransformerBuilder(ModelBuilder):
    """Adds the parts that both networks have.

    Parameters
    ----------
    name : str
        Name of the graph.
    batch : int or str
        Sequences at a time, or the name of a symbolic size.
    sequence : int
        Tokens of a sequence.
    width, heads : int
        Features of a token, and heads of an attention.
    layers : int
        Layers of the network; determines the scaling of residual branches.
    epsilon : float
        Epsilon of the layer normalisations.
    seed : int
        Seed of the weights.
    weights : bool
        Whether weights are stored; else they are inputs.

    Raises
    ------
    ValueError
        If the heads do not divide the width.
    """

    def __init__(
        self,
        name: str,
        batch: int | str,
        sequence: int,
        width: int,
        heads: int,
        layers: int,
        epsilon: float,
        seed: int,
        weights: bool,
    ) -> None:
        if width % heads:
            raise ValueError(f"width is {width}; expected a multiple of the {heads} heads")
        super().__init__(name, seed, weights)
        self.batch, self.sequence = batch, sequence
        self.width, self.heads = width, heads
        self.branch_gain = 0.5 / layers
        self._epsilon = epsilon

    def number(self, value: float, name: str) -> str:
        """A float32 scalar."""
        return self.constant(name, np.array(value, np.float32))

    def integers(self, values: list[int]) -> str:
        """A constant of int64, as shapes and axes are."""
        return self.constant(f"int64.{'_'.join(map(str, values))}", np.array(values, np.int64))

    def table(self, name: str, rows: int) -> str:
        """An embedding table with one row of ``width`` a key."""
        return self.weight(name, self.normal((rows, self.width), self.width**-0.5))

    def matrix(self, name: str, inputs: int, outputs: int, gain: float = 1.0) -> str:
        """Weights of a product with a row of ``inputs`` from the left."""
        return self.weight(f"{name}.weight", self.normal((inputs, outputs), (gain / inputs) ** 0.5))

    def vector(self, name: str, size: int) -> str:
        """Small random numbers to be added."""
        return self.weight(f"{name}.bias", self.normal((size,), 0.1))

    def layer_norm(self, x: str, name: str) -> str:
        """Append the normalisation of the last axis."""
        gamma = self.weight(f"{name}.weight", 1 + self.normal((self.width,), 0.1))
        inputs = [x, gamma, self.vector(name, self.width)]
        return self.op("LayerNormalization", *inputs, axis=-1, epsilon=self._epsilon)

    def reshape(self, x: str, *rest: int) -> str:
        """Reshape to (batch, sequence, *rest); a symbolic batch is read from ``x`` itself."""
        if isinstance(self.batch, int):
            return self.op("Reshape", x, self.integers([self.batch, self.sequence, *rest]))
        shape = self.op("Shape", self.tokens)
        batch = self.op("Gather", shape, self.constant("zero", np.array(0, np.int64)), axis=0)
        parts = [self.op("Unsqueeze", batch, self.integers([0]))]
        parts.append(self.integers([self.sequence, *rest]))
        return self.op("Reshape", x, self.op("Concat", *parts, axis=0))

    def attention(self, parts: list[str], mask: Callable[[str], str]) -> str:
        """Append attention of a query, a key and a value; ``mask`` changes the scores."""
        head = self.width // self.heads
        split = [self.reshape(x, self.heads, head) for x in parts]
        query = self.op("Transpose", split[0], perm=[0, 2, 1, 3])
        key = self.op("Transpose", split[1], perm=[0, 2, 3, 1])
        value = self.op("Transpose", split[2], perm=[0, 2, 1, 3])
        scores = self.op("MatMul", query, key)
        scores = self.op("Div", scores, self.number(math.sqrt(head), "sqrt_head"))
        weights = self.op("Softmax", mask(scores), axis=-1)
        context = self.op("Transpose", self.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        return self.reshape(context, self.width)

    @property
    def tokens(self) -> str:
        """The first input."""
        return next(iter(self._inputs))


def bert_base(
    batch: int | str = 1,
    sequence: int = 128,
    seed: int = 0,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 30522,
    weights: bool = True,
) -> onnx.ModelProto:
    """BERT (Devlin et al., 2018): post-normalised encoder layers with erf GELU, and the pooler.

    Parameters
    ----------
    batch : int or str
        Sequences at a time, or the name of a symbolic size.
    sequence : int
        Tokens of a sequence, at most 512.
    seed : int
        Seed of the weights.
    layers, width, heads, vocabulary : int
        Size; by default that of BERT-base, uncased.
    weights : bool
        Whether weights are stored, 109 million in full size; else they are inputs.

    Returns
    -------
    onnx.ModelProto
        From ``input_ids``, ``attention_mask`` and ``token_type_ids``, int64 (batch, sequence), to
        ``last_hidden_state`` (batch, sequence, width) and ``pooler_output`` (batch, width).

    Raises
    ------
    ValueError
        If the sequence is too long, or the heads do not divide the width.
    """
    _check_sequence(sequence, 512)
    net = TransformerBuilder("bert", batch, sequence, width, heads, layers, 1e-12, seed, weights)
    shape = (batch, sequence)
    tokens = net.add_input("input_ids", shape, vocabulary)
    visible = _additive_mask(net, net.add_input("attention_mask", shape, 2))
    segments = net.add_input("token_type_ids", shape, 2)
    x = net.op("Gather", net.table("embeddings.word", vocabulary), tokens)
    x = net.op("Add", x, net.op("Gather", net.table("embeddings.token_type", 2), segments))
    x = net.op("Add", x, _positions(net, "embeddings.position", 512))
    x = net.layer_norm(x, "embeddings.norm")
    for index in range(layers):
        x = _encoder_layer(net, x, visible, f"encoder.{index}")
    first = net.op("Gather", x, net.constant("zero", np.array(0, np.int64)), axis=1)
    weight = net.weight("pooler.weight", net.normal((width, width), width**-0.5))
    pooled = net.op("Tanh", net.op("Gemm", first, weight, net.vector("pooler", width), transB=1))
    return net.model(
        {
            "last_hidden_state": (x, (*shape, width)),
            "pooler_output": (pooled, (batch, width)),
        }
    )


def gpt2(
    batch: int | str = 1,
    sequence: int = 128,
    seed: int = 0,
    *,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    weights: bool = True,
) -> onnx.ModelProto:
    """GPT-2 (Radford et al., 2019): pre-normalised decoder layers, causal, with tanh GELU.

    Parameters are those of :func:`bert_base`, but a sequence has up to 1024 tokens. By default it
    is GPT-2 small, with 124 million weights.

    Returns
    -------
    onnx.ModelProto
        From ``input_ids``, int64 (batch, sequence), to ``logits`` (batch, sequence, vocabulary),
        computed with the table of the token embedding.

    Raises
    ------
    ValueError
        If the sequence is too long, or the heads do not divide the width.
    """
    _check_sequence(sequence, 1024)
    net = TransformerBuilder("gpt2", batch, sequence, width, heads, layers, 1e-5, seed, weights)
    tokens = net.add_input("input_ids", (batch, sequence), vocabulary)
    table = net.table("wte", vocabulary)
    x = net.op("Add", net.op("Gather", table, tokens), _positions(net, "wpe", 1024))
    for index in range(layers):
        x = _decoder_layer(net, x, f"h.{index}")
    x = net.layer_norm(x, "ln_f")
    logits = net.op("MatMul", x, net.op("Transpose", table, perm=[1, 0]))
    return net.model({"logits": (logits, (batch, sequence, vocabulary))})


def _check_sequence(sequence: int, longest: int) -> None:
    if not 1 <= sequence <= longest:
        raise ValueError(f"sequence is {sequence}; expected 1 to {longest} tokens")


def _positions(net: TransformerBuilder, name: str, longest: int) -> str:
    """Append the embeddings of the positions, for all sequences the same."""
    numbers = net.constant("positions", np.arange(net.sequence).reshape(1, -1))
    return net.op("Gather", net.table(name, longest), numbers)


def _additive_mask(net: TransformerBuilder, mask: str) -> str:
    """Append the tensor added to the scores: 0 for the tokens of ``mask``, else -3.4e38."""
    for axis in (1, 2):
        mask = net.op("Unsqueeze", mask, net.integers([axis]))
    mask = net.op("Cast", mask, to=onnx.TensorProto.FLOAT)
    hidden = net.op("Sub", net.number(1, "one"), mask)
    return net.op("Mul", hidden, net.number(NEGATIVE, "negative"))


def _encoder_layer(net: TransformerBuilder, x: str, mask: str, name: str) -> str:
    width = net.width
    parts = [_linear(net, x, f"{name}.{part}", width, width) for part in ("query", "key", "value")]
    context = net.attention(parts, lambda scores: net.op("Add", scores, mask))
    context = _linear(net, context, f"{name}.attention.output", width, width)
    x = net.layer_norm(net.op("Add", context, x), f"{name}.attention.norm")
    inside = _erf_gelu(net, _linear(net, x, f"{name}.intermediate", width, 4 * width))
    inside = _linear(net, inside, f"{name}.output", 4 * width, width)
    return net.layer_norm(net.op("Add", inside, x), f"{name}.norm")


def _linear(net: TransformerBuilder, x: str, name: str, inputs: int, outputs: int) -> str:
    """Append a product and a sum, as the exporter writes a layer of tensors with three axes."""
    product = net.op("MatMul", x, net.matrix(name, inputs, outputs))
    return net.op("Add", net.vector(name, outputs), product)


def _erf_gelu(net: TransformerBuilder, x: str) -> str:
    """Append ``x (1 + erf(x / sqrt 2)) / 2``."""
    root = net.op("Erf", net.op("Div", x, net.number(math.sqrt(2), "sqrt_2")))
    double = net.op("Mul", x, net.op("Add", root, net.number(1, "one")))
    return net.op("Mul", double, net.number(0.5, "half"))


def _decoder_layer(net: TransformerBuilder, x: str, name: str) -> str:
    width, gain = net.width, net.branch_gain
    inside = _flat_linear(
        net, net.layer_norm(x, f"{name}.ln_1"), f"{name}.c_attn", width, 3 * width
    )
    parts = net.append("Split", [inside, net.integers([width] * 3)], 3, axis=2)
    context = net.attention(parts, lambda scores: _causal(net, scores))
    x = net.op("Add", _flat_linear(net, context, f"{name}.c_proj", width, width, gain), x)
    inside = net.layer_norm(x, f"{name}.ln_2")
    inside = tanh_gelu(net, _flat_linear(net, inside, f"{name}.c_fc", width, 4 * width))
    inside = _flat_linear(net, inside, f"{name}.mlp.c_proj", 4 * width, width, gain)
    return net.op("Add", x, inside)


def _flat_linear(
    net: TransformerBuilder, x: str, name: str, inputs: int, outputs: int, gain: float = 1.0
) -> str:
    """Append a Gemm between reshapes, as the exporter writes GPT-2's layers."""
    flat = net.op("Reshape", x, net.integers([-1, inputs]))
    weights = [net.matrix(name, inputs, outputs, gain), net.vector(name, outputs)]
    return net.reshape(net.op("Gemm", flat, *weights), outputs)


def _causal(net: TransformerBuilder, scores: str) -> str:
    """Append the causal mask, which hides later tokens."""
    past = np.tril(np.ones((1, 1, net.sequence, net.sequence), bool))
    mask = net.constant("causal", past)
    return net.op("Where", mask, scores, net.number(NEGATIVE, "negative"))


def tanh_gelu(net: TransformerBuilder, x: str) -> str:
    """Append ``x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``."""
    half = net.op("Mul", x, net.number(0.5, "half"))
    cube = net.op("Pow", x, net.number(3, "three"))
    inside = net.op("Add", x, net.op("Mul", cube, net.number(0.044715, "gelu_cube")))
    inside = net.op("Mul", inside, net.number(math.sqrt(2 / math.pi), "gelu_root"))
    return net.op("Mul", half, net.op("Add", net.op("Tanh", inside), net.number(1, "one")))

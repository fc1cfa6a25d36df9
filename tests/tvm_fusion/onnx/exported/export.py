# SPDX-License-Identifier: Apache-2.0
"""Exports the small models beside it from JAX, TensorFlow and Keras, with random weights.

    pip install jax2onnx
    python export.py jax2onnx
    pip install tensorflow-cpu tf2onnx
    python export.py tf2onnx keras

The models are stored, since both tools need packages of hundreds of megabytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent


def export_jax() -> None:
    """Convolution, batch norm by hand, attention over its rows; the batch is open."""
    import jax
    import jax.numpy as jnp
    from jax2onnx import to_onnx

    generator = np.random.default_rng(0)
    kernel, project, out = (
        jnp.asarray(generator.standard_normal(shape).astype("float32") * 0.3)
        for shape in ((3, 3, 2, 8), (8, 24), (8, 5))
    )

    def model(image: Any) -> Any:
        y = jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = jax.nn.gelu(y).reshape(image.shape[0], -1, 8)
        query, key, value = jnp.split(y @ project, 3, axis=-1)
        weights = jax.nn.softmax(query @ key.transpose(0, 2, 1) / 8**0.5, axis=-1)
        return jnp.mean(weights @ value, axis=1) @ out

    path = str(FOLDER / "jax2onnx.onnx")
    to_onnx(model, inputs=[("B", 6, 6, 2)], return_mode="file", output_path=path)


def export_tensorflow() -> None:
    """A function of TensorFlow: strided convolution, depthwise one, pooling, product."""
    import tensorflow as tf
    import tf2onnx

    generator = np.random.default_rng(1)
    kernel, depthwise, out = (
        tf.constant(generator.standard_normal(shape).astype("float32") * 0.3)
        for shape in ((3, 3, 2, 8), (3, 3, 8, 1), (8, 5))
    )

    @tf.function
    def model(image: Any) -> Any:
        y = tf.nn.relu6(tf.nn.conv2d(image, kernel, strides=2, padding="SAME"))
        y = tf.nn.depthwise_conv2d(y, depthwise, strides=[1, 1, 1, 1], padding="SAME")
        return tf.nn.softmax(tf.reduce_mean(tf.nn.swish(y), axis=[1, 2]) @ out)

    tf2onnx.convert.from_function(
        model,
        input_signature=[tf.TensorSpec([None, 8, 8, 2], tf.float32, "image")],
        opset=17,
        output_path=str(FOLDER / "tf2onnx.onnx"),
    )


def export_keras() -> None:
    """Layers of Keras: embedding, bidirectional LSTM, GRU, layer norm, dense."""
    import keras
    import tf2onnx

    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32", name="tokens"),
            keras.layers.Embedding(20, 6),
            keras.layers.Bidirectional(keras.layers.LSTM(5, return_sequences=True)),
            keras.layers.GRU(4),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    import tensorflow as tf

    function = tf.function(model.call)
    tf2onnx.convert.from_function(
        function,
        input_signature=[tf.TensorSpec([2, 7], tf.int32, "tokens")],
        opset=17,
        output_path=str(FOLDER / "keras.onnx"),
    )


EXPORTS = {"jax2onnx": export_jax, "tf2onnx": export_tensorflow, "keras": export_keras}

if __name__ == "__main__":
    for name in sys.argv[1:] or EXPORTS:
        EXPORTS[name]()

# SPDX-License-Identifier: Apache-2.0
"""Models that the examples can build, by name, and a command that writes one.

    python examples/zoo.py bert_base -o bert.onnx layers=2 sequence=64 batch=n

Weights are random. A size that a model does not have is refused.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# The checkout itself holds these.
from examples.convnext import convnext_tiny  # noqa: E402
from examples.inception import inception_v3  # noqa: E402
from examples.mobilenet_v3 import mobilenet_v3_large  # noqa: E402
from examples.models import MODELS, resnext_50  # noqa: E402
from examples.regnet import regnet_y_400mf  # noqa: E402
from examples.transformers import bert_base, gpt2  # noqa: E402
from examples.unet import unet  # noqa: E402
from examples.vgg import vgg_16  # noqa: E402
from examples.wide_and_deep import wide_and_deep  # noqa: E402

GROUPED: dict[str, Callable[..., onnx.ModelProto]] = {
    "resnext_50": resnext_50,
    "regnet_y_400mf": regnet_y_400mf,
}
"""Networks whose convolutions have groups."""

ZOO: dict[str, Callable[..., onnx.ModelProto]] = {
    **MODELS,
    **GROUPED,
    "vgg_16": vgg_16,
    "unet": unet,
    "mobilenet_v3_large": mobilenet_v3_large,
    "convnext_tiny": convnext_tiny,
    "inception_v3": inception_v3,
    "bert_base": bert_base,
    "gpt2": gpt2,
    "wide_and_deep": wide_and_deep,
}


def read_sizes(name: str, texts: Sequence[str]) -> dict[str, int | str]:
    """Arguments of a builder from texts like ``layers=2``.

    Parameters
    ----------
    name : str
        A key of :data:`ZOO`.
    texts : Sequence[str]
        The texts; only the batch may be a name.

    Returns
    -------
    dict of str to int or str

    Raises
    ------
    ValueError
        If a text is malformed, or names a size that the model does not have.
    """
    parameters = inspect.signature(ZOO[name]).parameters.values()
    known = [each.name for each in parameters if type(each.default) is int]
    sizes: dict[str, int | str] = {}
    for text in texts:
        key, _, value = text.partition("=")
        is_size = value.isdecimal() and (int(value) > 0 or key == "seed")
        if key not in known or not (is_size or (key == "batch" and value.isidentifier())):
            raise ValueError(
                f"{text!r} is no size of {name}; expected NAME=NUMBER, above 0, with a name of "
                f"{', '.join(known)}"
            )
        sizes[key] = int(value) if is_size else value
    return sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Write one model to a file."""
    parser = argparse.ArgumentParser(description="Build a model with random weights as ONNX.")
    parser.add_argument("model", choices=sorted(ZOO))
    parser.add_argument("sizes", nargs="*", metavar="NAME=NUMBER", help="such as batch=8")
    parser.add_argument("-o", "--output", type=Path, help="default: MODEL.onnx")
    options = parser.parse_intermixed_args(arguments)
    output = options.output or Path(f"{options.model}.onnx")
    try:
        model = ZOO[options.model](**read_sizes(options.model, options.sizes))
        onnx.save(model, output)
    except (ValueError, OSError) as error:  # a builder refuses sizes that do not fit together
        parser.error(str(error))
    print(f"{output}: {len(model.graph.node)} nodes, {output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

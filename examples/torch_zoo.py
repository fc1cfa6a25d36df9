# SPDX-License-Identifier: Apache-2.0
"""Real architectures of PyTorch, torchvision, timm and transformers, exported to ONNX and checked.

    python examples/torch_zoo.py                      # all of them against ONNX Runtime
    python examples/torch_zoo.py swin_t llama -o DIR  # some, and keep the ONNX files

Weights are random, images and configurations small; ``--full`` takes published sizes, and language
models whose weights would take gigabytes at four layers of 768 features. Needs the extras ``zoo``
and ``check``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
# The checkout itself holds these; this folder would hide the package transformers.
sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path) != ROOT / "examples")]
from examples import torch_nets  # noqa: E402
from examples.torchvision_ops import import_torchvision, import_transformers  # noqa: E402

LIMIT = 1e-4
"""Largest error, relative to the largest number of an output."""


class Sample(NamedTuple):
    """A module and the inputs that it is exported with.

    Parameters
    ----------
    module : torch.nn.Module
        Module in evaluation mode; returns a tensor or a tuple of them.
    inputs : dict of str to torch.Tensor
        Inputs by the names of its parameters.
    traced : bool
        Whether the older exporter is needed, which traces.
    unordered : bool
        Whether the outputs are columns of a table whose rows may come in any order: rounding
        decides that of detections with almost one score.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    traced: bool = False
    unordered: bool = False


Build = Callable[[bool], Sample]
"""Builds a model, of its published size or a small one."""


class _Call(nn.Module):
    """A module with one way to call it, which returns tensors only."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.module, *inputs)


def _vision(name: str, small: int = 64, size: int = 224, **options: Any) -> Build:
    """A network of torchvision for images of ``small`` or ``size`` pixels."""

    def build(full: bool) -> Sample:
        models = import_torchvision().models
        module = models.get_model(name, weights=None, **options)
        pixels = size if full else small
        return Sample(module, {"image": torch.randn(1, 3, pixels, pixels)})

    return build


def _timm(name: str, small: str | None = None, pixels: int = 64, **options: Any) -> Build:
    """A classifier of timm; a small one takes ``options``, by another function if ``small``."""

    def build(full: bool) -> Sample:
        import_torchvision()  # This comes before timm, which imports it, too.
        from timm import models

        module = getattr(models, name if full or small is None else small)(
            **({} if full else {"num_classes": 10, **options})
        )
        size = module.default_cfg["input_size"][-1] if full else pixels
        return Sample(module, {"image": torch.randn(1, 3, size, size)})

    return build


def _segmentation(name: str) -> Build:
    def build(full: bool) -> Sample:
        models = import_torchvision().models
        module = models.get_model(name, weights=None, weights_backbone=None, num_classes=5)
        pixels = 224 if full else 64
        image = torch.randn(1, 3, pixels, pixels)
        return Sample(_Call(module, lambda m, x: m(x)["out"]), {"image": image})

    return build


def _detection(name: str, small: int, size: int) -> Build:
    """A detector: boxes, scores and labels of one image, all candidates suppressed by NMS."""

    def build(full: bool) -> Sample:
        pixels = size if full else small
        sizes = {} if small == size else {"min_size": pixels, "max_size": pixels}
        module = import_torchvision().models.get_model(
            name, weights=None, weights_backbone=None, num_classes=5, **sizes
        )

        _spread(module, pixels)

        def call(m: nn.Module, image: Tensor) -> tuple[Tensor, ...]:
            found = m([image])[0]
            return found["boxes"], found["scores"], found["labels"]

        inputs = {"image": torch.rand(3, pixels, pixels)}
        return Sample(_Call(module, call), inputs, traced=True, unordered=True)

    return build


def _spread(detector: nn.Module, pixels: int) -> None:
    """Give a detector scores that differ: rounding decides between equal ones."""
    for key, parameter in detector.head.named_parameters():
        if parameter.ndim > 1:
            # Sides of boxes are exponentials, which multiply errors of their large arguments.
            scale = 0.3 if "bbox_reg" in key else 1.0
            parameter.normal_(std=scale * parameter[0].numel() ** -0.5)
        elif key.endswith("bias"):
            parameter.zero_()
    detector.eval()
    for part in detector.modules():
        if isinstance(part, nn.BatchNorm2d):  # the statistics of random images
            part.train()
            part.momentum = 1.0
    detector([torch.rand(3, pixels, pixels) for _ in range(3)])
    detector.eval()


def _tokens(rows: int, count: int, vocabulary: int = 100) -> dict[str, Tensor]:
    mask = torch.ones(rows, count, dtype=torch.int64)
    if rows > 1:
        mask[0, -2:] = 0
    return {
        "input_ids": torch.randint(3, vocabulary, (rows, count)),
        "attention_mask": mask,
    }


_SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_FEED = {"intermediate_size": 64}


def _text(
    model: str,
    config: str,
    small: dict[str, Any],
    large: dict[str, Any] | None = None,
    **always: Any,
) -> Build:
    """A transformer of tokens: its first output, for two sequences of which one is masked.

    ``large`` is what a full one has unlike its default configuration.
    """

    def build(full: bool) -> Sample:
        transformers = import_transformers()
        options = {**((large or {}) if full else small), **always}
        module = getattr(transformers, model)(getattr(transformers, config)(**options))

        def call(m: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            found = m(input_ids=input_ids, attention_mask=attention_mask, return_dict=False)
            return found[0]

        inputs = _tokens(1, 128) if full else _tokens(2, 7)
        return Sample(_Call(module, call), inputs)

    return build


def _causal(
    name: str,
    small: dict[str, Any] | None = None,
    large: dict[str, Any] | None = None,
    **always: Any,
) -> Build:
    """A language model whose configuration has the field names of Llama's."""
    return _text(
        f"{name}ForCausalLM",
        f"{name}Config",
        {**_GROUPED, **(small or {})},
        {**_FOUR_LAYERS, **(large or {})},
        use_cache=False,
        **always,
    )


def _pixels(
    model: str, config: str, small: dict[str, Any], size: int = 32, key: str = "pixel_values"
) -> Build:
    """A transformer of images or frames: its first output."""

    def build(full: bool) -> Sample:
        transformers = import_transformers()
        module = getattr(transformers, model)(
            getattr(transformers, config)(**({} if full else small))
        )
        pixels = 224 if full else size
        image = torch.randn(1, 3, pixels, pixels)
        return Sample(_Call(module, lambda m, x: m(x, return_dict=False)[0]), {key: image})

    return build


def _gpt2_with_past(full: bool) -> Sample:
    """One step of decoding: keys and values of the tokens before come in and go out."""
    transformers = import_transformers()
    config = transformers.GPT2Config(**({} if full else _GPT))
    layers, heads = config.n_layer, config.n_head
    shape = (1, heads, 9, config.n_embd // heads)
    past = {f"past.{i}": torch.randn(shape) for i in range(2 * layers)}

    def call(m: nn.Module, input_ids: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        cache = transformers.DynamicCache()
        for i in range(layers):
            cache.update(states[2 * i], states[2 * i + 1], i)
        found = m(input_ids=input_ids, past_key_values=cache, use_cache=True)
        after = found.past_key_values.layers
        return (found.logits, *(t for layer in after for t in (layer.keys, layer.values)))

    ids = torch.randint(0, 100, (1, 1))
    return Sample(_Call(transformers.GPT2LMHeadModel(config), call), {"input_ids": ids, **past})


def _encoder_decoder(
    model: str, config: str, small: dict[str, Any], large: dict[str, Any] | None = None
) -> Build:
    def build(full: bool) -> Sample:
        transformers = import_transformers()
        options = (large or {}) if full else small
        module = getattr(transformers, model)(getattr(transformers, config)(**options))

        def call(m: Any, ids: Tensor, mask: Tensor, target: Tensor) -> Tensor:
            return m(ids, mask, decoder_input_ids=target, use_cache=False, return_dict=False)[0]

        inputs = _tokens(1, 64) if full else _tokens(2, 7)
        count = len(inputs["input_ids"])
        return Sample(
            _Call(module, call), {**inputs, "decoder_input_ids": torch.randint(3, 100, (count, 5))}
        )

    return build


def _whisper_encoder(full: bool) -> Sample:
    transformers = import_transformers()
    options = {} if full else _WHISPER
    module = transformers.WhisperModel(transformers.WhisperConfig(**options)).encoder
    frames = torch.randn(1, 80, 3000 if full else 100)
    return Sample(_Call(module, lambda m, x: m(x, return_dict=False)[0]), {"frames": frames})


def _whisper(full: bool) -> Sample:
    """Encoder and decoder: sound and the tokens so far."""
    transformers = import_transformers()
    module = transformers.WhisperModel(transformers.WhisperConfig(**({} if full else _WHISPER)))

    def call(m: Any, frames: Tensor, ids: Tensor) -> Tensor:
        return m(frames, decoder_input_ids=ids, use_cache=False, return_dict=False)[0]

    frames = torch.randn(1, 80, 3000 if full else 100)
    ids = torch.randint(3, 100, (1, 5))
    return Sample(_Call(module, call), {"frames": frames, "decoder_input_ids": ids})


def _clip(full: bool) -> Sample:
    transformers = import_transformers()
    text = {**_SMALL, **_FEED, "max_position_embeddings": 16, "projection_dim": 16}
    image = {**text, "image_size": 32, "patch_size": 8}
    image.pop("vocab_size")
    small = {"text_config": text, "vision_config": image, "projection_dim": 16}
    module = transformers.CLIPModel(transformers.CLIPConfig(**({} if full else small)))

    def call(m: Any, ids: Tensor, mask: Tensor, pixels: Tensor) -> Tensor:
        return m(ids, pixels, mask, return_dict=False)[0]

    pixels = 224 if full else 32
    tokens = _tokens(1, 77) if full else _tokens(2, 7)
    return Sample(_Call(module, call), {**tokens, "pixels": torch.randn(1, 3, pixels, pixels)})


def _clip_text(full: bool) -> Sample:
    transformers = import_transformers()
    small = {**_SMALL, **_FEED, "max_position_embeddings": 16}
    module = transformers.CLIPTextModel(transformers.CLIPTextConfig(**({} if full else small)))
    ids = torch.randint(3, 100, (1, 77 if full else 7))
    return Sample(_Call(module, lambda m, x: m(x, return_dict=False)[0]), {"input_ids": ids})


def _values(
    model: str, config: str, small: dict[str, Any], shapes: Sequence[Sequence[int]]
) -> Build:
    """A transformer of one array; the first and second of two shapes are small and full."""

    def build(full: bool) -> Sample:
        transformers = import_transformers()
        options = {} if full else small
        module = getattr(transformers, model)(getattr(transformers, config)(**options))
        values = torch.randn(*shapes[int(full)])
        return Sample(_Call(module, lambda m, x: m(x, return_dict=False)[0]), {"values": values})

    return build


def _own(make: Callable[[bool], nn.Module], **shapes: Sequence[Sequence[int]]) -> Build:
    """A network of ``torch_nets``; the first and second of two shapes are small and full."""

    def build(full: bool) -> Sample:
        return Sample(make(full), {k: torch.randn(*v[int(full)]) for k, v in shapes.items()})

    return build


def _diffusion(full: bool) -> Sample:
    width, pixels = (320, 32) if full else (32, 8)
    module = torch_nets.DiffusionBlock(width, 8 if full else 4, 768 if full else 48)
    latent = torch.randn(1, 4, pixels, pixels)
    context = torch.randn(1, 77 if full else 5, 768 if full else 48)
    return Sample(module, {"latent": latent, "step": torch.tensor([17]), "context": context})


def _ranking(make: Callable[..., nn.Module], crossed: bool) -> Build:
    def build(full: bool) -> Sample:
        sizes = {"features": 26, "rows": 10_000, "width": 32} if full else {}
        module, count = make(**sizes), 26 if full else 8
        rows = 64 if full else 3
        inputs = {
            "numbers": torch.randn(rows, 13),
            "categories": torch.randint(0, 100, (rows, count)),
        }
        if crossed:
            inputs["crossed"] = torch.randint(0, 100, (rows, 6))
        return Sample(module, inputs)

    return build


_BERT = {**_SMALL, **_FEED, "max_position_embeddings": 40}
_GROUPED = {**_SMALL, **_FEED, "num_key_value_heads": 2}
_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_FOUR_LAYERS = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
}
_VIT = {**_SMALL, **_FEED, "image_size": 32, "patch_size": 8}
_GPT = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4}
_GPT_BASE = {"n_embd": 768, "n_layer": 4, "n_head": 12}
_T5 = {
    "vocab_size": 100,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
}
_WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "max_source_positions": 50,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "vocab_size": 100,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
_WAVES = {
    **_SMALL,
    **_FEED,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 2),
    "conv_stride": (5, 2, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_SOUND = (1, 800), (1, 16000)
_ONES, _WIDTHS = (1, 1, 1, 1), (16, 32, 48, 64)

FAMILIES: dict[str, dict[str, Build]] = {
    "classification": {
        "alexnet": _vision("alexnet", 96),
        "vgg11": _vision("vgg11", 32),
        "resnet18": _vision("resnet18"),
        "resnet50": _vision("resnet50"),
        "resnext50_32x4d": _vision("resnext50_32x4d"),
        "regnet_y_400mf": _vision("regnet_y_400mf"),
        "convnext_tiny": _vision("convnext_tiny"),
        "inception_v3": _vision("inception_v3", 96, 299, init_weights=False),
        "googlenet": _vision("googlenet", init_weights=False),
        "densenet121": _vision("densenet121"),
        "efficientnet_b0": _vision("efficientnet_b0"),
        "efficientnet_v2_s": _vision("efficientnet_v2_s"),
        "mobilenet_v2": _vision("mobilenet_v2"),
        "mobilenet_v3_large": _vision("mobilenet_v3_large"),
        "mnasnet0_5": _vision("mnasnet0_5"),
        "shufflenet_v2_x1_0": _vision("shufflenet_v2_x1_0"),
        "squeezenet1_1": _vision("squeezenet1_1"),
        "swin_t": _vision("swin_t"),
        "swin_v2_t": _vision("swin_v2_t"),
        "vit_b_32": _vision("vit_b_32", 224),
        "maxvit_t": _vision("maxvit_t", 224),
        "r3d_18": lambda full: Sample(
            import_torchvision().models.get_model("r3d_18", weights=None),
            {"clip": torch.randn(1, 3, 8, 112, 112) if full else torch.randn(1, 3, 4, 32, 32)},
        ),
    },
    "timm": {
        "convnextv2": _timm("convnextv2_atto", depths=_ONES, dims=_WIDTHS),
        "mobilenetv4": _timm("mobilenetv4_conv_small_050"),
        "levit": _timm(
            "levit_128s",
            img_size=64,
            embed_dim=(32, 48, 64),
            depth=(1, 1, 1),
            num_heads=(2, 3, 4),
            key_dim=16,
        ),
        "poolformer": _timm("poolformerv2_s12", "MetaFormer", depths=_ONES, dims=_WIDTHS),
        "coatnet": _timm(
            "coatnet_pico_rw_224",
            img_size=64,
            depths=_ONES,
            embed_dim=(32, 32, 64, 64),
            stem_width=(16, 32),
        ),
        "ghostnet": _timm("ghostnet_050"),
        "res2net": _timm("res2net50_26w_4s", layers=_ONES),
        "cait": _timm("cait_xxs24_224", pixels=32, img_size=32, depth=2, embed_dim=32, num_heads=4),
        "edgenext": _timm("edgenext_xx_small", depths=(1, 2, 2, 2)),
        "mixer": _timm("mixer_s32_224", "MlpMixer", img_size=64, num_blocks=2, embed_dim=32),
        "repvgg": _timm("repvgg_a0"),
        "rexnet": _timm("rexnet_100"),
        "tiny_vit": _timm(
            "tiny_vit_5m_224", depths=_ONES, embed_dims=_WIDTHS, num_heads=(1, 2, 3, 4)
        ),
        "xcit": _timm("xcit_nano_12_p16_224", img_size=64, depth=2, embed_dim=32),
        "pvt_v2": _timm("pvt_v2_b0", depths=_ONES, embed_dims=(16, 32, 40, 64)),
        "convit": _timm(
            "convit_tiny", pixels=32, img_size=32, depth=3, local_up_to_layer=2, embed_dim=32
        ),
        "focalnet": _timm("focalnet_tiny_srf", "FocalNet", depths=_ONES, embed_dim=16),
        "sequencer": _timm(
            "sequencer2d_s",
            img_size=64,
            layers=_ONES,
            embed_dims=(32, 32, 32, 32),
            hidden_sizes=(8, 8, 8, 8),
        ),
        "mambaout": _timm("mambaout_femto", depths=_ONES, dims=_WIDTHS),
        "eva02": _timm(
            "eva02_tiny_patch14_224", pixels=56, img_size=56, depth=2, embed_dim=48, num_heads=3
        ),
    },
    "detection": {
        "ssdlite320_mobilenet_v3": _detection("ssdlite320_mobilenet_v3_large", 320, 320),
        "fcos_resnet50": _detection("fcos_resnet50_fpn", 96, 320),
        "retinanet_resnet50": _detection("retinanet_resnet50_fpn", 96, 320),
    },
    "segmentation": {
        "deeplabv3_mobilenet_v3": _segmentation("deeplabv3_mobilenet_v3_large"),
        "lraspp_mobilenet_v3": _segmentation("lraspp_mobilenet_v3_large"),
        "fcn_resnet50": _segmentation("fcn_resnet50"),
        "unet": _own(
            lambda full: torch_nets.UNet(64 if full else 16),
            image=((1, 3, 32, 32), (1, 3, 128, 128)),
        ),
    },
    "text": {
        "bert": _text("BertModel", "BertConfig", _BERT),
        "bert_eager": _text("BertModel", "BertConfig", _BERT, attn_implementation="eager"),
        "roberta": _text("RobertaModel", "RobertaConfig", _BERT),
        "albert": _text("AlbertModel", "AlbertConfig", {**_BERT, "embedding_size": 16}, _BASE),
        "electra": _text("ElectraModel", "ElectraConfig", {**_BERT, "embedding_size": 16}),
        "deberta_v2": _text(
            "DebertaV2Model", "DebertaV2Config", _BERT, {**_BASE, "num_hidden_layers": 12}
        ),
        "distilbert": _text(
            "DistilBertModel",
            "DistilBertConfig",
            {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        ),
        "gpt2": _text("GPT2LMHeadModel", "GPT2Config", _GPT, use_cache=False),
        "gpt2_with_past": _gpt2_with_past,
        "llama": _causal("Llama"),
        "mistral": _causal("Mistral"),
        "qwen2": _causal("Qwen2"),
        "gemma": _causal("Gemma", {"head_dim": 8}, {"head_dim": 64}),
        "gemma2": _causal(
            "Gemma2",
            {
                "head_dim": 8,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            {"head_dim": 64},
        ),
        "qwen3": _causal("Qwen3", {"head_dim": 8}, {"head_dim": 64}),
        "phi": _causal("Phi"),
        "stablelm": _causal("StableLm"),
        "olmo2": _causal("Olmo2", {"pad_token_id": 0}),
        "gpt_neox": _causal("GPTNeoX"),
        "falcon": _causal("Falcon"),
        "mixtral": _causal(
            "Mixtral", {"num_local_experts": 4}, experts_implementation="batched_mm"
        ),
        "gpt_neo": _text(
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            {
                "vocab_size": 100,
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "window_size": 4,
                "attention_types": [[["global", "local"], 1]],
            },
            {
                "hidden_size": 768,
                "num_layers": 4,
                "num_heads": 12,
                "attention_types": [[["global", "local"], 2]],
            },
            use_cache=False,
        ),
        "codegen": _text(
            "CodeGenForCausalLM",
            "CodeGenConfig",
            {**_GPT, "rotary_dim": 4},
            _GPT_BASE,
            use_cache=False,
        ),
        "opt": _text(
            "OPTForCausalLM",
            "OPTConfig",
            {**_SMALL, "ffn_dim": 64, "max_position_embeddings": 40, "word_embed_proj_dim": 32},
            use_cache=False,
        ),
        "bloom": _text(
            "BloomForCausalLM",
            "BloomConfig",
            {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4},
            {"hidden_size": 768, "n_layer": 4, "n_head": 12},
            use_cache=False,
        ),
        "mamba": _text(
            "MambaForCausalLM",
            "MambaConfig",
            {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
            {"num_hidden_layers": 4},
            use_cache=False,
        ),
        "rwkv": _text(
            "RwkvForCausalLM",
            "RwkvConfig",
            {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 16},
            {"hidden_size": 768, "num_hidden_layers": 4},
            use_cache=False,
        ),
        "fnet": _text(
            "FNetModel",
            "FNetConfig",
            {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, **_FEED},
        ),
        "mpnet": _text("MPNetModel", "MPNetConfig", _BERT),
        "roformer": _text("RoFormerModel", "RoFormerConfig", {**_BERT, "embedding_size": 32}),
        "funnel": _text(
            "FunnelModel",
            "FunnelConfig",
            {
                "vocab_size": 100,
                "block_sizes": [1, 1],
                "num_decoder_layers": 1,
                "d_model": 32,
                "n_head": 4,
                "d_head": 8,
                "d_inner": 64,
            },
        ),
        "squeezebert": _text(
            "SqueezeBertModel",
            "SqueezeBertConfig",
            {
                **_BERT,
                "embedding_size": 32,
                **{f"{key}_groups": 2 for key in ("q", "k", "v", "intermediate", "output")},
            },
        ),
        "deberta": _text(
            "DebertaModel",
            "DebertaConfig",
            _BERT,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_biased_input=False,
        ),
        "convbert": _text(
            "ConvBertModel",
            "ConvBertConfig",
            {**_BERT, "embedding_size": 32, "conv_kernel_size": 3},
        ),
        "mobilebert": _text(
            "MobileBertModel",
            "MobileBertConfig",
            {**_BERT, "embedding_size": 16, "intra_bottleneck_size": 16},
        ),
        "nystromformer": _text(
            "NystromformerModel",
            "NystromformerConfig",
            {**_BERT, "num_landmarks": 7, "segment_means_seq_len": 7, "conv_kernel_size": 5},
        ),
        "modernbert": _text(
            "ModernBertModel",
            "ModernBertConfig",
            {
                **_BERT,
                "local_attention": 4,
                **{f"{key}_token_id": 0 for key in ("pad", "bos", "eos", "cls", "sep")},
            },
        ),
        "t5": _encoder_decoder("T5ForConditionalGeneration", "T5Config", _T5),
        "umt5": _encoder_decoder("UMT5ForConditionalGeneration", "UMT5Config", _T5),
        "longt5": _encoder_decoder(
            "LongT5ForConditionalGeneration", "LongT5Config", {**_T5, "local_radius": 3}
        ),
        "bart": _encoder_decoder(
            "BartModel",
            "BartConfig",
            {
                "vocab_size": 100,
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
            },
            {
                "d_model": 768,
                "encoder_layers": 6,
                "decoder_layers": 6,
                "encoder_attention_heads": 12,
                "decoder_attention_heads": 12,
                "encoder_ffn_dim": 3072,
                "decoder_ffn_dim": 3072,
            },
        ),
        "clip": _clip,
        "clip_text": _clip_text,
    },
    "image transformers": {
        "vit": _pixels("ViTModel", "ViTConfig", _VIT),
        "deit": _pixels("DeiTModel", "DeiTConfig", _VIT),
        "beit": _pixels("BeitModel", "BeitConfig", _VIT),
        "dinov2": _pixels("Dinov2Model", "Dinov2Config", _VIT),
        "swin_hf": _pixels(
            "SwinModel",
            "SwinConfig",
            {
                "image_size": 32,
                "patch_size": 2,
                "embed_dim": 16,
                "depths": [2, 2],
                "num_heads": [2, 4],
                "window_size": 4,
            },
        ),
        "convnext_hf": _pixels(
            "ConvNextModel",
            "ConvNextConfig",
            {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
        ),
        "segformer": _pixels(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16},
            64,
        ),
        "mobilevit": _pixels("MobileViTModel", "MobileViTConfig", {"image_size": 64}, 64),
        "siglip": _pixels("SiglipVisionModel", "SiglipVisionConfig", _VIT),
        "yolos": _pixels(
            "YolosForObjectDetection",
            "YolosConfig",
            {**_VIT, "image_size": [32, 32], "num_detection_tokens": 5},
        ),
        "videomae": _values(
            "VideoMAEModel",
            "VideoMAEConfig",
            {**_VIT, "num_frames": 4},
            ((1, 4, 3, 32, 32), (1, 16, 3, 224, 224)),
        ),
    },
    "speech": {
        "whisper_encoder": _whisper_encoder,
        "wav2vec2": _values("Wav2Vec2Model", "Wav2Vec2Config", _WAVES, _SOUND),
        "hubert": _values("HubertModel", "HubertConfig", _WAVES, _SOUND),
        "wavlm": _values("WavLMModel", "WavLMConfig", _WAVES, _SOUND),
        "audio_spectrogram": _values(
            "ASTModel",
            "ASTConfig",
            {**_VIT, "patch_size": 16, "max_length": 64, "num_mel_bins": 32},
            ((1, 64, 32), (1, 1024, 128)),
        ),
        "whisper": _whisper,
        "conformer": _own(
            lambda full: torch_nets.Conformer(256 if full else 48),
            frames=((2, 21, 40), (1, 400, 40)),
        ),
        "speech_lstm": _own(
            lambda full: torch_nets.SpeechLSTM(nn.LSTM, 256 if full else 48),
            frames=((2, 21, 40), (1, 400, 40)),
        ),
        "speech_gru": _own(
            lambda full: torch_nets.SpeechLSTM(nn.GRU, 256 if full else 48),
            frames=((2, 21, 40), (1, 400, 40)),
        ),
    },
    "series": {
        "patchtst": _values(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            {
                "num_input_channels": 3,
                "context_length": 32,
                "patch_length": 8,
                "patch_stride": 8,
                "d_model": 32,
                "num_attention_heads": 4,
                "ffn_dim": 64,
                "num_hidden_layers": 2,
                "prediction_length": 8,
            },
            ((2, 32, 3), (2, 32, 1)),
        ),
    },
    "diffusion and ranking": {
        "diffusion_unet": _diffusion,
        "wide_and_deep": _ranking(torch_nets.WideAndDeep, True),
        "dlrm": _ranking(torch_nets.DLRM, False),
    },
}

TORCH_ZOO: dict[str, Build] = {
    name: build for family in FAMILIES.values() for name, build in family.items()
}


class Exported(NamedTuple):
    """A model, its inputs by name, and whether the rows of its outputs are ``unordered``."""

    model: onnx.ModelProto
    feed: dict[str, np.ndarray]
    unordered: bool


def export(name: str, full: bool = False) -> Exported:
    """Export a model to ONNX.

    Parameters
    ----------
    name : str
        A key of :data:`TORCH_ZOO`.
    full : bool
        Whether it has its published size.

    Returns
    -------
    Exported
    """
    torch.manual_seed(0)
    with _quiet(), torch.no_grad():
        module, inputs, traced, unordered = TORCH_ZOO[name](full)
        module.eval()
        for parameter in module.parameters():
            if not parameter.any():  # some heads begin with zeros
                parameter.normal_(std=0.02)
        file = io.BytesIO()
        if traced:
            torch.onnx.export(
                module,
                tuple(inputs.values()),
                file,
                dynamo=False,
                opset_version=17,
                input_names=list(inputs),
            )
        else:
            program = torch.onnx.export(
                module,
                tuple(inputs.values()),
                dynamo=True,
                input_names=list(inputs),
                verbose=False,
            )
            assert program is not None
            program.save(file)
    model = onnx.load_from_string(file.getvalue())
    names = {value.name for value in model.graph.input}
    feed = {key: value.numpy() for key, value in inputs.items() if key in names}
    return Exported(model, feed, unordered)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def check(name: str, full: bool = False, folder: Path | None = None) -> tuple[float, float]:
    """Compile a model and compare its outputs with ONNX Runtime's.

    Parameters
    ----------
    name : str
        A key of :data:`TORCH_ZOO`.
    full : bool
        Whether it has its published size.
    folder : Path, optional
        Where the ONNX file is kept.

    Returns
    -------
    float
        Largest error, relative to the largest number of its output.
    float
        Seconds that compiling took.
    """
    import onnxruntime

    import tvm_fusion

    model, feed, unordered = export(name, full)
    if folder is not None:
        onnx.save(model, folder / f"{name}.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    expected = session.run(None, feed)
    start = time.perf_counter()
    compiled = tvm_fusion.compile(model)
    seconds = time.perf_counter() - start
    found = compiled(feed)
    found = found if isinstance(found, tuple) else (found,)
    if unordered:
        return rows_error(found, expected), seconds
    return max(map(relative_error, found, expected)), seconds


def relative_error(output: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference of two arrays of one shape, relative to the largest number wanted."""
    if (output.shape, output.dtype) != (expected.shape, expected.dtype):
        raise AssertionError(
            f"{output.dtype} of shape {output.shape}, expected {expected.dtype} of {expected.shape}"
        )
    if not expected.size:
        return 0.0
    difference = np.abs(output.astype("float64") - expected.astype("float64")).max()
    return float(difference / max(np.abs(expected).max(), 1e-30))


def rows_error(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Largest error of a row's columns, each row compared with the nearest one found."""
    tables = [
        np.concatenate([part.reshape(len(part), -1).astype("float64") for part in parts], 1)
        for parts in (found, wanted)
    ]
    if tables[0].shape != tables[1].shape or not len(tables[1]):
        raise AssertionError(f"shapes {tables[0].shape} and {tables[1].shape}; expected the same")
    scale = np.abs(tables[1]).max(0)
    differences = np.abs(tables[0][:, None] - tables[1]) / scale
    return float(differences.max(2).min(0).max())


def main(arguments: Sequence[str] | None = None) -> int:
    """Check some models, and print a line each; the exit code is the number of failures."""
    parser = argparse.ArgumentParser(description="Check real architectures against ONNX Runtime.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(TORCH_ZOO))
    parser.add_argument("--full", action="store_true", help="published sizes")
    parser.add_argument("-o", "--output", type=Path, help="folder for the ONNX files")
    options = parser.parse_args(arguments)
    unknown = set(options.models) - set(TORCH_ZOO)
    if unknown:
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    failures = 0
    for name in options.models or TORCH_ZOO:
        try:
            error, seconds = check(name, options.full, options.output)
            verdict = "right" if error <= LIMIT else "WRONG"
            text = f"{verdict}, error {error:.1e}, compiled in {seconds:.1f} s"
        except Exception as raised:
            verdict, text = "failed", "".join(traceback.format_exception_only(raised)).strip()
        failures += verdict != "right"
        print(f"{name}: {text}", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())

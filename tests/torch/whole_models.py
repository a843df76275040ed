"""Whole models that people train, built small from transformers' configurations; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

_WORDS = 97
_TOKENS = 12


class WholeModel(NamedTuple):
    """A model in training, and what it is called with: `model(**inputs).loss` is what it is trained for."""

    model: nn.Module
    inputs: dict[str, Any]


def _words() -> dict[str, Any]:
    words = torch.randint(1, _WORDS, (2, _TOKENS), device="cpu")
    return {"input_ids": words, "labels": words}


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, device="cpu"), "labels": torch.arange(2, device="cpu")}


def _gpt2() -> WholeModel:
    """With tied weights, and dropout everywhere."""
    sizes = {"n_positions": _TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=_WORDS, bos_token_id=0, eos_token_id=0, **sizes))
    model.loss_type = "ForCausalLM"  # what it takes anyway, but not without a word
    return WholeModel(model, _words() | {"use_cache": False})


def _llama() -> WholeModel:
    """Without dropout: attention is one operation."""
    sizes = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 3, "max_position_embeddings": _TOKENS}
    config = LlamaConfig(vocab_size=_WORDS, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return WholeModel(LlamaForCausalLM(config), _words() | {"use_cache": False})


def _bert() -> WholeModel:
    """With a mask: the last tokens of the first sequence are padding."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "max_position_embeddings": _TOKENS}
    mask = torch.ones(2, _TOKENS, dtype=torch.long, device="cpu")
    mask[0, -3:] = 0
    model = BertForMaskedLM(BertConfig(vocab_size=_WORDS, num_attention_heads=2, **sizes))
    return WholeModel(model, _words() | {"attention_mask": mask})


def _vit() -> WholeModel:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "image_size": 32, "patch_size": 8}
    config = ViTConfig(num_attention_heads=2, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, **sizes)
    return WholeModel(ViTForImageClassification(config), _images())


def _t5() -> WholeModel:
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = T5Config(vocab_size=_WORDS, decoder_start_token_id=0, **sizes)
    return WholeModel(T5ForConditionalGeneration(config), _words() | {"use_cache": False})


def _resnet() -> WholeModel:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck")
    return WholeModel(ResNetForImageClassification(config), _images())


MODELS: dict[str, Callable[[], WholeModel]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "bert": _bert,
    "vit": _vit,
    "t5": _t5,
    "resnet": _resnet,
}


def whole_model(name: str, *, device: str = "cpu", seed: int = 0) -> WholeModel:
    """The one of that name, the same for the same seed; on the meta device its parameters have no values."""
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        made = MODELS[name]()
    made.model.train()
    return made

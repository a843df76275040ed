"""Blocks of the networks that people train, built from transformers' configurations: small, nothing is downloaded.

A block is one layer with its arguments; a language model is a whole one, and the list that its layers stand in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    BertConfig,
    ConvNextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    ViTConfig,
)
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.convnext.modeling_convnext import ConvNextLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.vit.modeling_vit import ViTLayer

from lowtide.torch import spiking


class Block(NamedTuple):
    """A module and what it is called with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Of a block: `tokens` is also the side of an image, `dropout` that of attention too; `words` are a model's."""

    width: int = 16
    tokens: int = 6
    batch: int = 2
    dropout: float = 0.1
    words: int = 97

    @property
    def heads(self) -> int:
        """At least two, of 64 numbers in wide ones."""
        return max(2, self.width // 64)

    def states(self) -> torch.Tensor:
        """What comes from the layer before."""
        return torch.randn(self.batch, self.tokens, self.width, requires_grad=True)


def gpt2_block(size: Size) -> Block:
    return Block(GPT2Block(_gpt2_config(size, 1), layer_idx=0), (size.states(),), {})


def gpt2_eager_block(size: Size) -> Block:
    """With attention written out, and a mask as a part of the arguments."""
    config = _gpt2_config(size, 1)
    config._attn_implementation = "eager"
    mask = torch.full((1, 1, size.tokens, size.tokens), torch.finfo(torch.float32).min).triu(1)
    return Block(GPT2Block(config, layer_idx=0), (size.states(),), {"attention_mask": mask})


def llama_layer(size: Size) -> Block:
    """Two heads ask one; cosines and sines come from outside."""
    config = _llama_config(size, 1)
    states = size.states()
    positions = torch.arange(size.tokens)[None]
    rotary = LlamaRotaryEmbedding(config)(states.detach(), positions)
    return Block(LlamaDecoderLayer(config, layer_idx=0), (states,), {"position_embeddings": rotary})


def bert_layer(size: Size) -> Block:
    """With a mask: the last token of the first sequence is padding."""
    config = BertConfig(
        hidden_size=size.width,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        attn_implementation="sdpa",
    )
    mask = torch.ones(size.batch, 1, size.tokens, size.tokens, dtype=torch.bool)
    mask[0, :, :, -1] = False
    return Block(BertLayer(config, layer_idx=0), (size.states(), mask), {})


def vit_layer(size: Size) -> Block:
    config = ViTConfig(
        hidden_size=size.width,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        attn_implementation="sdpa",
    )
    return Block(ViTLayer(config), (size.states(),), {})


def t5_encoder_block(size: Size) -> Block:
    """Gives its states and the bias of its positions, which it computes."""
    return Block(T5Block(_t5_config(size), has_relative_attention_bias=True, layer_idx=0), (size.states(),), {})


def t5_decoder_block(size: Size) -> Block:
    """Attends to an encoder's states too."""
    config = _t5_config(size)
    config.is_decoder = True
    block = T5Block(config, has_relative_attention_bias=True, layer_idx=0)
    return Block(block, (size.states(),), {"encoder_hidden_states": size.states()})


def convnext_layer(size: Size) -> Block:
    """Its dropout is that of the whole branch; its scale is one at which the branch counts."""
    layer = ConvNextLayer(ConvNextConfig(layer_scale_init_value=0.5), dim=size.width, drop_path=size.dropout)
    image = torch.randn(size.batch, size.width, size.tokens, size.tokens, requires_grad=True)
    return Block(layer, (image,), {})


class LifStep(nn.Module):
    """A step of a spiking network: synapses, leaky neurons with a surrogate gradient, and an output that forgets."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.synapses = nn.Linear(width, width, bias=False)
        self.readout = nn.Linear(width, 2)
        self.drop = nn.Dropout(dropout)
        self.spike = spiking.ReluGrad()

    def forward(self, carry: tuple[torch.Tensor, ...], x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
        """From (current, voltage, output) to the next, and what is seen of it."""
        current, voltage, output = carry
        current = spiking.expon_step(current, self.synapses(self.drop(x)), 0.8)
        voltage, spikes = spiking.lif_step(voltage, current, spike=self.spike, leak=0.3)
        output = spiking.expon_step(output, self.readout(spikes), 0.9)
        return (current, voltage, output), {"output": output, "spikes": spikes.detach()}


def lif_step(size: Size) -> Block:
    rows = size.batch * size.tokens
    carry = tuple(torch.randn(rows, width, requires_grad=True) for width in (size.width, size.width, 2))
    return Block(LifStep(size.width, size.dropout), (carry, torch.rand(rows, size.width, requires_grad=True)), {})


BLOCKS: dict[str, Callable[[Size], Block]] = {
    "gpt2": gpt2_block,
    "gpt2_eager": gpt2_eager_block,
    "llama": llama_layer,
    "bert": bert_layer,
    "vit": vit_layer,
    "t5_encoder": t5_encoder_block,
    "t5_decoder": t5_decoder_block,
    "convnext": convnext_layer,
    "lif": lif_step,
}


def block(name: str, size: Size | None = None, *, seed: int = 0, training: bool = True) -> Block:
    """The one of that name, the same for the same seed; leaves the random numbers as they are."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = BLOCKS[name](size or Size())
    made.module.train(training)
    return made


class LanguageModel(NamedTuple):
    """A model of which `model(**inputs).loss` can be taken, and the list of its layers, to be replaced one by one."""

    model: nn.Module
    inputs: dict[str, Any]
    blocks: nn.ModuleList


def gpt2(layers: int = 3, size: Size | None = None, *, seed: int = 0) -> LanguageModel:
    size = size or Size()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(_gpt2_config(size, layers)).train()
        model.loss_type = "ForCausalLM"  # what it takes anyway, but not without a word
        return LanguageModel(model, _words(size), model.transformer.h)


def llama(layers: int = 3, size: Size | None = None, *, seed: int = 0) -> LanguageModel:
    size = size or Size()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(_llama_config(size, layers)).train()
        return LanguageModel(model, _words(size), model.model.layers)


LANGUAGE_MODELS: dict[str, Callable[..., LanguageModel]] = {"gpt2": gpt2, "llama": llama}


def _words(size: Size) -> dict[str, Any]:
    words = torch.randint(size.words, (size.batch, size.tokens))
    return {"input_ids": words, "labels": words, "use_cache": False}


def _gpt2_config(size: Size, layers: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=size.words,
        n_positions=size.tokens,
        n_embd=size.width,
        n_layer=layers,
        n_head=size.heads,
        resid_pdrop=size.dropout,
        embd_pdrop=size.dropout,
        attn_pdrop=size.dropout,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )


def _llama_config(size: Size, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=size.words,
        max_position_embeddings=size.tokens,
        hidden_size=size.width,
        intermediate_size=size.width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        attention_dropout=size.dropout,
        attn_implementation="sdpa",
    )


def _t5_config(size: Size) -> T5Config:
    return T5Config(
        d_model=size.width,
        d_kv=size.width // size.heads,
        d_ff=4 * size.width,
        num_heads=size.heads,
        dropout_rate=size.dropout,
        attn_implementation="sdpa",
    )

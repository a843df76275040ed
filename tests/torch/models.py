"""Whole networks that people train, built small from transformers' configurations: nothing is downloaded.

All have dropout, but for the one with BatchNorm. `model(**kwargs).loss` is what they are trained for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

import lowtide.torch as lt
from lowtide import BudgetError, Plan
from lowtide.planners.blocks import Blocks
from lowtide.torch import measure
from lowtide.torch.memory.tracker import tensors_of
from lowtide.torch.state.bits import same_bits


class Model(NamedTuple):
    """A model in training, what it is called with, and how the loss is taken; None: as `plan_model` finds it."""

    module: nn.Module
    kwargs: dict[str, Any]
    args: tuple[Any, ...] = ()
    loss: Callable[[Any], torch.Tensor] | None = None

    @property
    def resident(self) -> int:
        """Bytes that are there before a step: parameters, buffers, arguments, gradients."""
        parameters = list(self.module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        arguments = tensors_of((self.args, self.kwargs))
        return measure.storage_bytes([*parameters, *gradients, *self.module.buffers(), *arguments])

    def plan(self, peak: int | str, **more: Any) -> Plan:
        """Of a step within the peak."""
        return lt.plan_model(self.module, *self.args, peak=peak, loss=self.loss, **more, **self.kwargs)

    def least(self, **more: Any) -> int:
        """The least peak that works, as the error for a peak of a byte names it."""
        try:
            self.plan(1, **more)
        except BudgetError as error:
            return error.least
        raise AssertionError("a step within a byte")

    def run(self) -> tuple[Any, torch.Tensor]:
        """What the model returns, and the loss."""
        output = self.module(*self.args, **self.kwargs)
        return output, getattr(output, "loss", output) if self.loss is None else self.loss(output)


@dataclass(frozen=True)
class Size:
    """Of a model; `tokens` is also the side of an image in patches, `words` the size of a vocabulary."""

    width: int = 32
    layers: int = 3
    batch: int = 4
    tokens: int = 16
    words: int = 97
    dropout: float = 0.1

    @property
    def heads(self) -> int:
        """At least two, of 64 numbers in wide ones."""
        return max(2, self.width // 64)

    def text(self) -> dict[str, Any]:
        """Words, which are to be foretold."""
        words = torch.randint(1, self.words, (self.batch, self.tokens), device="cpu")
        return {"input_ids": words, "labels": words}

    def pictures(self, side: int) -> dict[str, Any]:
        """Pictures, each of one of ten kinds."""
        pictures = torch.randn(self.batch, 3, side, side, device="cpu")
        return {"pixel_values": pictures, "labels": torch.arange(self.batch, device="cpu") % 10}


def gpt2(size: Size) -> Model:
    """With tied weights."""
    config = GPT2Config(
        vocab_size=size.words,
        n_positions=size.tokens,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=size.dropout,
        embd_pdrop=size.dropout,
        attn_pdrop=size.dropout,
        bos_token_id=0,
        eos_token_id=0,
    )
    module = GPT2LMHeadModel(config)
    module.loss_type = "ForCausalLM"  # what it takes anyway, but not without a word
    return Model(module, size.text() | {"use_cache": False})


def llama(size: Size) -> Model:
    """Two heads ask one."""
    config = LlamaConfig(
        vocab_size=size.words,
        max_position_embeddings=size.tokens,
        hidden_size=size.width,
        intermediate_size=size.width * 11 // 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        attention_dropout=size.dropout,
    )
    return Model(LlamaForCausalLM(config), size.text() | {"use_cache": False})


def bert(size: Size) -> Model:
    """With a mask: the last tokens of the first sequence are padding."""
    config = BertConfig(
        vocab_size=size.words,
        max_position_embeddings=size.tokens,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
    )
    mask = torch.ones(size.batch, size.tokens, dtype=torch.long, device="cpu")
    mask[0, -3:] = 0
    return Model(BertForMaskedLM(config), size.text() | {"attention_mask": mask})


def vit(size: Size) -> Model:
    """As many patches as a text has words, about."""
    side = 4 * max(1, round(size.tokens**0.5))
    config = ViTConfig(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        image_size=side,
        patch_size=4,
        num_labels=10,
    )
    return Model(ViTForImageClassification(config), size.pictures(side))


def t5(size: Size) -> Model:
    """An encoder and a decoder, which is given half as many words."""
    config = T5Config(
        vocab_size=size.words,
        d_model=size.width,
        d_kv=size.width // size.heads,
        d_ff=4 * size.width,
        num_layers=size.layers,
        num_heads=size.heads,
        dropout_rate=size.dropout,
        decoder_start_token_id=0,
    )
    kwargs = size.text()
    labels = kwargs["labels"][:, : size.tokens // 2].contiguous()
    return Model(T5ForConditionalGeneration(config), kwargs | {"labels": labels, "use_cache": False})


def resnet(size: Size) -> Model:
    """Two stages of convolutions with BatchNorm."""
    config = ResNetConfig(
        embedding_size=size.width // 2,
        hidden_sizes=[size.width // 2, size.width],
        depths=[size.layers, size.layers],
        layer_type="basic",
        num_labels=10,
    )
    return Model(ResNetForImageClassification(config), size.pictures(2 * size.tokens))


MODELS: dict[str, Callable[[Size], Model]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "resnet": resnet,
}


def model(name: str, size: Size | None = None, *, seed: int = 0, device: str = "cpu") -> Model:
    """The one of that name, the same for the same seed; leaves the random numbers as they are.

    Its arguments are on the CPU; on the meta device its parameters have no values.
    """
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        made = MODELS[name](size or Size())
    made.module.train()
    return made


def schedule_of(plan: Plan) -> Blocks:
    """Of a plan for a model."""
    assert isinstance(plan.schedule, Blocks)
    return plan.schedule


def decisions(plan: Plan) -> dict[str, str]:
    """The form of each block."""
    chain, options = plan.chain, schedule_of(plan).options
    return {chain.names[k]: chain[k].menu[options[k]].name for k in chain.blocks()}


class Step(NamedTuple):
    """What came of a training step: bytes at its worst moment, the loss, and all gradients and buffers."""

    peak: int
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    def assert_same(self, other: Step) -> None:
        """To the last bit."""
        assert same_bits(self.loss, other.loss)
        for found, expected in ((self.gradients, other.gradients), (self.buffers, other.buffers)):
            assert found.keys() == expected.keys()
            assert [name for name in found if not same_bits(found[name], expected[name])] == []


def train(made: Model, *, seed: int = 1) -> Step:
    """Forward, loss and backward; what the model returned is held until the end, as callers may."""
    module = made.module
    module.zero_grad()
    resident = made.resident
    torch.manual_seed(seed)
    with measure.peak() as memory:
        output, loss = made.run()
        loss.backward()
    del output
    gradients = {
        name: parameter.grad.to_dense().clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    for k, tensor in enumerate(tensors_of((made.args, made.kwargs))):
        if tensor.grad is not None:
            gradients[f"argument {k}"], tensor.grad = tensor.grad, None
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return Step(resident + memory.peak, loss.detach(), gradients, buffers)

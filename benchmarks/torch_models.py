"""Whole models within a peak, beside Hugging Face's gradient checkpointing of every layer.

    python benchmarks/torch_models.py [--quick] [--only Llama]

GPT-2 (12 layers), Llama (8) and ViT (12) of Hugging Face's transformers, built from configurations: width 512, 4 x 256
tokens or patches, eager, in float32; without dropout, and with 0.1. A training step is forward, loss and backward.

    peak    bytes of tensors alive at the worst moment of a step, measured: parameters, gradients, arguments, tapes, and
            what reruns need; as a share of the plain step's
    time    of a step, as a multiple of the plain one's: CPU seconds of this process (`time.process_time`), one thread;
            all take turns, and the least of the repeats counts. Freed memory stays with the process (glibc's `mallopt`)

Lowtide gets three peaks: that of gradient checkpointing, where it must be no slower; the middle between that and the
plain one, where it may take 0.4 of the extra time; and one beyond the plain peak, where every block is kept, which
shows what an applied plan costs. In each the measured peak is at most the one asked for, and the loss and all gradients
are asserted to have the plain step's bits.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from ratios import Ratio, command, cpu_in_turns, heading
from torch_lean import Size, gpt2, keep_freed_memory, llama, same_bits, verdict
from transformers import ViTConfig, ViTForImageClassification

import lowtide.torch as lt
from lowtide import BudgetError, Plan
from lowtide.planners.blocks import Blocks
from lowtide.sizes import format_size

PLAIN, EVERY_LAYER = "plain", "gradient checkpointing"
LIKE_IT, MIDDLE, KEEP = "its peak", "the middle", "all kept"


@dataclass(frozen=True)
class Case:
    """A model in training, and what it is called with."""

    model: Any
    arguments: dict[str, Any]

    def copy(self) -> Case:
        """The same with a model of its own."""
        return Case(copy.deepcopy(self.model), self.arguments)

    def results(self) -> tuple[torch.Tensor, ...]:
        """The loss of a step and its gradients."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        output = self.model(**self.arguments)  # held until the end, as most people do
        output.loss.backward()
        grads = [parameter.grad for parameter in self.model.parameters()]
        return (output.loss.detach(), *(grad for grad in grads if grad is not None))

    def peak(self) -> int:
        """Bytes alive at the worst moment of a step."""
        self.model.zero_grad(set_to_none=True)
        tensors = [value for value in self.arguments.values() if isinstance(value, torch.Tensor)]
        there = lt.measure.storage_bytes([*self.model.parameters(), *self.model.buffers(), *tensors])
        with lt.measure.peak() as memory:
            self.results()
        return there + memory.peak


def text(make: Any, size: Size, layers: int, dropout: float) -> Case:
    case = make(size, layers, dropout)
    return Case(case.model, {"input_ids": case.words, "labels": case.words, "use_cache": False})


def vit(size: Size, layers: int, dropout: float) -> Case:
    side = round(size.tokens**0.5)
    config = ViTConfig(
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, size.width // 64),
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        image_size=16 * side,
        patch_size=16,
        num_labels=10,
        attn_implementation="sdpa",
    )
    pictures = torch.randn(size.batch, 3, 16 * side, 16 * side)
    labels = torch.randint(10, (size.batch,))
    return Case(ViTForImageClassification(config).train(), {"pixel_values": pictures, "labels": labels})


@dataclass(frozen=True)
class Model:
    """How to make one, its layers, and its words."""

    name: str
    make: Callable[[Size, int, float], Case]
    layers: int
    words: int


MODELS = (
    Model("GPT-2", partial(text, gpt2), 12, 50_257),
    Model("Llama", partial(text, llama), 8, 32_000),
    Model("ViT", vit, 12, 10),
)


def planned(case: Case, peak: int) -> tuple[Case, Plan]:
    """A copy of the model, which runs within the peak, or within the least that works."""
    made = case.copy()
    try:
        return made, lt.auto_checkpoint(made.model, peak=peak, **made.arguments)
    except BudgetError as error:
        return made, lt.auto_checkpoint(made.model, peak=error.least, **made.arguments)


def kept_blocks(plan: Plan) -> str:
    """How many blocks are run in which way."""
    assert isinstance(plan.schedule, Blocks)
    ways = Counter(
        plan.chain[k].menu[option].name
        for k, option in enumerate(plan.schedule.options)
        if not plan.chain.names[k].startswith("(")
    )
    return ", ".join(f"{count} x {form}" for form, count in ways.items())


def whole_model(model: Model, size: Size, layers: int, dropout: float, repeats: int) -> list[Ratio]:
    """The table for a model."""
    torch.manual_seed(0)
    made = model.make(size, layers, dropout)
    cases = {PLAIN: made.copy(), EVERY_LAYER: made.copy()}  # all are copies, so that all lie alike in memory
    cases[EVERY_LAYER].model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = cases[PLAIN].results()
    most, its = cases[PLAIN].peak(), cases[EVERY_LAYER].peak()
    asked = {PLAIN: most, EVERY_LAYER: its, LIKE_IT: its, MIDDLE: (its + most) // 2, KEEP: 2 * most}
    plans = {}
    for way in (LIKE_IT, MIDDLE, KEEP):
        cases[way], plans[way] = planned(made, asked[way])
    for case in cases.values():
        same_bits(case.results(), expected)
        same_bits(case.results(), expected)  # the first call of a lean block is traced
    peaks = {way: case.peak() for way, case in cases.items()}
    found = cpu_in_turns([case.results for case in cases.values()], repeats)
    seconds = dict(zip(cases, found, strict=True))
    heading(f"{model.name}, {layers} layers, dropout {dropout:g}: plain takes {seconds[PLAIN] * 1e3:.0f} ms")
    print(f"{'':<24}{'asked':>11}{'predicted':>11}{'measured':>11}{'share':>8}{'time':>8}{'promised':>10}", flush=True)
    for way, peak in peaks.items():
        plan = plans.get(way)
        predicted = "" if plan is None else format_size(plan.bill.peak_memory)
        promised = "" if plan is None else f"{plan.time_factor:.3f}"
        print(
            f"{way:<24}{format_size(asked[way]):>11}{predicted:>11}{format_size(peak):>11}{peak / most:>8.3f}"
            f"{seconds[way] / seconds[PLAIN]:>8.3f}{promised:>10}",
            flush=True,
        )
    for way, plan in plans.items():
        print(f"{way}: {kept_blocks(plan)}", flush=True)
    name = f"{model.name}, dropout {dropout:g}"
    extra = {way: each - seconds[PLAIN] for way, each in seconds.items()}
    ratios = [
        Ratio(f"{name}, at its peak: time of gradient checkpointing's", seconds[LIKE_IT] / seconds[EVERY_LAYER], 1.0),
        Ratio(
            f"{name}, in the middle: extra time of gradient checkpointing's", extra[MIDDLE] / extra[EVERY_LAYER], 0.4
        ),
        Ratio(f"{name}, all kept: time of plain's", seconds[KEEP] / seconds[PLAIN], 1.01),
    ]
    for way in (LIKE_IT, MIDDLE, KEEP):
        ratios.append(Ratio(f"{name}, {way}: measured peak of the one asked for", peaks[way] / asked[way], 1.0))
    for ratio in ratios:
        print(f"{ratio.what}: {ratio.value:.3f}{verdict(ratio)}", flush=True)
    return ratios


def main(arguments: list[str]) -> list[Ratio]:
    parser = argparse.ArgumentParser(description="Whole models within a peak.")
    parser.add_argument("--quick", action="store_true", help="small models, few repeats")
    parser.add_argument("--only", help="only models with this in their name")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    repeats = 2 if given.quick else 10
    ratios: list[Ratio] = []
    for model in MODELS:
        if given.only is None or given.only in model.name:
            size = Size(64, 16, 2, 97) if given.quick else Size(512, 256, 4, model.words)
            for dropout in (0.0, 0.1):
                ratios += whole_model(model, size, 2 if given.quick else model.layers, dropout, repeats)
    return ratios


if __name__ == "__main__":
    command(main)

"""Will it fit? A model of 8 billion parameters planned for one card of 80 GB, on a machine that has neither.

The shape is that of Llama 3 with 8 billion parameters, from Hugging Face's transformers: 32 layers of width 4096,
128,256 words. Weights, gradients and the optimizer's numbers are bfloat16, and a step takes one text of 8,192 tokens.
The model is built on torch's meta device, without values, and planned on paper: nothing is downloaded, nothing is
allocated, nothing is run.

    python examples/fit_a_model.py --output demo-output

Three optimizers are tried. For each: what the plain step takes at its worst moment, what it takes if every layer is
run again, which is what `gradient_checkpointing_enable()` does, and what Lowtide plans for the memory of the card.
Times are estimates, from operations and bytes and the card's data sheet; they are there to compare plans by. The page
of the last plan is written to the folder, with a slider for other peaks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import lowtide.torch as lt
from lowtide import BudgetError, Plan, report
from lowtide.planners.blocks import Blocks
from lowtide.sizes import format_size

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "AdamW": torch.optim.AdamW,  # on a card it takes all parameters at once
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


@dataclass(frozen=True)
class Shape:
    """Of a Llama, and of a batch for it."""

    layers: int = 32
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    heads_of_keys: int = 8
    words: int = 128256
    texts: int = 1
    tokens: int = 8192


SMALL = Shape(layers=3, width=256, inner=896, heads=8, heads_of_keys=2, words=1000, tokens=256)


def llama(shape: Shape) -> tuple[nn.Module, dict[str, Any]]:
    """The model and what it is called with; all of it without values."""
    from transformers import LlamaConfig, LlamaForCausalLM  # only this example needs it

    config = LlamaConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads_of_keys,
        vocab_size=shape.words,
        max_position_embeddings=shape.tokens,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        words = torch.zeros(shape.texts, shape.tokens, dtype=torch.long)
    return model, {"input_ids": words, "labels": words, "use_cache": False}


@dataclass(frozen=True)
class Answer:
    """What was found for an optimizer: the plan, or None and the least peak that works."""

    optimizer: str
    plan: Plan | None
    least: int = 0


def ask(shape: Shape, card: lt.Device, memory: int) -> list[Answer]:
    """Plan a step with each optimizer."""
    model, batch = llama(shape)
    answers = []
    for name, optimizer in OPTIMIZERS.items():
        try:
            plan = lt.plan_model(model, **batch, peak=memory, optimizer=optimizer, on_paper=True, device=card)
            answers.append(Answer(name, plan))
        except BudgetError as error:
            answers.append(Answer(name, None, error.least))
    return answers


def all_in_form(plan: Plan, form: str) -> Plan:
    """The same blocks, each of them in the form of that name."""
    chain, schedule = plan.chain, plan.schedule
    assert isinstance(schedule, Blocks)
    menus = [[entry.name for entry in chain[k].menu] for k in range(len(chain))]
    options = tuple(menu.index(form) if form in menu else 0 for menu in menus)
    return Plan.make(chain, plan.knob, replace(schedule, options=options))


def table_of(answers: Sequence[Answer], card: lt.Device, memory: int) -> Table:
    """A row for each way to run each optimizer's step."""
    title = f"A training step within the {format_size(memory)} of one {card.name}"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.caption = "Extra time is a share of what the layers take in the plain step."
    table.add_column("optimizer", no_wrap=True)
    table.add_column("way")
    for heading in ("peak", "fits", "extra time"):
        table.add_column(heading, justify="right")
    for answer in answers:
        if answer.plan is None:
            table.add_row(answer.optimizer, "any plan, at least", format_size(answer.least), "no", "")
            continue
        ways = {
            "plain": all_in_form(answer.plan, "keep"),
            "every layer again": all_in_form(answer.plan, "rerun"),
            "Lowtide": answer.plan,
        }
        for way, plan in ways.items():
            peak = plan.bill.peak_memory
            fits = "yes" if peak <= memory else "no"
            table.add_row(answer.optimizer, way, format_size(peak), fits, f"{plan.time_factor - 1:.1%}")
    return table


def run(output: Path, shape: Shape, card: lt.Device, memory: int, console: Console) -> list[Answer]:
    """Plan, print what was found, and write the page of the last plan."""
    answers = ask(shape, card, memory)
    console.print(table_of(answers, card, memory))
    plans = [(answer.optimizer, answer.plan) for answer in answers if answer.plan is not None]
    if plans:
        name, plan = plans[-1]
        console.print(f"The plan with {name}", style="bold")
        for label, text in plan.lines():
            console.print(f"{label:<10}{text}", highlight=False, soft_wrap=True)
        output.mkdir(parents=True, exist_ok=True)
        report.write(plan, output / "fit-a-model.html")
    return answers


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Will it fit? A model of 8 billion parameters on one card.")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the page")
    parser.add_argument("--quick", action="store_true", help="a small model, in a small part of the card")
    given = parser.parse_args(arguments)
    if given.quick:
        run(given.output, SMALL, lt.H100, 28 * 2**20, Console())
    else:
        run(given.output, Shape(), lt.H100, lt.H100.memory, Console())


if __name__ == "__main__":
    main()

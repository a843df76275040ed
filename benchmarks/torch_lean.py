"""The lean tape on blocks of GPT-2 and Llama: its bytes and its time, beside the plain call and torch's checkpoints.

    python benchmarks/torch_lean.py [--quick] [--only Llama]

The blocks are those of Hugging Face's transformers, built from configurations: width 512, 4 x 256 tokens, eager, in
float32. Torch's selective checkpointing gets the policy that people write: matrix products and attention are saved, all
else is run again. Lowtide is run as it comes (all that is free is dropped), with a budget of half and of 36% of the
plain tape, with that of selective checkpointing, and with one that keeps everything, which shows what the hooks cost.

    tape    bytes of the tensors that a forward made and that its graph alone holds until the backward: in units of
            tokens x width numbers, and as a share of the plain call's
    time    of a forward and a backward, as a multiple of the plain call's: CPU seconds of this process
            (`time.process_time`), one thread; all take turns, and the least of the repeats counts. Freed memory stays
            with the process (glibc's `mallopt`), as it does with a GPU's allocator: page faults come at random

Whole models: every block is wrapped, and the peak of live bytes in one training step should fall as the points of the
frontier say: by the sum over the blocks of what they drop (`tape`). With as many words as the model has, the peak is at
the loss, where nothing has been made again yet. With few words it is in the backward of the last block, where what that
block makes again (`working`) is alive beside the tapes of all others. Both are shown. Gradients are asserted to have
the plain call's bits.

Last: the time in which a traced signature is found, as a multiple of 20 us.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from ratios import Ratio, command, cpu_in_turns, heading
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import lowtide.torch as lt
from lowtide.sizes import format_size
from lowtide.torch.lean.call import look_up

HEAD, FEW = 64, 64
FREE, HALF, THIRD, ALL = "lean", 'lean, tape="50%"', 'lean, tape="36%"', 'lean, tape="100%"'
PLAIN, CHECKPOINT, SELECTIVE, LIKE_SELECTIVE = "plain", "checkpoint", "selective", "lean, selective's tape"

aten = torch.ops.aten
SAVED = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


@dataclass(frozen=True)
class Size:
    """Of a model, and of the batch that it gets."""

    width: int
    tokens: int
    batch: int
    words: int

    @property
    def unit(self) -> int:
        """Bytes of one number for each token and each of the width."""
        return 4 * self.width * self.tokens * self.batch


@dataclass(frozen=True)
class Case:
    """A model, the list of its blocks, and what one of them is called with."""

    model: nn.Module
    blocks: nn.ModuleList
    arguments: dict[str, Any]
    words: torch.Tensor

    def loss(self) -> torch.Tensor:
        """What a training step takes the gradient of."""
        loss: torch.Tensor = self.model(input_ids=self.words, labels=self.words, use_cache=False).loss
        return loss


def gpt2(size: Size, layers: int, dropout: float) -> Case:
    config = GPT2Config(
        vocab_size=size.words,
        n_positions=size.tokens,
        n_embd=size.width,
        n_layer=layers,
        n_head=max(1, size.width // HEAD),
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # what it takes anyway, but not without a word
    return Case(model, model.transformer.h, {}, torch.randint(size.words, (size.batch, size.tokens)))


def llama(size: Size, layers: int, dropout: float) -> Case:
    heads = max(1, size.width // HEAD)
    config = LlamaConfig(
        vocab_size=size.words,
        max_position_embeddings=size.tokens,
        hidden_size=size.width,
        intermediate_size=size.width * 43 // 16,  # as in the first Llama: 11,008 for 4,096
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        attention_dropout=dropout,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).train()
    states = torch.zeros(size.batch, size.tokens, size.width)
    rotary = model.model.rotary_emb(states, torch.arange(size.tokens)[None])
    words = torch.randint(size.words, (size.batch, size.tokens))
    return Case(model, model.model.layers, {"position_embeddings": rotary}, words)


@dataclass(frozen=True)
class Model:
    """How to make one, layers and words of a whole one, and what is promised of a block: most tape, and most time."""

    name: str
    make: Callable[[Size, int, float], Case]
    layers: int
    words: int
    promises: tuple[tuple[str, float, float], ...]


MODELS = (
    Model("GPT-2", gpt2, 12, 50_257, ((THIRD, 0.36, 1.15), (HALF, 0.5, 1.08))),
    Model("Llama", llama, 8, 32_000, ((FREE, 0.55, 1.05),)),
)


def save_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """The policy for selective checkpointing."""
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class Block:
    """A block with its input, and ways to call it."""

    def __init__(self, case: Case, size: Size) -> None:
        (self.module,) = case.blocks
        self.arguments = case.arguments
        self.x = torch.randn(size.batch, size.tokens, size.width, requires_grad=True)
        self.cotangent = torch.randn_like(self.x)
        self.wanted = [self.x, *self.module.parameters()]
        self.ways: dict[str, Callable[[], Any]] = {
            PLAIN: partial(self.module, self.x, **self.arguments),
            CHECKPOINT: partial(checkpoint, self.module, self.x, use_reentrant=False, **self.arguments),
            SELECTIVE: partial(
                checkpoint,
                self.module,
                self.x,
                use_reentrant=False,
                context_fn=partial(create_selective_checkpoint_contexts, save_products),
                **self.arguments,
            ),
        }

    def add_lean(self, name: str, tape: int | str | None) -> None:
        """One more way: with a lean tape of that size."""
        self.ways[name] = partial(lt.Lean(self.module, tape=tape), self.x, **self.arguments)

    def results(self, way: str) -> tuple[torch.Tensor, ...]:
        """Output and all gradients."""
        torch.manual_seed(0)
        y = self.ways[way]()
        return (y.detach(), *torch.autograd.grad(y, self.wanted, self.cotangent))

    def look_up_seconds(self, count: int = 200) -> float:
        """Of finding the trace of a call that was traced before."""

        def look_up_often() -> None:
            for _ in range(count):
                assert look_up(self.module, (self.x,), self.arguments).variant is not None

        (seconds,) = cpu_in_turns([look_up_often], 20)
        return seconds / count

    def tape(self, way: str) -> int:
        """Bytes that wait for the backward."""
        with lt.measure.peak() as memory:
            graph = self.ways[way]().grad_fn
            gc.collect()
            held = memory.now
        del graph
        return held


def keep_freed_memory() -> None:
    """Have the C library reuse freed memory for large blocks too; elsewhere than with glibc nothing is changed."""
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for option, value in ((-1, -1), (-4, 0)):  # never trim; never map a block of its own
            library.mallopt(option, value)


def verdict(ratio: Ratio) -> str:
    return "" if ratio.limit is None else f"  limit {ratio.limit:g}: {'kept' if ratio.kept else 'NOT KEPT'}"


def same_bits(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert all(map(torch.equal, found, expected)), "output or gradients are not the plain call's"
    assert all(bool(each.abs().sum()) for each in expected), "a gradient is zero: nothing was compared"


def one_block(model: Model, size: Size, dropout: float, repeats: int) -> list[Ratio]:
    """The table for a block; with dropout nothing is promised."""
    torch.manual_seed(0)
    block = Block(model.make(size, 1, dropout), size)
    for name, share in ((FREE, None), (HALF, "50%"), (THIRD, "36%"), (ALL, "100%")):
        block.add_lean(name, share)
    block.add_lean(LIKE_SELECTIVE, block.tape(SELECTIVE))
    expected = block.results(PLAIN)
    with lt.record() as receipt:
        for way in block.ways:
            same_bits(block.results(way), expected)
            same_bits(block.results(way), expected)  # the first call of a lean one is traced
    assert receipt.kept_whole == 0, f"{receipt.kept_whole} lean calls kept their whole tape"
    tapes = {way: block.tape(way) for way in block.ways}
    seconds = dict(
        zip(block.ways, cpu_in_turns([partial(block.results, way) for way in block.ways], repeats), strict=True)
    )
    shares = {way: tape / tapes[PLAIN] for way, tape in tapes.items()}
    times = {way: each / seconds[PLAIN] for way, each in seconds.items()}
    heading(f"A block of {model.name}, dropout {dropout:g}: plain takes {seconds[PLAIN] * 1e3:.0f} ms")
    print(f"{'':<24}{'tape':>10}{'units':>8}{'share':>8}{'time':>8}", flush=True)
    for way, tape in tapes.items():
        units = tape / size.unit
        print(f"{way:<24}{format_size(tape):>10}{units:>8.2f}{shares[way]:>8.3f}{times[way]:>8.3f}", flush=True)
    if dropout:
        return []
    ratios = []
    for way, most_tape, most_time in model.promises:
        ratios.append(Ratio(f"{model.name}, {way}: tape of plain's", shares[way], most_tape))
        ratios.append(Ratio(f"{model.name}, {way}: time of plain's", times[way], most_time))
    by_selective = times[LIKE_SELECTIVE] / times[SELECTIVE]
    ratios.append(Ratio(f"{model.name}, {LIKE_SELECTIVE}: time of selective's", by_selective, 1.0))
    ratios.append(Ratio(f"{model.name}, {ALL}: time of plain's", times[ALL], 1.03))
    ratios.append(Ratio(f"{model.name}: time to find a signature, of 20 us", block.look_up_seconds() / 20e-6, 1.0))
    for ratio in ratios:
        print(f"{ratio.what}: {ratio.value:.3f}{verdict(ratio)}", flush=True)
    return ratios


def step_peaks(case: Case) -> tuple[int, int]:
    """Most live bytes in one training step, beside the model: up to the blocks' backward, and in it."""
    case.model.zero_grad(set_to_none=True)
    peaks: list[int] = []

    def note(_: torch.Tensor) -> None:
        peaks.append(memory.peak)
        memory.restart_peak()

    with lt.measure.peak() as memory:
        last = case.blocks[-1]
        handle = last.register_forward_hook(lambda _, __, output: first_of(output).register_hook(note) and None)
        case.loss().backward()
    handle.remove()
    return peaks[0], memory.peak


def first_of(output: Any) -> torch.Tensor:
    """What a block gives to the next one."""
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def gradients(case: Case) -> list[torch.Tensor]:
    return [parameter.grad for parameter in case.model.parameters() if parameter.grad is not None]


def whole_model(model: Model, size: Size, layers: int, limit: float = 0.05) -> Ratio:
    """The fall of the peak beside what the recipes of the blocks say."""
    torch.manual_seed(0)
    case = model.make(size, layers, 0.0)
    (at_the_loss, in_blocks), expected = step_peaks(case), gradients(case)
    plain = max(at_the_loss, in_blocks)
    x = torch.randn(size.batch, size.tokens, size.width, requires_grad=True)
    saved = working = 0
    for k, block in enumerate(case.blocks):
        points = lt.lean_frontier(block, x, **case.arguments)
        free = next((point for point in points if point.is_free), points[-1])  # tiny products may be as cheap
        saved, working = saved + free.plain_tape - free.tape, free.working
        case.blocks[k] = lt.Lean(block)
    # In the last block's backward all tapes are still there, and what that block makes again besides.
    predicted = plain - max(at_the_loss - saved, in_blocks - saved + working)
    step_peaks(case)  # traced
    lean = max(step_peaks(case))
    same_bits(gradients(case), expected)
    measured = plain - lean
    what = f"{model.name}, {layers} layers, {size.words:,} words: fall of the peak apart from predicted"
    ratio = Ratio(what, abs(measured / predicted - 1), limit)
    print(
        f"{model.name:<8}{layers:>3} layers {size.words:>7,} words  "
        f"peak {format_size(plain):>9} -> {format_size(lean):>9} ({lean / plain:.3f})  "
        f"fall {format_size(measured):>9}, predicted {format_size(predicted):>9}: "
        f"{measured / predicted:.3f}{verdict(ratio)}",
        flush=True,
    )
    return ratio


def main(arguments: list[str]) -> list[Ratio]:
    parser = argparse.ArgumentParser(description="The lean tape on blocks of GPT-2 and Llama.")
    parser.add_argument("--quick", action="store_true", help="small models, few repeats")
    parser.add_argument("--only", help="only models with this in their name")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    size = Size(64, 16, 2, FEW) if given.quick else Size(512, 256, 4, FEW)
    repeats = 2 if given.quick else 20
    chosen = [model for model in MODELS if given.only is None or given.only in model.name]
    ratios: list[Ratio] = []
    for model in chosen:
        for dropout in (0.0, 0.1):
            ratios += one_block(model, size, dropout, repeats)
    heading("Whole models, every block lean: the peak of one training step")
    for model in chosen:
        for words in (2048 if given.quick else model.words, FEW):
            ratios.append(whole_model(model, replace(size, words=words), 2 if given.quick else model.layers))
    return ratios


if __name__ == "__main__":
    command(main)

"""`lowtide.transformers`: the Trainer's losses and weights to the last bit, within the peak; own checkpointing, too."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import lowtide.torch as lt
from lowtide import BudgetError, InputError
from lowtide.transformers import LowtideCallback, use_lowtide_checkpointing

_WORDS, _TOKENS, _BATCH = 67, 48, 4


@pytest.fixture(autouse=True)
def _the_same_random_numbers() -> None:
    torch.manual_seed(0)


class _Texts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(_WORDS, (_TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


def _gpt2() -> Any:
    """With dropout everywhere."""
    torch.manual_seed(0)
    sizes = {"n_positions": _TOKENS, "n_embd": 48, "n_layer": 3, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=_WORDS, bos_token_id=0, eos_token_id=0, **sizes))
    model.loss_type = "ForCausalLM"  # what it takes anyway, but not without a word
    return model


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(16, 48), nn.Dropout(0.1), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.up(x))))  # type: ignore[no-any-return]


class _Small(nn.Module):
    """Of nobody's classes: quick to plan."""

    def __init__(self, *, as_tuple: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(_WORDS, 16)
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.as_tuple = as_tuple

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        given = {"logits": x @ self.table.weight.T}
        if labels is not None:
            given = {"loss": nn.functional.cross_entropy(given["logits"].flatten(0, 1), labels.flatten())} | given
        return tuple(given.values()) if self.as_tuple else given


class _Peaks(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Measures every step of training but the first, in which models are planned: everything that is alive."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self._stack = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            return
        optimizer = kwargs["optimizer"].optimizer
        held = [*kwargs["model"].parameters(), *kwargs["model"].buffers()]
        held += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        self._resident = lt.measure.storage_bytes(held) + 2 * _BATCH * _TOKENS * 8
        self._memory = self._stack.enter_context(lt.measure.peak())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            return
        self._stack.close()
        self.peaks.append(self._resident + self._memory.peak)


@dataclass(frozen=True)
class _Run:
    losses: list[float]
    weights: list[torch.Tensor]
    peaks: list[int]
    model: Any

    def is_like(self, other: _Run) -> bool:
        """Whether both came to the same, bit by bit."""
        return self.losses == other.losses and all(map(torch.equal, self.weights, other.weights))


def _arguments(folder: Path, **settings: Any) -> Any:
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "use_cpu": True}
    return TrainingArguments(str(folder), max_steps=3, per_device_train_batch_size=_BATCH, **quiet | settings)


def _train(folder: Path, callback: LowtideCallback | None = None, model: Any = None, **settings: Any) -> _Run:
    model = _gpt2() if model is None else model
    peaks = _Peaks()
    trainer = Trainer(model, _arguments(folder, **settings), train_dataset=_Texts(), eval_dataset=_Texts())
    for each in filter(None, [peaks, callback]):
        trainer.add_callback(each)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return _Run(losses, list(model.parameters()), peaks.peaks, model)


def _planned(model: nn.Module) -> list[str]:
    """Submodules whose `forward` is not their class's."""
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}],
    ids=["usual", "accumulated", "bf16"],
)
def test_losses_and_weights_are_the_same_within_the_peak(
    settings: dict[str, Any], tmp_path: Path, record_property: Any
) -> None:
    plain = _train(tmp_path, **settings)
    callback = LowtideCallback(peak=int(0.6 * max(plain.peaks)), verbose=False)
    run = _train(tmp_path, callback, **settings)
    assert run.is_like(plain)
    assert (len(run.losses), len(run.peaks)) == (3, 2)
    measured = max(run.peaks)
    assert measured <= callback.peak
    assert callback.plan is not None
    assert abs(callback.plan.bill.peak_memory / measured - 1) < 0.1
    assert callback.plan.knob.value == callback.peak
    assert _planned(run.model) == _planned(plain.model)  # accelerate's, for bf16
    share = measured / max(plain.peaks)
    record_property("figure", f"transformers.Trainer with {settings}: {share:.0%} of the plain peak, same bits")


def test_it_says_what_it_has_planned_and_stays_if_told_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = LowtideCallback("600KB", keep=True)
    model = _Small()
    _train(tmp_path, callback, model, eval_on_start=True, do_eval=True, per_device_eval_batch_size=32)
    printed = capsys.readouterr().out
    assert callback.plan is not None
    assert printed.count("asked     peak=585.9 KiB") == 1
    assert "blocks.0" not in printed.split("frontier")[1]
    blocks = _planned(model)
    assert blocks
    assert all(name.startswith("blocks.") for name in blocks)
    silent = LowtideCallback("600KB", verbose=False)
    _train(tmp_path, silent, model)  # a second training begins from no plan
    assert "asked" not in capsys.readouterr().out
    assert _planned(model) == []


def test_a_larger_batch_can_be_planned_for(tmp_path: Path) -> None:
    words = torch.zeros(4 * _BATCH, _TOKENS, dtype=torch.long)
    callback = LowtideCallback("8MB", batch={"input_ids": words, "labels": words}, verbose=False)
    small = LowtideCallback("8MB", verbose=False)
    assert _train(tmp_path, callback, _Small()).is_like(_train(tmp_path, small, _Small()))
    assert callback.plan is not None
    assert small.plan is not None
    assert callback.plan.chain.plain_tape > 3 * small.plan.chain.plain_tape


@pytest.mark.long
def test_a_peak_that_cannot_be_kept_is_an_error_that_names_one_that_can(tmp_path: Path) -> None:
    model = _Small()
    with pytest.raises(BudgetError, match="the least that works is") as told:
        _train(tmp_path, LowtideCallback(peak=1000), model, gradient_accumulation_steps=2)
    assert not model._forward_pre_hooks
    assert _planned(model) == []
    callback = LowtideCallback(peak=told.value.least, verbose=False)
    run = _train(tmp_path, callback, model, gradient_accumulation_steps=2)
    assert max(run.peaks) <= told.value.least  # with gradients that wait for the next batch


@pytest.mark.long
def test_losses_of_other_kinds(tmp_path: Path) -> None:
    plain = _train(tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(InputError, match="give loss="):
        _train(tmp_path, LowtideCallback("3MB"), label_smoothing_factor=0.1)
    spread = LowtideCallback("3MB", loss=lambda output: -output["logits"].log_softmax(-1).mean(), verbose=False)
    assert _train(tmp_path, spread, label_smoothing_factor=0.1).is_like(plain)


@pytest.mark.long
def test_a_model_that_gives_a_tuple(tmp_path: Path) -> None:
    plain = _train(tmp_path, model=_Small(as_tuple=True))
    callback = LowtideCallback("600KB", verbose=False)
    run = _train(tmp_path, callback, _Small(as_tuple=True))
    assert run.is_like(plain)
    assert max(run.peaks) <= 600_000 < max(plain.peaks)


def test_settings_that_do_not_go_with_a_plan_are_refused(tmp_path: Path) -> None:
    model = _gpt2()
    with pytest.raises(InputError, match="gradient_checkpointing"):
        _train(tmp_path, LowtideCallback("8GiB"), model, gradient_checkpointing=True)
    for name in ("torch_compile", "fsdp", "deepspeed"):
        arguments = _arguments(tmp_path)
        setattr(arguments, name, "yes")
        with pytest.raises(InputError, match=name):
            LowtideCallback("8GiB").on_train_begin(arguments, None, None, model=model)
    arguments = _arguments(tmp_path)
    arguments._n_gpu = 2
    with pytest.raises(InputError, match="torchrun"):
        LowtideCallback("8GiB").on_train_begin(arguments, None, None, model=model)


def test_training_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    model = _gpt2()
    callback = LowtideCallback("8GiB")
    trainer = Trainer(model, _arguments(tmp_path), train_dataset=_Texts(), callbacks=[callback])
    trainer.create_optimizer()
    events = trainer.callback_handler
    events.optimizer = trainer.optimizer
    events.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert len(model._forward_pre_hooks) == 1
    copy.deepcopy(model).train()(_Texts()[0]["input_ids"][None])  # a copy is not planned
    events.on_train_end(trainer.args, trainer.state, trainer.control)
    assert not model._forward_pre_hooks
    assert callback.plan is None


# --- the model's own checkpointing


def _llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 4, "max_position_embeddings": _TOKENS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=_WORDS, **sizes, **heads))


def _step(model: Any) -> tuple[list[torch.Tensor], int]:
    """The loss and all gradients, and the peak."""
    words = torch.arange(_BATCH * _TOKENS).reshape(_BATCH, _TOKENS) % _WORDS
    model.train().zero_grad()
    torch.manual_seed(1)
    with lt.measure.peak() as memory:
        loss = model(input_ids=words, labels=words, use_cache=False).loss
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())], memory.peak


class _Attention(TorchDispatchMode):
    """Counts how often attention is computed: reruns, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.times = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += function.overloadpacket in (torch.ops.aten._softmax, torch.ops.aten._safe_softmax)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("build", [_gpt2, _llama])
def test_own_checkpointing_with_lowtides(build: Any) -> None:
    model = build()
    plain, most = _step(model)
    model.gradient_checkpointing_enable()
    theirs, their_peak = _step(model)
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    use_lowtide_checkpointing(model)
    with _Attention() as attention:
        ours, our_peak = _step(model)
    layers = model.config.num_hidden_layers
    assert all(map(torch.equal, ours, plain))
    assert all(map(torch.equal, ours, theirs))
    assert attention.times == 2 * layers
    assert our_peak <= 1.01 * their_peak < 0.9 * most
    use_lowtide_checkpointing(model, every_n_layers=2, check_rerun=True)
    with _Attention() as attention:
        assert all(map(torch.equal, _step(model)[0], plain))
    assert attention.times == layers + (layers + 1) // 2
    model.gradient_checkpointing_disable()
    with _Attention() as attention:
        again, peak = _step(model)
    assert all(map(torch.equal, again, plain))
    assert (attention.times, peak) == (layers, most)
    assert not model.get_input_embeddings()._forward_hooks


def test_own_checkpointing_keeps_what_adapters_need() -> None:
    model = _gpt2()
    model.enable_input_require_grads()
    use_lowtide_checkpointing(model)
    assert model.get_input_embeddings()._forward_hooks


def test_a_model_without_own_checkpointing() -> None:
    with pytest.raises(InputError, match="Linear has no gradient checkpointing of its own"):
        use_lowtide_checkpointing(nn.Linear(2, 2))


@pytest.mark.long
def test_nothing_is_imported_unless_used() -> None:
    check = "import sys, lowtide.torch; print({'transformers', 'lightning', 'accelerate'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

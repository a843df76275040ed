"""`lowtide.lightning`: a LightningModule's losses, logs and weights to the last bit, within the peak."""

from __future__ import annotations

import importlib
import sys
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide.lightning
import lowtide.torch as lt
from lowtide import BudgetError, InputError
from lowtide.lightning import LowtideCallback

with warnings.catch_warnings():  # what their imports warn of is not ours
    warnings.simplefilter("ignore")
    import lightning.pytorch
    import pytorch_lightning
    from lightning.pytorch.loggers import CSVLogger

_BATCH = 128

# What Lightning warns of by itself: how it is installed, and where it is run.
pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]


@pytest.fixture(autouse=True)
def _the_same_random_numbers() -> None:
    torch.manual_seed(0)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(nn.functional.gelu(self.norm(self.up(x)))))  # type: ignore[no-any-return]


class _Network(lightning.pytorch.LightningModule):  # type: ignore[misc]  # lightning is not followed
    """Blocks with dropout and BatchNorm; its training step logs, counts and keeps a list."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block() for _ in range(6))
        self.last = nn.Linear(32, 4)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]  # torch's own

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        scores = self(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"best": scores.max().detach()}, on_step=False, on_epoch=True, reduce_fx="sum")
        self.losses.append(loss.item())
        if self.logger is not None:
            self.logger.log_metrics({"by hand": loss.item()}, step=batch_idx)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class _WithoutIndex(_Network):
    def training_step(self, batch: list[torch.Tensor]) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)["loss"]


class _WithoutOptimizer(_Network):
    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args)

    def configure_optimizers(self) -> None:
        return None


class _Peaks(lightning.pytorch.Callback):  # type: ignore[misc]
    """Measures every batch of training but the first, at which modules are planned: everything that is alive."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self._stack = ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            state = [each for optimizer in trainer.optimizers for each in optimizer.state.values()]
            held = [*pl_module.parameters(), *pl_module.buffers(), *batch]
            held += [value for each in state for value in each.values()]
            self._resident = lt.measure.storage_bytes(held)
            self._memory = self._stack.enter_context(lt.measure.peak())
            for parameter in pl_module.parameters():  # gradients of the batch before: seen when they are let go
                parameter.grad = None if parameter.grad is None else parameter.grad.clone()

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1]:
            self._stack.close()
            self.peaks.append(self._resident + self._memory.peak)

    def on_exception(self, *args: Any) -> None:
        self._stack.close()


@dataclass(frozen=True)
class _Run:
    module: Any
    peaks: list[int]
    logged: dict[str, torch.Tensor]

    def is_like(self, other: _Run) -> bool:
        """Whether both came to the same, bit by bit."""
        mine, others = self.module.state_dict(), other.module.state_dict()
        return (
            self.module.losses == other.module.losses
            and list(mine) == list(others)
            and all(map(torch.equal, mine.values(), others.values()))
            and self.logged == other.logged
        )


def _train(callback: Any = None, module: Any = None, package: Any = lightning.pytorch, **settings: Any) -> _Run:
    module = _Network() if module is None else module
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    peaks = _Peaks()
    callbacks = [peaks, *([] if callback is None else [callback])]
    trainer = package.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=callbacks, **quiet | {"logger": False} | settings
    )
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(4 * _BATCH, 32), torch.randint(4, (4 * _BATCH,)))
    trainer.fit(module, DataLoader(data, batch_size=_BATCH))
    return _Run(module, peaks.peaks, dict(trainer.callback_metrics))


def _planned(module: nn.Module) -> list[str]:
    """Submodules whose `forward` is not their class's."""
    return [name for name, each in module.named_modules() if "forward" in each.__dict__]


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}],
    ids=["usual", "accumulated", "bf16"],
)
def test_losses_logs_and_weights_are_the_same_within_the_peak(settings: dict[str, Any], record_property: Any) -> None:
    plain = _train(**settings)
    callback = LowtideCallback(peak=int(0.6 * max(plain.peaks)), verbose=False)
    run = _train(callback, **settings)
    assert run.is_like(plain)
    assert (len(run.module.losses), len(run.peaks)) == (4, 3)
    measured = max(run.peaks)
    assert measured <= callback.peak < max(plain.peaks)
    assert callback.plan is not None
    assert abs(callback.plan.bill.peak_memory / measured - 1) < 0.1
    assert _planned(run.module) == []
    share = measured / max(plain.peaks)
    record_property("figure", f"Lightning with {settings}: {share:.0%} of the plain peak, same bits")


def test_it_says_what_it_has_planned_and_stays_if_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    callback = LowtideCallback("900KB", keep=True)
    run = _train(callback)
    assert capsys.readouterr().out.count("asked     peak=878.9 KiB") == 1
    assert callback.plan is not None
    blocks = _planned(run.module)
    assert blocks
    assert all(name.startswith("blocks.") for name in blocks)
    assert {name for name in callback.plan.chain.names if not name.startswith("(")} >= {"blocks.0", "blocks.5"}
    _train(LowtideCallback("900KB", verbose=False), run.module)  # a second training begins from no plan
    assert "asked" not in capsys.readouterr().out
    assert _planned(run.module) == []


def test_loggers_get_each_thing_once(tmp_path: Path) -> None:
    rows = []
    for name, callback in (("plain", None), ("planned", LowtideCallback("900KB", verbose=False))):
        logger = CSVLogger(tmp_path, name)
        _train(callback, logger=logger, log_every_n_steps=1)
        rows.append((Path(logger.log_dir) / "metrics.csv").read_text(encoding="utf-8"))
    assert rows[0] == rows[1]
    assert rows[0].count("\n") > 4


@pytest.mark.long
@pytest.mark.parametrize("kind", [_WithoutIndex, _WithoutOptimizer])
@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_training_steps_of_other_kinds(kind: type[_Network]) -> None:
    callback = LowtideCallback("900KB", verbose=False)
    assert _train(callback, kind()).is_like(_train(module=kind()))
    assert callback.plan is not None
    assert ("(optimizer step)" in callback.plan.chain.names) == (kind is _WithoutIndex)


def test_a_larger_batch_can_be_planned_for() -> None:
    batch = [torch.zeros(4 * _BATCH, 32), torch.zeros(4 * _BATCH, dtype=torch.long)]
    callback = LowtideCallback("8MB", batch=batch, verbose=False)
    small = LowtideCallback("8MB", verbose=False)
    assert _train(callback).is_like(_train(small))
    assert callback.plan is not None
    assert small.plan is not None
    assert callback.plan.chain.plain_tape > 3 * small.plan.chain.plain_tape


@pytest.mark.long
def test_a_peak_that_cannot_be_kept_is_an_error_that_names_one_that_can() -> None:
    module = _Network()
    with pytest.raises(BudgetError, match="the least that works is") as told:
        _train(LowtideCallback(peak=1000), module)
    assert (_planned(module), module.losses) == ([], [])
    callback = LowtideCallback(peak=told.value.least, verbose=False)
    assert max(_train(callback, module).peaks) <= told.value.least


def test_a_module_that_optimizes_by_hand_is_refused() -> None:
    with pytest.raises(InputError, match="_Network optimizes by hand"):
        _train(LowtideCallback("8GiB"), _Network(by_hand=True))


class _Fails(_Network):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        if batch_idx == 2:
            raise ValueError("no more")
        return super().training_step(batch, batch_idx)


def test_a_training_that_fails_leaves_no_plan() -> None:
    module = _Fails()
    with pytest.raises(ValueError, match="no more"):
        _train(LowtideCallback("900KB", verbose=False), module)
    assert _planned(module) == []
    assert len(module.losses) == 2


class _OlderNetwork(pytorch_lightning.LightningModule):  # type: ignore[misc]
    """The same, of the package's older name."""

    def __init__(self) -> None:
        super().__init__()
        self.network = _Network()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.network.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters())


def test_the_package_under_its_older_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _train(module=_OlderNetwork(), package=pytorch_lightning)
    callback = LowtideCallback("900KB", verbose=False)
    assert plain.module.network.losses == _train(callback, _OlderNetwork(), pytorch_lightning).module.network.losses
    assert callback.plan is not None
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)  # as if it were not installed
    try:
        assert issubclass(importlib.reload(lowtide.lightning).LowtideCallback, pytorch_lightning.Callback)
    finally:
        monkeypatch.undo()
        importlib.reload(lowtide.lightning)

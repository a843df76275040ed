"""Models that are hard to split, or hard to run again: the plain bits within the peak, or a clear word about it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import InputError, Plan
from lowtide.torch.model import planning as model_planning
from tests.torch.models import Model, decisions, model, schedule_of, train
from tests.torch.odd_blocks import WIDTH, Mlp
from tests.torch.odd_models import BATCH, ODD, Net, in_a_row, mean_square, odd, on_x, row_of
from tests.torch.planned import measured

AS_IT_IS = "nothing of this model can be planned: it runs as it is"
NO_ROW = "no submodule is one of a row, so the outermost ones were taken for blocks"
UNSEEN = "returns nothing that a gradient is seen to reach, and is left as it is"
LARGER = ("albert", "vgg", "nested", "u-net", "torch's own")
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated:DeprecationWarning")


def descend(made: Model) -> None:
    """A step of an optimizer."""
    with torch.no_grad():
        for parameter in made.module.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LARGER else n for n in ODD])
def test_the_peak_is_kept_and_the_bits_are_the_plain_ones(name: str) -> None:
    """Over several steps, in which parameters change, and whatever blocks keep."""
    plain = odd(name)
    expected = []
    for seed in range(3):
        expected.append(train(plain, seed=seed))
        descend(plain)
    torch.manual_seed(0)  # some go another way for other values
    least = odd(name).least()
    for peak in (least, max(least, (least + expected[0].peak) // 2)):
        made = odd(name)
        torch.manual_seed(0)
        plan = made.plan(peak)
        assert plan.bill.peak_memory <= peak
        lt.apply(plan, made.module)
        for seed, step in enumerate(expected):
            found = train(made, seed=seed)
            found.assert_same(step)
            assert found.peak <= peak
            descend(made)


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        ("bare", [AS_IT_IS]),
        ("one layer", [AS_IT_IS]),
        ("three times", ["called more than once, and so left as they are: blocks.0", AS_IT_IS]),
        ("shared", ["called more than once, and so left as they are: blocks.0", AS_IT_IS]),
        ("some shared", ["called more than once, and so left as they are: blocks.1"]),
        (
            "albert",
            [NO_ROW, "called more than once, and so left as they are: albert.encoder.albert_layer_groups.0"],
        ),
        ("unlike", [NO_ROW]),
        ("unused", [f"blocks.1 {UNSEEN}"]),
        ("detached", [f"blocks.1 {UNSEEN}"]),
        ("dataclasses", [*(f"blocks.{k} {UNSEEN}" for k in (2, 1, 0)), AS_IT_IS]),
        ("gradient inside", ["the model pulls something back in its forward: no block was planned", AS_IT_IS]),
        (
            "if",
            ["not called in the step that was measured, and so left as they are: blocks.1, blocks.3, blocks.5"],
        ),
        ("item", []),
        ("towers", []),
    ],
)
def test_what_was_not_planned_is_said(name: str, notes: list[str]) -> None:
    plan = measured(name)
    said = [note for note in schedule_of(plan).notes if not note.startswith("a step that was run as planned took")]
    assert said == notes
    for note in notes:
        assert note in " ".join(str(plan).split())


def test_blocks_that_are_given_what_is_written_over_are_left_as_they_are() -> None:
    (in_place,) = schedule_of(measured("adds in place")).notes
    assert in_place == "given what is changed in place afterwards, and so left as they are: blocks.0, blocks.1"
    assert schedule_of(measured("relu in place")).notes == ()  # written over by themselves


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("if", ["blocks.0", "blocks.2", "blocks.4"]),
        ("a count from data", ["blocks.0", "blocks.1", "blocks.2"]),
        ("first frozen", ["blocks.1", "blocks.2", "blocks.3"]),
        ("middle frozen", ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        ("all but the last frozen", ["blocks.3"]),
        ("without grad", ["blocks.1", "blocks.2"]),
        ("dictionary", ["parts.first", "parts.a b", "parts.last"]),
        ("u-net", ["down.0", "down.1", "down.2", "up.0", "up.1", "up.2"]),
        ("towers", ["left.0", "right.0", "left.1", "right.1", "left.2", "right.2"]),
        ("vgg", ["."]),
        ("tied", ["blocks.0", "blocks.1", "blocks.2"]),
        ("torch's own", ["layers.0", "layers.1", "layers.2"]),
        ("unlike", ["second"]),
    ],
)
def test_blocks_are_found_in_the_order_of_their_calls(name: str, blocks: list[str]) -> None:
    assert list(decisions(measured(name))) == blocks


@pytest.mark.long
def test_a_sequential_gets_the_plan_of_a_chain() -> None:
    made = odd("vgg")
    ((name, form),) = decisions(made.plan(made.least())).items()
    assert name == "."
    assert form.startswith("nest ")
    assert "(" in form  # some of its layers are checkpointed together


@pytest.mark.long
def test_beyond_the_plain_peak_everything_is_kept() -> None:
    for name in ("vgg", "u-net", "torch's own", "towers"):
        plan = measured(name)
        assert set(decisions(plan).values()) == {"keep"}
        assert plan.time_factor == 1


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:a lean tape of .* was planned, and this call allows none:UserWarning")
def test_a_larger_batch_than_planned_for_still_has_the_plain_bits() -> None:
    """The peak is another matter."""
    for share in (1.0, 1.2, 1.5):
        made, plain = odd("tied"), odd("tied")
        lt.apply(made.plan(int(share * made.least())), made.module)
        words = torch.randint(50, (8, 12), generator=torch.Generator().manual_seed(0))
        train(made._replace(args=(words,))).assert_same(train(plain._replace(args=(words,))))


# --- nothing is touched by planning


def everything(made: Model) -> dict[str, Any]:
    """All of a model that planning could change."""
    module = made.module
    found: dict[str, Any] = {f"state {name}": value.clone() for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        found[f"{name} is"] = id(parameter)
        found[f"{name} at"] = parameter.data_ptr(), parameter._version
        found[f"{name} requires"] = parameter.requires_grad
        found[f"{name} grad"] = None if parameter.grad is None else parameter.grad.clone()
        found[f"{name} grad is"] = id(parameter.grad)
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        found[f"{name} hooks"] = [list(each or {}) for each in hooks]  # torch itself leaves an empty dict, or none
    for name, part in module.named_modules():
        found[f"{name} mode"] = part.training
        found[f"{name} names"] = sorted(part.__dict__)
        found[f"{name} numbers"] = {key: value for key, value in part.__dict__.items() if isinstance(value, int)}
    found["random"] = torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state())  # noqa: NPY002
    found["settings"] = torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    found["arguments"] = [
        (tensor.clone(), tensor.grad, tensor.requires_grad, tensor._version)
        for tensor in (*made.args, *made.kwargs.values())
        if isinstance(tensor, torch.Tensor)
    ]
    return found


def assert_untouched(made: Model, before: dict[str, Any]) -> None:
    after = everything(made)
    assert after.keys() == before.keys()
    assert [name for name in before if not same(after[name], before[name])] == []


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


UNTOUCHED = (
    *("gpt2", "resnet"),
    *("vgg", "u-net", "counts", "spectral norm", "tied", "x with a gradient", "keywords", "middle frozen", "extras"),
    *("in eval", "lstm", "gradient inside"),
)


@pytest.mark.untraced
@pytest.mark.parametrize("name", UNTOUCHED)
@pytest.mark.parametrize("there", [False, True], ids=["no gradients", "gradients there"])
def test_planning_touches_nothing(name: str, there: bool) -> None:
    made = odd(name) if name in ODD else model(name)
    if there:
        train(made)
    for part in made.module.modules():
        if isinstance(part, nn.Dropout):
            part.eval()  # some in one mode, some in the other
    before = everything(made)
    made.plan("1GB")
    assert_untouched(made, before)
    made.least()  # as it is after an error
    assert_untouched(made, before)


def test_an_error_in_the_model_touches_nothing_and_is_the_caller_s() -> None:
    def broken(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        in_a_row(blocks, x)
        raise KeyError("broken")

    made = on_x(Net(broken))
    before = everything(made)
    with pytest.raises(KeyError, match="broken"):
        made.plan("1GB")
    assert_untouched(made, before)


def test_hooks_of_parameters_are_silent_while_planning() -> None:
    made = row_of(Mlp)
    optimizer = torch.optim.SGD(made.module.parameters(), lr=1.0)
    fired: list[str] = []

    def step(parameter: torch.Tensor) -> None:
        fired.append("step")
        optimizer.step()
        optimizer.zero_grad()

    for parameter in made.module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
        parameter.register_hook(lambda gradient: fired.append("gradient"))
    before = everything(made)
    plan = made.plan(made.least())
    assert fired == []
    assert_untouched(made, before)
    lt.apply(plan, made.module)
    train(made)
    assert set(fired) == {"step", "gradient"}


def test_hooks_of_modules_fire_once_in_a_step_whatever_the_plan() -> None:
    made = odd("x with a gradient")
    lt.apply(made.plan(made.least()), made.module)
    fired: list[str] = []
    for name, block in made.module.blocks.named_children():  # type: ignore[union-attr]
        block.register_forward_pre_hook(lambda *_, name=name: fired.append(f"pre {name}"))
        block.register_forward_hook(lambda *_, name=name: fired.append(f"forward {name}"))
        block.register_full_backward_hook(lambda *_, name=name: fired.append(f"backward {name}"))
    train(made)
    there = [f"{kind} {k}" for k in range(3) for kind in ("pre", "forward")]
    assert fired == [*there, *(f"backward {k}" for k in (2, 1, 0))]


def test_gradients_that_are_there_are_added_to() -> None:
    plain, made = odd("tied"), odd("tied")
    for one in (plain, made):
        train(one)
    peak = made.least()
    lt.apply(made.plan(peak), made.module)
    for one in (plain, made):
        torch.manual_seed(3)
        one.run()[1].backward()
    for a, b in zip(plain.module.parameters(), made.module.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


# --- errors


def no_loss() -> Model:
    return on_x(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))._replace(loss=None)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            lambda: no_loss(),
            "has no loss of one number, but a tensor of shape (32, 16); give loss=, a function that takes the loss",
        ),
        (
            lambda: no_loss()._replace(loss=lambda output: output.mean(0)),
            "the model's Tensor has no loss of one number, but a tensor of shape (16,); give loss=",
        ),
        (
            lambda: no_loss()._replace(loss=lambda output: float(output.detach().sum())),  # type: ignore[arg-type, return-value]
            "the model's Tensor has no loss of one number, but 'float'; give loss=",
        ),
        (
            lambda: Model(Net(lambda blocks, x: (in_a_row(blocks, x),)), {}, (torch.randn(BATCH, WIDTH),)),
            "the model's tuple has no loss of one number, but 'NoneType'; give loss=",
        ),
        (
            lambda: Model(Net(lambda blocks, x: {"x": in_a_row(blocks, x)}), {}, (torch.randn(BATCH, WIDTH),)),
            "the model's dict has no loss of one number, but 'NoneType'; give loss=",
        ),
        (
            lambda: on_x(nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
            "the loss needs no gradient, so there is nothing to plan; let a parameter require one",
        ),
        (
            lambda: no_loss()._replace(loss=lambda output: output.detach().sum()),
            "the loss needs no gradient, so there is nothing to plan; let a parameter require one",
        ),
        (lambda: Model(Mlp().forward, {}, (torch.randn(2, WIDTH),)), "model is a method; give an nn.Module"),  # type: ignore[arg-type]
        (lambda: Model(None, {}), "model is a NoneType; give an nn.Module"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_planned(made: Callable[[], Model], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        made().plan("1GB")


@pytest.mark.parametrize(
    ("peak", "said"),
    [
        (1.5, "peak=1.5"),
        ("25%", "peak='25%' is a share of nothing here; give an int of bytes"),
        (0, "peak=0"),
        (-5, "peak=-5"),
        (True, "peak=True is a boolean"),
        ("much", "peak='much' is not a size"),
        (None, "peak=None"),
    ],
)
def test_what_is_no_peak(peak: Any, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        row_of(Mlp).plan(peak)


def test_a_model_that_checkpoints_by_itself() -> None:
    made = model("gpt2")
    made.module.gradient_checkpointing_enable()  # type: ignore[operator]
    with pytest.raises(InputError, match=re.escape("turn it off with model.gradient_checkpointing_disable()")):
        made.plan("1GB")


def test_a_device_is_for_planning_on_paper() -> None:
    with pytest.raises(InputError, match=re.escape("device='h100' is for planning on paper; give on_paper=True too")):
        row_of(Mlp).plan("1GB", device="h100")


def test_an_optimizer_that_is_none() -> None:
    with pytest.raises(InputError, match="optimizer is a str"):
        row_of(Mlp).plan("1GB", optimizer="AdamW")


@pytest.mark.long
def test_the_loss_is_found_in_what_models_give() -> None:
    loss = {
        "a number": lambda blocks, x: in_a_row(blocks, x).square().mean(),
        "a number in a row": lambda blocks, x: in_a_row(blocks, x).square().mean().reshape(1),
        "a dict": lambda blocks, x: {"loss": in_a_row(blocks, x).square().mean()},
    }
    for call in loss.values():
        plan = Model(Net(call), {}, (torch.randn(BATCH, WIDTH),)).plan("1GB")
        assert list(decisions(plan)) == ["blocks.0", "blocks.1", "blocks.2"]
    plan = lt.plan_model(Net(in_a_row), torch.randn(BATCH, WIDTH), peak="1GB", loss=mean_square)
    assert list(decisions(plan)) == ["blocks.0", "blocks.1", "blocks.2"]


class _InParentheses(nn.Module):
    """Two blocks whose names look like those of what happens outside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("(loss)", Mlp())
        self.add_module("(second", Mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for block in self.children():
            x = block(x)
        return x


def test_blocks_may_be_called_like_what_happens_outside_them() -> None:
    def fresh() -> Model:
        torch.manual_seed(0)
        return on_x(_InParentheses())

    plain, made = train(fresh()), fresh()
    plan = Plan.from_json(made.plan(made.least()).to_json())
    assert list(decisions(plan)) == ["(loss)", "(second"]
    lt.apply(plan, made.module)
    train(made).assert_same(plain)


class _Spaced(nn.Module):
    """Children whose names have the signs that stand between names in a form."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("go up; then", Mlp())
        self.add_module("go: down", Mlp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for part in self.children():
            x = part(x)
        return x


def test_children_may_have_names_with_the_signs_that_stand_between_names() -> None:
    made = row_of(_Spaced)
    plan = Plan.from_json(made.plan(made.least()).to_json())
    assert set(decisions(plan)) == {"blocks.0", "blocks.1", "blocks.2"}
    paths = {path for entry in plan.chain[0].menu if entry.form is not None for path, _ in entry.form.ways}
    assert paths == {"", "go up; then", "go: down"}
    lt.apply(plan, made.module)


class _Refusing(Mlp):
    """Cannot be run by itself: it wants what another layer has made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Refuses leaves of a graph."""
        if x.is_leaf and x.requires_grad:
            raise RuntimeError("what nobody made is refused")
        return super().forward(x)


def test_blocks_that_cannot_be_run_by_themselves_are_left_as_they_are() -> None:
    made = row_of(_Refusing)
    plan = made.plan("1GB")
    assert list(decisions(plan)) == ["blocks.0"]  # which is given x, and x needs no gradient
    assert schedule_of(plan).notes == (
        "blocks.1 cannot be run by itself, and is left as it is: what nobody made is refused",
    )


def drops_layers(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Each is left out with some probability."""
    for block in blocks:
        x = block(x) if torch.rand(()) < 0.6 else x
    return x


def test_layers_that_are_left_out_at_random_are_planned_like_their_siblings() -> None:
    """For the fullest of several draws; what that leaves out is taken to cost what its sibling does."""
    made = on_x(Net(drops_layers, [Mlp() for _ in range(12)]))
    plan = made.plan("1GB")
    assert list(decisions(plan)) == [f"blocks.{k}" for k in range(12)]
    assert any(
        "was not called in the step that was measured: planned like blocks." in n for n in schedule_of(plan).notes
    )
    least = made.least()
    plan = made.plan(least)
    lt.apply(plan, made.module)
    plain = on_x(Net(drops_layers, [Mlp() for _ in range(12)]))
    plain.module.load_state_dict(made.module.state_dict())
    plain = plain._replace(args=made.args)
    for seed in range(4):
        found = train(made, seed=seed)
        found.assert_same(train(plain, seed=seed))
        assert found.peak <= least


class _Draws(Mlp):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.of_python = random.Random(1)
        self.of_numpy = np.random.default_rng(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Stronger or weaker."""
        return super().forward(x) * (1 + self.of_python.random() + float(self.of_numpy.random()))


def test_generators_of_modules_are_where_they_were() -> None:
    made = row_of(_Draws)
    blocks: Any = made.module.blocks
    before = [(block.of_python.getstate(), block.of_numpy.bit_generator.state) for block in blocks]
    made.least()
    assert [(block.of_python.getstate(), block.of_numpy.bit_generator.state) for block in blocks] == before


class _Hooking(Mlp):
    """Registers a hook in its first forward, and says so."""

    hooked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As it is."""
        if not self.hooked:
            self.hooked = True
            self.up.register_forward_hook(lambda *_: None)
        return super().forward(x)


def test_hooks_that_a_forward_registers_are_not_there_twice() -> None:
    made = row_of(_Hooking)
    made.least()
    blocks: Any = made.module.blocks
    assert [len(block.up._forward_hooks) for block in blocks] == [0, 0, 0]
    assert not any(block.hooked for block in blocks)


class _Wrapped(nn.Module):
    """Does nothing but call another module, which calls three."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _InThree()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the one inside."""
        out: torch.Tensor = self.inner(x)
        return out


class _InThree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Mlp(), Mlp(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        out: torch.Tensor = self.c(self.b(self.a(x)))
        return out


def test_what_a_block_wraps_is_looked_into() -> None:
    plan = row_of(_Wrapped).plan("1GB")
    assert list(decisions(plan)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert "inner.a: rerun; inner.b: rerun" in [entry.name for entry in plan.chain[0].menu]


def test_a_plan_that_takes_more_than_foretold_is_made_again_aiming_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    made = row_of(Mlp)
    peak = (made.least() + train(row_of(Mlp)).peak) // 2
    really = model_planning.Planning._measured
    tried: list[int] = []

    def surprised(self: Any, plan: Plan) -> int:
        tried.append(plan.bill.peak_memory)
        return really(self, plan) if len(tried) > 1 else peak + 1

    monkeypatch.setattr(model_planning.Planning, "_measured", surprised)
    plan = made.plan(peak)
    assert tried == [tried[0], plan.bill.peak_memory]
    assert tried[0] > tried[1]
    lt.apply(plan, made.module)
    assert train(made).peak <= peak


def test_where_no_plan_comes_true_the_smallest_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made = row_of(Mlp)
    least = made.least()
    monkeypatch.setattr(model_planning, "_MOST_PLANS_RUN", 0)
    plan = made.plan(2 * least)
    assert plan.bill.peak_memory <= least

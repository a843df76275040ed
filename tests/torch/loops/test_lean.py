"""Loops with lean tapes: the plain loop's bits, the budget kept, and less tape for the same budget."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import BudgetError, InputError
from lowtide.interface.cache import Cache
from lowtide.torch import measure
from lowtide.torch.loops import lean_step
from tests.torch.loops.test_budget import MODELS, peak_of
from tests.torch.networks import NETWORKS, Network, differences, outcome, plain

KNOBS: dict[str, dict[str, Any]] = {
    "base 6": {"base": 6},
    "base 23": {"base": 23},
    "checkpoints 3": {"checkpoints": 3},
    "budget": {"budget": 60_000},
    "no knob": {},
}
WAYS: dict[str, dict[str, Any]] = {
    "reverse": {"base": 5, "reverse": True},
    "sum": {"checkpoints": 3, "reduce": "sum"},
    "mean": {"base": 4, "reduce": "mean"},
    "last": {"budget": 60_000, "reduce": "last"},
    "every rerun compared": {"checkpoints": 2, "check_rerun": True},
    "all with grad": {"checkpoints": 2, "advance_with_grad": True},
}


def _same_as_plain(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    oracle = {key: options[key] for key in ("reverse", "reduce") if key in options}
    expected, _ = outcome(lambda: NETWORKS[name](23, dtype), lambda net: plain(net, **oracle))
    with lt.record(memory=False) as receipt:
        found, _ = outcome(
            lambda: NETWORKS[name](23, dtype),
            lambda net: lt.checkpointed_scan(net.counted, net.init, net.xs, lean=True, **options),
        )
    assert differences(expected, found) == []
    assert receipt.kept_whole == 0


# Every network with a knob for each dtype, and the others with the whole sweeps.
SWEEP = [
    pytest.param(name, knob, dtype, marks=() if (n + k + d) % len(KNOBS) == 0 else pytest.mark.slow)
    for n, name in enumerate(NETWORKS)
    for k, knob in enumerate(KNOBS)
    for d, dtype in enumerate([torch.float32, torch.float64])
]


@pytest.mark.untraced
@pytest.mark.parametrize(("name", "knob", "dtype"), SWEEP, ids=str)
def test_everything_equals_the_plain_loop(name: str, knob: str, dtype: torch.dtype) -> None:
    _same_as_plain(name, dtype, KNOBS[knob])


OTHER_SWEEP = [
    pytest.param(name, way, marks=() if (n + w) % 2 else pytest.mark.slow)
    for n, name in enumerate(["lif", "dropout", "lif_modules", "spiking_jelly"])
    for w, way in enumerate(WAYS)
]


@pytest.mark.untraced
@pytest.mark.parametrize(("name", "way"), OTHER_SWEEP)
def test_so_it_does_in_every_other_way_to_run(name: str, way: str) -> None:
    _same_as_plain(name, torch.float32, WAYS[way])


def test_a_module_in_a_for_loop_with_its_plan() -> None:
    def run(net: Network, **options: Any) -> Any:
        assert net.module is not None
        return (
            lt.for_loop(net.module, net.xs) if not options else lt.checkpointed_for_loop(net.module, net.xs, **options)
        )

    def planned(net: Network) -> Any:
        assert net.module is not None
        return run(net, plan=lt.plan_for_loop(net.module, net.xs, budget=60_000, lean=True), lean=True)

    expected, _ = outcome(lambda: NETWORKS["snn_torch"](23, torch.float32), run)
    found, _ = outcome(lambda: NETWORKS["snn_torch"](23, torch.float32), planned)
    assert differences(expected, found) == []


def _while_loop(**options: Any) -> list[torch.Tensor]:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(5, 5), nn.GELU(), nn.Dropout(0.2), nn.Linear(5, 5), nn.Tanh())
    start = torch.randn(3, 5, requires_grad=True)
    carry = (start, torch.zeros(()))

    def cond(carry: Any) -> torch.Tensor:
        return carry[1] < 30  # type: ignore[no-any-return]

    def body(carry: Any) -> Any:
        return carry[0] + 0.1 * net(carry[0]), carry[1] + 1

    if options:
        carry = lt.checkpointed_while_loop(cond, body, carry, **options)
    else:
        while cond(carry):
            carry = body(carry)
    return [carry[0], *torch.autograd.grad(carry[0].square().sum(), [start, *net.parameters()]), torch.get_rng_state()]


@pytest.mark.parametrize("knob", [{"checkpoints": 4}, {"budget": 60_000}, {"lean": True}], ids=str)
def test_a_while_loop(knob: dict[str, Any]) -> None:
    assert all(map(torch.equal, _while_loop(), _while_loop(**{"lean": True, **knob})))


def test_second_derivatives_and_a_second_backward() -> None:
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    h = torch.randn(2, 4, dtype=torch.float64)

    def step(h: torch.Tensor, _: None) -> Any:
        return torch.tanh((h @ w).exp() * 0.3 + h), None

    def derivatives(loop: Any, **options: Any) -> list[torch.Tensor]:
        loss = loop(step, h, length=7, **options)[0].square().sum()
        first = torch.autograd.grad(loss, w, retain_graph=True)
        (again,) = torch.autograd.grad(loss, w, create_graph=True)
        return [*first, again, *torch.autograd.grad(again.square().sum(), w)]

    expected, found = derivatives(lt.scan), derivatives(lt.checkpointed_scan, base=3, lean=True)
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])
    torch.testing.assert_close(expected[2], found[2])


def _recurrent(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """Its tape is made again from the state that it begins with, which autograd does not save."""
    linear = nn.Linear(6, width)

    def step(v: torch.Tensor, x: torch.Tensor) -> Any:
        a = v + linear(x)
        v = a * a.exp() * 1e-3
        return v, v.sum(1)

    return step, torch.zeros(batch, width), list(linear.parameters())


LEAN_MODELS = {**MODELS, "recurrent": _recurrent}


def _cases(seeds: int, longest: int) -> list[Any]:
    return [
        (name, width, batch, length, share, x_grads)
        for seed in range(seeds)
        for name in LEAN_MODELS
        for rng in [random.Random(f"lean {seed} {name}")]
        for width, batch, length in [(rng.randint(2, 70), rng.randint(1, 40), rng.randint(10, longest))]
        for share, x_grads in [(rng.choice([0.02, 0.1, 0.3, 0.8]), rng.random() < 0.4)]
    ]


# The runs for the least budget, which has room for one snapshot, grow with the square of the length.
CASES = [*_cases(1, 40), *(pytest.param(case, marks=pytest.mark.slow) for case in _cases(3, 200))]


def _least(model: Any, xs: Any, **options: Any) -> int:
    with pytest.raises(BudgetError) as caught:
        lt.checkpointed_scan(model[0], model[1], xs, budget=1, lean=True, **options)
    return caught.value.least


@pytest.mark.untraced
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_measured_peak_is_within_the_budget(case: Any) -> None:
    name, width, batch, length, share, x_grads = case
    torch.manual_seed(0)
    xs = torch.randn(length, batch, 6, requires_grad=x_grads)
    model = LEAN_MODELS[name](width, batch)
    low = _least(model, xs)
    assert peak_of(model, xs, low, lean=True) <= low
    tapes = lt.plan_scan(*model[:2], xs, base=1, lean=True).chain.plain_tape
    # Another model, so that this one is traced within the budget.
    budget = int(1.1 * low + share * max(0, tapes - low))
    assert peak_of(LEAN_MODELS[name](width, batch), xs, budget, lean=True) <= budget


def _two_outputs(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    linear = nn.Linear(width, width)

    def step(h: torch.Tensor, _: Any) -> Any:
        a = linear(h)
        e = a.exp()
        s = e.sin()
        return torch.tanh(a) + 0.1 * s * e, ((e * s).cos() * s * e.sin()).sum(1)

    return step, torch.zeros(batch, width), list(linear.parameters())


@pytest.mark.untraced
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_so_it_is_where_only_the_last_output_is_used(share: float) -> None:
    model, xs = _two_outputs(40, 30), torch.zeros(60, 1)
    low = _least(model, xs, reduce="last")
    tapes = lt.plan_scan(*model[:2], xs, base=1, lean=True, reduce="last").chain.plain_tape
    budget = int(low + share * (tapes - low))
    assert peak_of(model, xs, budget, lean=True, reduce="last") <= budget


def _counting(width: int, batch: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """Each step gets another number, so that steps are traced while the loop runs."""
    w = torch.randn(width, width, requires_grad=True)

    def step(h: torch.Tensor, k: int) -> Any:
        e = (h @ w * 0.1).exp()
        return torch.tanh(e * (0.1 * k) + e.sin() * e.cos()), None

    return step, torch.zeros(batch, width), [w]


@pytest.mark.untraced
@pytest.mark.parametrize("again", [False, True])
def test_there_is_room_for_tracing_a_number_that_is_new(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_step, "_needed", Cache(1))
    model, xs = _counting(20, 30), lt.Steps(lambda k: k, 40)
    _least(_counting(10, 10), xs)  # more steps than are remembered
    if again:  # the first steps are traced, later ones are not
        lt.plan_scan(*model[:2], xs, lean=True)
    low = _least(model, xs)
    assert peak_of(model, xs, low, lean=True) <= low


@pytest.mark.parametrize("name", ["lif", "deep", "module", "dropout"])
def test_a_lean_tape_is_smaller_and_the_same_budget_needs_fewer_runs(name: str) -> None:
    torch.manual_seed(0)
    model, xs = MODELS[name](40, 30), torch.randn(200, 30, 6)
    whole, lean = (lt.plan_scan(*model[:2], xs, base=1, lean=lean).chain for lean in (False, True))
    assert lean.steps[0].tape <= 0.71 * whole.steps[0].tape
    for share in (0.2, 0.5, 0.8):
        budget = int(share * whole.plain_tape)
        plans = [lt.plan_scan(*model[:2], xs, budget=budget, lean=lean) for lean in (False, True)]
        assert plans[1].runs_per_step < plans[0].runs_per_step


def test_a_step_that_goes_another_way_keeps_its_whole_tape_and_says_so() -> None:
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    xs = torch.tensor([0.0] * 5 + [1.0] * 5, dtype=torch.float64)

    def turning(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh((h @ w).exp() * 0.1)
        return (h.sin() * h if x > 0 else h), None

    h = torch.ones(2, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad(lt.scan(turning, h, xs)[0].sum(), w)
    with lt.record() as receipt:
        with pytest.warns(UserWarning, match="a step of .*turning"):
            last, _ = lt.checkpointed_scan(turning, h, xs, base=10, lean=True)
        (found,) = torch.autograd.grad(last.sum(), w)
    assert torch.equal(expected, found)
    assert receipt.kept_whole > 0


@pytest.mark.long
def test_a_loop_leaves_nothing_behind() -> None:
    xs = torch.randn(30, 8, 6)
    with measure.peak() as memory:
        for _ in range(3):
            step, init, leaves = MODELS["deep"](20, 8)
            torch.autograd.grad(lt.checkpointed_scan(step, init, xs, base=5, lean=True)[1].sum(), leaves)
            del step, init, leaves
        gc.collect()
        assert memory.now == 0


def test_compiled_steps_have_no_lean_tapes() -> None:
    with pytest.raises(InputError, match="compile=True and lean=True"):
        lt.checkpointed_scan(lambda h, x: (h, x), torch.zeros(2), length=3, compile=True, lean=True)
    with pytest.raises(InputError, match="compile=True and lean=True"):
        lt.checkpointed_for_loop(lambda x: x, torch.zeros(3, 2), compile=True, lean=True)


def test_an_error_of_the_step_is_its_own() -> None:
    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        if x[0] > 2:
            raise RuntimeError("mine")
        return torch.tanh(h * x), h

    xs = torch.arange(5.0).unsqueeze(1).expand(5, 3)
    with pytest.raises(RuntimeError, match=r"^mine$"):
        lt.checkpointed_scan(step, torch.ones(3, requires_grad=True), xs, base=5, lean=True)

"""A planned model among others: hooks, optimizers, autocast, functional calls, the compiler, processes."""

from __future__ import annotations

import os
import socket
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import lowtide.torch as lt
from lowtide.torch.state.bits import same_bits
from tests.torch.models import Model, model, train
from tests.torch.planned import KINDS, made_of, plan_of


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_called_once_but_for_reruns(kind: str) -> None:
    made = made_of(kind)
    module = made.module
    calls: Counter[str] = Counter()

    def count(name: str) -> None:
        if not lt.is_recomputing():
            calls[name] += 1

    for when in ("before", "after"):
        for part in (module, *module.children()):
            part.register_forward_pre_hook(lambda *_, when=when: count(f"pre {when}"))
            part.register_forward_hook(lambda *_, when=when: count(f"forward {when}"))
        if when == "before":
            lt.apply(plan_of(kind), module)
    train(made)
    planned = calls.copy()
    calls.clear()
    lt.unapply(module)
    train(made)
    assert planned == calls
    assert set(calls.values()) != {0}


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_all_that_belongs_to_it(kind: str) -> None:
    """Momentum, clipping, a scheduler, two batches to a step, eval in between."""

    def run(one: Model) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(one.module.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        torch.manual_seed(3)
        found = []
        for _ in range(4):
            for _ in range(2):
                loss = one.run()[1]
                loss.backward()
                found.append(loss.detach())
            nn.utils.clip_grad_norm_(one.module.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            one.module.eval()
            with torch.no_grad():
                found.append(one.run()[1])
            one.module.train()
        return [*found, *one.module.state_dict().values()]

    made = made_of(kind)
    lt.apply(plan_of(kind), made.module)
    assert all(map(same_bits, run(made), run(made_of(kind))))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str) -> None:
    def run(one: Model) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = one.run()[1]
        loss.backward()
        return [loss.detach(), *(p.grad for p in one.module.parameters() if p.grad is not None)]

    made, plain = made_of(kind), made_of(kind)
    lt.apply(plan_of(kind), made.module)
    for _ in range(3):
        assert all(map(same_bits, run(made), run(plain)))


class Autocast(nn.Module):
    """A model in lower precision, as trainers run it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **kwargs: Any) -> Any:
        """With weights that are cast once."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**kwargs)


def autocast(name: str) -> Model:
    made = model(name)
    return made._replace(module=Autocast(made.module).train())


@pytest.mark.long
def test_the_peak_is_kept_in_lower_precision() -> None:
    plain = train(autocast("gpt2"))
    least = autocast("gpt2").least()
    for peak in (least, (least + plain.peak) // 2):
        made = autocast("gpt2")
        lt.apply(made.plan(peak), made.module)
        found = train(made)
        found.assert_same(plain)
        assert found.peak <= peak


@pytest.mark.long
def test_the_peak_is_kept_where_it_was_planned_in_lower_precision() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        plain = train(model("gpt2"))
    with torch.autocast("cpu", torch.bfloat16):
        made = model("gpt2")
        peak = made.least()
        lt.apply(made.plan(peak), made.module)
    with torch.autocast("cpu", torch.bfloat16):
        found = train(made)
    found.assert_same(plain)
    assert found.peak <= peak


@pytest.mark.parametrize("kind", KINDS)
def test_functional_call(kind: str) -> None:
    made, plain = made_of(kind), made_of(kind)
    lt.apply(plan_of(kind), made.module)
    others = {
        name: torch.full_like(parameter, 0.01).requires_grad_() for name, parameter in plain.module.named_parameters()
    }

    def run(one: Model) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        output = functional_call(one.module, others, one.args)
        loss = output if one.loss is None else one.loss(output)
        return (loss, *torch.autograd.grad(loss, list(others.values()), allow_unused=True))

    assert all(a is b or same_bits(a, b) for a, b in zip(run(made), run(plain), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_name_twice_and_in_part(kind: str) -> None:
    made, plain = made_of(kind), made_of(kind)
    lt.apply(plan_of(kind), made.module)
    found = []
    for one in (made, plain):
        torch.manual_seed(0)
        loss = one.run()[1]
        parameters = list(one.module.parameters())
        found.append(
            [
                *torch.autograd.grad(loss, parameters, retain_graph=True),
                *torch.autograd.grad(loss, parameters[:1], retain_graph=True),
                *torch.autograd.grad(2 * loss, parameters[-1:]),
            ]
        )
    assert all(map(same_bits, *found))


@pytest.mark.filterwarnings("ignore:a lean tape of .* was planned, and this call allows none:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_done_to_the_model_after_the_plan(kind: str) -> None:
    made, plain = made_of(kind), made_of(kind)
    lt.apply(plan_of(kind), made.module)
    train(made)
    train(plain)
    for one in (made, plain):
        one.module.load_state_dict({name: value * 0.5 for name, value in one.module.state_dict().items()})
    train(made).assert_same(train(plain))
    for one in (made, plain):
        next(one.module.parameters()).requires_grad_(False)
    train(made).assert_same(train(plain))
    for one in (made, plain):
        one.module.double()
    double = [
        one._replace(args=tuple(x.double() if x.is_floating_point() else x for x in one.args)) for one in (made, plain)
    ]
    train(double[0]).assert_same(train(double[1]))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiler_is_not_disturbed(kind: str) -> None:
    """Without dropout: under this backend, torch's own checkpoints, which ours are there, draw other numbers again."""
    made, plain = made_of(kind), made_of(kind)
    for one in (made, plain):
        for part in one.module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
    lt.apply(plan_of(kind), made.module)
    torch._dynamo.reset()
    compiled = made._replace(module=torch.compile(made.module, backend="eager"))  # type: ignore[arg-type]
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss = compiled.run()[1]
        loss.backward()
        expected = train(plain, seed=seed)
        torch.testing.assert_close(loss, expected.loss)
        for name, parameter in made.module.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, expected.gradients[name])
            parameter.grad = None
    torch._dynamo.reset()


def _work(rank: int, folder: str, interface: str) -> None:
    """What one process of two does; what fails here is raised in the test."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    warnings.simplefilter("ignore")  # gloo warns of names that it cannot resolve
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)

    def run(one: Model) -> list[torch.Tensor]:
        parallel = DistributedDataParallel(one.module)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
        torch.manual_seed(10 + rank)
        for _ in range(3):
            optimizer.zero_grad()
            parallel(**one.kwargs).loss.backward()
            optimizer.step()
        return list(one.module.state_dict().values())

    expected = run(model("gpt2"))
    made = model("gpt2")
    lt.apply(made.plan(made.least()), made.module)
    assert all(map(same_bits, run(made), expected))
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort a process that ends in order


@pytest.mark.long
def test_data_parallel_training(tmp_path: Path) -> None:
    if not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    names = [name for _, name in socket.if_nameindex()]
    spawn(_work, args=(str(tmp_path), "lo" if "lo" in names else names[0]), nprocs=2)


def test_planning_leaves_the_cache_of_autocast_on() -> None:
    assert torch.is_autocast_cache_enabled()
    model("gpt2").least()
    assert torch.is_autocast_cache_enabled()


def _replica(module: nn.Module) -> nn.Module:
    """As `nn.DataParallel` makes them, with parameters that are zero."""
    made: Any = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        made._modules[name] = None if child is None else _replica(child)
    made._parameters = {}
    for name, parameter in module._parameters.items():
        object.__setattr__(made, name, None if parameter is None else parameter * 0)
    return made  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:a lean tape of .* was planned:UserWarning")  # parameters of replicas are computed
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_run_with_their_own_parameters(kind: str) -> None:
    made = made_of(kind)
    torch.manual_seed(0)
    plain, _ = made._replace(module=_replica(made.module)).run()
    lt.apply(plan_of(kind), made.module)
    torch.manual_seed(0)
    planned, _ = made._replace(module=_replica(made.module)).run()
    assert same_bits(planned, plain)
    torch.manual_seed(0)
    assert not same_bits(made.run()[0], plain)


def test_a_replica_of_what_others_have_wrapped_calls_what_they_call() -> None:
    made = made_of("rerun")
    lt.apply(plan_of("rerun"), made.module)
    block = next(part for part in made.module.modules() if "forward" in part.__dict__)
    block.forward = partial(_called, block.forward)
    assert block._replicate_for_data_parallel().forward is block.forward


def _called(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)

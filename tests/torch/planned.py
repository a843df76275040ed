"""Plans with a form of each kind for every block, and what they make a model do."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import Plan
from lowtide.plan import Knob
from lowtide.planners.blocks import Blocks
from tests.torch.models import Model
from tests.torch.odd_models import odd

# For each kind of form, a model, and what the form's name begins with or has in it.
KINDS = {
    "rerun": ("tied", r"rerun"),
    "lean": ("tied", r"lean \d.*"),
    "lean in the rerun": ("tied", r"rerun, lean .*"),
    "children": ("torch's own", r"\w+: rerun.*"),
    "nest": ("vgg", r"nest .*\(.*"),
}


@cache
def measured(name: str) -> Plan:
    """A plan that keeps everything, the same whichever test asks first; its chain has all the other forms."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return odd(name).plan("1GB")


def plan_of(kind: str) -> Plan:
    """A plan with that kind of form for every block that has one."""
    name, pattern = KINDS[kind]
    chain = measured(name).chain
    options = [
        next((k for k, option in enumerate(step.menu) if re.fullmatch(pattern, option.name)), 0)
        for step in map(chain.__getitem__, range(len(chain)))
    ]
    assert any(options)
    return Plan.make(chain, Knob("peak", 2**30), Blocks(tuple(options)))


def made_of(kind: str) -> Model:
    return odd(KINDS[kind][0])


class Products(TorchDispatchMode):
    """Counts matrix products and convolutions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.count: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in (torch.ops.aten.addmm.default, torch.ops.aten.convolution.default)
        return func(*args, **(kwargs or {}))


def products(run: Callable[[], Any]) -> int:
    counter = Products()
    with counter:
        run()
    return counter.count


def inside(module: nn.Module) -> dict[str, dict[str, int]]:
    """What each submodule has, by identity."""
    return {
        name: {key: id(value) for key, value in part.__dict__.items() if key != "training"}
        for name, part in module.named_modules()
    }

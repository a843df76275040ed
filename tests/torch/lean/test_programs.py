"""Random programs with a lean tape: outputs, gradients and random numbers are the plain ones to the bit.

A program is called three times with other values each time: the first call is traced, the others go by what was found.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import lowtide.torch as lt
from lowtide import BudgetError
from lowtide.torch.state.bits import same_bits
from tests.torch.lean.drawn_programs import (
    CALLS,
    EVERYTHING,
    IN_PLACE,
    POINTWISE,
    PRODUCTS,
    RANDOM,
    READING,
    REDUCING,
    VIEWS,
    WILD,
    Given,
    Program,
    examples,
    programs,
)

# What torch says of some drawn programs, once in a process: of the plain call, or of the lean one if that comes first.
ODD_PROGRAM = "Use of .* on expanded tensors is deprecated"
pytestmark = pytest.mark.filterwarnings(f"ignore:{ODD_PROGRAM}:UserWarning")

Outcome = list[torch.Tensor | None] | str


def _run(call: Callable[..., Any], given: Given, number: int, context: Callable[[], Any]) -> Outcome:
    """Outputs, gradients and where the random numbers are; or what is raised, and where."""
    torch.manual_seed(number)
    leaves, arguments = given.arguments(number)
    with context():
        try:
            outputs = call(*arguments)
        except BudgetError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return f"forward, {type(error).__name__}: {error}"
    kept = [output.detach().clone() for output in outputs]
    state = torch.get_rng_state()
    torch.manual_seed(99)  # a backward that draws numbers draws others
    roots = [output for output in outputs if output.requires_grad]
    grads: tuple[Any, ...] = ()
    if roots:
        seeds = [(root.detach() * 0.5 + 1.0) if root.is_floating_point() else None for root in roots]
        try:
            grads = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
        except RuntimeError as error:
            return f"backward: {error}"
    return [*kept, state, torch.get_rng_state(), *grads]


def _kind(outcome: Outcome) -> str:
    return outcome.split(":")[0] if isinstance(outcome, str) else "tensors"


def _agree(expected: Outcome, found: Outcome) -> bool:
    if isinstance(expected, str) or isinstance(found, str):
        return _kind(expected) == _kind(found)
    return len(expected) == len(found) and all(
        a is b or (a is not None and b is not None and same_bits(a, b)) for a, b in zip(expected, found, strict=True)
    )


def _told(outcome: Outcome) -> Outcome:
    """Without the random numbers, which say nothing."""
    return outcome if isinstance(outcome, str) else [x for x in outcome if x is None or x.dtype is not torch.uint8]


Surroundings = Callable[[Callable[..., Any]], Callable[..., Any]]


def _check(
    program: Program,
    tape: int | str | None = None,
    given: Given | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    around: Surroundings = lambda call: call,
    inside: Surroundings = lambda call: call,
    may_differ: bool = False,
) -> None:
    """`around`: what calls the lean function; `inside`: what it calls; both are there in the plain call as well."""
    function, given = program.function(), given or Given()
    plain, lean = around(inside(function)), around(partial(lt.lean, inside(function), tape=tape))
    for number in range(CALLS):
        expected = _run(plain, given, number, context)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if may_differ else "error")
            warnings.filterwarnings("ignore", ODD_PROGRAM, UserWarning)
            try:
                found = _run(lean, given, number, context)
            except BudgetError as error:
                assert tape is not None
                assert str(error.least) in str(error).replace(",", "")  # noqa: PT017  (any size may be too small)
                lean = around(partial(lt.lean, inside(function), tape=max(error.least, 1)))
                found = _run(lean, given, number, context)
        if _kind(found) == "backward" != _kind(expected):
            # Checkpoints and hooks that copy hide that a saved tensor was changed. By itself the function fails, too.
            expected = _run(function, given, number, nullcontext)
        assert _agree(expected, found), (number, _told(expected), _told(found))


TAPES = st.sampled_from([None, None, "100%", "50%", "12%"])

FORMS = ["own", "slices", "leaves", "twice in call 0", "twice in call 2", "no grad"]


@pytest.mark.long
@examples(80)
@given(programs(POINTWISE + REDUCING), TAPES)
def test_pointwise_operations_and_reductions(program: Program, tape: str | None) -> None:
    _check(program, tape)


@pytest.mark.long
@examples(60)
@given(programs(POINTWISE + PRODUCTS + VIEWS), TAPES)
def test_products_and_views(program: Program, tape: str | None) -> None:
    _check(program, tape)


@pytest.mark.long
@examples(80)
@given(programs(POINTWISE + IN_PLACE + VIEWS), TAPES)
def test_changes_in_place(program: Program, tape: str | None) -> None:
    _check(program, tape)


@pytest.mark.long
@examples(60)
@given(programs(POINTWISE + RANDOM), TAPES)
def test_random_numbers(program: Program, tape: str | None) -> None:
    _check(program, tape)


@pytest.mark.long
@examples(60)
@given(programs(EVERYTHING, most=20), TAPES)
def test_everything(program: Program, tape: str | None) -> None:
    _check(program, tape)


@pytest.mark.long
@examples(30)
@given(programs(POINTWISE + VIEWS + READING), TAPES)
def test_numbers_that_are_read_from_tensors(program: Program, tape: str | None) -> None:
    _check(program, tape)


@pytest.mark.long
@examples(30)
@given(programs(POINTWISE + PRODUCTS + WILD), TAPES)
def test_another_way_in_another_call(program: Program, tape: str | None) -> None:
    _check(program, tape, may_differ=True)


@pytest.mark.parametrize("form", FORMS)
@examples(10)
@given(program=programs(EVERYTHING))
def test_arguments_of_any_form(form: str, program: Program) -> None:
    _check(program, given=Given(form))


@pytest.mark.long
@examples(40)
@given(programs(EVERYTHING), TAPES)
def test_under_autocast(program: Program, tape: str | None) -> None:
    _check(program, tape, context=lambda: torch.autocast("cpu", torch.bfloat16))


def _in_ours(call: Callable[..., Any]) -> Callable[..., Any]:
    return partial(lt.checkpoint, call)


def _in_torchs(call: Callable[..., Any]) -> Callable[..., Any]:
    return partial(torch_checkpoint, call, use_reentrant=False)


def _in_lean(call: Callable[..., Any]) -> Callable[..., Any]:
    return partial(lt.lean, call)


def _copying() -> AbstractContextManager[Any]:
    """Hooks that keep something else than the tensor, in another layout."""
    return saved_tensors_hooks(lambda tensor: tensor.contiguous().clone(), lambda tensor: tensor)


# torch's rrelu saves its slopes before it draws them: whoever looks at once, as torch's checkpoint does, sees none.
OTHERS = [line for line in EVERYTHING if "rrelu" not in line]

SURROUNDINGS: dict[str, dict[str, Any]] = {
    "in lt.checkpoint": {"around": _in_ours},
    "in torch's checkpoint": {"around": _in_torchs},
    "lt.checkpoint inside": {"inside": _in_ours},
    "torch's checkpoint inside": {"inside": _in_torchs},
    "lean inside": {"inside": _in_lean},
    "in save_on_cpu": {"context": save_on_cpu},
    "in hooks that copy": {"context": _copying},
}


@pytest.mark.parametrize("name", SURROUNDINGS)
@examples(12)
@given(program=programs(OTHERS, copies=True), tape=TAPES)
def test_inside_and_around_others(name: str, program: Program, tape: str | None) -> None:
    _check(program, tape, **SURROUNDINGS[name])


@pytest.mark.slow
@examples(2500)
@given(program=programs(EVERYTHING, most=25), tape=TAPES, form=st.sampled_from(FORMS), casts=st.booleans())
def test_many_programs(program: Program, tape: str | None, form: str, casts: bool) -> None:
    _check(program, tape, Given(form), lambda: torch.autocast("cpu", torch.bfloat16, enabled=casts))


@pytest.mark.slow
@examples(1500)
@given(program=programs(EVERYTHING, most=25), tape=TAPES)
def test_many_longer_programs(program: Program, tape: str | None) -> None:
    _check(program, tape)


@pytest.mark.slow
@examples(1000)
@given(program=programs(OTHERS, most=15, copies=True), tape=TAPES, name=st.sampled_from(sorted(SURROUNDINGS)))
def test_many_programs_inside_and_around_others(program: Program, tape: str | None, name: str) -> None:
    _check(program, tape, **SURROUNDINGS[name])

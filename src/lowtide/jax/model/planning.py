"""A whole model in bounded memory: a peak decides which of its blocks are run again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from lowtide.chain import Role
from lowtide.checks import function
from lowtide.errors import InputError
from lowtide.forms import Form
from lowtide.jax.compare import runs_plainly
from lowtide.jax.model.blocks import chosen_blocks, found_blocks
from lowtide.jax.model.forms import BlockForm, forms, model_runner
from lowtide.jax.model.parts import Model, trace_model
from lowtide.jax.model.program import Program
from lowtide.jax.model.search import Fit, FormSearch
from lowtide.plan import Knob, Plan
from lowtide.planners.blocks import Blocks, block_frontier
from lowtide.sizes import check_budget

_MOST_SHOWN = 6  # names in a note or an error message


def plan_model(
    loss: Callable[..., Any],
    params: Any,
    *args: Any,
    peak: int | str,
    blocks: str | Iterable[str] | None = None,
    optimizer: Any = None,
    has_aux: bool = False,
    donate: bool = True,
    **kwargs: Any,
) -> Plan:
    """The plan for a training step on `loss(params, *args, **kwargs)` that takes at most `peak` bytes. See `apply`.

    For each block of the model, the plan keeps its tape or runs it again in the backward, either completely or except
    for some values: those with a `checkpoint_name`, or products of arrays. Of the choices found whose program, as XLA
    compiles it here, stays within the peak, it has the fewest operations. Usually two to five programs are compiled for
    it, twice as many with an optimizer, and more before an error. Nothing is run or allocated: types are enough.

    A block is everything that is computed with the parameters of one entry of a list in `params`, such as
    `params["blocks"]` or an equinox model's `layers`. Nothing has to be marked in the loss. The plan's notes say which
    blocks were found and what could not be planned.

    Args:
        loss: a pure function that returns one float, as for `jax.value_and_grad`.
        params: what gradients are taken with respect to: any pytree of arrays or `jax.ShapeDtypeStruct`s, or an equinox
            model.
        args: its other arguments, which may be `jax.ShapeDtypeStruct`s, too. Leaves that are not arrays are part of the
            program, also in `params`.
        peak: bytes for everything that `memory_analysis()` counts in the compiled step: arguments (parameters,
            optimizer state, data), results (gradients) and temporaries. 8589934592, "8GiB", or "60%" of the plain step.
        blocks: names of blocks or patterns for them ("layers.*"); None for entries of lists that are alike.
        optimizer: an optax optimizer, whose `update` is then part of the step.
        has_aux: whether the loss returns a pair, as for `jax.value_and_grad`.
        donate: whether, with an optimizer, parameters and optimizer state are donated (`donate_argnums`).
        kwargs: keyword arguments of the loss.

    Raises:
        BudgetError: no plan stays within the peak; `.least` is the smallest one that was compiled, and works.
        InputError: an argument cannot be used.
    """
    check_budget(peak, "peak")
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(f"optimizer={optimizer!r} has no init and update; give one as optax makes them")
    found = names = found_blocks(params) if blocks is None else chosen_blocks(params, blocks)
    model = trace_model(loss, params, args, kwargs, names)
    while model.unread:
        names = [name for name in names if name not in model.unread]
        model = trace_model(loss, params, args, kwargs, names)
    program = Program(model, params, has_aux=has_aux, optimizer=optimizer, donate=donate)
    fit = FormSearch(model, program).within(peak)
    resident = program.resident()
    unread = [name for name in found if name not in names]
    notes = tuple(_notes(fit, model, unread, optimizer is not None and donate))
    schedule = Blocks(fit.options, optimizer=resident.optimizer, inputs=resident.inputs, notes=notes, unit="FLOP")
    return Plan.make(fit.chain, Knob("peak", fit.peak), schedule).logged("a model")


def apply(plan: Plan, loss: Callable[..., Any]) -> Callable[..., Any]:
    """The loss function with the plan's blocks run again in the backward: same arguments, same result, same gradients.

    Use the result wherever the loss was used, under `jit`, `value_and_grad`, `vmap` or equinox's filters; `loss` itself
    is not changed. The plan's bytes are for the shapes that it was made for; other shapes work too. Each call outside
    of `jit` is traced again.

    Args:
        plan: what `plan_model` returned.
        loss: the function that it was made for.

    Raises:
        InputError: the plan is not for this function; may also be raised when the result is called.
    """
    function(loss, "loss")
    if not isinstance(plan, Plan) or not isinstance(plan.schedule, Blocks):
        raise InputError(f"plan={plan!r} is not a plan for a model; give what plan_model returned")
    chain, options = plan.chain, plan.schedule.options
    wanted = [
        (chain.names[k], chain[k].menu[option].form)
        for k, option in enumerate(options)
        if chain.role(k) is not Role.OPTIMIZER
    ]
    blocks = [chain.names[k] for k in chain.blocks()]
    if not any(plan.schedule.options):
        return loss

    @functools.wraps(loss)
    def planned(params: Any, *args: Any, **kwargs: Any) -> Any:
        if runs_plainly():
            return loss(params, *args, **kwargs)
        model = trace_model(loss, params, args, kwargs, blocks)
        return model.tree.unflatten(model_runner(model, _chosen(model, wanted, blocks))(model.leaves))

    return planned


def _chosen(model: Model, wanted: list[tuple[str, Form | None]], blocks: list[str]) -> list[BlockForm]:
    """The form of each part of the model, by the names and forms in the plan."""
    menus = [{entry.form: entry for entry in forms(part)} for part in model.parts]
    alike = [part.name for part in model.parts] == [name for name, _ in wanted]
    if not alike or any(form not in menu for menu, (_, form) in zip(menus, wanted, strict=True)):
        here = [part.name for part in model.parts if part.is_block]
        raise InputError(
            f"the plan is for a model of {len(blocks):,} blocks ({_few(blocks)}), and here are {len(here):,} "
            f"({_few(here)}); plan again"
        )
    return [menu[form] for menu, (_, form) in zip(menus, wanted, strict=True) if form is not None]


def _notes(fit: Fit, model: Model, unread: list[str], donated: bool) -> list[str]:
    """The plan's notes: sentences that say what was planned and what was not."""
    count = sum(part.is_block for part in model.parts)
    taken = (
        f"XLA allocates {fit.taken:,} B for this step on {jax.default_backend()}, and {fit.plain:,} B if all is kept: "
        "arguments, results and temporaries, as memory_analysis() counts them. Nothing was run."
    )
    said = [taken, "Times are floating point operations, counted and not measured."]
    if fit.again is not None:
        which = "its block" if count == 1 else "all blocks but the last"
        said.append(f"With {which} run again it would be {fit.again:,} B.")
    if fit.expected is not None:
        said.append(f"Before this choice was compiled, {fit.expected:,} B were expected of it.")
    if donated:
        said.append("Parameters and optimizer state are taken to be donated: jax.jit(..., donate_argnums=...).")
    if unread:
        said.append(
            f"Not planned: {_few(unread)}. No equation is computed with the parameters of one of these alone: they "
            "are not read, or a loop reads several of them (for loops there is checkpointed_scan)."
        )
    if not count:
        said.append(
            "There is nothing to split: the parameters hold no list of blocks that are alike. The step is as it was. "
            "Keep each block's parameters in an entry of a list, or name blocks with blocks=."
        )
    elif len(block_frontier(fit.chain)) == 1:
        said.append(
            "To run a block again saves nothing here: what each starts from is as large as its tape. For a row of such "
            "blocks there is sequential, which runs several of them again together."
        )
    return said


def _few(names: list[str]) -> str:
    """The names as text; only the first ones if there are many."""
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more:,} more" if more > 0 else "") if names else "none"

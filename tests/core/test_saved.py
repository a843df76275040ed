"""Plans that an earlier version saved are read: with their forms, their roles, and what was inferred then."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide import Plan
from lowtide.chain import Role
from lowtide.forms import KEEP, RERUN, Form, Way

SAVED = Path(__file__).parent / "saved"


def saved(name: str) -> Plan:
    """The plan of that name."""
    return Plan.from_json((SAVED / f"{name}.json").read_text())


@pytest.mark.parametrize("name", sorted(path.stem for path in SAVED.glob("*.json")))
def test_they_are_read_and_written_anew(name: str) -> None:
    plan = saved(name)
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan)


def test_a_model_knows_its_blocks_and_their_forms() -> None:
    chain = saved("model").chain
    assert [chain.names[k] for k in chain.blocks()] == ["blocks.0", "blocks.1", "blocks.2", "tail"]
    assert (chain.role(0), chain.role(len(chain) - 1)) == (Role.OPTIMIZER, Role.LOSS)
    assert all(entry.form is not None for k in chain.blocks() for entry in chain[k].menu)
    again = Way(rerun=True)
    first = [entry.form for entry in chain[chain.blocks()[0]].menu]
    assert first[0] == KEEP
    assert {RERUN, Form((("a", again),)), Form((("", again), ("a", again), ("b", again)))} <= set(first)
    last = [entry.form.kind for entry in chain[chain.blocks()[-1]].menu if entry.form is not None]
    assert "nested" in last


def test_a_model_in_jax_knows_what_its_reruns_keep() -> None:
    chain = saved("jax_model").chain
    forms = [entry.form for entry in chain[chain.blocks()[0]].menu]
    assert Form((("", Way(rerun=True, kept=("hidden",))),)) in forms
    assert RERUN in forms


def test_layers_know_their_lean_tapes() -> None:
    chain = saved("layers").chain
    menus = [chain[k].menu for k in range(len(chain))]
    assert any(entry.form is not None and entry.form.whole_lean is not None for menu in menus for entry in menu)
    assert not chain.roles


def test_layers_know_which_ones_a_step_is() -> None:
    chain = saved("layers").chain
    assert [name.split(" ")[0] for name in chain.names] == [
        str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in chain.layers
    ]
    assert not saved("model").chain.layers
    assert not saved("loop").chain.layers


def test_rooms_are_inferred() -> None:
    assert saved("jax_loop").rooms
    assert not saved("loop").rooms

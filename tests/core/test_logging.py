"""Decisions are logged at INFO, once each, measuring at DEBUG; and nothing is printed by default."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

import lowtide.torch as lt
from lowtide import Chain, StepCost, plan, plan_chain


@pytest.fixture(autouse=True)
def nothing_was_said() -> None:
    plan._log_once.cache_clear()


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    assert {name.partition(".")[0] for name, *_ in caplog.record_tuples} <= {"lowtide"}
    return [text for _, found, text in caplog.record_tuples if found == level]


def test_a_plan_is_said_once_with_its_figures(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    cell, xs = nn.Linear(4, 4), torch.randn(40, 2, 4)
    for _ in range(3):
        lt.checkpointed_for_loop(cell, xs, budget="4KiB").sum().backward()
    (text,) = said(caplog, logging.INFO)
    made = lt.plan_for_loop(cell, xs, budget="4KiB")
    assert text.startswith("a loop: 40 steps, budget=4 KiB: ")
    assert f"{made.runs_per_step:.4g} runs per step ({made.planner})" in text


def test_layers_and_models_are_said_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "lowtide")
    net, x = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))), torch.randn(64, 8)
    lt.plan_sequential(net, x)
    lt.plan_model(net, x, peak="1GiB", loss=torch.sum)
    layers, model = said(caplog, logging.INFO)
    assert layers.startswith("layers: 3 steps, none given")
    assert model.startswith("Sequential: ")
    measured = said(caplog, logging.DEBUG)
    assert measured[0].startswith("measured 3 layers: ")
    assert any(text.startswith("measured a model: ") for text in measured)


def test_a_plan_that_is_asked_for_on_paper_is_not_a_decision(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "lowtide")
    made = plan_chain(Chain.equal(StepCost(1, 5), 9), 20)
    assert said(caplog, logging.INFO) == []
    assert made.logged("this") is made


@pytest.mark.long
def test_nothing_is_printed_by_default() -> None:
    code = "import lowtide as l; l.plan_chain(l.Chain.equal(l.StepCost(1, 5), 9), 20).logged('this'); import logging; "
    code += "logging.getLogger('lowtide').warning('that')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""

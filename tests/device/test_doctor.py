"""The doctor on an accelerator: it is found, everything holds, and bytes are those of its allocator."""

from __future__ import annotations

import pytest
import torch

from lowtide.doctor import examine, torch_checks
from tests.device import tide

pytestmark = pytest.mark.usefixtures("the_tide")


@pytest.mark.parametrize(
    "check", ["bits: loop", "bits: checkpoint", "bits: layers", "random numbers", "hidden state", "lean", "host copies"]
)
def test_it_holds(check: str) -> None:
    device = torch_checks.devices()[f"{tide.NAME}:0"]
    found = examine._finding(tide.NAME, check, torch_checks.checks(device, quick=True)[check])
    assert found.holds, found


@pytest.mark.parametrize("check", ["budget: loop", "peak: model"])
def test_bytes_are_kept(check: str) -> None:
    device = torch.device(tide.NAME, 1)
    found = examine._finding(tide.NAME, check, torch_checks.checks(device, quick=True)[check])
    assert found.holds is not False, found
    assert ("allocated" in found.text) == (torch_checks.allocator_of(device) is not None)

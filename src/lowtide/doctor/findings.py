"""What the doctor finds, as values: facts about the installation, and the outcome of each check."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Fact:
    """Something about the installation: a version, a device, a package that is missing."""

    name: str
    text: str


class Outcome(NamedTuple):
    """The outcome of a check: whether what it checks holds, and the figures.

    `holds` is None where nothing is promised, such as speed, or where the check cannot be made here.
    """

    holds: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check on a device."""

    device: str
    check: str
    holds: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found."""

    facts: tuple[Fact, ...]
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing was found that does not hold."""
        return all(finding.holds is not False for finding in self.findings)

    def with_(self, found: Fact | Finding) -> Report:
        """The report with this in it, too."""
        if isinstance(found, Fact):
            return dataclasses.replace(self, facts=(*self.facts, found))
        return dataclasses.replace(self, findings=(*self.findings, found))

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps({"holds": self.holds, **dataclasses.asdict(self)}, indent=1)


def to_line(found: Fact | Finding) -> str:
    """What was found as a line of JSON, which `from_line` reads."""
    return json.dumps(dataclasses.asdict(found))


def from_line(line: str) -> Fact | Finding:
    """What was found, from its line of JSON."""
    fields = json.loads(line)
    return Finding(**fields) if "check" in fields else Fact(**fields)

"""Files that others' tools read: the citation, the issue forms, the workflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from lowtide import __version__

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    found = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "license"} <= found.keys()
    assert found["version"] == __version__


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_issue_forms_ask_for_the_doctor(form: Path) -> None:
    found = read(form)
    assert {"name", "description", "body"} <= found.keys()
    fields = {field["id"]: field["attributes"] for field in found["body"]}
    assert all(attributes["label"] for attributes in fields.values())
    assert "lowtide doctor" in fields["doctor"]["description"]


def test_the_workflow_tries_every_python_that_is_said_to_work() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    matrix = read(ROOT / ".github" / "workflows" / "test.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    assert all(f'"Programming Language :: Python :: {version}"' in project for version in matrix["python"])

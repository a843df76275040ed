"""Run the tests of every mutant, or of those whose names contain a word: `python -m tests.mutants [WORD ...]`.

For each mutant the sources are copied, one place is changed, and the tests that it names are run on the copy, up to
the first failure. A mutant that no test catches lives, which is a gap in the tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

from tests.mutants.table import MUTANTS, ROOT, Mutant

_FAILED = 1  # pytest's exit code for tests that failed; others mean that it could not run them
_MOST_SECONDS = 900


def outcome(mutant: Mutant) -> str:
    """`caught`, `LIVES`, or why the tests could not be run."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder) / "src"
        shutil.copytree(ROOT / "src", sources, ignore=shutil.ignore_patterns("__pycache__"))
        (sources / "lowtide" / mutant.file).write_text(mutant.changed())
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        # A hang is a failure that nobody would overlook: it counts as caught.
        try:
            run = subprocess.run(
                [*command, *mutant.tests],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                check=False,
                timeout=_MOST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return "caught"
    if run.returncode == _FAILED:
        return "caught"
    return "LIVES" if run.returncode == 0 else f"NOT RUN: {run.stdout[-500:]}{run.stderr[-500:]}"


def main() -> int:
    """Run them; returns how many were not caught."""
    parser = argparse.ArgumentParser(prog="make mutants", description="Run the tests of deliberately wrong variants.")
    parser.add_argument("words", nargs="*", help="only mutants whose names contain one of these words")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many to run at once")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.words or any(word in m.name for word in given.words)]
    began = monotonic()
    not_caught = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for number, (mutant, found) in enumerate(zip(chosen, pool.map(outcome, chosen), strict=True), start=1):
            not_caught += found != "caught"
            print(f"{number:>3} of {len(chosen)}  {found:<8} {mutant.name}", flush=True)
    print(f"{len(chosen) - not_caught} of {len(chosen)} caught, {monotonic() - began:.0f} s")
    return not_caught


if __name__ == "__main__":
    sys.exit(min(main(), 1))

"""All mutants, part by part of the library."""

from __future__ import annotations

from tests.mutants.calls import CALLS
from tests.mutants.lean import LEAN
from tests.mutants.loops import LOOPS
from tests.mutants.models import MODELS
from tests.mutants.mutant import ROOT, Mutant
from tests.mutants.on_jax import ON_JAX
from tests.mutants.planners import PLANNERS
from tests.mutants.state import STATE

__all__ = ["MUTANTS", "ROOT", "Mutant"]

MUTANTS = (*PLANNERS, *LOOPS, *CALLS, *LEAN, *STATE, *MODELS, *ON_JAX)

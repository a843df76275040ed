"""Mistakes in loops and layers that JAX compiles."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LOOPS, _LAYERS = "tests/jax/loops", "tests/jax/layers"

ON_JAX = (
    Mutant(
        "a state that is only passed through goes to the first slot",
        "jax/loops/lowering.py",
        "leg_table[leg_table[:, 0] == _NO_SLOT, 0] = slots.count",
        "leg_table[leg_table[:, 0] == _NO_SLOT, 0] = 0",
        (f"{_LOOPS}/test_lowering.py::test_a_state_that_is_only_passed_through_goes_to_a_spare_slot",),
    ),
    Mutant(
        "a slot is never used again",
        "jax/loops/lowering.py",
        "self._free.append(self.held.pop(step))",
        "self.held.pop(step)",
        (f"{_LOOPS}/test_lowering.py::test_a_golden_one",),
    ),
    Mutant(
        "there are as many rows of tape as the shortest stretch has",
        "jax/loops/lowering.py",
        "(stretch_table[:, 5] - stretch_table[:, 3]).max()",
        "(stretch_table[:, 5] - stretch_table[:, 3]).min()",
        (f"{_LOOPS}/test_lowering.py::test_a_snapshot_every_so_many_steps",),
    ),
    Mutant(
        "reversed places are one too high",
        "jax/loops/lowering.py",
        "return self.length - 1 - k if self.reverse else k",
        "return self.length - k if self.reverse else k",
        (f"{_LOOPS}/test_loops.py::test_reversed_loops_read_and_write_from_the_last_place_on",),
    ),
    Mutant(
        "unrolled loops leave out what is left over",
        "jax/loops/lowering.py",
        "return lax.fori_loop(start + count * self.unroll, stop, body, held)",
        "return held",
        (f"{_LOOPS}/test_loops.py::test_unrolled_as_far_as_it_goes",),
    ),
    Mutant(
        "a gradient flows through the carry for one step only",
        "jax/loops/tape.py",
        "        if grown == on:\n            break\n        on = grown\n",
        "        break\n",
        (f"{_LOOPS}/test_transforms.py::test_auxiliary_results",),
    ),
    Mutant(
        "the rows of inputs are stored with the tape",
        "jax/loops/tape.py",
        "            elif var in x:\n",
        "            elif var is x:\n",
        (f"{_LOOPS}/test_loops.py::test_what_is_a_row_of_the_inputs_is_read_again_and_not_taped",),
    ),
    Mutant(
        "a rerun does not wait for its cotangents",
        "jax/layers/rerun.py",
        "leaves = replaced(leaves, waiting, after([leaves[k] for k in waiting], ready))",
        "leaves = replaced(leaves, waiting, [leaves[k] for k in waiting])",
        (f"{_LAYERS}/test_checkpoint.py::test_a_rerun_waits_until_it_is_needed",),
    ),
    Mutant(
        "keys of random draws do not wait",
        "jax/layers/rerun.py",
        "if k >= self._consts or not is_float(jax.typeof(leaf))]",
        "if k >= self._consts]",
        (f"{_LAYERS}/test_checkpoint.py::test_masks_that_are_drawn_from_closed_over_keys_wait_too",),
    ),
)

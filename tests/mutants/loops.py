"""Mistakes in loops: the engine, the runner, and the order in which cotangents are added."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TESTS = "tests/torch/loops"

LOOPS = (
    Mutant(
        "gradients go to every start that needs one, reached or not",
        "torch/loops/engine.py",
        "zip(pullback.state, runner.given_flags, strict=False)",
        "zip(pullback.state, runner.first_flags, strict=False)",
        (f"{_TESTS}/test_training.py::test_what_a_step_overwrites_unread_may_come_from_a_graph_that_is_gone",),
    ),
    Mutant(
        "a second backward goes on from where the first has ended",
        "torch/loops/engine.py",
        "                self._resume(0, runner.begin)\n",
        "",
        (f"{_TESTS}/test_loops.py::test_gradients_can_be_taken_twice_and_differentiated",),
    ),
    Mutant(
        "a snapshot is let go when it is restored",
        "torch/loops/engine.py",
        "                self._resume(step, self._snapshots[step])",
        "                self._resume(step, self._snapshots.pop(step))",
        (f"{_TESTS}/test_loops.py::test_nested_values_go_in_and_come_out",),
    ),
    Mutant(
        "the last output has a gradient if any has",
        "torch/loops/engine.py",
        "bool(column) and column[-1][0] == self.runner.length - 1 for column",
        "bool(column) for column",
        (f"{_TESTS}/test_corners.py::test_the_last_output_may_have_no_gradient_where_the_others_have_one",),
    ),
    Mutant(
        "cotangents of outputs come before those of the final state",
        "torch/loops/pullback.py",
        "        self._enter_state(piece, roots, cotangents)\n        self._enter_outputs(piece, roots, cotangents)\n",
        "        self._enter_outputs(piece, roots, cotangents)\n        self._enter_state(piece, roots, cotangents)\n",
        (f"{_TESTS}/test_order.py::test_outputs_that_are_the_final_state",),
    ),
    Mutant(
        "cotangents of a stack enter in the order of steps",
        "torch/loops/pullback.py",
        "                entries = sorted(entries, key=lambda entry: place(entry[0]))\n",
        "                entries = sorted(entries, key=lambda entry: entry[0])\n",
        (f"{_TESTS}/test_order.py",),
    ),
    Mutant(
        "a tensor that is twice in the state has its gradient twice",
        "torch/loops/pullback.py",
        "arrived.pop(edge, None)",
        "arrived.get(edge, None)",
        (f"{_TESTS}/test_corners.py::test_the_same_tensor_twice_in_the_carry",),
    ),
    Mutant(
        "a cotangent that has entered enters again",
        "torch/loops/pullback.py",
        "            if self._entered:\n",
        "            if not self._entered:\n",
        (f"{_TESTS}/test_corners.py::test_a_tape_that_stays_while_later_steps_run",),
    ),
    Mutant(
        "gradients of inputs are written in the order of steps",
        "torch/loops/pullback.py",
        "                buffer[place] = grad",
        "                buffer[k] = grad",
        (f"{_TESTS}/test_order.py::test_outputs_that_are_the_final_state",),
    ),
    Mutant(
        "the cotangent of a running sum enters at the bare output",
        "torch/loops/runner.py",
        "edge_of(leaf.view_as(leaf) if in_order else leaf)",
        "edge_of(leaf)",
        (f"{_TESTS}/test_order.py::test_a_state_that_is_summed_where_it_is_made",),
    ),
    Mutant(
        "state that is changed in place is a leaf of its graph",
        "torch/loops/runner.py",
        "root.clone() if key in changed else root for",
        "root for",
        ("tests/torch/state/test_hidden.py::test_state_of_every_kind",),
    ),
    Mutant(
        "gradients that a step adds by itself count twice",
        "torch/loops/runner.py",
        "gradients_aside(self._graded)",
        "gradients_aside(())",
        (f"{_TESTS}/test_outside.py::test_a_backward_inside_the_step_counts_once",),
    ),
    Mutant(
        "reruns of a loop go on drawing",
        "torch/loops/runner.py",
        "self._draws = any(state is not first for state, first in states)",
        "self._draws = any(state is None for state, _ in states)",
        (f"{_TESTS}/test_corners.py::test_comparisons_put_generators_back",),
    ),
    Mutant(
        "rows of a reversed loop come in rising order",
        "torch/loops/inputs.py",
        "return items if first <= last else reversed(items)",
        "return items",
        (f"{_TESTS}/test_inputs.py::test_rows_are_the_tensors_rows",),
    ),
    Mutant(
        "a sum begins with its first output, which may be minus zero",
        "torch/loops/outputs.py",
        "return 0 + leaf.detach()",
        "return leaf.detach()",
        (f"{_TESTS}/test_inputs.py::test_sums_begin_with_zero_so_that_minus_zero_is_lost_as_in_a_plain_sum",),
    ),
)

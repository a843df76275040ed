"""Mistakes in `checkpoint`, one call of a function that is run again."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TESTS, _CALL = "tests/torch/checkpoint", "torch/checkpoint/call.py"

CALLS = (
    Mutant(
        "a tensor that was changed after it was saved is handed out",
        _CALL,
        "if tensor._version != self.versions[number] and",
        "if tensor._version < self.versions[number] and",
        (f"{_TESTS}/test_failures.py::test_a_value_that_the_function_changes_after_it_was_saved_is_an_error",),
    ),
    Mutant(
        "noise is compared before it is drawn",
        _CALL,
        "        self._look_again(number - _LATE)\n",
        "        self._look_again(number + _LATE)\n",
        (f"{_TESTS}/test_failures.py::test_statistics_that_are_no_buffers_are_updated_once",),
    ),
    Mutant(
        "a rerun ends before the noise that it saves is drawn",
        _CALL,
        "if number == ends and number - self._unfilled > _LATE:",
        "if number == ends:",
        (f"{_TESTS}/test_early_stop.py::test_no_product_more_than_torchs",),
    ),
    Mutant(
        "a rerun ends an operation too late",
        _CALL,
        "ends = wanted - 1 if self._stops else -1",
        "ends = wanted if self._stops else -1",
        (f"{_TESTS}/test_early_stop.py::test_no_product_more_than_torchs",),
    ),
    Mutant(
        "calls are rerun from the inside out",
        _CALL,
        "for call in reversed(waiting):",
        "for call in waiting:",
        (f"{_TESTS}/test_promises.py::test_5_nested_calls_are_rerun_once_each_from_the_outside_in",),
    ),
    Mutant(
        "other shapes are not told",
        _CALL,
        "if likes is not None and list(map(_like, saved)) != likes[:number]:",
        "if likes is not None and len(saved) != len(likes[:number]):",
        (f"{_TESTS}/test_failures.py::test_other_shapes_are_an_error_though_no_value_is_compared",),
    ),
    Mutant(
        "fewer tensors are enough",
        _CALL,
        "        if number < wanted:\n            then",
        "        if number > wanted:\n            then",
        (f"{_TESTS}/test_promises.py::test_7_fewer_saved_tensors_are_an_error",),
    ),
    Mutant(
        "saved tensors of buffers change when these are put forward",
        _CALL,
        "        if rewritten:\n",
        "        if not rewritten:\n",
        (f"{_TESTS}/test_failures.py::test_a_buffer_that_is_saved_and_counts_on_is_right_or_an_error",),
    ),
    Mutant(
        "reruns draw other random numbers",
        _CALL,
        "if preserve_rng_state and _get_mode(_FAKE) is None:",
        "if preserve_rng_state and _get_mode(_FAKE) is not None:",
        (f"{_TESTS}/test_promises.py::test_4_the_rerun_draws_the_forwards_numbers_and_leaves_none_drawn",),
    ),
    Mutant(
        "a tensor is kept after it was handed out",
        _CALL,
        "        store[number] = None\n",
        "",
        (f"{_TESTS}/test_promises.py::test_5_a_second_backward_runs_again_and_frees_again",),
    ),
    Mutant(
        "saved tensors keep the rerun's graph",
        _CALL,
        "append(tensor if tensor.is_leaf else tensor.detach())",
        "append(tensor)",
        (f"{_TESTS}/test_promises.py::test_9_also_where_the_backward_asks_for_a_part_only",),
    ),
    Mutant(
        "values of a rerun are not compared",
        _CALL,
        "elif then != now and number not in self._noted.exempt:",
        "elif then is None and number not in self._noted.exempt:",
        (f"{_TESTS}/test_homes.py::test_a_counter_elsewhere_is_refused",),
    ),
)

"""Mistakes in what a rerun finds as the first run found it, in how the two are compared, and in counts of bytes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_STATE, _LOOPS, _CHECKPOINT, _MEMORY = (f"tests/torch/{name}" for name in ("state", "loops", "checkpoint", "memory"))

STATE = (
    Mutant(
        "autocast keeps no copies of weights after a loop",
        "torch/state/ambient.py",
        "            torch.set_autocast_cache_enabled(cached)",
        "            torch.set_autocast_cache_enabled(False)",
        (f"{_LOOPS}/test_loops.py::test_autocast_keeps_copies_of_weights_again_after_a_loop",),
    ),
    Mutant(
        "of a large tensor one number is compared",
        "torch/state/samples.py",
        "checksum(memory[:: (count // _NUMBERS) | 1].tobytes())",
        "checksum(memory[:1].tobytes())",
        (f"{_STATE}/test_samples.py::test_of_a_large_tensor_a_thousand_numbers_and_more_are_read",),
    ),
    Mutant(
        "a rerun of a call starts its generators where they are",
        "torch/state/generators.py",
        "            if present is not state:\n                source.write(state)\n\n    def __exit__",
        "            if present is state:\n                source.write(state)\n\n    def __exit__",
        (f"{_CHECKPOINT}/test_promises.py::test_4_the_rerun_draws_the_forwards_numbers_and_leaves_none_drawn",),
    ),
    Mutant(
        "a rerun of a loop leaves its generators where it has drawn",
        "torch/state/generators.py",
        "            self.restore(mark)\n            for source, state",
        "            self.mark()\n            for source, state",
        (f"{_LOOPS}/test_corners.py::test_generators_are_where_they_were_before_the_backward",),
    ),
    Mutant(
        "reruns of a loop run in the mode that modules are in now",
        "torch/state/hidden.py",
        "        for module, training in self._training:\n            module.training = training\n        try:\n",
        "        try:\n",
        (f"{_LOOPS}/test_corners.py::test_collections_in_modules_and_a_mode_switched_in_between",),
    ),
    Mutant(
        "a rerun writes into its snapshot",
        "torch/state/hidden.py",
        "                        copied(part.tensors[number])\n",
        "                        pass\n",
        (f"{_STATE}/test_hidden.py::test_batch_norm_is_updated_once_for_each_step",),
    ),
    Mutant(
        "what planning has changed in place stays so",
        "torch/state/hidden.py",
        "                tensor.data.copy_(copy)\n",
        "                copy.copy_(tensor.data)\n",
        (f"{_LOOPS}/test_corners.py::test_planning_leaves_what_steps_change_in_place",),
    ),
    Mutant(
        "buffers are left as the rerun found them",
        "torch/state/notes.py",
        "values = self._copy if now is None else now",
        "values = self._copy",
        (f"{_CHECKPOINT}/test_failures.py::test_batch_norm_counts_once",),
    ),
    Mutant(
        "a view of an argument is a new storage",
        "torch/memory/tracker.py",
        "if storage is not None and given.get(storage._cdata) != storage.nbytes():",
        "if storage is not None:",
        (f"{_MEMORY}/test_tracker.py::test_results_and_what_comes_back_from_the_loss_are_no_part_of_a_loops_memory",),
    ),
    Mutant(
        "a storage that is resized counts again",
        "torch/memory/tracker.py",
        "        self.begin(key, size, left_out=span.left_out)\n",
        "        self.begin(key, size)\n",
        (f"{_MEMORY}/test_tracker.py::test_what_is_left_out_is_so_after_it_has_grown",),
    ),
    Mutant(
        "the worst moment is forgotten with the storage that was made before it",
        "torch/memory/tracker.py",
        "        before.most = max(before.most, span.most)\n",
        "",
        (f"{_MEMORY}/test_tracker.py::test_what_grows_was_small_before",),
    ),
)

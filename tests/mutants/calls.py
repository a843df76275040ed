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
        (f"{_TESTS}/test_promises.py", f"{_TESTS}/test_failures.py"),
    ),
    Mutant(
        "noise is compared before it is drawn",
        _CALL,
        "        self._look_again(number - _LATE)\n",
        "        self._look_again(number + _LATE)\n",
        (f"{_TESTS}/test_failures.py", f"{_TESTS}/test_early_stop.py"),
    ),
    Mutant(
        "a rerun ends before the noise that it saves is drawn",
        _CALL,
        "if number == ends and number - self._unfilled > _LATE:",
        "if number == ends:",
        (f"{_TESTS}/test_failures.py", f"{_TESTS}/test_early_stop.py"),
    ),
    Mutant(
        "a rerun ends an operation too late",
        _CALL,
        "ends = wanted - 1 if self._stops else -1",
        "ends = wanted if self._stops else -1",
        (f"{_TESTS}/test_early_stop.py",),
    ),
    Mutant(
        "calls are rerun from the inside out",
        _CALL,
        "for call in reversed(waiting):",
        "for call in waiting:",
        (f"{_TESTS}/test_promises.py",),
    ),
    Mutant(
        "a call lacks its arguments only if all are gone",
        _CALL,
        "return not self.store or any(tensor is None for tensor in self.store[start:stop])",
        "return not self.store",
        (f"{_TESTS}/test_promises.py",),
    ),
    Mutant(
        "other shapes are not told",
        _CALL,
        "if likes is not None and list(map(_like, saved)) != likes[:number]:",
        "if likes is not None and len(saved) != len(likes[:number]):",
        (f"{_TESTS}/test_promises.py", f"{_TESTS}/test_failures.py"),
    ),
    Mutant(
        "fewer tensors are enough",
        _CALL,
        "        if number < wanted:\n            then",
        "        if number > wanted:\n            then",
        (f"{_TESTS}/test_promises.py",),
    ),
    Mutant(
        "saved tensors of buffers change when these are put forward",
        _CALL,
        "        if rewritten:\n",
        "        if not rewritten:\n",
        (f"{_TESTS}/test_failures.py", f"{_TESTS}/test_owners.py"),
    ),
    Mutant(
        "reruns draw other random numbers",
        _CALL,
        "if preserve_rng_state and _get_mode(_FAKE) is None:",
        "if preserve_rng_state and _get_mode(_FAKE) is not None:",
        (f"{_TESTS}/test_promises.py",),
    ),
    Mutant(
        "a tensor is kept after it was handed out",
        _CALL,
        "        store[number] = None\n",
        "",
        (f"{_TESTS}/test_promises.py",),
    ),
    Mutant(
        "saved tensors keep the rerun's graph",
        _CALL,
        "append(tensor if tensor.is_leaf else tensor.detach())",
        "append(tensor)",
        (f"{_TESTS}/test_promises.py",),
    ),
    Mutant(
        "values of a rerun are not compared",
        _CALL,
        "elif then != now and number not in self._noted.exempt:",
        "elif then is None and number not in self._noted.exempt:",
        (f"{_TESTS}/test_homes.py",),
    ),
)

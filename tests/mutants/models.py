"""Mistakes in rows of layers and in whole models."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LAYERS, _MODEL = "tests/torch/layers", "tests/torch/model"

MODELS = (
    Mutant(
        "first runs inside a call count as taped",
        "torch/layers/nested.py",
        "self._runner.run(self._parts, layers_and_x[-1], taping=again, first",
        "self._runner.run(self._parts, layers_and_x[-1], taping=True, first",
        (f"{_LAYERS}/test_nested.py::test_every_run_of_a_step_goes_through_the_same_function",),
    ),
    Mutant(
        "a lean step is lean only where its tape is kept",
        "torch/layers/nested.py",
        "                if part.option:\n                    x = self.lean",
        "                if part.option and taping:\n                    x = self.lean",
        (f"{_LAYERS}/test_nested.py::test_every_run_of_a_step_goes_through_the_same_function",),
    ),
    Mutant(
        "every entry of a menu is the one before it",
        "torch/layers/nested.py",
        "entry = self._chain[step].options[option - 1]",
        "entry = self._chain[step].options[max(option - 2, 0)]",
        (f"{_LAYERS}/test_budget.py::test_so_it_is_for_rows_of_every_kind",),
    ),
    Mutant(
        "a part in eval mode runs without its plan",
        "torch/model/apply.py",
        "in_eval=not module.training, check_rerun",
        "in_eval=False, check_rerun",
        (f"{_MODEL}/test_apply.py::test_a_model_that_is_trained_in_eval_mode_runs_as_planned_in_it",),
    ),
    Mutant(
        "a model runs as planned in eval mode too",
        "torch/model/apply.py",
        "or not (module.training or self.in_eval):",
        "or not module:",
        (f"{_MODEL}/test_apply.py::test_in_eval_and_without_grad_nothing_is_run_again",),
    ),
    Mutant(
        "wrappers around a plan are lost while it is off",
        "torch/model/apply.py",
        '            forward.module.__dict__["forward"] = outermost\n',
        "",
        (f"{_MODEL}/test_forms.py::test_what_others_have_put_around_a_plan_is_there_again_after_a_run_without_it",),
    ),
    Mutant(
        "a plan for a batch of one size refuses the others",
        "torch/model/forms.py",
        "LeanSize(form.tape, form.working, strict=False)",
        "LeanSize(form.tape, form.working, strict=True)",
        (f"{_MODEL}/test_forms.py::test_a_lean_tape_that_was_planned_for_smaller_arguments_keeps_more_and_says_so",),
    ),
    Mutant(
        "a lean rerun is not compared as asked",
        "torch/model/forms.py",
        "return checkpoint(_leanly, module, args, kwargs, way.lean, check_rerun=check_rerun)",
        "return checkpoint(_leanly, module, args, kwargs, way.lean)",
        (f"{_MODEL}/test_forms.py::test_reruns_of_either_form_are_compared_as_asked",),
    ),
)

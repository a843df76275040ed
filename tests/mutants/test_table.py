from __future__ import annotations

import ast

from tests.mutants.table import MUTANTS, ROOT


def test_there_are_at_least_sixty_with_names_of_their_own() -> None:
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_each_changes_one_place_and_is_python() -> None:
    for mutant in MUTANTS:
        text = mutant.source()
        assert text.count(mutant.before) == 1, f"{mutant.name}: `before` is there {text.count(mutant.before)} times"
        assert ast.dump(ast.parse(mutant.changed())) != ast.dump(ast.parse(text)), mutant.name


def test_each_names_tests_that_exist() -> None:
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            text = (ROOT / file).read_text()
            assert not function or f"def {function.partition('[')[0]}(" in text, f"{mutant.name}: {test}"

"""The mutants fit the package as it is: a breakage that cannot be made proves nothing."""

from __future__ import annotations

import re

import pytest

from tests.mutants.run import ROOT, Mutant, load

MUTANTS = load([])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_names_tests_that_there_are(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.old != mutant.new
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        function = re.sub(r"\[.*", "", name.rpartition("::")[2])
        assert not name or f"def {function}(" in (ROOT / file).read_text(), test

"""The list of the quick suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suites import UNKNOWN, in_quick, quick_tests


def test_the_quick_suite_lists_only_tests_that_exist(request: pytest.FixtureRequest) -> None:
    # An error of collection would have no words here: pytest-xdist shows none of its workers'.
    assert request.config.stash.get(UNKNOWN, []) == []


def test_a_list_has_sections_comments_and_ids(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("# why\n[one]\na.py::test_a[x]  # why\n\n[two]\na.py::test_b\n")
    assert quick_tests(path) == ["a.py::test_a[x]", "a.py::test_b"]
    assert quick_tests(path, "two") == ["a.py::test_b"]


def test_a_file_and_an_id_without_parameters_stand_for_all_of_their_tests() -> None:
    assert in_quick("a.py::test_b[local]", ["a.py"])
    assert in_quick("a.py::test_b[local]", ["a.py::test_b"])
    assert in_quick("a.py::test_b[local]", ["a.py::test_b[local]"])
    assert not in_quick("a.py::test_b[spark]", ["a.py::test_b[local]"])
    assert in_quick("tests/unit/test_a.py::test_b", [])

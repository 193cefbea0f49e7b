"""What `make mutation` draws, and which tests it runs for a change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.choose import Test
from tests.mutation import covering, run

SOURCE = """
LIMIT = 5

def least(values: list[int] | None, other: int = 0) -> int:
    if values and other:
        return min(values) + 1
    return other
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with one room and one file, in the working directory."""
    room = tmp_path / "horovod_runner" / "room"
    room.mkdir(parents=True)
    (room / "least.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return room / "least.py"


@pytest.mark.usefixtures("package")
def test_what_runs_is_changed_and_no_annotation_or_setting() -> None:
    changes = run.draw(1, 60, [])
    assert {change.room for change in changes} == {"room"}
    lines = {change.old for change in changes}
    assert lines == {
        "def least(values: list[int] | None, other: int = 0) -> int:",  # the default
        "if values and other:",
        "return min(values) + 1",
    }
    assert all(" | None" in each.new for each in changes if each.old.startswith("def"))


@pytest.mark.usefixtures("package")
def test_a_seed_draws_the_same_changes_again_and_another_one_others() -> None:
    assert run.draw(1, 5, []) == run.draw(1, 5, [])
    assert run.draw(1, 5, []) != run.draw(2, 5, [])


def test_the_changed_lines_are_those_of_the_unchanged_file(package: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    changed = other / package.relative_to(tmp_path)
    changed.parent.mkdir(parents=True)
    changed.write_text(SOURCE.replace("+ 1", "- 1"))
    assert covering.changed_lines(other, tmp_path) == {("room/least.py", 6)}


def test_tests_that_import_a_module_are_found_however_they_do(tmp_path: Path) -> None:
    for name, line in {
        "test_a": "from horovod_runner.room.least import least",
        "test_b": "from horovod_runner.room import least, other",
        "test_c": "import horovod_runner.room.least",
        "test_d": "from horovod_runner.room import other",
        "test_e": "from horovod_runner.room.least_of_all import least",
    }.items():
        (tmp_path / f"{name}.py").write_text(f"{line}\n")
    found = covering.importing("room/least.py", tmp_path)
    assert {Path(path).stem for path in found} == {"test_a", "test_b", "test_c"}


SHARING = """
import pytest

@pytest.fixture(scope="module")
def results(): ...

def test_dear(results): ...
def test_looks(results): ...
def test_other(tmp_path): ...
"""


def test_tests_that_share_a_run_come_after_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("test_a.py", "test_b.py"):
        Path(name).write_text(SHARING)
    lines = frozenset({("room/least.py", 6)})
    cheap, dear, looks, slow, other, apart = (
        Test(name, seconds, lines)
        for name, seconds in (
            ("tests/unit/test_c.py", 1.0),
            ("test_a.py::test_dear", 9.0),
            ("test_a.py::test_looks[torch]", 0.1),
            ("test_a.py::test_looks[all]", 9.0),
            ("test_a.py::test_other", 0.1),
            ("test_b.py::test_looks[torch]", 0.1),
        )
    )
    chosen = covering.with_sharers([dear, cheap], [looks, slow, other, apart, dear, cheap])
    assert [*chosen] == [cheap, dear, looks]


def test_scores_name_what_was_missed_and_leave_out_what_changes_nothing() -> None:
    spec = run.MutationSpec("horovod_runner/room/least.py", "core/AddNot", 0, (1, 0), (1, 4))
    changes = [run.Change(spec, "a", "b"), run.Change(spec, "c", "d")]
    page = run.scores(changes, changes[:1], "a title")
    assert "| all | 2 | 0 | 1 | 50% |" in page
    assert "`c`" in page
    assert "`a`" not in page

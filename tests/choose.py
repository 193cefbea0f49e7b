"""Which tests belong into the quick suite, by what they notice.

    make coverage                               # an hour or two; ends with the output of this
    .venv/bin/python -m tests.choose .lines     # again, after a change of quick.txt

A test is worth what it adds to the fast tests and to those chosen before: mutants that its table
in mutants/ says it notices, and lines that it runs. The list of what only the whole suite notices
ends the output.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coverage.sqldata import CoverageData

from tests.mutants.run import Mutant, load
from tests.suites import FAST, LISTED, in_quick, quick_tests

#: A mutant noticed is worth as much as this many lines that are run for the first time.
MUTANT_LINES = 30


@dataclass(frozen=True)
class Test:
    """What a run of the whole suite recorded of a test, and which mutants it notices."""

    name: str
    seconds: float
    lines: frozenset[tuple[str, int]]
    mutants: frozenset[str]

    def worth(self, lines: set[tuple[str, int]], mutants: set[str]) -> int:
        """How much the test adds to lines and mutants that are covered already."""
        return len(self.lines - lines) + MUTANT_LINES * len(self.mutants - mutants)


def read(
    folder: Path, mutants: Iterable[Mutant], only: Container[str] | None = None
) -> dict[str, Test]:
    """The tests that lines_by_test.py has recorded, by name; with their lines in some files."""
    lines: dict[str, set[tuple[str, int]]] = {}
    data = CoverageData(str(folder / ".coverage"))
    data.read()
    for file in data.measured_files():
        short = file.rpartition("horovod_runner/")[2]
        if only is not None and short not in only:
            continue
        for line, tests in data.contexts_by_lineno(file).items():
            for test in tests:
                lines.setdefault(test, set()).add((short, line))
    noticed_by: dict[str, set[str]] = {}
    for mutant in mutants:
        for test in mutant.tests:
            recorded = test.partition("::")[0] if test.startswith(FAST) else test
            noticed_by.setdefault(recorded, set()).add(mutant.breaks)
    took: dict[str, float] = defaultdict(float)  # a file of fast tests may have been run in parts
    for path in folder.glob("*.seconds"):
        for row in path.read_text().splitlines():
            spent, _, name = row.partition(" ")
            took[name] += float(spent)
    found = {}
    for name, seconds in took.items():
        names = {name, name.partition("[")[0], name.partition("::")[0]}
        noticed = set[str]().union(*(noticed_by.get(each, ()) for each in names))
        found[name] = Test(name, seconds, frozenset(lines.get(name, ())), frozenset(noticed))
    return found


def union(tests: Iterable[Test]) -> tuple[set[tuple[str, int]], set[str]]:
    """The lines and the mutants of several tests."""
    lines: set[tuple[str, int]] = set()
    mutants: set[str] = set()
    for test in tests:
        lines |= test.lines
        mutants |= test.mutants
    return lines, mutants


def show_order(tests: Mapping[str, Test], chosen: list[Test], seconds: float) -> None:
    """Print which further tests add most for each second, until a time is used up."""
    lines, mutants = union(chosen)
    left = [test for test in tests.values() if test not in chosen]
    spent = 0.0
    while left:
        best = max(left, key=lambda test: test.worth(lines, mutants) / (test.seconds + 0.5))
        left.remove(best)
        spent += best.seconds
        if spent > seconds or not best.worth(lines, mutants):
            return
        names = " ".join(sorted(best.mutants - mutants)) or "-"
        print(f"{spent:6.0f} s {len(best.lines - lines):5} lines {best.name}  {names}")
        lines |= best.lines
        mutants |= best.mutants


def main() -> None:
    """Print what the quick suite has and lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="for further tests")
    options = parser.parse_args()
    tests = read(options.folder, load([]))
    listed = quick_tests()
    stories = quick_tests(LISTED, "stories")
    chosen = [test for test in tests.values() if in_quick(test.name, listed)]
    lines, mutants = union(chosen)
    all_lines, all_mutants = union(tests.values())
    print(f"{len(chosen)} of {len(tests)} tests, {sum(each.seconds for each in chosen):.0f} s")
    print(f"{len(mutants)} of {len(all_mutants)} mutants, {len(mutants) / len(all_mutants):.1%}")
    print(f"{len(lines)} of {len(all_lines)} lines, {len(lines) / len(all_lines):.1%}")
    print("\nFor nothing:")
    for test in chosen:
        if not in_quick(test.name, stories) and not test.worth(
            *union(each for each in chosen if each is not test)
        ):
            print(f"{test.seconds:6.0f} s {test.name}")
    print("\nWhat would add most:")
    show_order(tests, chosen, options.seconds)
    print("\nOnly the whole suite notices:", *sorted(all_mutants - mutants), sep="\n  ")
    for file, count in Counter(file for file, _ in all_lines - lines).most_common():
        print(f"  {count:4} lines of {file}")


if __name__ == "__main__":
    main()

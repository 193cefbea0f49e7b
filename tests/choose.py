"""Which tests belong into the quick suite, by the lines that they run.

    make coverage                               # an hour or two; ends with the output of this
    .venv/bin/python -m tests.choose .lines     # again, after a change of quick.txt

A test is worth the lines that it runs and that neither the fast tests nor those chosen before run.
The files with lines that only the whole suite runs end the output.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coverage.sqldata import CoverageData

from tests.suites import LISTED, in_quick, quick_tests


@dataclass(frozen=True)
class Test:
    """What a run of the whole suite recorded of a test."""

    name: str
    seconds: float
    lines: frozenset[tuple[str, int]]


def read(folder: Path, only: Container[str] | None = None) -> dict[str, Test]:
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
    took: dict[str, float] = defaultdict(float)  # a file of fast tests may have been run in parts
    for path in folder.glob("*.seconds"):
        for row in path.read_text().splitlines():
            spent, _, name = row.partition(" ")
            took[name] += float(spent)
    return {
        name: Test(name, seconds, frozenset(lines.get(name, ()))) for name, seconds in took.items()
    }


def lines_of(tests: Iterable[Test]) -> set[tuple[str, int]]:
    """The lines that several tests run."""
    return set[tuple[str, int]]().union(*(test.lines for test in tests))


def show_order(tests: Mapping[str, Test], chosen: list[Test], seconds: float) -> None:
    """Print which further tests add most for each second, until a time is used up."""
    lines = lines_of(chosen)
    left = [test for test in tests.values() if test not in chosen]
    spent = 0.0
    while left:
        best = max(left, key=lambda test: len(test.lines - lines) / (test.seconds + 0.5))
        left.remove(best)
        spent += best.seconds
        if spent > seconds or best.lines <= lines:
            return
        print(f"{spent:6.0f} s {len(best.lines - lines):5} lines {best.name}")
        lines |= best.lines


def main() -> None:
    """Print what the quick suite has and lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=300, help="for further tests")
    options = parser.parse_args()
    tests = read(options.folder)
    listed = quick_tests()
    stories = quick_tests(LISTED, "stories")
    chosen = [test for test in tests.values() if in_quick(test.name, listed)]
    lines, all_lines = lines_of(chosen), lines_of(tests.values())
    print(f"{len(chosen)} of {len(tests)} tests, {sum(each.seconds for each in chosen):.0f} s")
    print(f"{len(lines)} of {len(all_lines)} lines, {len(lines) / len(all_lines):.1%}")
    print("\nAdds no line:")
    times = Counter(line for test in chosen for line in test.lines)
    for test in chosen:
        if not in_quick(test.name, stories) and all(times[line] > 1 for line in test.lines):
            print(f"{test.seconds:6.0f} s {test.name}")
    print("\nWhat would add most:")
    show_order(tests, chosen, options.seconds)
    print("\nOnly the whole suite runs:")
    for file, count in Counter(file for file, _ in all_lines - lines).most_common():
        print(f"  {count:4} lines of {file}")


if __name__ == "__main__":
    main()

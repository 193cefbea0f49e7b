"""Judges random programs, and prints the smallest script of each that is wrong.

make oracle N=1000 SEED=1
python -m tests.oracle.run 100 --seed 1 --frameworks torch ddp
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import batched

from tests.oracle.judge import Verdict, judge, judge_all
from tests.oracle.programs import FRAMEWORKS, Program, draw

_TOGETHER = 12


def judged(programs: Sequence[Program]) -> Iterator[tuple[Program, Verdict]]:
    """Programs with their verdicts, those together that can be run together."""
    alike: dict[tuple[str, int], list[Program]] = defaultdict(list)
    for program in programs:
        alike[program.framework, program.ranks].append(program)
    for group in alike.values():
        for some in batched(group, _TOGETHER, strict=False):
            yield from zip(some, judge_all(some), strict=True)


def shrink(program: Program, kind: str) -> Program:
    """The smallest program with the same kind of verdict."""
    for simpler in program.simpler():
        if judge(simpler).kind == kind:
            return shrink(simpler, kind)
    return program


def _commented(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())


def main() -> int:
    """Judge programs and say what was found.

    Returns:
        The exit status: 1 if a program is wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="how many programs")
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    parser.add_argument(
        "--no-shrink", action="store_true", help="print programs as they were drawn"
    )
    given = parser.parse_args()
    frameworks = tuple(given.frameworks)
    programs = [draw(given.seed + number, frameworks) for number in range(given.count)]
    kinds: Counter[tuple[str, str]] = Counter()
    wrong = 0
    for program, verdict in judged(programs):
        kinds[program.framework, verdict.kind] += 1
        if verdict.is_right:
            continue
        wrong += 1
        smallest = program if given.no_shrink else shrink(program, verdict.kind)
        print(f"\n# {verdict.kind}: {program}\n{_commented(verdict.details[:1500])}")
        print(smallest.script, flush=True)
    print()
    for (framework, kind), count in sorted(kinds.items()):
        print(f"{framework:18} {kind:30} {count}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

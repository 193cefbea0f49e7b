"""Break the package on purpose, one small way at a time, and see which test notices.

    make mutants                                           # all of them
    .venv/bin/python -m tests.mutants.run data             # those of data.toml
    .venv/bin/python -m tests.mutants.run --check          # only report those that do not apply
    .venv/bin/python -m tests.mutants.run --suite quick    # with the tests of the quick suite alone
    .venv/bin/python -m tests.mutants.run --sample 1:80    # 80 of them
    .venv/bin/python -m tests.mutants.run --only "order"   # those with this in `breaks`

Each mutant is a table in one of the TOML files beside this one:

    breaks  what a user would suffer from; no other mutant has the same
    where   the function or class to change, as in a pytest id: "package/file.py::Class::method";
            or just the file, for code outside of functions
    old     an expression, or consecutive statements, that occur there exactly once; see pattern.py
    new     what replaces them
    tests   the tests that may notice it, cheapest first

For each mutant the whole checkout is copied to a temporary folder and changed there. Then its tests
run until the first one fails. A mutant that no test notices is a hole in the suite: its line says
MISSED. The exit status is 1 if there is a hole, a mutant does not apply, or a test does not exist.
The quick suite may have holes: `--suite quick` shows how many.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.mutants import pattern
from tests.suites import in_quick, quick_tests

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
#: The options of pytest that choose a suite.
SUITES = {"all": ("--places", "all"), "quick": ("--suite", "quick")}
SECONDS = 600  # a mutant that hangs every test is noticed, too


@dataclass(frozen=True)
class Mutant:
    """One way to break the package."""

    breaks: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        """The file to change."""
        return self.where.partition("::")[0]

    def source(self, tree: Path) -> str:
        """Return the changed source of the file.

        Raises:
            PatternError: The mutant does not apply to this checkout.
        """
        file, _, name = self.where.partition("::")
        if not (tree / file).is_file():
            raise pattern.PatternError("there is no such file")
        return pattern.replace((tree / file).read_text(), name, self.old, self.new)


def load(areas: Sequence[str]) -> list[Mutant]:
    """The mutants of the files named, or of all.

    Raises:
        SystemExit: a file has no such area, or two mutants break the same.
    """
    known = {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
    unknown = set(areas) - set(known)
    if unknown:
        sys.exit(f"no such area: {', '.join(unknown)}; choose from {', '.join(known)}")
    found = [
        Mutant(**{**table, "tests": tuple(table["tests"])})
        for area in areas or known
        for table in tomllib.loads(known[area].read_text())["mutant"]
    ]
    if len({mutant.breaks for mutant in found}) < len(found):
        sys.exit("two mutants have the same `breaks`")
    return found


def collect(mutants: Sequence[Mutant]) -> list[str]:
    """The ids of all tests in the files that the mutants name."""
    files = {test.partition("::")[0] for mutant in mutants for test in mutant.tests}
    there = sorted(file for file in files if (ROOT / file).exists())
    done = run_pytest(["--collect-only", *SUITES["all"], *there], ROOT)
    if done.returncode not in {0, 2}:
        sys.exit(f"the tests cannot be collected:\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if "::" in line]


def named(test: str, ids: Sequence[str]) -> list[str]:
    """The tests that one entry of a mutant stands for: a folder, a file, all parameters or one."""
    inside = tuple(test + mark for mark in ("/", "::", "["))
    return [each for each in ids if each == test or each.startswith(inside)]


def examine(
    mutants: Sequence[Mutant], tree: Path, ids: Sequence[str]
) -> tuple[list[Mutant], list[str]]:
    """Return the mutants to try, with those of their tests that exist; and a line per problem."""
    good, problems = [], []
    for mutant in mutants:
        tests = tuple(test for test in mutant.tests if named(test, ids))
        missing = [test for test in mutant.tests if test not in tests] if mutant.tests else ["none"]
        problems += [f"no such test: {mutant.breaks} {test}" for test in missing]
        try:
            mutant.source(tree)
        except pattern.PatternError as error:
            problems.append(f"does not apply: {mutant.breaks} {error} ({mutant.where})")
            continue
        if tests:
            good.append(replace(mutant, tests=tests))
    return good, problems


def in_quick_suite(mutants: Sequence[Mutant], ids: Sequence[str], tree: Path) -> list[Mutant]:
    """Return the mutants with those of their tests that are in the quick suite, at least in part.

    Prints a line for each mutant without such a test.
    """
    listed = quick_tests(tree / "tests" / "quick.txt")
    found = []
    for mutant in mutants:
        tests = [t for t in mutant.tests if any(in_quick(i, listed) for i in named(t, ids))]
        if tests:
            found.append(replace(mutant, tests=tuple(tests)))
        else:
            print(f"only test-all: {mutant.breaks}")
    return found


def copy(tree: Path, folder: Path) -> None:
    """Copy what git knows of a checkout, and link its environments."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=tree,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        source, target = tree / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for environment in tree.glob(".venv*"):
        (folder / environment.name).symlink_to(environment)


def run_pytest(
    arguments: Sequence[str], folder: Path, seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a checkout, with the package that is there and not the installed one."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "HYPOTHESIS_STORAGE_DIRECTORY": f"{folder}/.hypothesis",
        },
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def first_failure(
    sources: Mapping[str, str], arguments: Sequence[str], seconds: float | None = None
) -> str:
    """Run tests on a copy with some other sources; the first that fails, or "" if none does."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy(ROOT, Path(name))
        for file, source in sources.items():
            (Path(name) / file).write_text(source)
        try:
            done = run_pytest(["-x", *arguments], Path(name), seconds)
        except subprocess.TimeoutExpired:
            return f"(no end within {seconds} s)"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in {0, 1, 2}:
        sys.exit(f"{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[0] if failed else "(collection failed)" if done.returncode else ""


def try_all(mutants: Sequence[Mutant], options: argparse.Namespace) -> int:
    """Run the tests of mutants, and print what happened; returns how many were noticed.

    Raises:
        SystemExit: A test fails without any mutant.
    """
    suite = SUITES[options.suite]
    tests = dict.fromkeys(test for mutant in mutants for test in mutant.tests)
    # Mutants have no comments and another layout. So has this copy: a test may read the source.
    files = {mutant.file for mutant in mutants}
    plain = {file: ast.unparse(ast.parse((ROOT / file).read_text())) for file in files}
    broken = first_failure(plain, [*suite, *tests])
    if broken:
        sys.exit(f"{broken} fails without any mutant")

    def try_one(mutant: Mutant) -> bool:
        changed = {mutant.file: mutant.source(ROOT)}
        noticed = first_failure(changed, [*suite, *mutant.tests], SECONDS)
        print(f"{noticed or 'MISSED'}: {mutant.breaks}", flush=True)
        return bool(noticed)

    with ThreadPoolExecutor(options.jobs) as threads:
        return sum(threads.map(try_one, mutants))


def main() -> int:
    """Try the mutants; returns the exit status."""
    parser = argparse.ArgumentParser(description="Which test notices which breakage?")
    parser.add_argument("areas", nargs="*", help="names of TOML files without .toml; default: all")
    parser.add_argument("--only", metavar="TEXT", default="", help="those that break this alone")
    parser.add_argument("--sample", metavar="SEED:COUNT", help="this many, drawn by a seed: 1:80")
    parser.add_argument("--suite", choices=SUITES, default="all", help="the tests to run")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--check", action="store_true", help="only see whether they apply")
    options = parser.parse_args()
    mutants = [each for each in load(options.areas) if options.only in each.breaks]
    if options.sample:
        seed, count = map(int, options.sample.split(":"))
        mutants = random.Random(seed).sample(mutants, min(count, len(mutants)))
    if not mutants:
        sys.exit("no such mutant")
    ids = collect(mutants)
    good, problems = examine(mutants, ROOT, ids)
    print(*problems, sep="\n", end="\n" if problems else "")
    if options.check or not good:
        print(f"{len(good)} of {len(mutants)} mutants can be tried")
        return len(problems) > 0
    tried = in_quick_suite(good, ids, ROOT) if options.suite == "quick" else good
    noticed = try_all(tried, options) if tried else 0
    print(f"{noticed} of {len(good)} noticed ({noticed / len(good):.0%})")
    missed = noticed < len(good) and options.suite == "all"
    return 1 if problems or missed else 0


if __name__ == "__main__":
    sys.exit(main())

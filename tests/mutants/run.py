"""Break the package on purpose, one small way at a time, and see which test notices.

    make mutants                                    # all of them
    .venv/bin/python tests/mutants/run.py data      # those of data.toml
    .venv/bin/python tests/mutants/run.py --check   # whether each one fits the package as it is

Each mutant is a table in one of the TOML files beside this one: what breaks, the file, the text and
what replaces it, and the tests to run, cheapest first. For each one the whole checkout is copied to
a temporary folder, changed there, and the tests run until the first one fails. A mutant that no
test notices is a hole in the suite: its line says MISSED, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
PLACES = ("--places", "all")
SECONDS = 600  # a mutant that hangs every test is noticed, too


@dataclass(frozen=True)
class Mutant:
    """One way to break the package; see the TOML files."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def load(areas: list[str]) -> list[Mutant]:
    """The mutants of the files named, or of all.

    Raises:
        SystemExit: a file has no such area, or two mutants have the same name.
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
    if len({mutant.name for mutant in found}) < len(found):
        sys.exit("two mutants have the same name")
    return found


def misfits(mutants: list[Mutant], tree: Path) -> list[str]:
    """What is wrong with mutants that change no single place, or name tests that there are not."""
    found = []
    for mutant in mutants:
        source = tree / mutant.file
        times = source.read_text().count(mutant.old) if source.is_file() else 0
        if times != 1 or mutant.old == mutant.new:
            found.append(f"{mutant.name}: {mutant.file} has {times} times:\n{mutant.old}")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            text = (tree / file).read_text() if (tree / file).is_file() else ""
            function = re.sub(r"\[.*", "", name.rpartition("::")[2])
            if not (tree / file).exists() or (name and f"def {function}(" not in text):
                found.append(f"{mutant.name}: there is no test {test}")
        if not mutant.tests:
            found.append(f"{mutant.name}: no tests")
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


def apply(mutant: Mutant, folder: Path) -> None:
    """Make the change."""
    file = folder / mutant.file
    file.write_text(file.read_text().replace(mutant.old, mutant.new))


def first_failure(mutant: Mutant | None, tests: tuple[str, ...], tree: Path, python: str) -> str:
    """Run tests on a copy, with a mutant or without; the first that fails, or "" if none does."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy(tree, folder)
        if mutant is not None:
            apply(mutant, folder)
        command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        command += [*PLACES, *tests]
        # The copy comes before the checkout that is installed in the environment.
        environment = {
            **os.environ,
            "PYTHONPATH": name,
            "HYPOTHESIS_STORAGE_DIRECTORY": f"{name}/h",
        }
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"(no end within {SECONDS} s)"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in {0, 1, 2}:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return failed[0] if failed else "(collection failed)" if done.returncode else ""


def main() -> int:
    """Try the mutants; returns the exit status."""
    parser = argparse.ArgumentParser(description="Which test notices which breakage?")
    parser.add_argument("areas", nargs="*", help="names of TOML files without .toml; default: all")
    parser.add_argument("--only", metavar="NAME", action="append", help="this mutant alone")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default: 2)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout to break")
    parser.add_argument("--python", default=sys.executable, help="its Python")
    parser.add_argument("--check", action="store_true", help="only see whether they fit")
    options = parser.parse_args()
    mutants = [m for m in load(options.areas) if not options.only or m.name in options.only]
    if not mutants:
        sys.exit("no such mutant")
    wrong = misfits(mutants, options.tree)
    if wrong or options.check:
        print(*wrong, sep="\n") if wrong else print(f"{len(mutants)} mutants fit")
        return len(wrong) > 0
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    broken = first_failure(None, tests, options.tree, options.python)
    if broken:
        sys.exit(f"{broken} fails without any mutant")

    def try_one(mutant: Mutant) -> bool:
        noticed = first_failure(mutant, mutant.tests, options.tree, options.python)
        print(f"{mutant.name:45} {noticed or 'MISSED: ' + mutant.breaks}", flush=True)
        return bool(noticed)

    with ThreadPoolExecutor(options.jobs) as threads:
        noticed = list(threads.map(try_one, mutants))
    print(f"{sum(noticed)} of {len(mutants)} noticed")
    return 0 if all(noticed) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Random training programs: what is drawn of each, and how it becomes a Python script.

A script has `train(ranks, distributed, ...)`. A rank calls it with its own number, and one process
with the numbers of all ranks, whose losses it averages. Both must end with the same weights.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Any

#: Frameworks: the module that writes a program for each, and its share of the drawn programs in
#: percent.
FRAMEWORKS = {
    "torch": ("torch_programs", 40),
    "ddp": ("torch_programs", 18),
    "lightning": ("lightning_programs", 8),
    "keras_torch": ("keras_programs", 12),
    "keras_tensorflow": ("keras_programs", 10),
    "tape": ("keras_programs", 8),
    "trainer": ("trainer_programs", 4),
}
#: Choices that mean something beside another one alone.
_DEPENDENT = {"rest": "passes", "ranks_later": "restart", "schedule_made": "schedule"}
#: Drawn for each program. Of the others, so many at most are not the plain ones.
_ALWAYS = ("optimizer", "ranks")
_FEATURES = 5
_RUNS = """

if __name__ == "__main__":
    import numpy

    from horovod_runner import HorovodRunner

    def flat(weights):
        return numpy.concatenate([numpy.ravel(each) for each in weights])

    state = own_state = None
    for ranks, begin, end in {phases}:
        runner = HorovodRunner(np=-ranks)
        by_rank, state = runner.run(main, begin=begin, end=end, state=state{data})
        alone, own_state = train(list(range(ranks)), False, begin, end, own_state)
    for rank, weights in enumerate(by_rank):
        to_first = numpy.abs(flat(weights) - flat(by_rank[0])).max()
        to_one = numpy.abs(flat(weights) - flat(alone)).max()
        print(f"rank {{rank}}: off by {{to_first:.3g}} from rank 0, {{to_one:.3g}} from one")
"""


@dataclass(frozen=True)
class Program:
    """A program as it was drawn.

    Attributes:
        framework: a key of FRAMEWORKS.
        seed: the seed it was drawn from.
        choices: by name, the ones that are not the plain ones.
    """

    framework: str
    seed: int
    choices: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name in self.choices:
            return self.choices[name]
        for framework in (self.framework, *FRAMEWORKS):
            possible = _writer(framework).CHOICES[framework]
            if name in possible:  # what another framework has is the plain one here
                return possible[name][0]
        raise AttributeError(name)

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.choices.items())
        return f"{self.framework}, seed {self.seed}: {shown or 'plain'}"

    @property
    def phases(self) -> list[tuple[int, int, int]]:
        """The runs that the training takes: their ranks, first steps and ends."""
        if self.restart == "none":
            return [(self.ranks, 0, self.steps)]
        middle = self.steps // 2
        return [(self.ranks, 0, middle), (self.ranks_later, middle, self.steps)]

    @property
    def source(self) -> str:
        """The script."""
        return str(_writer(self.framework).source(self))

    @property
    def script(self) -> str:
        """The script with an end that runs it on this machine, and shows what differs."""
        data = ", data=table()" if self.reads_feed else ""
        return f"{self.source}{_RUNS.format(phases=self.phases, data=data)}"

    @property
    def reads_feed(self) -> bool:
        """Whether `main` has an argument `data`; `table()` of the script makes it."""
        return bool(_found("reads_feed", self))

    @property
    def undefined(self) -> str:
        """Why this training has no counterpart in one process, so the user must be told; or ""."""
        return str(_found("undefined", self))

    @property
    def only_alike(self) -> str:
        """Why its weights may differ from those of one process, though not by rank; or ""."""
        return str(_found("only_alike", self))

    def simpler(self) -> Iterator[Program]:
        """Programs with one choice less, or with fewer steps or ranks."""
        for name in self.choices:
            rest = {key: value for key, value in self.choices.items() if key != name}
            yield _settled(replace(self, choices=rest))


def draw(seed: int, frameworks: tuple[str, ...] = tuple(FRAMEWORKS)) -> Program:
    """Draw a program.

    Args:
        seed: the same one gives the same program.
        frameworks: among these.
    """
    drawn = random.Random(seed)
    weights = [FRAMEWORKS[each][1] for each in frameworks]
    (framework,) = drawn.choices(frameworks, weights)
    possible = _writer(framework).CHOICES[framework]
    some = {name for name, values in possible.items() if len(values) > 1}
    others = sorted(some - set(_ALWAYS) - _DEPENDENT.keys())
    names = drawn.sample(others, min(drawn.randint(1, _FEATURES), len(others)))
    for name, base in _DEPENDENT.items():
        if base in names and name in possible and drawn.random() < 0.5:
            names.append(name)
    choices = {name: drawn.choice(possible[name][1:]) for name in names}
    for name in _ALWAYS:
        value = drawn.choice(possible[name])
        if value != possible[name][0]:
            choices[name] = value
    return _settled(Program(framework, seed, choices))


def _settled(program: Program) -> Program:
    """The program without the choices that do not go together with its others."""
    excluded = _writer(program.framework).EXCLUDED
    while True:
        there = program.choices
        left_out = [
            name for name, base in _DEPENDENT.items() if name in there and base not in there
        ]
        left_out += [name for name, when in excluded if name in there and when(program)]
        if not left_out:
            return program
        rest = {name: value for name, value in there.items() if name != left_out[0]}
        program = replace(program, choices=rest)


def _found(name: str, program: Program) -> Any:
    """What a function of the module finds out that writes a program; "" if it has none."""
    find = getattr(_writer(program.framework), name, None)
    return "" if find is None else find(program)


def _writer(framework: str) -> ModuleType:
    return import_module(f"tests.oracle.{FRAMEWORKS[framework][0]}")


def rows_by_rank(program: Program) -> str:
    """Code that says how many rows a batch has."""
    rows = {"equal": [5] * 4, "uneven": [5, 2, 7, 3], "one row": [1] * 4}[program.rows]
    return f"ROWS = {rows}  # of a batch, by rank"


def lines(*parts: Any) -> str:
    """Text of the parts that are texts, also inside of lists; conditions leave others out."""
    return "\n".join(_texts(parts))


def _texts(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, list):
            yield from _texts(part)

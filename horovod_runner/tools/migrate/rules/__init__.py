"""The rules for old code: one for each kind, in a module for each library.

A rule is a matcher of libcst's, a reason and a change (`rule.fix`, `rule.on`), or a function of the
whole text (`rule.rule`). It finds nothing in what it has changed itself. Rules import code, names
and source, and functions of each other.
"""

from horovod_runner.tools.migrate.rules import (  # noqa: F401 - each adds its rules
    gpus,
    imports,
    keras,
    launch,
    lightning,
    petastorm,
    tensorflow_1,
    training,
)
from horovod_runner.tools.migrate.rules.rule import RULES

__all__ = ["RULES"]

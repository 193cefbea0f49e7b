"""Runs the import hooks of a run (:mod:`horovod_runner.run.import_hooks`) in a rank.

A hook changes a module of a framework at the end of its import. A later version of the framework
may lack what the hook looks for. That never fails the user's import: the hook's changes are undone,
and the user is told what the run does without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from horovod_runner.wire.job_file import ImportHook
from horovod_runner.worker.api import current_rank, log_to_driver
from horovod_runner.worker.imports.finder import around_import
from horovod_runner.worker.imports.garbage import keep_imports_uncollected


class _Hooks:
    def __init__(self) -> None:
        self._known: dict[ImportHook, None] = {}
        self._failed: dict[ImportHook, str] = {}  # why
        self._untold: list[ImportHook] = []
        self._importing: set[str] = set()  # frameworks
        self._tells = False

    def install(self, hooks: Iterable[ImportHook], *, in_rank: bool = True) -> None:
        """Set up what happens in this process when a framework is imported.

        A module that is imported already stays as it is, except for hooks that are only for ranks.
        A hook that is installed already runs no second time, as in a rank that a fork server has
        forked. The fork server (``in_rank=False``) leaves out the hooks that are only for ranks,
        and lets the ranks tell what has failed.
        """
        keep_imports_uncollected()
        for hook in hooks:
            if hook in self._known or (hook.only_ranks and not in_rank):
                continue
            self._known[hook] = None
            around_import(hook.framework, self._completed)  # before the next one: it ends after it
            for name in hook.modules:
                around_import(name, self._changed)
                if hook.only_ranks and name in sys.modules:
                    self._run(hook, sys.modules[name])
        self._tells = self._tells or in_rank
        self._tell()

    @contextmanager
    def _changed(self, module: ModuleType) -> Iterator[None]:
        name = module.__name__
        yield
        for hook in list(self._known):
            if name in hook.modules:
                self._run(hook, module)

    @contextmanager
    def _completed(self, framework: ModuleType) -> Iterator[None]:
        name = framework.__name__
        self._importing.add(name)
        try:
            yield
        finally:
            self._importing.discard(name)
        for hook in list(self._known):
            is_meant = hook.framework == name and hasattr(framework, hook.sign or "__name__")
            if is_meant and not any(map(_find, hook.modules)):
                self._fail(hook, f"there is no module {hook.modules[0]}")
        self._tell()

    def _run(self, hook: ImportHook, module: ModuleType) -> None:
        before: list[tuple[Any, dict[str, Any]]] = []
        try:
            function = _function(hook.function)
            before = _attributes(module)
            function(module)
        except Exception as error:
            _undo(before)
            self._fail(hook, f"{module.__name__}: {_text(error)}")
            self._tell()

    def _fail(self, hook: ImportHook, reason: str) -> None:
        if hook not in self._failed:
            self._failed[hook] = reason
            self._untold.append(hook)

    def _tell(self) -> None:
        """Tell the user what has failed, once: together, at the end of a framework's import."""
        if not self._tells:
            return
        told = [hook for hook in self._untold if hook.framework not in self._importing]
        self._untold = [hook for hook in self._untold if hook not in told]
        if current_rank() == 0:  # all ranks have the same versions
            for framework in dict.fromkeys(hook.framework for hook in told):
                failed = [hook for hook in told if hook.framework == framework]
                log_to_driver(_notice(framework, {hook: self._failed[hook] for hook in failed}))


install = _Hooks().install


def _notice(framework: str, failed: dict[ImportHook, str]) -> str:
    version = getattr(sys.modules.get(framework), "__version__", "of an unknown version")
    wrong = "; ".join(hook.without for hook in failed if hook.trains)
    rest = "; ".join(hook.without for hook in failed if not hook.trains)
    text = f"HorovodRunner: this version of horovod_runner does not fit {framework} {version}. "
    text += f"THE TRAINING CAN GO WRONG, because {wrong}. " if wrong else ""
    text += f"In this run {rest}. " if rest else ""
    reasons = "; ".join(dict.fromkeys(failed.values()))
    return f"{text}Use another version of one of them. What is missing: {reasons}"


def _text(error: Exception) -> str:
    if isinstance(error, AttributeError) and error.name:
        # Python's own text speaks of a circular import: the module is still being imported.
        owner = getattr(error.obj, "__name__", type(error.obj).__name__)
        return f"{owner} has no attribute {error.name}"
    return f"{type(error).__name__}: {error}"


def _function(name: str) -> Any:
    """The function of a hook: "package.module:name", or "package.module:object.method"."""
    module, _, path = name.partition(":")
    found: Any = import_module(module, "horovod_runner")
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _attributes(module: ModuleType) -> list[tuple[Any, dict[str, Any]]]:
    # Not isinstance: it asks for __class__, at which deprecated names of torch warn.
    kinds = [each for each in vars(module).values() if issubclass(type(each), type)]
    own = [kind for kind in kinds if kind.__module__ == module.__name__]
    return [(owner, dict(vars(owner))) for owner in (module, *own)]


def _undo(before: list[tuple[Any, dict[str, Any]]]) -> None:
    """Give modules and classes the attributes that they had; modules that were imported stay."""
    for owner, attributes in before:
        for name, value in list(vars(owner).items()):
            if name not in attributes and not issubclass(type(value), ModuleType):
                delattr(owner, name)
            elif name in attributes and value is not attributes[name]:
                setattr(owner, name, attributes[name])


def _find(name: str) -> ModuleSpec | None:
    """The spec of a module in a package that is imported, without an import; None without one."""
    spec: ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
    parent = name.rpartition(".")[0]
    if spec is not None or not parent:
        return spec
    folders = getattr(_find(parent), "submodule_search_locations", None)
    return None if folders is None else PathFinder.find_spec(name, folders)

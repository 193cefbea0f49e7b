"""Pickles main and its arguments; if that fails, names the captured object and the path to it.

    main -> helper -> cfg.session has the type pyspark.sql.session.SparkSession (...)

The search runs only after a failure: a run that pickles pays for one pickling.
"""

from __future__ import annotations

import functools
import io
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from horovod_runner.common.by_value import by_value
from horovod_runner.common.text import bytes_text
from horovod_runner.worker.interpreter import main_module
from horovod_runner.worker.script import Script

# A task's closure is one array of the JVM.
MAX_BYTES = (1 << 31) - (1 << 20)

# What to do instead, by the type's module and name, or by its package.
_FRAME = (
    "Make it an argument of its own, run(main, train=df): it arrives in main as this rank's shard."
)
_ROWS = "Pass rdd.toDF() as an argument of its own: it arrives in main as this rank's shard."
_ADVICE = {
    "pyspark.sql.dataframe.DataFrame": _FRAME,
    "pyspark.sql.classic.dataframe.DataFrame": _FRAME,
    "pyspark.sql.connect.dataframe.DataFrame": _FRAME,
    "pyspark.rdd.RDD": _ROWS,
    "pyspark.core.rdd.RDD": _ROWS,
    "pyspark.pandas.frame.DataFrame": "Pass frame.to_spark(): it arrives in main as a shard.",
    "pandas.core.frame.DataFrame": _FRAME,
    "pandas.DataFrame": _FRAME,
    "pyspark": "It exists only on the driver: use it before run, and pass its results.",
    "_thread": "Create it inside main: every rank is a separate process.",
    "threading": "Create it inside main: every rank is a separate process.",
    "_io": "Pass the path, and open the file inside main.",
    "socket": "Pass the address, and connect inside main.",
    "sqlite3": "Pass the path, and connect inside main.",
    "builtins.generator": "Pass a list, or the function that makes it.",
    "torch": "Pass it from the CPU, tensor.cpu(), and move it to the rank's own GPU inside main.",
    "numpy": "Write it to files that the ranks can read, and load it inside main.",
    "pandas": "Write it to files that the ranks can read, and load it inside main.",
    "pyarrow": _FRAME,
}


# Pickle, and cloudpickle too, refers to them by their names.
_CACHED = type(functools.lru_cache(len))


class RefusedError(Exception):
    """An object can be pickled, but would be wrong or useless on a rank."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler; refuses objects that would arrive broken."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=5)

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor) and obj.is_cuda:
            raise RefusedError("a tensor on a GPU: every rank would load it onto the same one")
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(obj, numpy.ndarray) and obj.nbytes > MAX_BYTES:
            raise RefusedError(f"{bytes_text(obj.nbytes)}, and a task can receive at most 2 GB")
        if type(obj).__module__.startswith("pyspark.sql.connect."):
            # They pickle as references to a session that no rank has.
            raise RefusedError("it belongs to this process's connection to Spark")
        if isinstance(obj, _CACHED) and obj.__module__ == "__main__":
            return main_module.cached, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


def pickle_for_ranks(value: object, ship_modules: Sequence[types.ModuleType] = ()) -> bytes:
    """Pickle with cloudpickle; raises RefusedError for an object that would arrive broken."""
    file = io.BytesIO()
    with by_value(ship_modules):
        _Pickler(file).dump(value)
    return file.getvalue()


class _MainGlobals(dict[str, Any]):
    """The globals of the user's ``__main__``; becomes those of the rank's ``__main__``."""


class _CallPickler(_Pickler):
    """Pickles a call of main. Functions of ``__main__`` share the rank's ``__main__`` later."""

    def __init__(self, file: Any, main: Callable[..., Any]) -> None:
        super().__init__(file)
        own = getattr(getattr(main, "func", main), "__globals__", {})  # .func of functools.partial
        is_main = own.get("__name__") == "__main__"
        self._names: Mapping[str, Any] = own if is_main else vars(sys.modules["__main__"])
        self.globals_ref[id(self._names)] = _MainGlobals()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _MainGlobals):
            return main_module.main_globals, (), None, None, iter(obj.items())
        return super().reducer_override(obj)


class _DefinitionFinder(_CallPickler):
    """Writes nothing, and finds what is defined in ``__main__``."""

    def __init__(self, main: Callable[..., Any]) -> None:
        super().__init__(_Nowhere(), main)
        self.defined: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | types.FunctionType | _CACHED) and obj.__module__ == "__main__":
            name = getattr(obj, "__name__", "")  # not where a callable object is cached
            if self._names.get(name) is obj:
                self.defined[name] = obj
        kind = type(obj)
        package = kind.__module__.partition(".")[0]
        # The class is asked: torch.classes, a module, raises RuntimeError for names that it lacks.
        if package in ("torch", "numpy") and hasattr(kind, "dtype") and obj.dtype != object:
            return int, ()  # large, and nothing is defined in it
        return super().reducer_override(obj)


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


def pickle_call(
    main: Callable[..., Any],
    kwargs: Mapping[str, Any],
    ship_modules: Sequence[types.ModuleType] = (),
) -> bytes:
    """Pickle ``main`` and its arguments, for ``worker.interpreter.main_module.load_call``.

    Two pickles, one after the other, which share objects: what main and the arguments use of
    ``__main__``; main and the arguments. Processes that a rank starts load the first alone.
    """
    file = io.BytesIO()
    with by_value(ship_modules):
        finder = _DefinitionFinder(main)
        finder.dump((main, kwargs))
        pickler = _CallPickler(file, main)
        pickler.dump((finder.defined, main if isinstance(main, Script) else None))
        pickler.dump((main, kwargs))
    return file.getvalue()


def find_culprit(
    main: Callable[..., Any], kwargs: Mapping[str, Any], ship_modules: Sequence[types.ModuleType]
) -> str:
    """Describe the innermost object that cannot be pickled; empty if none is found."""

    def reason(value: Any) -> str:
        """Why it cannot be pickled; empty if it can."""
        try:
            pickle_for_ranks(value, ship_modules)
        except Exception as error:
            lines = str(error).strip().splitlines()
            return lines[0][:200] if lines else type(error).__name__
        return ""

    for start, root in _roots(main, kwargs):
        if reason(root):
            path, culprit = _descend(start, root, lambda value: bool(reason(value)))
            advice = _known(culprit) or "Create it inside main instead of capturing or passing it."
            return f"{path} has the type {_type_name(culprit)} ({reason(culprit)}). {advice}"
    return ""


def find_largest(main: Callable[..., Any], kwargs: Mapping[str, Any]) -> str:
    """The path to the object that takes most of the pickled bytes, and its size."""

    def size(value: Any) -> int:
        try:
            return len(pickle_for_ranks(value))
        except Exception:
            return 0

    roots = [(size(root), start, root) for start, root in _roots(main, kwargs)]
    total, start, root = max(roots, key=lambda item: item[0])
    path, largest = _descend(start, root, lambda value: size(value) > total // 2)
    return f"{path}, of type {_type_name(largest)}, with {bytes_text(size(largest))}"


def _roots(main: Callable[..., Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    name = getattr(main, "__name__", None) or _type_name(main)
    return [(name, main), *((f"argument {key}", value) for key, value in kwargs.items())]


def _descend(path: str, value: Any, matches: Callable[[Any], bool]) -> tuple[str, Any]:
    """Follow the first matching child from a value that matches, as deep as it goes."""
    seen = {id(value)}
    while not _known(value):  # the inside of a known type does not help the user
        for step, child in _children(value):
            if id(child) not in seen and matches(child):
                path, value = f"{path}{step}", child
                seen.add(id(child))
                break
        else:
            break
    return path, value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """The objects that are pickled with a value, each with its step of the path."""
    if isinstance(value, types.FunctionType):
        yield from _captured(value)
    elif isinstance(value, types.MethodType):
        yield " -> self", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f" -> argument {i}", item) for i, item in enumerate(value.args))
        yield from ((f" -> {name}=", item) for name, item in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f" -> {item!r:.40}", item) for item in value)
    else:
        attributes = getattr(value, "__dict__", None) or {}
        yield from ((f".{name}", item) for name, item in dict(attributes).items())
        if isinstance(value, type):
            yield from ((f" -> {base.__qualname__}", base) for base in value.__bases__)


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            yield f" -> {name}", cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f" -> {name}", function.__globals__[name]
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield " -> a default value", default


def _global_names(code: types.CodeType) -> Iterator[str]:
    """The global names that a function may use, those of its inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _known(value: object) -> str:
    """What to do instead of pickling a value of this type; empty for other types."""
    kind = type(value)
    full = f"{kind.__module__}.{kind.__qualname__}"
    return _ADVICE.get(full) or _ADVICE.get(kind.__module__.partition(".")[0]) or ""

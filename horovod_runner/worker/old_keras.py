"""Adds a note to an exception that comes from code for Keras 2 or TensorFlow 1.

The note names the line, what it was written for, and both ways out.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from importlib import metadata
from traceback import walk_tb
from typing import Any, Final, NamedTuple

from horovod_runner.worker import old_keras_names as names
from horovod_runner.worker.old_keras_names import OldName

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_KEYWORD = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")
_OPTIMIZER_KEYWORD = re.compile(r"Argument\(s\) not recognized: \{'(\w+)'")
_IMPORT = re.compile(r"cannot import name '(\w+)' from '(keras[\w.]*|tensorflow[\w.]*)'")
_MISSING = re.compile(r"(?:module '([\w.]+)'|'(\w+)' object) has no attribute '(\w+)'")
# A line of a tf.function: TensorFlow puts its traceback into the text of a new exception.
_TRACED = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s+([^\n]*)')
_STANDALONE = re.compile(r"^\s*(import keras\b|from keras\b)", re.MULTILINE)


class _Line(NamedTuple):
    file: str
    number: int
    text: str


_BY_HOROVOD_RUNNER: Final = (
    'HorovodRunner(env={"TF_USE_LEGACY_KERAS": "1"}), or --env TF_USE_LEGACY_KERAS=1'
)
#: In a program that something else starts.
BY_PROGRAM: Final = (
    "TF_USE_LEGACY_KERAS=1 in the environment of every rank (mpirun -x TF_USE_LEGACY_KERAS=1)"
)


def add_note(error: BaseException, setting: str = _BY_HOROVOD_RUNNER) -> None:
    """Add a note to an exception if it comes from code for Keras 2 or TensorFlow 1.

    ``setting`` says how the ranks get TF_USE_LEGACY_KERAS. Does nothing if neither Keras nor
    TensorFlow is imported.
    """
    if "keras" not in sys.modules and "tensorflow" not in sys.modules:
        return
    line = _users_line(error)
    old = None if line is None else _old_name(error, line.text)
    if line is not None and old is not None:
        error.add_note(_note(old, line, setting))


def _note(old: OldName, line: _Line, setting: str) -> str:
    library = old.library.partition(" ")[0]
    is_cell = line.file.startswith("<") or "ipykernel" in line.file
    where = "the notebook" if is_cell else os.path.basename(line.file)
    place = f"line {line.number} of a cell" if is_cell else f"{line.file}, line {line.number},"
    text = (
        f"HorovodRunner: {place} was written for {old.library}, and this "
        f"rank has {library} {_version(library.lower())}: {line.text}\n"
        f"Either change the code. Write {old.now}. `horovod-runner migrate FILE` lists all such "
        f"lines of {where}, and changes most of them.\n"
    )
    if _is_legacy():
        return text + "TF_USE_LEGACY_KERAS=1 is set already, and does not help here."
    text += (
        f"Or use Keras 2: install tf_keras on all hosts (pip install tf_keras), and set {setting}."
    )
    if old.keras_2:
        text += f" {old.keras_2}"
    if old.library == "TensorFlow 1":
        text += (
            " The names of TensorFlow 1 are in tf.compat.v1 then, those of its keras.backend in "
            "tf.compat.v1.keras.backend."
        )
    if _STANDALONE.search("".join(linecache.getlines(line.file))):
        text += (
            " The variable changes tf.keras alone: replace `import keras` by `from tensorflow "
            "import keras`, and horovod.keras by horovod.tensorflow.keras."
        )
    return text


def _old_name(error: BaseException, line: str) -> OldName | None:
    text = str(error)
    if isinstance(error, AttributeError):
        return _attribute(error, line)
    if isinstance(error, ImportError):
        missing = isinstance(error, ModuleNotFoundError)
        return _module(error.name or "") if missing else _imported(text)
    if isinstance(error, TypeError):
        if found := _KEYWORD.search(text):
            return names.KEYWORDS.get((found[1], found[2]))
        called = re.search(r"\.(variables|weights)\(\)", line)
        return names.CALLED_LIST if called and "'list' object is not callable" in text else None
    return _value(text) if isinstance(error, ValueError) else None


def _value(text: str) -> OldName | None:
    if found := _OPTIMIZER_KEYWORD.search(text):
        return names.OPTIMIZER_KEYWORDS.get(found[1])
    is_file = any(words in text for words in names.FILE_ERRORS)
    return names.FILES if is_file else None


def _attribute(error: AttributeError, line: str) -> OldName | None:
    found = _MISSING.search(str(error))
    if found is None:
        return None
    module, kind, name = found.groups()
    if (kind, name) == ("str", "name") and "set_value(" in line:
        return names.BACKEND["set_value"]  # tf.keras has kept it, for variables of Keras 2
    if module is None:
        return names.ATTRIBUTES.get(name) if _is_keras(error.obj, kind) else None
    if module.endswith("keras.backend"):
        return names.BACKEND.get(name, names.OLD_BACKEND)
    if module.partition(".")[0] == "tensorflow":
        return _tensorflow(module, name)
    return _missing(module, name)


def _is_keras(thing: object, kind: str) -> bool:
    """Whether an object, or else a class of this name, is a model or optimizer of Keras.

    The object is None where TensorFlow has replaced the exception that had it.
    """
    if thing is not None:
        return any(base.__module__.partition(".")[0] == "keras" for base in type(thing).__mro__)
    keras = sys.modules.get("keras")
    homes = (getattr(keras, "models", None), getattr(keras, "optimizers", None))
    return any(hasattr(home, kind) for home in homes)


def _tensorflow(module: str, name: str) -> OldName | None:
    path = re.sub(r"^tensorflow\.?(_api\.v2\.?)?", "", module)
    inside: Any = sys.modules["tensorflow"].compat.v1
    for part in filter(None, [*path.split("."), name]):
        inside = getattr(inside, part, None)
    known = inside is not None or name in ("contrib", "estimator")
    return names.tensorflow_1(f"{path}.{name}".lstrip(".")) if known else None


def _imported(text: str) -> OldName | None:
    if text.startswith("`keras.optimizers.legacy` is not supported"):
        return names.LEGACY_OPTIMIZERS
    found = _IMPORT.search(text)
    if found is None:
        return None
    name, module = found.groups()
    if module.endswith("keras.backend"):
        return names.BACKEND.get(name, names.OLD_BACKEND)
    if loss := _loss(module, name):
        return loss
    if module.startswith("tensorflow"):
        return _tensorflow(module, name)
    return _missing(module, name)


def _missing(module: str, name: str) -> OldName | None:
    """Return what to write for a name that a module of the package keras has lost."""
    if name in names.ONLY_IN_TF_KERAS.get(module, ()):
        return OldName("Keras 2", f"from tensorflow.{module} import {name}")
    if loss := _loss(module, name):
        return loss
    return _module(f"{module}.{name}")


def _loss(module: str, name: str) -> OldName | None:
    """Return what to write for a loss that is called otherwise today; None for other names."""
    home = module.replace("keras._tf_keras.", "tensorflow.")
    new = names.loss(home, name)
    return OldName("Keras 2", f"{home}.{new}") if new else None


def _module(name: str) -> OldName | None:
    name = name.removeprefix("tensorflow.")
    home = names.MODULES.get(name)
    if home is not None:
        return OldName("Keras 2", f"from {home} import ...")
    if name in names.ONLY_IN_TF_KERAS:
        return OldName("Keras 2", f"from tensorflow.{name} import ...")
    return None


def _users_line(error: BaseException) -> _Line | None:
    """Return the innermost line that belongs neither to an installed package nor to this one."""
    last = None
    for frame, number in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not _is_installed(file):
            last = _Line(file, number, linecache.getline(file, number).strip())
    for file, line, text in _TRACED.findall(str(error)):
        if not _is_installed(file):
            last = _Line(file, int(line), text.strip())
    return last


def _is_installed(file: str) -> bool:
    if file.startswith("<frozen") or "__autograph_generated_file" in file:
        return True
    paths = sysconfig.get_paths()
    folders = (_PACKAGE, paths["stdlib"], paths["platstdlib"])
    return any(folder in file for folder in ("site-packages", "dist-packages")) or any(
        file.startswith(folder + os.sep) for folder in folders
    )


def _is_legacy() -> bool:
    return os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return str(getattr(sys.modules.get(package), "__version__", "of another version"))

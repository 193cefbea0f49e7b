"""The state of a training, copied out of the model and stored in a file, and read back.

    torch     .pt      what torch.save writes; read with weights_only
    arrays    .npz     NumPy arrays and plain values; TensorFlow tensors become arrays
    keras     .keras   what Keras saves, optimizer included
    bytes     .bin
    folder    .tar

Nothing here is ever unpickled by plain ``pickle``.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from horovod_runner.errors import CheckpointError
from horovod_runner.marker import Kind

_TREE = "tree.msgpack"
_PLAIN = (type(None), bool, int, float, str, bytes)


class Snapshot(NamedTuple):
    """A copy of a state, to be written at leisure.

    Attributes:
        kind: see the module.
        write: writes it to a new file, whose name ends as :data:`SUFFIXES` says.
    """

    kind: Kind
    write: Callable[[Path], None]


class Copier:
    """Copies states out of the model, into the same memory each time: one at a time.

    The first copy of a large state takes longer, for the memory is new.
    """

    def __init__(self) -> None:
        self._torch: dict[tuple[Any, ...], Any] = {}
        self._arrays: dict[tuple[Any, ...], Any] = {}
        self._used: set[tuple[Any, ...]] = set()
        self._twin: Any = None
        self._twin_of: Any = None

    def copy(self, state: Any) -> Snapshot:
        """Copy a state; what was copied before is overwritten.

        Raises:
            TypeError: it holds something that cannot be stored.
        """
        if isinstance(state, (bytes, bytearray, memoryview)):
            data = bytes(state)
            return Snapshot("bytes", lambda path: _write_bytes(path, data))
        if isinstance(state, (str, os.PathLike)):
            return _packed(Path(state))
        if _is_keras(state):
            return self._copy_keras(state)
        if not isinstance(state, Mapping):
            raise TypeError(
                f"a checkpoint's state is a dict, a Keras model, bytes, or the path of a folder, "
                f"not {type(state).__qualname__}: give a torch module's state_dict(), in a dict of "
                "all that is to be found again"
            )
        torch = sys.modules.get("torch")
        seen: dict[tuple[Any, ...], Any] = {}
        with_torch = torch is not None and _holds(state, torch.Tensor)
        self._used = set()
        copied = _map(state, "", lambda value, where: self._leaf(value, where, seen, with_torch))
        for buffers in (self._torch, self._arrays):  # what the state has no longer
            for key in buffers.keys() - self._used:
                del buffers[key]
        if with_torch:
            return Snapshot("torch", lambda path: _write_torch(path, copied))
        return Snapshot("arrays", lambda path: _write_arrays(path, copied))

    def _leaf(
        self, value: Any, where: str, seen: dict[tuple[Any, ...], Any], with_torch: bool
    ) -> Any:
        if type(value) in _PLAIN:
            return value
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        if torch is not None:
            if isinstance(value, torch.Tensor):
                return self._copy_tensor(torch, value, where, seen)
            if with_torch and isinstance(value, (torch.dtype, torch.device)):
                return value
        if isinstance(value, type):
            raise _not_storable(value, where)
        if type(value).__module__.startswith("tensorflow.") and hasattr(value, "numpy"):
            value = value.numpy()  # a copy, unless the tensor itself never changes
            if type(value) in _PLAIN:
                return value
            numpy = sys.modules["numpy"]
        if numpy is not None and isinstance(value, numpy.generic):
            return value
        if numpy is not None and isinstance(value, numpy.ndarray):
            if value.dtype.hasobject:
                raise _not_storable(value, where, f" of dtype {value.dtype}")
            return self._copy_array(numpy, value, where)
        raise _not_storable(value, where)

    def _copy_tensor(
        self, torch: Any, tensor: Any, where: str, seen: dict[tuple[Any, ...], Any]
    ) -> Any:
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.cpu().clone()
        # Tied weights stay tied, and are stored once.
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and same in seen:
            return seen[same]
        key = (where, tuple(tensor.shape), tensor.dtype)
        self._used.add(key)
        buffer = self._torch.get(key)
        if buffer is None:
            pinned = tensor.is_cuda  # copied to by the device itself
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._torch[key] = buffer
        buffer.copy_(tensor)
        seen[same] = buffer
        return buffer

    def _copy_array(self, numpy: Any, array: Any, where: str) -> Any:
        key = (where, array.shape, array.dtype)
        self._used.add(key)
        buffer = self._arrays.get(key)
        if buffer is None:
            buffer = self._arrays[key] = numpy.empty(array.shape, array.dtype)
        numpy.copyto(buffer, array)
        return buffer

    def _copy_keras(self, model: Any) -> Snapshot:
        """Into a twin of the model, which is saved beside the training."""
        if self._twin_of is not model or not self._matches(model):
            self._twin_of, self._twin = model, _twin_of(model)
        if self._twin is None:
            return _saved_at_once(model)
        for own, other in zip(keras_variables(self._twin), keras_variables(model), strict=True):
            own.assign(other)
        twin = self._twin
        return Snapshot("keras", twin.save)

    def _matches(self, model: Any) -> bool:
        """Whether the twin still has all variables of its model (an optimizer is built late)."""
        if self._twin is None:
            return True
        ours, theirs = keras_variables(self._twin), keras_variables(model)
        return [v.shape for v in ours] == [v.shape for v in theirs]


def _is_keras(state: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(state, keras.Model)


def keras_variables(model: Any) -> list[Any]:
    """A Keras model's weights and its optimizer's state; not the states of random generators."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.weights, *(optimizer.variables if optimizer is not None else ())]


def _twin_of(model: Any) -> Any:
    """A model of its own with the same layers and optimizer; None where Keras cannot make one."""
    keras = sys.modules["keras"]
    try:
        twin = keras.models.clone_model(model)
        if not twin.built:
            twin.build(model.input_shape)
        if getattr(model, "compiled", False):
            twin.compile_from_config(model.get_compile_config())
            if twin.optimizer is not None and model.optimizer.built:
                twin.optimizer.build(twin.trainable_variables)
        ours, theirs = keras_variables(twin), keras_variables(model)
        return twin if [v.shape for v in ours] == [v.shape for v in theirs] else None
    except Exception:
        return None  # a subclassed model, say: it is saved while the training waits


def _saved_at_once(model: Any) -> Snapshot:
    with tempfile.TemporaryDirectory(prefix="horovod_runner-keras-") as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        data = path.read_bytes()
    return Snapshot("keras", lambda path: _write_bytes(path, data))


def _packed(folder: Path) -> Snapshot:
    """A folder's files, as they are now."""
    if not folder.is_dir():
        raise TypeError(
            f"{str(folder)!r} is no folder: a checkpoint's state is a dict, a Keras model, bytes, "
            "or the path of a folder that is there"
        )
    # To disk, not to memory: it may be of any size.
    packed = tempfile.TemporaryFile(prefix="horovod_runner-folder-")  # noqa: SIM115 - see write
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, arcname=".")

    def write(path: Path) -> None:
        with packed, path.open("xb") as file:
            packed.seek(0)
            shutil.copyfileobj(packed, file, 1 << 20)

    return Snapshot("folder", write)


def _holds(value: Any, kind: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(each, kind) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds(each, kind) for each in value)
    return isinstance(value, kind)


def _map(value: Any, where: str, leaf: Callable[[Any, str], Any]) -> Any:
    """The same containers with other leaves.

    Raises:
        TypeError: a container or a key is of a type that cannot be stored.
    """
    kind = type(value)
    if kind in (dict, OrderedDict) or (isinstance(value, Mapping) and not hasattr(value, "shape")):
        made: dict[Any, Any] = OrderedDict() if kind is OrderedDict else {}
        for key, each in value.items():
            if type(key) not in _PLAIN:
                raise TypeError(
                    f"state{where} has a key of type {type(key).__qualname__} ({key!r:.80}): keys "
                    "are strings and numbers in a checkpoint"
                )
            made[key] = _map(each, f"{where}[{key!r}]", leaf)
        if hasattr(value, "_metadata"):  # torch's own: the versions of the modules
            made._metadata = value._metadata  # type: ignore[attr-defined]
        return made
    if kind is list:
        return [_map(each, f"{where}[{index}]", leaf) for index, each in enumerate(value)]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):  # torch.Size is one
        return tuple(_map(each, f"{where}[{index}]", leaf) for index, each in enumerate(value))
    return leaf(value, where)


def _not_storable(value: Any, where: str, more: str = "") -> TypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    advice = ": give its state_dict()" if hasattr(value, "state_dict") else ""
    return TypeError(
        f"state{where} is a {kind}{more}, which a checkpoint cannot hold{advice}. It holds "
        "tensors, NumPy arrays, numbers, strings, bytes and None, in dicts, lists and tuples."
    )


def _write_bytes(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)


def _write_torch(path: Path, state: Any) -> None:
    try:
        sys.modules["torch"].save(state, path)
    except RuntimeError as error:  # torch's own does not tell what the system said
        free = shutil.disk_usage(path.parent).free / 1e6
        told = str(error).partition("\n")[0]
        raise OSError(f"torch.save failed with {free:.1f} MB free on its disk: {told}") from error


def _write_arrays(path: Path, state: Any) -> None:
    import numpy

    npy: Any = numpy.lib.format
    arrays: dict[str, Any] = {}

    def fold(value: Any) -> Any:
        if isinstance(value, dict):
            return ["dict", [[key, fold(each)] for key, each in value.items()]]
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, [fold(each) for each in value]]
        if isinstance(value, (numpy.ndarray, numpy.generic)):
            name = f"a{len(arrays)}"
            own = numpy.asarray(value)
            # What NumPy itself does not know (bfloat16) it would store as mere bytes.
            arrays[name] = own.view(f"u{own.itemsize}") if own.dtype.kind == "V" else own
            return ["scalar" if isinstance(value, numpy.generic) else "array", name, own.dtype.name]
        if type(value) is int and not -(2**63) <= value < 2**63:
            return ["int", str(value)]
        return ["", value]

    tree = msgspec.msgpack.encode(fold(state))
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        archive.writestr(_TREE, tree)
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                npy.write_array(file, array, allow_pickle=False)


def read(kind: Kind, path: Path) -> Any:
    """The state in a file.

    Raises:
        CheckpointError: what wrote it is not installed here, or knows more than this version.
    """
    try:
        return _READERS[kind](path)
    except ImportError as error:
        raise CheckpointError(
            f"the checkpoint {path.name} cannot be read here: {error}. It is a {kind} one; install "
            "what wrote it"
        ) from error


def _read_torch(path: Path) -> Any:
    import torch

    with _numpy_allowed(torch):
        return torch.load(path, map_location="cpu", weights_only=True)


def _numpy_allowed(torch: Any) -> Any:
    """Lets ``weights_only`` pass NumPy's arrays and numbers, which hold no code either."""
    allow = getattr(torch.serialization, "safe_globals", None)
    try:
        import numpy
    except ImportError:
        return nullcontext()
    if allow is None:  # torch before 2.5
        return nullcontext()
    home = "_core" if numpy.lib.NumpyVersion(numpy.__version__) >= "2.0.0" else "core"
    multiarray = import_module(f"numpy.{home}.multiarray")
    kinds = {type(numpy.dtype(code)) for code in numpy.typecodes["AllFloat"]}
    kinds |= {type(numpy.dtype(code)) for code in numpy.typecodes["AllInteger"] + "?USFD"}
    kinds |= {type(numpy.dtype(code)) for code in ("M8[s]", "m8[s]")}
    found = [numpy.ndarray, numpy.dtype, *kinds]
    # By both names: NumPy 2 moved them.
    for name in ("_reconstruct", "scalar"):
        function = getattr(multiarray, name)
        found += [(function, f"numpy.{place}.multiarray.{name}") for place in ("core", "_core")]
    return allow(found)


def _read_arrays(path: Path) -> Any:
    import numpy

    npy: Any = numpy.lib.format
    with zipfile.ZipFile(path) as archive:

        def array(name: str, dtype: str) -> Any:
            with archive.open(f"{name}.npy") as file:
                found = npy.read_array(file, allow_pickle=False)
            if found.dtype.name != dtype and found.dtype.kind == "u":
                import ml_dtypes

                return found.view(getattr(ml_dtypes, dtype))
            return found

        def unfold(folded: Any) -> Any:
            kind, value, *rest = folded
            match kind:
                case "dict":
                    return {key: unfold(each) for key, each in value}
                case "list":
                    return [unfold(each) for each in value]
                case "tuple":
                    return tuple(unfold(each) for each in value)
                case "array":
                    return array(value, rest[0])
                case "scalar":
                    return array(value, rest[0])[()]
            return int(value) if kind == "int" else value

        return unfold(msgspec.msgpack.decode(archive.read(_TREE)))


def _read_keras(path: Path) -> Any:
    import keras

    return keras.models.load_model(path)  # in safe mode, its default


def _read_folder(path: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=_scratch()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # The filter keeps everything inside. Pythons before 3.11.4 may know none: what
    # `save_checkpoint` writes has plain files and folders alone.
    safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(path) as tar:
        members = tar.getmembers()
        for each in members if not safely else ():
            inside = (folder / each.name).resolve().is_relative_to(folder.resolve())
            if not inside or not (each.isfile() or each.isdir()):
                raise ValueError(f"{each.name} is no file or folder of the checkpoint")
        tar.extractall(folder, members, **safely)  # noqa: S202 - see above
    return folder


def _scratch() -> str | None:
    """The run's own folder, in a rank; else the system's."""
    return os.environ.get("HOROVOD_RUNNER_DATA")


_READERS: Final[Mapping[Kind, Callable[[Path], Any]]] = {
    "torch": _read_torch,
    "arrays": _read_arrays,
    "keras": _read_keras,
    "bytes": lambda path: path.read_bytes(),
    "folder": _read_folder,
}

"""Packs a state into one block of memory with one copy, and reads it back. The format of commits.

    tensors and arrays, each at a multiple of 64 bytes | tree: containers, plain values, positions

The tree is MessagePack. Reading runs no code.
"""

from __future__ import annotations

import io
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from horovod_runner.checkpoints.formats import foreign_type, is_foreign
from horovod_runner.checkpoints.snapshot import is_dense, map_state

_ALIGNMENT: Final = 64
_decode_tree: Final = msgspec.msgpack.Decoder().decode
# A block of memory: a writable buffer, such as an mmap.
Memory = Any


class _Placed(NamedTuple):
    """A tensor or an array that has its place in memory, and its entry in the tree."""

    entry: list[Any]  # how to read it, its position, and more


class StateLayout:
    """Where each part of a state, see :func:`map_state`, goes in memory. Copies nothing yet.

    The encoded tree begins at ``tree_at``, and the block has ``size`` bytes.

    Raises:
        TypeError: the state holds a value that cannot be stored.
    """

    def __init__(self, state: Any) -> None:
        self._copies: list[Callable[[Memory], None]] = []
        self._end = 0
        mapped, _ = map_state(state, self._place_tensor, self._place_array)
        self.tree: bytes = msgspec.msgpack.encode(_encode(mapped))
        self.tree_at = self._end
        self.size = self._end + len(self.tree)

    def copy_to(self, memory: Memory) -> None:
        """Copy the state to memory of at least :attr:`size` bytes."""
        for copy in self._copies:
            copy(memory)
        memory[self.tree_at : self.size] = self.tree

    def _place(self, size: int) -> int:
        # Also of nothing: no two parts have the same position.
        at = self._end
        self._end += -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        return at

    def _place_tensor(self, tensor: Any, _where: str) -> _Placed:
        torch = sys.modules["torch"]
        if not is_dense(tensor):
            file = io.BytesIO()
            torch.save(tensor.cpu(), file)
            return self._place_bytes("saved", file.getvalue())
        size = tensor.numel() * tensor.element_size()
        at = self._place(size)

        def copy(memory: Memory) -> None:
            block = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at)
            block.view(tensor.dtype).view(tensor.shape).copy_(tensor)

        if size:
            self._copies.append(copy)
        return _Placed(["tensor", at, _torch_name(tensor.dtype), list(tensor.shape)])

    def _place_array(self, value: Any, _where: str) -> _Placed:
        numpy: Any = sys.modules["numpy"]
        array = numpy.asarray(value)
        dtype = array.dtype
        name = dtype.name if is_foreign(dtype) else dtype.str
        if dtype.names is not None:
            file = io.BytesIO()
            numpy.lib.format.write_array(file, array, allow_pickle=False)
            placed = self._place_bytes("npy", file.getvalue())
        else:
            at = self._place(array.nbytes)

            def copy(memory: Memory) -> None:
                numpy.copyto(numpy.ndarray(array.shape, dtype, memory, at), array)

            if array.nbytes:
                self._copies.append(copy)
            placed = _Placed(["array", at, name, list(array.shape)])
        return _Placed(["scalar", placed.entry]) if isinstance(value, numpy.generic) else placed

    def _place_bytes(self, kind: str, data: bytes) -> _Placed:
        at = self._place(len(data))

        def copy(memory: Memory) -> None:
            memory[at : at + len(data)] = data

        self._copies.append(copy)
        return _Placed([kind, at, len(data)])


def _torch_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _encode(value: Any) -> list[Any]:  # a node's kind, and what belongs to it
    if isinstance(value, _Placed):
        return value.entry
    if isinstance(value, dict):
        kind = "ordered" if isinstance(value, OrderedDict) else "dict"
        node = [kind, [[_encode(key), _encode(item)] for key, item in value.items()]]
        if hasattr(value, "_metadata"):  # of torch's state_dict: the versions of the modules
            node.append(_encode(value._metadata))
        return node
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_encode(item) for item in value]]
    if type(value) is int and not -(2**63) <= value < 2**63:
        return ["int", str(value)]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, (torch.dtype, torch.device)):
        return [f"torch.{type(value).__name__}", _torch_name(value)]
    return ["", value]


def read(memory: Memory, tree_at: int, size: int) -> Any:
    """Read a state; tensors are on the CPU. The result shares no memory with the block.

    The memory must be writable, though nothing is written to it.

    Raises:
        ImportError: the framework of a tensor or an array is not installed here.
    """
    found: dict[int, Any] = {}  # by position: tied weights stay tied

    def decode(node: Any) -> Any:
        kind, value, *rest = node
        made: Any = value
        match kind:
            case "dict" | "ordered":
                items = [(decode(key), decode(item)) for key, item in value]
                made = OrderedDict(items) if kind == "ordered" else dict(items)
                if rest:
                    made._metadata = decode(rest[0])
            case "list":
                made = [decode(item) for item in value]
            case "tuple":
                made = tuple(decode(item) for item in value)
            case "int":
                made = int(value)
            case "scalar":
                made = decode(value)[()]
            case "torch.dtype":
                made = _torch_dtype(value)
            case "torch.device":
                import torch

                made = torch.device(value)
            case "tensor" | "array" | "saved" | "npy":
                if value not in found:
                    found[value] = _READERS[kind](memory, value, *rest)
                made = found[value]
        return made

    return decode(_decode_tree(memory[tree_at:size]))


def _torch_dtype(name: str) -> Any:
    import torch

    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a type of torch's")
    return dtype


def _read_tensor(memory: Memory, at: int, name: str, shape: list[int]) -> Any:
    import torch

    dtype = _torch_dtype(name)
    tensor = torch.empty(shape, dtype=dtype)
    size = tensor.numel() * tensor.element_size()
    if size:
        block = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=at)
        tensor.copy_(block.view(dtype).view(shape))
    return tensor


def _read_array(memory: Memory, at: int, name: str, shape: list[int]) -> Any:
    import numpy

    try:
        dtype: Any = numpy.dtype(name)
    except TypeError:
        dtype = foreign_type(name)
    if not math.prod(shape):
        return numpy.empty(shape, dtype)
    return numpy.ndarray(shape, dtype, memory, at).copy()


def _read_saved(memory: Memory, at: int, size: int) -> Any:
    import torch

    return torch.load(io.BytesIO(memory[at : at + size]), map_location="cpu", weights_only=True)


def _read_npy(memory: Memory, at: int, size: int) -> Any:
    import numpy

    npy: Any = numpy.lib.format
    return npy.read_array(io.BytesIO(memory[at : at + size]), allow_pickle=False)


_READERS: Final[dict[str, Callable[..., Any]]] = {
    "tensor": _read_tensor,
    "array": _read_array,
    "saved": _read_saved,
    "npy": _read_npy,
}

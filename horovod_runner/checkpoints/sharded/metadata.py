"""The file `.metadata` of a sharded checkpoint: what lies where, with the SHA-256 of each piece.

It is the file of torch.distributed.checkpoint, a pickle, with two additions that other readers do
not see. It is read without running code: only the classes that it is made of are accepted.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from horovod_runner.checkpoints.sharded.tree import Shape
from horovod_runner.errors import CheckpointError

_ALLOWED: Final = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "horovod_runner.checkpoints.sharded.tree": {"Shape"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}
# The attributes that are added.
_SHAPE: Final = "horovod_runner_shape"
_DIGEST: Final = "horovod_runner_sha256"


class StoredPiece(NamedTuple):
    """Where a value, or a rank's part of a tensor, lies."""

    file: str
    at: int
    length: int  # in bytes
    sha256: bytes


def write(metadata: Metadata, pieces: dict[MetadataIndex, StoredPiece], shape: Shape) -> bytes:
    """Encode the planner's metadata of a checkpoint, with what is added."""
    metadata.planner_data = shape.paths
    metadata.storage_data = {}
    for index, piece in pieces.items():
        info = filesystem._StorageInfo(piece.file, piece.at, piece.length)
        setattr(info, _DIGEST, piece.sha256)
        metadata.storage_data[index] = info
    setattr(metadata, _SHAPE, (shape.numbered, shape.empty))
    return pickle.dumps(metadata)


def read(data: bytes, name: str) -> tuple[Metadata, dict[MetadataIndex, StoredPiece], Shape]:
    """Decode the metadata of a checkpoint called ``name``.

    Raises:
        CheckpointError: it was not written by :func:`write`.
    """
    try:
        metadata = unpickle(data)
        shape = Shape(metadata.planner_data, *getattr(metadata, _SHAPE))
        pieces = {
            index: StoredPiece(info.relative_path, info.offset, info.length, getattr(info, _DIGEST))
            for index, info in metadata.storage_data.items()
        }
    except Exception as error:
        raise CheckpointError(
            f"the metadata of the checkpoint {name} cannot be read: {error}. Another program, or "
            "another version of torch, may have written them: use another checkpoint."
        ) from error
    return metadata, pieces, shape


def unpickle(data: bytes) -> Any:
    """Read a pickle of the planner's classes; running no code.

    Raises:
        pickle.UnpicklingError: it holds something else.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, torch.dtype):
            return value
        raise pickle.UnpicklingError(f"{module}.{name} is not expected there")


def _member(kind: Any, name: str) -> Any:
    """The member of an enumeration: Python 3.12 and later pickle it as a call of getattr."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"{kind!r} is not expected there")
    return kind[name]

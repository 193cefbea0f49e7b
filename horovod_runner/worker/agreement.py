"""Decisions that all ranks take together."""

from __future__ import annotations

import math
import operator
import pickle
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, overload

from horovod_runner.wire.collectives import SmallCollectives, connected
from horovod_runner.worker import context

T = TypeVar("T")
How = Literal["rank 0", "any", "all", "mean", "min", "max"]
_HOWS = get_args(How)
_NAME = "agree"
_SHOWN = 4  # ranks of each kind
_LARGEST = 2**63 - 1  # that travels as an integer
_COMBINE: dict[str, Callable[[Sequence[float]], Any]] = {
    "any": any,
    "all": all,
    "mean": lambda values: sum(map(float, values)) / len(values),
    "min": lambda values: math.nan if any(map(math.isnan, values)) else min(values),
    "max": lambda values: math.nan if any(map(math.isnan, values)) else max(values),
}


@overload
def agree(value: T, how: Literal["rank 0"] = "rank 0") -> T: ...


@overload
def agree(value: Any, how: Literal["any", "all"]) -> bool: ...


@overload
def agree(value: Any, how: Literal["mean", "min", "max"]) -> float: ...


def agree(value: Any, how: How = "rank 0") -> Any:
    """Return the same value on every rank, for decisions that all ranks must take alike.

        width = agree(random.choice([32, 64]))          # rank 0's
        if agree(math.isnan(loss), "any"): break        # True on all ranks if it is on one
        scheduler.step(agree(loss.item(), "mean"))      # the mean over the ranks

    Call it on every rank, after ``hvd.init()`` or ``torch.distributed.init_process_group()``. It
    takes one small collective; two with "rank 0". With one rank, and outside a run, it returns the
    value.

    Args:
        value: this rank's. "rank 0": anything that can be pickled. "any", "all": its truth counts.
            Otherwise a number, or a tensor with one value.
        how: "rank 0" returns rank 0's value; "any" and "all" return a bool; "mean", "min" and
            "max" return a number, which is NaN if one of them is.

    Raises:
        RuntimeError: the ranks are not connected yet, or do not all make this call.
        TypeError: ``value`` is not a number.
        ValueError: ``how`` is unknown.
    """
    if how not in _HOWS:
        raise ValueError(f"agree: how must be one of {', '.join(_HOWS)}, not {how!r}")
    number = None if how == "rank 0" else _number(value, how)
    rank = context.current()
    if rank is None or rank.size == 1:
        return value if number is None else _COMBINE[how]([number])
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and not tensorflow.executing_eagerly():
        raise RuntimeError(
            "agree was called inside a tf.function, which calls Python only once: call it in the "
            "loop around that, or in a callback"
        )
    ranks = connected("agree compares the values of the ranks")
    caller = sys._getframe(1)
    asked = _call_of(how, caller.f_code.co_filename, caller.f_lineno)
    if number is not None:
        # Each rank knows the numbers and types of all, so the results are alike.
        sent = [number, 1] if isinstance(number, int) else [_packed(number), 0]
        given = _same_call(ranks, asked, sent)
        return _COMBINE[how]([each if integer else _unpacked(each) for each, integer in given])
    data = _pickled(value) if rank.rank == 0 else b""
    count, _ = _same_call(ranks, asked, [len(data)])[0]
    received = ranks.broadcast(data, count, name=_NAME)
    return pickle.loads(received) if rank.rank else value  # noqa: S301 - rank 0 sent it


@lru_cache
def _call_of(how: How, file: str, line: int) -> str:
    # Without the folder, which may differ by host.
    return f"agree(how={how!r}) at {Path(file).name}:{line}"


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"agree sends rank 0's value to the others, and {type(value).__name__} cannot be "
            f"pickled: {error}"
        ) from error


def _number(value: Any, how: str) -> float:
    if how in ("any", "all"):
        return bool(value)
    with suppress(TypeError):  # which operator.index raises for what is not an integer
        if abs(number := operator.index(value)) <= _LARGEST:
            return number
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"agree(value, how={how!r}) requires a number, not {type(value).__name__}; "
            'how="rank 0" takes any object'
        ) from None


def _packed(number: float) -> int:
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


def _unpacked(number: int) -> float:
    (unpacked,) = struct.unpack("<d", number.to_bytes(8, "little", signed=True))
    return float(unpacked)


def _same_call(ranks: SmallCollectives, asked: str, sent: Sequence[int]) -> list[list[int]]:
    """The numbers of all ranks, which must make the same call."""
    numbers, texts = exchange(ranks, asked, asked, sent)
    if not texts:
        return numbers
    shown = "; ".join(f"rank {rank} {text}" for rank, text in texts.items())
    raise RuntimeError(
        f"the ranks do not make the same decision: {shown}. Every rank must call agree at the same "
        "place, the same number of times."
    )


def exchange(
    ranks: SmallCollectives, key: str, text: str, sent: Sequence[int] = (), *, name: str = _NAME
) -> tuple[list[list[int]], dict[int, str]]:
    """Gather numbers, and find out whether all ranks have the same key.

    Args:
        ranks: connects them.
        key: to be compared.
        text: for other ranks to see, where keys differ.
        sent: this rank's numbers, two at most.
        name: shown where a rank waits for the others for ever.

    Returns:
        Two numbers by rank; and if keys differ, the texts of some ranks of each kind by number.
    """
    # Both may name a file, whose name need not be UTF-8.
    compared, data = (each.encode(errors="backslashreplace") for each in (key, text))
    found = ranks.gather([zlib.crc32(compared), len(data), *sent, 0, 0][:4], name)
    numbers = [each[2:] for each in found]
    if len({digest for digest, *_ in found}) == 1:
        return numbers, {}
    differing = [rank for rank, (digest, *_) in enumerate(found) if digest != found[0][0]]
    same = [rank for rank in range(len(found)) if rank not in differing]
    rank = context.current()
    own = 0 if rank is None else rank.rank
    return numbers, {
        root: ranks.broadcast(data if root == own else b"", found[root][1], root, name).decode()
        for root in sorted([*same[:_SHOWN], *differing[:_SHOWN]])
    }

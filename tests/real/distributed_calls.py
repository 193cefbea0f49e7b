"""Calls of torch.distributed whose results on two backends are compared, in a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

_KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8)
_KINDS += (torch.int32, torch.int64)
_OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)


def values(*shape: int, kind: Any = torch.float32) -> Any:
    return torch.randint(1, 4, shape).to(kind)


def reduced(group: Any, kind: Any, op: Any) -> list[Any]:
    tensor = values(5, 3, kind=kind)
    dist.all_reduce(tensor, op=op, group=group)
    return [tensor]


def gathered(group: Any, kind: Any) -> list[Any]:
    tensor = values(3, kind=kind)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor, group=group)
    return parts


def whole(group: Any) -> list[Any]:
    out = torch.empty(dist.get_world_size() * 4, 2)
    dist.all_gather_into_tensor(out, values(4, 2), group=group)
    return [out]


def scattered(group: Any) -> list[Any]:
    size = dist.get_world_size()
    out, part = torch.empty(4, 2), torch.empty(3)
    dist.reduce_scatter_tensor(out, values(4 * size, 2), group=group)
    dist.reduce_scatter(part, [values(3) for _ in range(size)], group=group)
    return [out, part]


def to_all(group: Any) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = [rank + 1] * size, [other + 1 for other in range(size)]
    out = torch.empty(sum(received), 2)
    dist.all_to_all_single(out, values(sum(sent), 2), received, sent, group=group)
    return [out]


def from_root(group: Any) -> list[Any]:
    tensor = values(3, 4).t()  # not contiguous
    dist.broadcast(tensor, 1, group=group)
    out, parts = torch.empty(3), [values(3) for _ in range(dist.get_world_size())]
    dist.scatter(out, parts if dist.get_rank() == 1 else None, src=1, group=group)
    return [tensor, out]


def to_root(group: Any) -> list[Any]:
    is_root = dist.get_rank() == 1
    tensor, own = values(4), values(3)
    parts = [torch.empty(3) for _ in range(dist.get_world_size())] if is_root else []
    dist.reduce(tensor, 1, group=group)
    dist.gather(own, parts if is_root else None, dst=1, group=group)
    return [tensor, *parts] if is_root else []


def odd_tensors(group: Any) -> list[Any]:
    # Of three ranks' parts of the last ones, one or two have a piece of 1 MiB more than the others.
    odd = [values(count) for count in (3_000_001, 786_433, 786_434, 40_001, 5_001)]
    tensors = [torch.empty(0), torch.tensor(3.0), *odd]
    for tensor in tensors:
        dist.all_reduce(tensor, group=group)
    return tensors


def sparse(group: Any) -> list[Any]:
    places = torch.tensor([[0, dist.get_rank() + 1]])
    tensor = torch.sparse_coo_tensor(places, torch.ones(2, 2), (dist.get_world_size() + 1, 2))
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


def later(group: Any) -> list[Any]:
    tensors = [values(10), values(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    future = works[1].get_future().then(lambda done: done.value()[0] * 2)
    works[0].wait()
    return [tensors[0], future.wait()]


def messages(group: Any) -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    got, from_any = torch.empty(5), torch.empty(2)
    ops = [
        dist.P2POp(dist.isend, values(5), (rank + 1) % size, group=group),
        dist.P2POp(dist.irecv, got, (rank - 1) % size, group=group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    if rank:
        dist.send(torch.full((2,), float(rank)), 0, group=group, tag=3)
        return [got]
    sources = {dist.recv(from_any, group=group, tag=3) for _ in range(size - 1)}
    return [got, torch.tensor(sorted(sources))]


def different_results(gloo: Any) -> list[str]:
    """Make each call in the default group and in a group of gloo.

    Returns:
        What is different, as text.
    """
    calls: dict[str, Callable[[Any], list[Any]]] = {
        f"all_reduce of {kind} by {op}": lambda group, kind=kind, op=op: reduced(group, kind, op)
        for kind in _KINDS
        for op in _OPS
    }
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        calls[f"all_reduce by {op}"] = lambda group, op=op: reduced(group, torch.int32, op)
    for kind in (*_KINDS, torch.bool):
        calls[f"all_gather of {kind}"] = lambda group, kind=kind: gathered(group, kind)
    for call in (
        whole,
        scattered,
        to_all,
        from_root,
        to_root,
        odd_tensors,
        sparse,
        later,
        messages,
    ):
        calls[call.__name__] = call
    found = []
    for name, call in calls.items():
        results = []
        for group in (None, gloo):
            torch.manual_seed(dist.get_rank())
            results.append(call(group))
        for ours, theirs in zip(*results, strict=True):
            # float16 and bfloat16 are rounded after each addition.
            if not torch.allclose(ours.double(), theirs.double(), rtol=1e-2):
                found.append(f"{name}: {ours}, with gloo {theirs}")
    return found


def missing_beyond_gloo() -> list[str]:
    """Make the calls that gloo does not have; returns the names of those that are wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * (size - 1) / 2
    mean, flags = torch.full((3,), float(rank)), torch.tensor([rank == 0, True])
    dist.all_reduce(mean, op=ReduceOp.AVG)
    parts = [torch.full((1 + 300_000 * part,), float(rank)) for part in range(size)]
    uneven_part = torch.empty_like(parts[rank])
    dist.reduce_scatter(uneven_part, parts)
    dist.all_reduce(flags, op=ReduceOp.MIN)
    uneven = [torch.empty(other + 1) for other in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    pairs = torch.full((2,), rank + 1j)
    dist.all_reduce(pairs)
    columns = torch.arange(12.0).reshape(4, 3)[:, ::2]
    dist.all_reduce(columns)
    part = torch.empty(1)
    premultiplied = dist._make_nccl_premul_sum(0.5 * (rank + 1))  # each rank's own
    dist.reduce_scatter_tensor(part, torch.ones(size), op=premultiplied)
    large, large_part = torch.full((4 * size,), 40_000.0).half(), torch.empty(4).half()
    dist.reduce_scatter_tensor(large_part, large, op=ReduceOp.AVG)
    dist.all_reduce(large, op=ReduceOp.AVG)  # the sum would be infinite
    facts = {
        "avg of float16": bool(((torch.cat([large, large_part]) - 40_000).abs() < 100).all()),
        "avg": mean.tolist() == [total / size] * 3,
        "bool": flags.tolist() == [False, True],
        "uneven all_gather": [each.tolist() for each in uneven]
        == [[float(other)] * (other + 1) for other in range(size)],
        "not contiguous": columns.tolist()
        == [[3.0 * row * size, (3.0 * row + 2) * size] for row in range(4)],
        "complex": pairs.tolist() == [total + size * 1j] * 2,
        "premultiplied sum": part.item() == size * (size + 1) / 4,
        "uneven reduce_scatter": bool((uneven_part == total).all()),
    }
    return [name for name, right in facts.items() if not right]

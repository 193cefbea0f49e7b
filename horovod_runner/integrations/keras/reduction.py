"""The settings by which gradients are reduced: those of a DistributedOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# The positions of the gradients of each group; None reduces each gradient separately.
Groups = tuple[tuple[int, ...], ...] | None


@dataclass(frozen=True)
class Reduction:
    """How the gradients of one optimizer are reduced.

    Attributes:
        op: Horovod's Average or Sum.
        compression: a class with ``compress`` and ``decompress`` like Horovod's, or SentAsBFloat16.
        predivide: the gradients are divided by this before the sum, and by the number of ranks
            over this after the sum.
        sparse_as_dense: whether sparse gradients are converted to dense ones first.
        groups: the number of groups of gradients, each reduced in one operation; or the keys of the
            variables of each group. 0 reduces each gradient separately.
        device_dense, device_sparse: TensorFlow's names of the devices to reduce on.
        process_set: the ranks that reduce; None for all ranks.
    """

    op: Any
    compression: Any
    predivide: float = 1.0
    sparse_as_dense: bool = False
    groups: int | tuple[tuple[Hashable, ...], ...] = 0
    device_dense: str = ""
    device_sparse: str = ""
    process_set: Any = None

    def size(self, hvd: Any) -> int:
        """Return the number of ranks that reduce; 1 on a rank that is not one of them."""
        if self.process_set is None:
            return int(hvd.size())
        return int(self.process_set.size()) if self.process_set.included() else 1

    def where(self) -> dict[str, Any]:
        """Return the keyword arguments of all Horovod's collectives."""
        return {} if self.process_set is None else {"process_set": self.process_set}

    def options(self, hvd: Any) -> dict[str, Any]:
        """Return the keyword arguments of Horovod's allreduce."""
        if self.predivide == 1.0:
            return {"op": self.op, **self.where()}
        return {
            "op": hvd.Sum,
            "prescale_factor": 1.0 / self.predivide,
            "postscale_factor": self.predivide / self.size(hvd),
            **self.where(),
        }

    def partition(self, keys: Sequence[Hashable]) -> Groups:
        """Split the gradients of the variables with these keys into groups."""
        if not self.groups:
            return None
        positions = range(len(keys))
        if isinstance(self.groups, int):
            count = -(-len(keys) // self.groups)
            return tuple(tuple(positions[start : start + count]) for start in positions[::count])
        group_of = {key: number for number, group in enumerate(self.groups) for key in group}
        groups: dict[Any, list[int]] = {}
        for position, key in enumerate(keys):
            groups.setdefault(group_of.get(key, ("alone", position)), []).append(position)
        return tuple(tuple(group) for group in groups.values())

    def check(self, hvd: Any) -> None:
        """Raise TypeError or ValueError for a setting that is not supported."""
        if self.op not in (hvd.Average, hvd.Sum):
            is_adasum = self.op == hvd.Adasum
            raise ValueError(
                f"op must be Average or Sum{', not Adasum' if is_adasum else ''}: Horovod has no "
                "Adasum for Keras's optimizers, and the other operations are not sums. To train "
                "with many ranks use op=hvd.Average and LearningRateWarmupCallback. For Adasum "
                "itself write a loop with horovod.tensorflow's DistributedGradientTape(tape, "
                "op=hvd.Adasum), or use horovod.torch; it needs "
                'ClusterConfig(cpu_collectives="mpi") and a power of 2 as np'
            )
        if self.predivide != 1.0 and self.op != hvd.Average:
            raise ValueError("gradient_predivide_factor splits an average: it requires op=Average")
        if not self.predivide > 0:
            raise ValueError(f"gradient_predivide_factor must be above 0, not {self.predivide}")
        if isinstance(self.groups, int) and self.groups < 0:
            raise ValueError(f"groups must be 0 or more, not {self.groups}")
        if self.process_set is not None:
            _check_process_set(self.process_set)
        if self.compression is SentAsBFloat16:
            if self.predivide != 1.0 or self.groups:
                raise ValueError(
                    "Compression.bf16 sums all gradients at once in float32: it cannot be combined "
                    "with gradient_predivide_factor or groups"
                )
        elif hasattr(self.compression, "reduce") or not all(
            hasattr(self.compression, name) for name in ("compress", "decompress")
        ):  # those of horovod.torch alone have "reduce"
            raise TypeError(
                f"compression must be Compression.none, fp16 or bf16, not {self.compression!r}"
            )


class Completed(NamedTuple):
    """Gradients without a gap.

    Attributes:
        gradients: this rank's, with zeros for those that it lacks.
        ranks: returns how many ranks have each gradient, as a tensor.
        alike: a tensor: whether all ranks send the same ones as IndexedSlices; None where none is.
    """

    gradients: list[Any]
    ranks: Callable[[], Any]
    alike: Any


def groups_of(
    groups: Any, key_of: Callable[[Any], Hashable]
) -> int | tuple[tuple[Hashable, ...], ...]:
    """Return the argument ``groups`` with keys in the place of variables.

    Raises:
        TypeError: it is not None, a number, or a list of lists of variables.
        ValueError: a variable is in two groups.
    """
    if groups is None:
        return 0
    if isinstance(groups, int) and not isinstance(groups, bool):
        return groups
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(g, (list, tuple)) for g in groups
    ):
        raise TypeError(
            f"groups must be a number of groups, or a list of lists of variables, not {groups!r}"
        )
    keyed = tuple(tuple(key_of(variable) for variable in group) for group in groups)
    keys = [key for group in keyed for key in group]
    if len(set(keys)) < len(keys):
        names = [getattr(v, "path", v.name) for group in groups for v in group]
        twice = next(name for key, name in zip(keys, names, strict=True) if keys.count(key) > 1)
        raise ValueError(f"the variable {twice} is twice in groups: each may be in one group only")
    return keyed


def by_type(groups: Sequence[Sequence[int]], types: Mapping[int, Any]) -> list[list[int]]:
    """Split groups of gradients so that each has one type, as Horovod's operations require.

    Gradients are named by their positions. Those without an entry in ``types`` are left out.
    """
    split: list[list[int]] = []
    for group in groups:
        of_type: dict[Any, list[int]] = {}
        for position in group:
            if position in types:
                of_type.setdefault(types[position], []).append(position)
        split += of_type.values()
    return split


def _check_process_set(process_set: Any) -> None:
    if not hasattr(process_set, "process_set_id"):
        raise TypeError(f"process_set must be a hvd.ProcessSet, not {process_set!r}")
    if process_set.process_set_id is None:
        raise ValueError(
            f"Horovod does not know {process_set} yet: pass it to hvd.init(process_sets=[...]), or "
            'begin with hvd.init(process_sets="dynamic") and call hvd.add_process_set'
        )


class SentAsBFloat16:
    """Marks gradients that are sent as bfloat16: float32's exponent and 8 bits of its fraction.

    Horovod cannot sum bfloat16. Each rank therefore receives its part of the gradients from all
    ranks, sums it in float32, and sends the sum to all: the traffic of a 16-bit allreduce.
    """

"""Finds ranks that have made different models, before weights are broadcast into them."""

from __future__ import annotations

from collections.abc import Iterable

from horovod_runner.wire.collectives import connected
from horovod_runner.worker import context
from horovod_runner.worker.agreement import exchange
from horovod_runner.worker.checks.notes import users_line

_SHAPE = " of shape "


def check_same_model(
    weights: Iterable[tuple[str, Iterable[int]]], *, same_names: bool = True
) -> None:
    """Compare the names and shapes that the ranks are about to broadcast; called on every rank.

    Raises:
        ValueError: on all ranks: they have other weights than rank 0.
    """
    rank = context.current()
    if rank is None or rank.size == 1:
        return
    named = [(name, tuple(map(int, shape))) for name, shape in weights]
    lines = [f"{name}{_SHAPE}{shape}" for name, shape in named]

    def compared(line: str) -> str:
        return line if same_names else line.rpartition(_SHAPE)[2]

    key = "\n".join(map(compared, lines))
    ranks = connected("the ranks compare their models")
    text = "\n".join([users_line(), *lines])
    _, texts = exchange(ranks, key, text, name="broadcast_parameters")
    if not texts:
        return
    place, *first = texts[0].splitlines()
    wanted = [*map(compared, first)]
    other, other_place, theirs = next(
        (rank, place, theirs)
        for rank, (place, *theirs) in ((rank, text.splitlines()) for rank, text in texts.items())
        if [*map(compared, theirs)] != wanted
    )
    pairs = zip([*first, "no more weights"], [*theirs, "no more weights"], strict=False)
    ours, differing = next((a, b) for a, b in pairs if compared(a) != compared(b))
    raise ValueError(
        f"the ranks have made different models: rank 0 has {ours} at {place}, and rank {other} "
        f"{differing} at {other_place} ({len(first)} and {len(theirs)} weights). Usual causes: a "
        "width or depth that each rank chooses for itself, such as random.choice or "
        "trial.suggest_int, and a layer under `if hvd.rank() == 0`. Let all ranks take rank 0's "
        "choice: width = agree(width)."
    )

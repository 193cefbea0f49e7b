"""Decides which checkpoints to keep and which one is best: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from horovod_runner.common.options import CheckpointConfig, Mode
from horovod_runner.wire.marker import Marker


def surplus(markers: Iterable[Marker], config: CheckpointConfig) -> list[Marker]:
    """The checkpoints to remove, of all that exist.

    The latest ``num_to_keep`` stay; with a metric the best ``num_to_keep``, and the latest one.
    """
    newest = sorted(markers, key=lambda marker: marker.number, reverse=True)
    keep = config.num_to_keep
    if keep is None:
        return []
    if config.metric is None:
        return newest[keep:]
    best = ranked(newest, config.metric, config.mode)[:keep]
    kept = {marker.name for marker in [*newest[:1], *best]}
    return [marker for marker in newest if marker.name not in kept]


def ranked(markers: Sequence[Marker], metric: str, mode: Mode) -> list[Marker]:
    """Sort checkpoints by a metric, best first; of equal ones the newest first.

    Checkpoints without the metric, or where it is NaN, come last.
    """

    def key(marker: Marker) -> tuple[bool, float, int]:
        value = float(marker.metrics.get(metric, math.nan))
        if math.isnan(value):
            return True, 0.0, -marker.number
        return False, value if mode == "min" else -value, -marker.number

    return sorted(markers, key=key)

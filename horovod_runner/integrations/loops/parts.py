"""The parts of a training loop, and those that this rank has prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

Role: TypeAlias = Literal["model", "optimizer", "schedule", "scaler", "batches", ""]

_OF_TORCH: Final[Mapping[str, Role]] = {
    "Module": "model",
    "Optimizer": "optimizer",
    "DataLoader": "batches",
    "GradScaler": "scaler",
}
#: What `prepare` has returned since the last loop over `epochs`.
prepared: list[Any] = []


def homes_of(part: Any) -> set[str]:
    """The packages that an object's class and its bases are of."""
    return {base.__module__.partition(".")[0] for base in type(part).__mro__}


def role_of(part: Any) -> Role:
    """Return the role of an object in a training; empty if it has none."""
    names = {base.__name__ for base in type(part).__mro__}
    homes = homes_of(part)
    if "horovod_runner" in homes and names & {"Feed", "RankLoader"}:
        return "batches"
    if "keras" in homes:
        return "model" if "Model" in names else "optimizer" if hasattr(part, "apply") else ""
    if "torch" in homes:
        for name, role in _OF_TORCH.items():
            if name in names:
                return role
    # Schedules have an optimizer, also those of other packages, such as timm's.
    return "schedule" if hasattr(part, "optimizer") and hasattr(part, "state_dict") else ""

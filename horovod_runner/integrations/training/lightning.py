"""A training of a Lightning module, which has its own loss and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from horovod_runner.integrations.training.training import Trained, Training

if TYPE_CHECKING:
    from horovod_runner.data.shard import Shard


@dataclass(frozen=True, kw_only=True)
class LightningTraining(Training):
    """A training of a Lightning module."""

    pairs: bool = False  # its steps get (inputs, labels), and not a dict of tensors by column
    trainer_options: Mapping[str, Any] = field(default_factory=dict)

    def check(self, first: Mapping[str, Any]) -> None:
        """See Training, as for the methods below; only the module's methods are looked for."""
        if not hasattr(self.model, "training_step"):
            raise TypeError(f"model must be a Lightning module, not {type(self.model).__name__}")

    def feed(self, shard: Shard, *, is_training: bool) -> dict[str, Any]:
        """See Training; without pairs the parts of a batch are columns, and so are the options."""
        options = super().feed(shard, is_training=is_training)
        return options if self.pairs else {**options, **self.options}

    def for_ranks(self) -> Self:
        """Without what the module makes itself, which may not be picklable."""
        return replace(self, optimizer=None, loss=None, loss_weights=None, metrics=None)

    def train(self, train: Shard, valid: Shard | None) -> Trained | None:
        """Run ``Trainer.fit``.

        The module with the loop is imported here: after the user's model, which decides between
        packages (``lightning`` or ``pytorch_lightning``).
        """
        from horovod_runner.integrations.training import lightning_loop

        return lightning_loop.train(self, train, valid)

    def trained_model(self, trained: Trained) -> Any:
        """A copy of the module on the CPU, in evaluation mode."""
        from horovod_runner.integrations.training.torch import with_weights

        return with_weights(self.model, trained)

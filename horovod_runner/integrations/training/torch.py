"""A training of a torch module, with an optimizer and a loss."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from horovod_runner.data.scoring.models.torch import as_tensor, caller
from horovod_runner.integrations.training.training import Metric, Trained, Training, paired

if TYPE_CHECKING:
    from horovod_runner.data.shard import Shard


@dataclass(frozen=True, kw_only=True)
class TorchTraining(Training):
    """A training of a torch module.

    Attributes:
        optimizer: an optimizer, or a function from the module's parameters to one. An optimizer
            that holds the parameters of this module is pickled with it, and holds them afterwards.
        loss: a function of (output, label), or a list with one for each output.
        metrics: by name; see metrics.py.
        minibatch: trains with a batch in place of our own step: a function of (training, model,
            optimizer, batch, step) to the outputs and the loss; see torch_loop.py.
        step: computes the loss in place of model and loss: a function of (model, inputs, labels)
            to the mean loss, or to the loss and the outputs; see :func:`horovod_runner.fit`.
        returns_optimizer: whether the state of the optimizer comes back with the weights.
    """

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    minibatch: Callable[..., Any] | None = None
    step: Callable[..., Any] | None = None
    returns_optimizer: bool = False

    def loss_of(self, output: int) -> Callable[..., Any]:
        """The loss of an output, by its number."""
        several = isinstance(self.loss, list | tuple)
        loss: Callable[..., Any] = self.loss[output] if several else self.loss
        return loss

    def check(self, first: Mapping[str, Any]) -> None:
        """See Training, as for the methods below."""
        from horovod_runner.integrations.training.losses import as_list, total_loss
        from horovod_runner.integrations.training.optimizer import make_optimizer

        if not isinstance(self.model, torch.nn.Module):
            is_class = isinstance(self.model, type)
            kind = f"the class {self.model.__name__}" if is_class else type(self.model).__name__
            raise TypeError(f"model must be a torch module, not {kind}")
        # Together: the copy of an optimizer then holds the parameters of the copied model.
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        make_optimizer(model.cpu().eval(), optimizer, self.learning_rate)
        tensors = [as_tensor(value) for value in first.values()]
        inputs, labels, weight = self.split_parts(tensors)
        shapes = _shapes(inputs)
        with torch.no_grad():
            if self.step is not None:
                self._check_step(model, inputs, labels)
                return
            try:
                outputs = as_list(caller(model)(inputs))
            except Exception as error:  # whatever the user's module raises
                raise ValueError(
                    f"model does not fit the columns: {type(error).__name__}: {error}, on a batch "
                    f"of {shapes}. Change {self.names.features} or dtypes, or the model. "
                    f"{self.names.side_by_side} is one input, of columns side by side"
                ) from error
            try:
                total_loss(self, outputs, labels, weight)
            except Exception as error:
                given = ", ".join(
                    f"{name} {value.dtype} {tuple(value.shape)}"
                    for name, value in zip(self.labels, labels, strict=True)
                )
                returned = ", ".join(str(tuple(output.shape)) for output in outputs)
                raise ValueError(
                    f"loss does not fit the outputs {returned} and the labels {given}: "
                    f"{type(error).__name__}: {str(error).rstrip('.')}. Change loss, "
                    f"{self.names.labels} or the model; for classes the model needs an output "
                    "for each"
                ) from error

    def _check_step(self, model: Any, inputs: dict[str, Any], labels: list[Any]) -> None:
        assert self.step is not None  # noqa: S101 - it is what is checked
        try:
            result = self.step(model, *paired(inputs, labels))
        except Exception as error:  # whatever the user's function raises
            raise ValueError(
                f"step fails on the first rows: {type(error).__name__}: {error}. It is called with "
                f"the model, the inputs ({_shapes(inputs)}) and the labels"
            ) from error
        loss = result[0] if isinstance(result, tuple) else result
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise TypeError(
                "step must return the mean loss as a tensor with one number, or a tuple of the "
                f"loss and the outputs, not {type(result).__name__}"
            )

    def train(self, train: Shard, valid: Shard | None) -> Trained | None:
        """Run the loop of torch_loop.py."""
        from horovod_runner.integrations.training import torch_loop

        return torch_loop.train(self, train, valid)

    def trained_model(self, trained: Trained) -> torch.nn.Module:
        """A copy of the module on the CPU, in evaluation mode."""
        return with_weights(self.model, trained)


def _shapes(inputs: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else f"{name} (a list of {len(value)})"
        for name, value in inputs.items()
    )


def with_weights(module: torch.nn.Module, trained: Trained) -> torch.nn.Module:
    """A copy of a module on the CPU, with the trained weights, in evaluation mode."""
    module = copy.deepcopy(module).cpu()
    module.load_state_dict(torch.load(io.BytesIO(trained.weights), weights_only=True))
    return module.eval()

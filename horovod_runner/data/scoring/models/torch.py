"""Models of torch: modules, Lightning modules, TorchScript and exported programs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import cloudpickle
import numpy as np
import torch

from horovod_runner.common.by_value import by_value
from horovod_runner.data.feed.options import Framework
from horovod_runner.data.scoring.models.kind import Call, Parts


@dataclass(frozen=True)
class TorchKind:
    """A model of torch."""

    form: Literal["module", "lightning", "script", "export"]
    framework: Framework = "torch"

    def write(self, model: Any, path: Path, ship_modules: Sequence[ModuleType]) -> None:
        """Write the model; its weights lie in the file so that processes can map them."""
        if self.form == "script":
            torch.jit.save(model, str(path))
        elif self.form == "export":
            with path.open("xb") as file:
                torch.export.save(model, file)
        else:
            with by_value(ship_modules):
                torch.save(model, str(path), pickle_module=cloudpickle)

    def load(self, path: Path, device: str) -> Call:
        """Read the model in evaluation mode.

        On the CPU, with a warning, where Spark gave the task a GPU that torch cannot use.
        """
        if device.startswith("cuda") and not torch.cuda.is_available():
            warnings.warn(
                f"Spark gave this task a GPU ({device}), and torch {torch.__version__} finds none: "
                "it computes on the CPU. Install a torch for CUDA on the executors",
                stacklevel=2,
            )
            device = "cpu"
        if self.form == "script":
            model = torch.jit.load(str(path), map_location=device)
            model.eval()
        elif self.form == "export":
            with path.open("rb") as file:
                model = torch.export.load(file).module()
        else:
            # Mapped: the processes of a host share one copy of the weights. Our own file.
            model = torch.load(str(path), map_location="cpu", weights_only=False, mmap=True)
            model.eval().requires_grad_(False)
        if device != "cpu":
            model = model.to(device)
        call = caller(model)
        if self.form == "lightning" and _overrides_predict_step(model):
            call = partial(_predict_step, model)

        def without_gradients(parts: Parts) -> Any:
            tensors = {name: as_tensor(value, device) for name, value in parts.items()}
            with torch.inference_mode():
                return call(tensors)

        return without_gradients


def read_module(path: Path) -> Any:
    """The module in a file of :meth:`TorchKind.write`, on the CPU."""
    return torch.load(path, map_location="cpu", weights_only=False)


def as_tensor(value: Any, device: str = "cpu") -> Any:
    """A part of a batch as a tensor; of lists, text stays, and arrays become one tensor each."""
    if isinstance(value, list):
        return [as_tensor(row, device) if isinstance(row, np.ndarray) else row for row in value]
    if not value.flags.writeable:  # torch warns of tensors that share read-only memory
        value = value.copy()
    tensor = torch.from_numpy(value)
    return tensor if device == "cpu" else tensor.to(device)


def caller(model: Any) -> Callable[[dict[str, Any]], Any]:
    """What calls a model with its inputs: by name if they are its parameters, or in order."""
    parameters = _parameters(model)

    def call(parts: dict[str, Any]) -> Any:
        if len(parts) > 1 and set(parts) <= set(parameters):
            return model(**parts)
        for name, parameter in zip(parts, parameters, strict=False):
            if name in parameters and name != parameter:
                raise ValueError(
                    f"the input {name!r} has the name of a parameter of forward, and would be "
                    f"passed as {parameter!r}: inputs are passed in order unless all have names of "
                    f"parameters. Put the inputs into the order of {', '.join(parameters)}"
                )
        return model(*parts.values())

    return call


def _predict_step(model: Any, parts: dict[str, Any]) -> Any:
    values = tuple(parts.values())
    return model.predict_step(values[0] if len(values) == 1 else values, 0)


def _overrides_predict_step(model: Any) -> bool:
    bases = [base for base in type(model).__mro__ if "predict_step" in vars(base)]
    return bool(bases) and not bases[0].__module__.startswith(("lightning.", "pytorch_lightning."))


def _parameters(model: Any) -> list[str]:
    """Names of the parameters of a module's ``forward``, in order."""
    try:
        return list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # TorchScript and exported programs may have none to inspect
        return []


def kind_of(model: Any) -> TorchKind | None:
    """The kind of a model of torch; None if it is another object."""
    if isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        return TorchKind("script")
    if isinstance(model, torch.export.ExportedProgram):
        return TorchKind("export")
    if not isinstance(model, torch.nn.Module):
        return None
    is_lightning = any(
        base.__name__ == "LightningModule"
        and base.__module__.startswith(("lightning.", "pytorch_lightning."))
        for base in type(model).__mro__
    )
    return TorchKind("lightning" if is_lightning else "module")


def unwrapped(model: Any) -> Any:
    """The user's module inside DistributedDataParallel, or one that torch.compile returned."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    compiled_from = getattr(model, "_orig_mod", None)
    return model if compiled_from is None else unwrapped(compiled_from)

"""Simulated GPUs: torch computes on the CPU, and minds on which device each tensor would be.

A tensor's storage carries its device. A mode of torch sees each function that is called, and one
below autograd each operation: what is moved to "cuda" is marked, what is computed from marked
tensors is marked too, and an operation on tensors of different devices fails with CUDA's own words.
Values are right, and Horovod sees tensors of the CPU. Streams and events do nothing.

python tests/simulated_gpu.py PROGRAM ARGUMENT... runs a program on a machine with two of them, and
with a Horovod that was built with NCCL; after --no-nccl with the one that is installed.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GPUS = 2
#: What brings them into a rank: a row of the import hooks that travels in the job.
FUNCTION = f"{__name__ if __name__ != '__main__' else 'tests.simulated_gpu'}:install"


class _Number(threading.local):
    """The current device of a thread; 0 at its start, as CUDA's is."""

    value = 0


def install(torch: Any) -> None:
    """Simulate GPUs in this process from now on; called when torch has been imported."""
    number = _Number()
    _replace_cuda(torch, number)
    functions, operations = _modes(torch, number)

    def enter() -> None:
        operations().__enter__()
        functions().__enter__()

    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def _bootstrap_inner(self: threading.Thread) -> None:
        enter()  # modes are of a thread
        begin(self)

    threading.Thread._bootstrap_inner = _bootstrap_inner  # type: ignore[attr-defined]
    enter()
    run_backward = torch.autograd._engine_run_backward

    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        with functions():  # torch leaves the mode, and hooks and Python's gradients need it
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = _engine_run_backward


def install_nccl(ops: Any) -> None:
    """Say that Horovod was built with NCCL; called with the module ``horovod.torch.mpi_ops``."""
    ops.nccl_built = lambda: True


def _modes(torch: Any, number: _Number) -> tuple[Any, Any]:
    """The two modes; here, because torch must not be imported before this is called."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten, tensor = torch.ops.aten, torch.Tensor
    cpu = torch.device("cpu")
    # These take tensors of other devices by design.
    copies = {aten.copy_.default, aten._pack_padded_sequence.default, aten.set_.source_Storage}
    indexing = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}

    def storage(each: Any) -> Any:
        with contextlib.suppress(NotImplementedError):  # a sparse tensor has none
            return each.untyped_storage()
        return None

    def device_of(each: Any) -> Any:
        return getattr(storage(each), "simulated_device", cpu)

    def mark(value: Any, device: Any) -> Any:
        for each in tree_leaves(value):
            if isinstance(each, tensor) and (held := storage(each)) is not None:
                held.simulated_device = device
        return value

    def named(device: Any) -> Any:
        """A device as CUDA would name it, with its number."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return device
        index = number.value if device.index is None else device.index
        if index >= _count():
            raise RuntimeError("CUDA error: invalid device ordinal (simulated GPUs)")
        return torch.device("cuda", index)

    def moved(each: Any, device: Any, result: Any) -> Any:
        """What a conversion has made of a tensor, on another device."""
        if device == device_of(each):
            return result
        if storage(result) is storage(each):
            result = result.clone()
        return mark(result, device)

    def to(each: Any, *args: Any, **kwargs: Any) -> Any:
        if "other" in kwargs or (args and isinstance(args[0], tensor)):
            other = kwargs.pop("other", None)
            other, args = (args[0], args[1:]) if other is None else (other, args)
            return moved(each, device_of(other), each.to(other, *args, **kwargs))
        device = kwargs.pop("device", None)
        if args and isinstance(args[0], str | int | torch.device):
            device, args = args[0], args[1:]
        if device is None:
            return each.to(*args, **kwargs)
        first = () if args and isinstance(args[0], torch.dtype) else (cpu,)
        return moved(each, named(device), each.to(*first, *args, **kwargs))

    def cuda(each: Any, device: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        return moved(each, named("cuda" if device is None else device), each)

    def numpy(each: Any, *args: Any, **kwargs: Any) -> Any:
        if device_of(each) != cpu:
            raise TypeError(
                f"can't convert {device_of(each)} device type tensor to numpy. Use Tensor.cpu() to "
                "copy the tensor to host memory first."
            )
        return each.numpy(*args, **kwargs)

    def reduce(each: Any, protocol: int) -> Any:
        """Pickled, it stays on its device, as torch's own: elsewhere it is not to be loaded."""
        with torch._C.DisableTorchFunction():
            plain = each.__reduce_ex__(protocol)
        return plain if device_of(each) == cpu else (_loaded, (str(device_of(each)), *plain))

    def array(each: Any, *args: Any, **kwargs: Any) -> Any:
        return numpy(each).__array__(*args, **kwargs)

    instead = {
        tensor.device.__get__: device_of,
        tensor.is_cuda.__get__: lambda each: device_of(each) != cpu,
        tensor.is_cpu.__get__: lambda each: device_of(each) == cpu,
        tensor.get_device: lambda each: -1 if device_of(each) == cpu else device_of(each).index,
        tensor.to: to,
        tensor.cuda: cuda,
        tensor.cpu: lambda each, *_args, **_kwargs: moved(each, cpu, each),
        tensor.numpy: numpy,
        tensor.__array__: array,
        tensor.__reduce_ex__: reduce,
        tensor.new: lambda each, *args, **kwargs: mark(each.new(*args, **kwargs), device_of(each)),
        tensor.pin_memory: lambda each, *_args: each,
        tensor.is_pinned: lambda each, *_args: True,
        tensor.record_stream: lambda each, _stream: None,
    }

    class Functions(TorchFunctionMode):
        """Moves tensors, and makes them on the device that is asked for."""

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if (own := instead.get(function)) is not None:
                return own(*args, **kwargs)
            if kwargs.get("device") is None:
                if "device" not in kwargs and kwargs.get("pin_memory"):
                    del kwargs["pin_memory"]
                return function(*args, **kwargs)
            device = named(kwargs["device"])
            if device.type not in ("cpu", "cuda"):  # "meta"
                return function(*args, **kwargs)
            kwargs.pop("pin_memory", None)
            made = function(*args, **{**kwargs, "device": cpu})
            if args and isinstance(args[0], tensor) and isinstance(made, tensor):
                return moved(args[0], device, made) if device_of(made) != device else made
            return mark(made, device)

    class Operations(TorchDispatchMode):
        """Fails where devices differ, and marks results."""

        def __torch_dispatch__(
            self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            written = [
                value
                for value, argument in zip(args, operation._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            strict = {id(each) for each in tree_leaves(written)}
            # Those that may stay on the CPU: numbers, and the indices of a tensor on a GPU.
            meant = args[0] if operation.overloadpacket in indexing else (args, kwargs)
            tensors = [each for each in tree_leaves(meant) if isinstance(each, tensor)]
            devices = dict.fromkeys(
                device_of(each)
                for each in tensors
                if each.dim() or id(each) in strict or device_of(each) != cpu
            )
            if len(devices) > 1 and operation not in copies:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, {' and '.join(map(str, devices))}! (simulated GPUs, {operation})"
                )
            made = operation(*args, **kwargs)
            on_gpu = [device for device in devices if device != cpu]
            if on_gpu and operation not in copies:
                mark(made, on_gpu[0])
            return made

    return Functions, Operations


def _loaded(device: str, rebuild: Callable[..., Any], parts: Any, *_state: Any) -> Any:
    """A tensor that was pickled on a GPU, in a process that simulates them."""
    return rebuild(*parts).to(device)


class _Nothing:
    """A stream or an event: all work is done when it is asked for."""

    def __init__(self, device: Any = None, *_args: Any, **_kwargs: Any) -> None:
        self.device = device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Nothing)

    def __hash__(self) -> int:
        return 0

    def record_event(self, *_args: Any) -> _Nothing:
        return self

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def elapsed_time(self, _other: _Nothing) -> float:
        return 0.0

    def synchronize(self, *_args: Any) -> None:
        """As all others: nothing is to be waited for."""

    wait_event = wait_stream = record = wait = synchronize


def _another(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own: torch's compiler refuses one that stands in two places."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _count() -> int:
    """How many GPUs this process may see; a rank that is forked may see others than its server."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))
    return len([device for device in visible.split(",") if device])


def _replace_cuda(torch: Any, number: _Number) -> None:
    """Give torch.cuda what programs ask it."""

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < _count():
            raise RuntimeError("CUDA error: invalid device ordinal (simulated GPUs)")
        number.value = index

    def exchange(device: int) -> int:
        before = number.value
        if device >= 0:
            set_device(device)
        return before

    @contextlib.contextmanager
    def stream(_stream: Any) -> Iterator[None]:
        yield

    def properties(device: Any = None) -> Any:
        return SimpleNamespace(
            name="Simulated GPU", total_memory=1 << 34, major=9, minor=0, multi_processor_count=1
        )

    def named_current(device: Any = None) -> _Nothing:
        return _Nothing(torch.device("cuda", number.value) if device is None else device)

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    torch.version.cuda = torch.version.cuda or "13.0"
    torch.backends.cuda.is_built = lambda: True
    for name, value in {
        "is_available": lambda: _count() > 0,
        "is_initialized": lambda: _count() > 0,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *_args, **_kwargs: True,
        "device_count": _count,
        "current_device": lambda: number.value,
        "set_device": set_device,
        "get_device_name": lambda _device=None: "Simulated GPU",
        "get_device_capability": lambda _device=None: (9, 0),
        "get_device_properties": properties,
        "get_arch_list": lambda: ["sm_90"],
        "memory_allocated": lambda _device=None: 0,
        "max_memory_allocated": lambda _device=None: 0,
        "mem_get_info": lambda _device=None: (1 << 34, 1 << 34),
        "memory_stats": lambda _device=None: {},
        "current_stream": named_current,
        "default_stream": named_current,
        "stream": stream,
        "Stream": _Nothing,
        "Event": _Nothing,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "init": nothing,
        "get_rng_state_all": list,
        "set_rng_state_all": nothing,
        "_lazy_init": nothing,
        "_lazy_call": lambda call, **_kwargs: call(),
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
    }.items():
        setattr(torch.cuda, name, value if isinstance(value, type) else _another(value))
    for name, value in {
        "deviceCount": _count,
        "getDeviceIndex": lambda: number.value,
        "setDeviceIndex": set_device,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "getStream": named_current,
        "synchronizeDevice": nothing,
    }.items():
        setattr(torch._C, f"_accelerator_{name}", _another(value))


def simulate(folder: Path, *, nccl: bool) -> None:
    """Give this machine two GPUs: nvidia-smi lists them, and this process and ranks compute there.

    Args:
        folder: an empty one, for a program nvidia-smi.
        nccl: whether Horovod seems to be built with NCCL.
    """
    import torch

    from horovod_runner.host import software
    from horovod_runner.run import make_job
    from horovod_runner.wire.job_file import ImportHook

    lines = "".join(f"{n}, Simulated GPU, GPU-5170000{n}\\n" for n in range(GPUS))
    program = folder / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nprintf "{lines}"\n')
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(GPUS)))
    # Before the hook of the package that makes the rank's own the current one.
    hooks = [ImportHook("torch", FUNCTION, "torch has no simulated GPUs")]
    if nccl:
        said = ImportHook("horovod.torch.mpi_ops", f"{FUNCTION}_nccl", "Horovod has no NCCL")
        hooks.append(said)
        software.without_nccl = lambda hosts, main: []
    make_job.IMPORT_HOOKS = (*hooks, *make_job.IMPORT_HOOKS)  # type: ignore[misc, assignment]
    install(torch)


def main() -> None:
    """Run the program that the command line names."""
    import tempfile

    sys.argv[:] = sys.argv[1:]
    nccl = sys.argv[0] != "--no-nccl"
    sys.argv[:] = sys.argv[not nccl :]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    with tempfile.TemporaryDirectory() as folder:
        simulate(Path(folder), nccl=nccl)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

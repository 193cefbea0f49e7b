"""Cost of ``fit`` beside the same loop by hand: a step, the first step, memory; and of ``agree``.

By turns the same ranks train an epoch by hand and one as ``fit`` does, with the same network, the
same feed and Horovod's optimizer. Then each trains in processes of its own, from a cold start.

    python benchmarks/fit.py [--np 1] [--turns 20] [--rounds 5] [--json PATH]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import report

from horovod_runner import HorovodRunner

_ROWS, _WIDTH, _BATCH = 6400, 256, 64
_SLOWER, _FIRST, _MEMORY, _AGREE = 1.03, 0.2, 1.05, 30.0
_COLUMNS: Any = {"x": "x", "y": "y"}
_FRAMEWORKS = ("torch", "keras", "lightning")
#: Trainings of some epochs, by name; the first argument is called at the end of each step.
Arms = dict[str, Callable[[Any, int], None]]


def table() -> pd.DataFrame:
    """Rows of numbers with classes."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_ROWS, _WIDTH)).astype(np.float32)
    return pd.DataFrame({"x": list(x), "y": rng.integers(0, 10, _ROWS)})


def arms_of(framework: str, data: Any) -> Arms:
    """The trainings of a framework; for the ranks' ``main``."""
    makers = {"torch": of_torch, "keras": of_keras, "lightning": of_lightning}
    return makers[framework](data)


def of_keras(data: Any) -> Arms:
    """With ``model.fit``."""
    import keras

    import horovod_runner.keras as hvd
    from horovod_runner.integrations.training.keras import KerasTraining

    hvd.init()

    class Steps(keras.callbacks.Callback):  # type: ignore[misc]
        """Tells of steps."""

        def __init__(self, told: Any) -> None:
            super().__init__()
            self.on_train_batch_end = lambda batch, logs=None: told()

    def network() -> Any:
        parts = [keras.layers.Dense(512, "relu"), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((_WIDTH,)), *parts])

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def by_hand(told: Any, epochs: int) -> None:
        model = network()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss)
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            Steps(told),
            hvd.callbacks.ReportCallback(save_every=0),
        ]
        feed = data.to_tf(global_batch=_BATCH, columns=_COLUMNS, shuffle=True)
        model.fit(feed, epochs=epochs, callbacks=callbacks, verbose=0, shuffle=False)

    def by_fit(told: Any, epochs: int) -> None:
        KerasTraining(
            model=network(),
            features={"x": "x"},
            labels=["y"],
            loss=loss,
            optimizer=keras.optimizers.SGD(0.01),
            global_batch=_BATCH,
            epochs=epochs,
            callbacks=[Steps(told)],
        ).for_ranks().train(data, None)

    return {"by hand": by_hand, "fit": by_fit}


def layers() -> Any:
    """A network of torch."""
    import torch

    torch.manual_seed(0)
    parts = [torch.nn.Linear(_WIDTH, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)]
    return torch.nn.Sequential(*parts)


def sgd(parameters: Any) -> Any:
    """Its optimizer."""
    import torch

    return torch.optim.SGD(parameters, lr=0.01)


def of_torch(data: Any) -> Arms:
    """With a loop."""
    import horovod.torch as hvd
    import torch

    from horovod_runner.integrations.training.torch import TorchTraining

    hvd.init()

    class After:
        """Tells of steps."""

        def __init__(self, told: Any) -> None:
            self.on_step_end = lambda step, loss: told()

        def on_epoch_end(self, epoch: int, metrics: Any) -> None:
            """Nothing."""

    def by_hand(told: Any, epochs: int) -> None:
        model = layers()
        optimizer: Any = hvd.DistributedOptimizer(
            sgd(model.parameters()), named_parameters=model.named_parameters()
        )
        hvd.broadcast_parameters(model.state_dict(), 0)
        feed = data.to_torch(global_batch=_BATCH, columns=_COLUMNS, shuffle=True)
        total = torch.zeros(())
        for _ in range(epochs):
            for x, y in feed:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                total += loss.detach()
                told()

    def by_fit(told: Any, epochs: int) -> None:
        TorchTraining(
            model=layers(),
            features={"x": "x"},
            labels=["y"],
            loss=torch.nn.CrossEntropyLoss(),
            optimizer=sgd,
            global_batch=_BATCH,
            epochs=epochs,
            callbacks=[After(told)],
        ).train(data, None)

    return {"by hand": by_hand, "fit": by_fit}


def of_lightning(data: Any) -> Arms:
    """With a Trainer."""
    import horovod.torch as hvd
    import lightning
    import torch

    from horovod_runner.integrations.training.lightning import LightningTraining
    from horovod_runner.lightning import HorovodStrategy, ReportCallback

    hvd.init()

    class Module(lightning.LightningModule):  # type: ignore[misc]
        """The network."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def training_step(self, batch: Any, index: int) -> Any:
            """As in Lightning."""
            x, y = batch
            loss = torch.nn.functional.cross_entropy(self.layers(x), y)
            self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            """As in Lightning."""
            return sgd(self.parameters())

    class Ends(lightning.Callback):  # type: ignore[misc]
        """Tells of steps."""

        def __init__(self, told: Any) -> None:
            self.on_train_batch_end = lambda *args, **options: told()

    quiet = {
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False),
        "enable_model_summary": False,
    }

    def by_hand(told: Any, epochs: int) -> None:
        trainer = lightning.Trainer(
            strategy=HorovodStrategy(),
            max_epochs=epochs,
            callbacks=[Ends(told), ReportCallback(save_every=0)],
            **quiet,
        )
        trainer.fit(Module(), data.to_torch(global_batch=_BATCH, columns=_COLUMNS, shuffle=True))

    def by_fit(told: Any, epochs: int) -> None:
        LightningTraining(
            model=Module(),
            features={"x": "x"},
            labels=["y"],
            pairs=True,
            global_batch=_BATCH,
            epochs=epochs,
            callbacks=[Ends(told)],
        ).train(data, None)

    return {"by hand": by_hand, "fit": by_fit}


def steps(data: Any, framework: str, turns: int) -> dict[str, list[float]]:
    """Microseconds of the steps of each arm, by turns; the ranks' ``main``."""
    import random
    import time
    from itertools import pairwise

    arms = arms_of(framework, data)
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        # In a different order each time, the same on all ranks.
        for name in random.Random(turn).sample(sorted(arms), len(arms)):
            moments: list[float] = []
            arms[name](lambda moments=moments: moments.append(time.perf_counter()), 1)
            if turn:  # the first is a warm-up
                found[name] += [(b - a) * 1e6 for a, b in pairwise(moments[9:])]
    return found


def cold(data: Any, framework: str, arm: str) -> tuple[float, float]:
    """Seconds from the start of ``main`` to the first step, and MiB at the end."""
    import resource
    import time

    start = time.perf_counter()
    moments: list[float] = []
    arms_of(framework, data)[arm](lambda: moments.append(time.perf_counter()), 2)
    return moments[0] - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def agreements(turns: int) -> dict[str, float]:
    """Microseconds of a step of 1 ms, alone, with ``agree``, and with Horovod's least collective.

    The ranks' ``main``.
    """
    import time

    import horovod.torch as hvd
    import torch

    from horovod_runner import agree

    hvd.init()
    one = torch.ones(1)
    arms: dict[str, Callable[[int], Any]] = {
        "alone": lambda step: None,
        "agree": lambda step: agree(step, "max"),
        "a number": lambda step: hvd.allreduce_(one, op=hvd.Max, name="one"),
    }

    def once(call: Callable[[int], Any]) -> float:
        start = time.perf_counter()
        for step in range(100):
            until = time.perf_counter() + 1e-3
            while time.perf_counter() < until:
                pass
            call(step)
        return (time.perf_counter() - start) * 1e4

    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        for name, call in arms.items():
            seconds = once(call)
            if turn:
                found[name].append(seconds)
    return {name: median(each) for name, each in found.items()}


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--np", type=int, default=1, help="ranks on this machine (default: 1)")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frameworks", nargs="*", default=_FRAMEWORKS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runner = HorovodRunner(np=-options.np, progress=False, env={"OMP_NUM_THREADS": "1"})
    data, rows, raw = table(), [], {}
    for framework in options.frameworks:
        found = runner.run(steps, data=data, framework=framework, turns=options.turns)
        usual = {name: median(each) for name, each in found.items()}
        starts: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
        for number in range(options.rounds):
            for name, known in starts.items():
                known.append(runner.run(cold, data=data, framework=framework, arm=name))
                print(f"{framework} {number} {name}: {known[-1]}", file=sys.stderr, flush=True)
        raw[framework] = {"steps": usual, "starts": starts}
        first = {name: median(a for a, _ in each) for name, each in starts.items()}
        memory = {name: median(b for _, b in each) for name, each in starts.items()}
        ratio, late = usual["fit"] / usual["by hand"], first["fit"] - first["by hand"]
        more = memory["fit"] / memory["by hand"]
        rows += [
            [f"{framework}: a step by hand, us", f"{usual['by hand']:,.0f}", "", ""],
            [f"{framework}: a step, fit / by hand", *report.at_most(framework, ratio, _SLOWER)],
            [
                f"{framework}: first step, fit - by hand, s",
                *report.at_most(f"{framework} first", late, _FIRST),
            ],
            [
                f"{framework}: memory, fit / by hand",
                *report.at_most(f"{framework} memory", more, _MEMORY),
            ],
        ]
    times = HorovodRunner(np=-2, progress=False).run(agreements, turns=options.turns)
    raw["agree"] = times
    verdict = report.at_most("agree", times["agree"] - times["alone"], _AGREE)
    rows.append(["agree beside a step of 1 ms, us", *verdict])
    least = times["a number"] - times["alone"]
    rows.append(["hvd.allreduce of a number beside it, us", f"{least:,.0f}", "", ""])
    print(report.machine("keras", "tensorflow-cpu", "lightning"))
    print(report.table([f"{options.np} ranks", "", "target", ""], rows))
    if options.json:
        report.write_json(options.json, {"figures": raw})


if __name__ == "__main__":
    main()

"""The training of elastic.py, written for Horovod Elastic; also a script for ``horovodrun``.

horovodrun ... python benchmarks/elastic_training.py NOTES
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

STEPS_BEFORE, STEPS_AFTER = 150, 20
STEP_SECONDS = 0.02  # plus the duration of the step itself
COMMIT_EVERY = 5


def main(notes: str) -> None:
    """Train, and kill the last rank on the way.

    Args:
        notes: a file, which gets a line for each step of rank 0: the number of ranks and the time.
            The rank that is killed writes a line with 0 ranks.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
    )
    noted = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(ranks: int) -> None:
        os.write(noted, f"{json.dumps([ranks, time.time()])}\n".encode())

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.left:
            optimizer.zero_grad()
            model(torch.ones(32, 64)).square().mean().backward()
            optimizer.step()
            time.sleep(STEP_SECONDS)
            if hvd.rank() == 0:
                note(hvd.size())
            state.done += 1
            killing = state.done == STEPS_BEFORE
            if killing and not state.killed:
                # It is done once, so all ranks commit that it was.
                state.killed, state.left = True, STEPS_AFTER
                state.commit()
                if hvd.rank() == hvd.size() - 1:
                    time.sleep(0.2)  # the others have committed
                    note(0)
                    os.kill(os.getpid(), signal.SIGKILL)
            if state.killed:
                state.left -= 1
            if state.done % COMMIT_EVERY == 0:
                state.commit()

    train(hvd.elastic.TorchState(model, optimizer, done=0, left=10**6, killed=False))


if __name__ == "__main__":
    main(sys.argv[1])

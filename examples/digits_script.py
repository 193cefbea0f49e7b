"""Train on handwritten digits with Horovod: a plain script for any launcher.

    horovod-runner run examples/digits_script.py --np -2        # two ranks on this machine
    horovod-runner run examples/digits_script.py --np 4 --master spark://host:7077
    sbatch examples/train.sbatch                                # in an allocation of Slurm
    mpirun -np 2 python examples/digits_script.py               # without HorovodRunner

The functions of horovod_runner do nothing unless HorovodRunner started the script.
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from horovod_runner import load_checkpoint, report, save_checkpoint

parser = argparse.ArgumentParser(description="Train on handwritten digits with Horovod.")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32)
options = parser.parse_args()

hvd.init()
device = torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank())
    device = torch.device("cuda")

digits = load_digits()
pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
data = TensorDataset(pixels, torch.tensor(digits.target))
sampler = DistributedSampler(data, hvd.size(), hvd.rank(), seed=1)
loader = DataLoader(data, options.batch_size, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
done = 0
checkpoint = load_checkpoint()
if checkpoint is not None:
    done = checkpoint.state["epoch"]
    model.load_state_dict(checkpoint.state["model"])
    optimizer.load_state_dict(checkpoint.state["optimizer"])
    if hvd.rank() == 0:
        print(f"resumes after epoch {done}")
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(done + 1, options.epochs + 1):
    sampler.set_epoch(epoch)
    total = torch.zeros(())
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total += loss.detach().cpu()
    mean = hvd.allreduce(total / len(loader), name="loss").item()
    report(loss=mean, step=epoch * len(loader), epoch=epoch)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    save_checkpoint(state, epoch * len(loader))
    if hvd.rank() == 0:
        print(f"epoch {epoch:2}: loss {mean:.4f}")

"""Lightning with Horovod: two ranks learn the same as one process, and resume after a failure."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from horovod_runner import CheckpointConfig, ClusterConfig, DebugConfig, HorovodRunner
from tests.preload import LIGHTNING

pytestmark = pytest.mark.horovod
LOCAL, STEPS = 8, 4


def fit(
    epochs: int,
    *,
    alone: bool = False,
    fails: bool = False,
    clip: float | None = None,
    experts: bool = False,
    manual: bool = False,
    contrastive: bool = False,
) -> Any:
    """Train on this rank's part of every global batch; with ``alone``, on whole global batches.

    Args:
        epochs: how many.
        alone: whether this is the training of one process.
        fails: whether the first attempt does, in the third epoch.
        clip: gradients, by this norm.
        experts: whether each rank uses other layers. No rank uses the last ones.
        manual: whether the module takes its steps itself, and clips.
        contrastive: whether the loss compares the rows of all ranks.
    """
    import horovod.torch as hvd
    import lightning
    import torch

    from horovod_runner import current_attempt
    from horovod_runner.lightning import HorovodStrategy, ReportCallback, resume_from

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
            )
            self.experts = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))
            self.automatic_optimization = not manual

        def forward(self, x: Any) -> Any:
            y = self.layers(x)
            if not experts:
                return y
            if not alone:
                return self.experts[hvd.rank()](y)
            parts = [self.experts[rank](y[rank :: hvd.size()]) for rank in range(hvd.size())]
            return torch.stack(parts, dim=1).reshape(y.shape)

        def training_step(self, batch: Any, index: int) -> Any:
            if fails and self.current_epoch == 2 and current_attempt() == 1:
                raise OSError("no good")
            x, y = batch
            loss = torch.nn.functional.mse_loss(self(x), y)
            if contrastive:
                rows = self.all_gather(self(x), sync_grads=True).reshape(-1)
                loss = torch.pdist(rows[:, None]).square().mean() + rows.mean().square()
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            self.log("time", 0.5)  # not reported: reports have a column of this name
            if not manual:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            decay = 0.1 if experts else 0.0
            optimizer = torch.optim.SGD(
                self.parameters(), lr=0.05, momentum=0.9, weight_decay=decay
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
            }

    hvd.init()
    torch.manual_seed(0 if alone else hvd.rank())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * hvd.size() * LOCAL, 4, generator=generator)
    rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    if not alone:  # Lightning's sampler would shuffle
        rows = torch.utils.data.Subset(rows, range(hvd.rank(), len(rows), hvd.size()))
    loader = torch.utils.data.DataLoader(rows, LOCAL * hvd.size() if alone else LOCAL)
    model = Model()
    trainer = lightning.Trainer(
        strategy="auto" if alone else HorovodStrategy(),
        accelerator="cpu",
        callbacks=[] if alone else [ReportCallback(every=2)],
        max_epochs=epochs,
        use_distributed_sampler=False,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=None if alone else resume_from())
    if contrastive and not alone:
        with torch.inference_mode():  # as in trainer.test
            assert len(trainer.strategy.all_gather(x[:2])) == hvd.size()
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    return [float(trainer.callback_metrics["loss"]), weights]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip": 0.1},
    "experts": {"experts": True},
    "manual": {"manual": True},
    "contrastive": {"contrastive": True},
}


def fit_all() -> dict[str, list[Any]]:
    import horovod.torch as hvd

    results = {}
    for name, options in CASES.items():
        result = fit(3, **options)
        results[name] = [*hvd.allgather_object(result), fit(3, alone=True, **options)]
    return results


WARM = ClusterConfig(preload_frameworks=LIGHTNING)


@cache
def fitted() -> dict[str, list[Any]]:
    """Run all fits in one run, because imports take most of the time."""
    runner = HorovodRunner(
        np=-2,
        progress=False,
        debug_config=DebugConfig(weight_check="epoch"),
        cluster_config=WARM,
    )
    return dict(runner.run(fit_all))


# Slow: the import of Lightning, and six trainings in the one run that all cases share.
@pytest.mark.parametrize("name", CASES)
@pytest.mark.xdist_group("lightning")
def test_two_ranks_learn_what_one_process_learns(name: str) -> None:
    first, second, alone = fitted()[name]
    assert first == second
    assert first[0] == pytest.approx(alone[0], abs=1e-5)
    for weights, expected in zip(first[1], alone[1], strict=True):
        assert weights == pytest.approx(expected, abs=1e-5)


@pytest.mark.xdist_group("lightning")
def test_a_fit_resumes_after_a_failure() -> None:
    runner = HorovodRunner(
        np=-2,
        progress=False,
        max_restarts=1,
        checkpoint_config=CheckpointConfig(num_to_keep=None),
        cluster_config=WARM,
    )
    resumed = runner.run(fit, epochs=3, fails=True)
    assert [saved.step for saved in runner.last_run.checkpoints] == [4, 8, 12]
    assert runner.last_run.metrics.to_pylist()[-1]["step"] == 12
    assert resumed == fitted()["plain"][0]

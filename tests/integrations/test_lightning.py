"""Lightning: steps, logs, checkpoints, averaged weights, errors, and two ranks."""

import copy
import logging
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
from framework_ranks import A, C, on_two_ranks
from ranks import close
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import isda

RANKS = (("WORLD_SIZE", "1"), ("RANK", "0"))


def train_lightning(
    folder: Path,
    *,
    epochs: int = 2,
    resume: str | None = None,
    rank_batch: int = 4,
    fits: tuple[int, ...] = (),
    norm: bool = False,
    again: bool = False,
    new_callback: bool = False,
    **options: Any,
) -> dict[str, Any]:
    import lightning as lightning_package
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from isda.integrations.lightning import ISDACallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning_package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            between = nn.BatchNorm1d(A) if norm else nn.Identity()
            self.model = nn.Sequential(nn.Linear(3, A), between, nn.ReLU(), nn.Linear(A, C))
            self.criterion = ISDACallback(isda.attach(self.model, lambda_0=2.0))
            self.lr = 0.5

        def training_step(self, batch, index):
            loss = self.criterion(self.model(batch[0]), batch[1])
            if again:
                loss = loss + self.criterion(self.model(batch[0]), batch[1], update=False)
            return loss

        def validation_step(self, batch, index):
            self.log("val", self.criterion(self.model(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    torch.manual_seed(0)
    module = Module()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(24, 3, generator=generator), torch.randint(C, (24,), generator=generator)
    )
    extra = options.pop("callbacks", [])
    options = {"log_every_n_steps": 1, **options}
    world, rank = (int(os.environ.get(name, value)) for name, value in RANKS)
    part = torch.utils.data.Subset(data, range(rank, len(data), world))  # together the same batches
    loader = DataLoader(part, rank_batch)
    for number in fits or (epochs,):
        if new_callback:
            module.criterion = ISDACallback(module.criterion.criterion)
        trainer = lightning_package.Trainer(
            max_epochs=number,
            accelerator="cpu",
            default_root_dir=folder,
            logger=CSVLogger(folder),
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                *extra,
                module.criterion,
                ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_top_k=-1),
            ],
            **options,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, loader, loader, ckpt_path=resume)
    with pytest.raises(ValueError, match="must be one of the Trainer's callbacks"):
        module.criterion(
            torch.zeros(2, C, requires_grad=True), torch.zeros(2).long()
        )  # training is over
    attached, target = module.criterion.criterion, data.tensors[1][-rank_batch:]
    matrices = [attached.estimator.class_covariance(c) for c in range(C)]
    weight = attached.gather_parameters()[0].detach()
    soft = F.one_hot(target, C).float()
    tokens = soft[:, None].expand(-1, C + 1, -1)
    return {
        "weights": [p.detach() for p in module.parameters()],
        "names": list(module.state_dict()),
        "state": module.criterion.criterion.state_dict(),
        "total_steps": module.criterion.criterion.total_steps,
        "metrics": {name: float(v) for name, v in trainer.logged_metrics.items()},
        "nothing": float(module.criterion._mean_quadratic(torch.tensor([-100, -100]))),
        "quadratic": float(reference.quadratic(weight, target, matrices).mean()),
        "soft": [float(module.criterion._mean_quadratic(each)) for each in (soft, tokens)],
    }


def test_lightning_steps_log_and_checkpoint(tmp_path):
    pytest.importorskip("lightning")
    whole = train_lightning(tmp_path / "whole", epochs=3)
    assert whole["total_steps"] == whole["state"]["criterion.step"] == 18
    assert whole["metrics"]["isda/strength"] == pytest.approx(2.0 * 17 / 18)
    assert whole["quadratic"] > 0
    for found in (whole["metrics"]["isda/quadratic"], *whole["soft"]):
        assert found == pytest.approx(whole["quadratic"], rel=1e-4)
    assert not any("criterion" in name for name in whole["names"])
    assert whole["nothing"] == 0.0
    checkpoint = str(tmp_path / "whole" / "checkpoints" / "epoch=1.ckpt")
    resumed = train_lightning(tmp_path / "resumed", epochs=3, resume=checkpoint)
    close(resumed["state"], whole["state"])
    close(resumed["weights"], whole["weights"])


def test_lightning_accumulation(tmp_path):
    """Six batches per epoch give updates of four and of two batches."""
    pytest.importorskip("lightning")
    ours = train_lightning(tmp_path, accumulate_grad_batches=4)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 12
    ours = train_lightning(tmp_path / "steps", max_steps=3, accumulate_grad_batches=4)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 10
    # without a number of epochs, the Trainer estimates before it knows the number of batches
    options = {"epochs": -1, "max_steps": 3, "accumulate_grad_batches": 8, "log_every_n_steps": 0}
    ours = train_lightning(tmp_path / "open", **options)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 18


def test_lightning_logs_the_strength_of_counted_passes(tmp_path):
    """A second pass of the same step has the λ of the first one."""
    pytest.importorskip("lightning")
    ours = train_lightning(tmp_path, again=True)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 12
    assert ours["metrics"]["isda/strength"] == pytest.approx(2.0 * 11 / 12)


@pytest.mark.parametrize("new_callback", [False, True])
def test_lightning_fits_twice(new_callback, tmp_path):
    """Each fit restarts the ramp; the statistics are kept."""
    pytest.importorskip("lightning")
    ours = train_lightning(tmp_path, epochs=1, fits=(1, 3), new_callback=new_callback)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 18
    assert ours["state"]["criterion.estimator.count"].sum() == 4 * 24


def test_lightning_weight_averaging_leaves_the_statistics(tmp_path):
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EMAWeightAveraging

    plain = train_lightning(tmp_path / "plain")
    averaged = train_lightning(tmp_path / "ema", callbacks=[EMAWeightAveraging(decay=0.9)])
    close(averaged["state"], plain["state"])
    different = zip(averaged["weights"], plain["weights"], strict=True)
    assert not all(torch.equal(*pair) for pair in different)
    checkpoint = str(tmp_path / "ema" / "checkpoints" / "epoch=0.ckpt")
    resumed = train_lightning(
        tmp_path / "more", resume=checkpoint, callbacks=[EMAWeightAveraging(decay=0.9)]
    )
    close(resumed["state"], averaged["state"])
    close(resumed["weights"], averaged["weights"])


def test_lightning_batch_norm_of_averaged_weights(tmp_path):
    """The epoch that recomputes the batch norm of the average is not training."""
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    average = StochasticWeightAveraging(0.1, swa_epoch_start=1)
    ours = train_lightning(tmp_path, epochs=3, norm=True, callbacks=[average])
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 18
    assert ours["state"]["criterion.estimator.count"].sum() == 3 * 24
    assert ours["metrics"]["isda/strength"] == pytest.approx(2.0 * 17 / 18)


def test_lightning_learning_rate_finder(tmp_path):
    """It runs batches without callbacks, before the number of steps is known."""
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import LearningRateFinder

    find = LearningRateFinder(num_training_steps=5, update_attr=False)
    ours = train_lightning(tmp_path / "ours", callbacks=[find])
    plain = train_lightning(tmp_path / "plain")
    close(ours["state"], plain["state"])
    close(ours["weights"], plain["weights"])


@pytest.mark.parametrize("ramp", ["linear", "constant"])
def test_lightning_outside_of_training(ramp):
    """Ordinary cross entropy without side effects, as for the Tuner."""
    pytest.importorskip("lightning")
    from isda.integrations.lightning import ISDACallback

    model = nn.Linear(3, C)
    attached = isda.attach(model, lambda_0=2.0, ramp=ramp)
    attached(model(torch.randn(8, 3)), torch.arange(8) % C, progress=1.0)
    before = copy.deepcopy(attached.state_dict())
    criterion = ISDACallback(attached)
    criterion.setup(SimpleNamespace(world_size=1), nn.Module(), "fit")
    logits, target = model(torch.randn(8, 3)), torch.arange(8) % C
    torch.testing.assert_close(criterion(logits, target), F.cross_entropy(logits, target))
    assert attached.training
    close(attached.state_dict(), before)


@pytest.mark.ddp
def test_lightning_on_two_ranks(tmp_path):
    pytest.importorskip("lightning")
    whole = train_lightning(tmp_path / "whole", rank_batch=8)
    for ours in on_two_ranks(_train_lightning_on_ranks, tmp_path / "ranks"):
        assert ours["total_steps"] == ours["state"]["criterion.step"] == 6
        close(ours["state"], whole["state"])
        close(ours["weights"], whole["weights"])


def _train_lightning_on_ranks(folder: Path) -> dict[str, Any]:
    from lightning.pytorch.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend="gloo")
    return train_lightning(
        folder / "lightning", strategy=strategy, devices=2, use_distributed_sampler=False
    )


def test_lightning_refusals(tmp_path):
    lightning_package = pytest.importorskip("lightning")
    from isda.integrations.lightning import ISDACallback

    model = nn.Linear(3, C)
    callback = ISDACallback(isda.attach(model))
    with pytest.raises(ValueError, match=r"Trainer\(callbacks=\[module\.criterion\]\)"):
        callback(model(torch.randn(2, 3)), torch.tensor([0, 1]))

    class Module(lightning_package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(3, C)
            self.criterion = isda.attach(self.model)

    module = Module()
    callback = ISDACallback(module.criterion)
    trainer = lightning_package.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"must not be a submodule .* self\.criterion = ISDACall"):
        callback.setup(trainer, module, "fit")
    trainer.state.fn = "fit"
    with pytest.raises(ValueError, match="checkpoint does not contain the criterion's state"):
        callback.on_load_checkpoint(trainer, module, {"callbacks": {}})
    trainer.state.fn = "test"
    callback.on_load_checkpoint(trainer, module, {"callbacks": {}})
    infinite = lightning_package.Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, max_epochs=-1
    )
    with pytest.raises(ValueError, match=r"the Trainer estimates inf steps: set max_steps"):
        callback.on_train_start(infinite, module)

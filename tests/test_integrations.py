"""Integrations with the real frameworks: exact losses, steps, checkpoints, and two ranks."""

import argparse
import copy
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reference
import torch
import torch.multiprocessing as mp
from forks import START_METHOD
from programs import PATIENCE, environment_of_rank, forget_world, held_port
from ranks import close
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import isda
from isda.integrations.steps import count_batches

C, A, L = 4, 8, 5
CHEAP = {"lambda_0": 2.0, "covariance": "identity", "ramp": "constant"}
"""A loss that does not depend on how the samples are divided into batches."""


def test_batches_of_a_training():
    def reference(updates: int, batches: int, accumulation: int) -> int:
        number = 0
        while updates:
            for start in range(0, batches, accumulation):
                number += min(accumulation, batches - start)
                updates -= 1
                if not updates:
                    break
        return number

    for updates in range(1, 12):
        for batches in range(1, 8):
            for accumulation in range(1, 6):
                expected = reference(updates, batches, accumulation)
                assert count_batches(updates, batches, accumulation) == expected
    assert count_batches(5, None, 3) == 15


@pytest.fixture(scope="module")
def imported_by_isda() -> list[str]:
    code = "import sys, isda, isda.integrations; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.split()


@pytest.mark.parametrize("package", ["transformers", "lightning", "timm", "accelerate"])
def test_isda_imports_no_framework(package, imported_by_isda):
    assert package not in imported_by_isda
    assert "isda.integrations" in imported_by_isda


def on_two_ranks(work, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    with held_port() as port:
        arguments = (work, port, str(folder))
        mp.start_processes(_on_rank, arguments, nprocs=2, start_method=START_METHOD)
    return [torch.load(folder / f"result{rank}.pt") for rank in range(2)]


def _on_rank(rank: int, work, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment_of_rank(rank, 2, port), ACCELERATE_USE_CPU="true")
    forget_world()
    torch.save(work(Path(folder)), f"{folder}/result{rank}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


# Transformers


class Tokens(Dataset):
    """Sequences with a label for each token, of which a varying number is ignored."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, 9, (size, L), generator=generator)
        self.labels = self.tokens % C
        for i in range(size):
            self.labels[i, 1 + i % L :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[i], "labels": self.labels[i]}


def train_tokens(
    folder: Path,
    *,
    batch_size: int = 2,
    accumulation: int = 1,
    size: int = 16,
    resume: bool | str | None = None,
    options: dict[str, Any] = CHEAP,
    callback: dict[str, Any] | None = None,
    loss: str | None = "isda",
    then_epochs: int = 0,
    **arguments: Any,
) -> dict[str, Any]:
    import transformers

    from isda.integrations.transformers import ISDACallback, loss_func

    class Trainer(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    transformers.logging.set_verbosity_error()
    transformers.set_seed(0)
    config = transformers.BertConfig(
        vocab_size=9,
        hidden_size=A,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        num_labels=C,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForTokenClassification(config)
    criterion = isda.attach(model, **options)
    functions = {
        None: None,
        "isda": loss_func(criterion),
        "mean": lambda outputs, labels, num_items_in_batch=None: criterion(outputs.logits, labels),
    }
    trainer = Trainer(
        model,
        transformers.TrainingArguments(
            str(folder),
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=size // int(os.environ.get("WORLD_SIZE", "1")),
            gradient_accumulation_steps=accumulation,
            optim="sgd",
            learning_rate=0.5,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            logging_steps=1,
            **{"save_strategy": "no", "num_train_epochs": 1, **arguments},
        ),
        train_dataset=Tokens(size),
        eval_dataset=Tokens(size),
        compute_loss_func=functions[loss],
        callbacks=[ISDACallback(criterion, **callback or {})],
    )
    trainer.train(resume_from_checkpoint=resume)
    if then_epochs:
        trainer.args.num_train_epochs = then_epochs
        trainer.train()
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "weights": [p.detach() for p in model.parameters()],
        "state": criterion.state_dict(),
        "total_steps": criterion.total_steps,
        "evaluation": trainer.evaluate()["eval_loss"],
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    """Batches of 8, one process, no accumulation."""
    pytest.importorskip("transformers")
    return train_tokens(tmp_path_factory.mktemp("whole"), batch_size=8)


def test_trainer_with_accumulation(whole, tmp_path):
    """The loss of four batches of 2 is that of one of 8, and not four times as large."""
    ours = train_tokens(tmp_path / "a", batch_size=2, accumulation=4)
    close(ours["losses"], whole["losses"])
    close(ours["weights"], whole["weights"])
    close(ours["evaluation"], whole["evaluation"])
    assert (whole["total_steps"], ours["total_steps"]) == (2, 8)
    wrong = train_tokens(tmp_path / "b", batch_size=2, accumulation=4, loss="mean")
    assert wrong["losses"][0] > 3 * whole["losses"][0]  # the defect that loss_func mends


@pytest.mark.ddp
def test_trainer_on_two_ranks_with_accumulation(whole, tmp_path):
    for ours in on_two_ranks(_train_on_ranks, tmp_path):
        close(ours["losses"], whole["losses"])
        close(ours["weights"], whole["weights"])
        close(ours["evaluation"], whole["evaluation"])
        assert ours["total_steps"] == 4


def _train_on_ranks(folder: Path) -> dict[str, Any]:
    return train_tokens(folder / "trainer", batch_size=2, accumulation=2)


@pytest.mark.ddp
def test_trainer_resumes_on_two_ranks(tmp_path):
    first, second = on_two_ranks(_resume_on_ranks, tmp_path)
    for name in ("state", "weights"):
        close(first["resumed"][name], first["whole"][name])
        close(second["resumed"][name], first["whole"][name])
    assert first["whole"]["state"]["criterion.step"] == 4


@pytest.mark.ddp
def test_trainer_resumes_with_sharded_statistics(tmp_path):
    """Each rank has a file of its own."""
    records = on_two_ranks(_resume_sharded_on_ranks, tmp_path)
    for record in records:
        close(record["resumed"]["state"], record["whole"]["state"])
        close(record["resumed"]["weights"], record["whole"]["weights"])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoint-2").glob("isda*"))
    assert names == ["isda_0.pt", "isda_1.pt"]


def _resume_sharded_on_ranks(folder: Path) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    return _resume_on_ranks(folder, isda.ShardedCovariance)


def _resume_on_ranks(folder: Path, covariance: Any = isda.FullCovariance) -> dict[str, Any]:
    options = {"lambda_0": 2.0, "covariance": covariance(A, C)}
    record = {"whole": train_tokens(folder / "run", options=options, **SAVE)}
    checkpoint = str(folder / "run" / "checkpoint-2")
    options["covariance"] = covariance(A, C)
    record["resumed"] = train_tokens(folder / "run", options=options, resume=checkpoint, **SAVE)
    return record


SAVE = {"save_strategy": "steps", "save_steps": 2}


def test_trainer_checkpoints(tmp_path):
    """λ and the statistics go on where they were."""
    options = {"lambda_0": 2.0}
    whole = train_tokens(tmp_path / "run", options=options, **SAVE)
    assert whole["total_steps"] == whole["state"]["criterion.step"] == 8
    resumed = train_tokens(
        tmp_path / "run", options=options, resume=str(tmp_path / "run" / "checkpoint-4"), **SAVE
    )
    close(resumed["state"], whole["state"])
    close(resumed["weights"], whole["weights"])
    close(resumed["losses"], whole["losses"])


def test_trainer_checkpoint_in_another_folder(tmp_path):
    options = {"lambda_0": 2.0}
    whole = train_tokens(tmp_path / "run", options=options, **SAVE)
    elsewhere = str(tmp_path / "run" / "checkpoint-4")
    train_tokens(tmp_path / "other", options={"lambda_0": 0.5}, size=24, **SAVE)  # also has one
    with pytest.raises(ValueError, match=r"resumed at step 4, but .* is not in .*other/checkpoint"):
        train_tokens(tmp_path / "other", options=options, resume=elsewhere, **SAVE)
    resumed = train_tokens(
        tmp_path / "other",
        options=options,
        resume=elsewhere,
        callback={"resume_from_checkpoint": elsewhere},
        **SAVE,
    )
    close(resumed["state"], whole["state"])
    (tmp_path / "run" / "checkpoint-4" / "isda.pt").unlink()
    with pytest.raises(ValueError, match=r"load the model with from_pretrained"):
        train_tokens(tmp_path / "run", options=options, resume=elsewhere, **SAVE)


def test_trainer_trains_twice(tmp_path):
    """Each training has a ramp of its own, also if ``auto_find_batch_size`` starts it again."""
    pytest.importorskip("transformers")
    ours = train_tokens(tmp_path, options={"lambda_0": 2.0}, then_epochs=3)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 24
    given = {"lambda_0": 2.0, "total_steps": 32}
    ours = train_tokens(tmp_path / "given", options=given, then_epochs=3)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 32


def test_trainer_whose_loss_is_another(tmp_path):
    """What would train silently with another loss than was asked for."""
    transformers = pytest.importorskip("transformers")
    from isda.integrations.transformers import ISDACallback

    with pytest.raises(ValueError, match=r"pass label_smoothing=0\.1 to isda\.attach instead"):
        train_tokens(tmp_path, label_smoothing_factor=0.1)
    train_tokens(tmp_path, options={**CHEAP, "label_smoothing": 0.1}, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"without the criterion: pass compute_loss_func=loss_fu"):
        train_tokens(tmp_path, loss=None)
    sizes = {"vocab_size": 9, "n_embd": A, "n_layer": 1, "n_head": 2, "n_positions": L}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    callback = ISDACallback(isda.attach(model))
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel is a language model, .* are shifted"):
        callback.on_train_begin(arguments, transformers.TrainerState(), None, model)


def test_trainer_refusals():
    transformers = pytest.importorskip("isda.integrations.transformers")
    model = nn.Linear(A, C)
    with pytest.raises(ValueError, match=r"ignore_index must be -100 .* got 255: set such labels"):
        transformers.loss_func(isda.attach(model, ignore_index=255))
    with pytest.raises(ValueError, match=r"reduction must be 'mean'.* got 'sum'"):
        transformers.loss_func(isda.attach(model, reduction="sum"))
    with pytest.raises(ValueError, match=r"must be that of isda\.attach\(model, …\), got Cross"):
        transformers.ISDACallback(nn.CrossEntropyLoss())
    compute_loss = transformers.loss_func(isda.attach(model, ramp="constant"))
    with pytest.raises(ValueError, match='labels must be in the batch as "labels"'):
        compute_loss({"logits": model(torch.randn(2, A))}, None)
    state = pytest.importorskip("transformers").TrainerState(is_hyper_param_search=True)
    callback = transformers.ISDACallback(isda.attach(model))
    with pytest.raises(ValueError, match="train each trial with a Trainer of its own"):
        callback.on_train_begin(None, state, None)


@pytest.mark.parametrize(
    "wrap",
    [lambda x: {"logits": x}, lambda x: SimpleNamespace(logits=x), lambda x: (x, None)],
    ids=["dict", "attribute", "tuple"],
)
def test_loss_func_finds_the_logits(wrap):
    loss_func = pytest.importorskip("isda.integrations.transformers").loss_func
    model, labels = nn.Linear(4, 3), torch.tensor([0, 2])
    compute_loss = loss_func(isda.attach(model, lambda_0=0.0, total_steps=5))
    logits = model(torch.randn(2, 4))
    expected = nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(compute_loss(wrap(logits), labels), expected)


@pytest.mark.parametrize("kind", ["probabilities", "labels", "maps", "plain", "tokens"])
def test_loss_func_divides_by_what_the_trainer_counts(kind):
    """``labels.ne(-100).sum()`` counts the probabilities of all classes, too."""
    loss_func = pytest.importorskip("isda.integrations.transformers").loss_func
    options = {"lambda_0": 1.0, "ramp": "constant"}
    model, x = nn.Linear(A, C), torch.randn(6, A)
    loss: nn.Module | None = None
    if kind == "probabilities":
        labels = torch.randn(6, C).softmax(1)
    elif kind == "labels":
        labels = torch.randint(2, (6, C)).float()
        loss, options = isda.ISDABCEWithLogitsLoss(A, C, **options), {}
    elif kind == "maps":
        model, x = nn.Conv2d(A, C, 1), torch.randn(2, A, 3, 3)
        labels = torch.randint(C, (2, 6, 6))
    elif kind == "tokens":  # as many as classes
        x, labels = torch.randn(3, C, A), torch.randn(3, C, C).softmax(2)
    else:
        labels = torch.randint(C, (6,))
    criterion = isda.attach(model, loss, **options)
    logits = model(x)
    large = nn.functional.interpolate(logits, (6, 6), mode="bilinear") if kind == "maps" else logits
    expected = criterion(large, labels)
    criterion.load_state_dict({k: torch.zeros_like(v) for k, v in criterion.state_dict().items()})
    model(x)
    ours = loss_func(criterion)({"logits": logits}, labels, labels.ne(-100).sum())
    close(ours, expected)
    criterion.eval()  # and in evaluation
    ours = loss_func(criterion)({"logits": logits}, labels, labels.ne(-100).sum())
    close(ours, criterion(large, labels))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_loss_func_with_as_many_tokens_as_classes(soft, train):
    """Also in the first call, which may be an evaluation."""
    loss_func = pytest.importorskip("isda.integrations.transformers").loss_func
    model = nn.Linear(A, C).train(train)
    criterion = isda.attach(model, lambda_0=0.0, total_steps=5)
    labels = torch.randn(3, C, C).softmax(2) if soft else torch.randint(C, (3, C))
    with torch.no_grad():
        logits = model(torch.randn(3, C, A))
    loss = loss_func(criterion)({"logits": logits}, labels)
    close(loss, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1)))


# Lightning


RANKS = (("WORLD_SIZE", "1"), ("RANK", "0"))


def train_lightning(
    folder: Path,
    *,
    epochs: int = 2,
    resume: str | None = None,
    rank_batch: int = 4,
    fits: tuple[int, ...] = (),
    norm: bool = False,
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
            return self.criterion(self.model(batch[0]), batch[1])

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
    part = torch.utils.data.Subset(data, range(rank, len(data), world))  # same batches together
    loader = DataLoader(part, rank_batch)
    for number in fits or (epochs,):
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
        module.criterion(torch.zeros(2, C, requires_grad=True), torch.zeros(2).long())  # is over
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
    """Six batches an epoch, of which four and two make an update."""
    pytest.importorskip("lightning")
    ours = train_lightning(tmp_path, accumulate_grad_batches=4)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 12
    ours = train_lightning(tmp_path / "steps", max_steps=3, accumulate_grad_batches=4)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 10
    # without a number of epochs, the Trainer estimates before it knows the number of batches
    options = {"epochs": -1, "max_steps": 3, "accumulate_grad_batches": 8, "log_every_n_steps": 0}
    ours = train_lightning(tmp_path / "open", **options)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 18


def test_lightning_fits_twice(tmp_path):
    """Each fit has a ramp of its own; the statistics go on."""
    pytest.importorskip("lightning")
    ours = train_lightning(tmp_path, epochs=1, fits=(1, 3))
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
    """The epoch that recomputes the batch norm of the average is no training."""
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    average = StochasticWeightAveraging(0.1, swa_epoch_start=1)
    ours = train_lightning(tmp_path, epochs=3, norm=True, callbacks=[average])
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 18
    assert ours["state"]["criterion.estimator.count"].sum() == 3 * 24
    assert ours["metrics"]["isda/strength"] == pytest.approx(2.0 * 17 / 18)


def test_lightning_learning_rate_finder(tmp_path):
    """It runs batches without the callbacks, and before the number of steps is known."""
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import LearningRateFinder

    find = LearningRateFinder(num_training_steps=5, update_attr=False)
    ours = train_lightning(tmp_path / "ours", callbacks=[find])
    plain = train_lightning(tmp_path / "plain")
    close(ours["state"], plain["state"])
    close(ours["weights"], plain["weights"])


@pytest.mark.parametrize("ramp", ["linear", "constant"])
def test_lightning_outside_of_training(ramp):
    """Ordinary cross entropy, which changes nothing, such as for the Tuner."""
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
    with pytest.raises(ValueError, match="checkpoint has no state of the criterion"):
        callback.on_load_checkpoint(trainer, module, {"callbacks": {}})
    trainer.state.fn = "test"
    callback.on_load_checkpoint(trainer, module, {"callbacks": {}})
    infinite = lightning_package.Trainer(
        accelerator="cpu", logger=False, default_root_dir=tmp_path, max_epochs=-1
    )
    with pytest.raises(ValueError, match=r"the Trainer estimates inf steps: set max_steps"):
        callback.on_train_start(infinite, module)


# timm


def create_task(**options: Any) -> Any:
    from timm.loss import LabelSmoothingCrossEntropy

    from isda.integrations.timm import ISDATask

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, A), nn.ReLU(), nn.Linear(A, C))
    task = ISDATask(model, LabelSmoothingCrossEntropy(0.1), verbose=False, lambda_0=2.0, **options)
    task.total_steps = 6
    return task


def run_task(task: Any, steps: range, part: slice = slice(None)) -> list[torch.Tensor]:
    module = task.get_trainable_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 3, generator=generator)
        target = torch.randint(C, (8,), generator=generator)
        loss = task(x[part], target[part])["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        task.update_ema(step)
        losses.append(loss.detach())
    return losses


def test_timm_task_keeps_the_smoothing_and_resumes(tmp_path):
    pytest.importorskip("timm")
    from timm.task import (
        ClassificationTask,
        load_task_ema_checkpoint,
        resume_task_checkpoint,
    )
    from timm.utils import CheckpointSaver

    whole = create_task()
    assert whole.criterion.criterion.label_smoothing == 0.1
    expected = run_task(whole, range(6))
    half = create_task()
    half.setup_ema(decay=0.9)
    run_task(half, range(3))
    saver = CheckpointSaver(
        half.trainable_module,
        torch.optim.SGD(half.trainable_module.parameters(), lr=0.5),
        checkpoint_dir=str(tmp_path),
        task=half,
    )
    saver.save_checkpoint(0, metric=1.0)
    resumed = create_task()
    resume_task_checkpoint(resumed, str(tmp_path / "last.pth.tar"))
    resumed.setup_ema(decay=0.9)
    load_task_ema_checkpoint(resumed, str(tmp_path / "last.pth.tar"))
    close(run_task(resumed, range(3, 6)), expected[3:])
    close(resumed.get_task_state(), whole.get_task_state())
    assert resumed.total_steps == 6
    assert not resumed.get_task_state(ema=True)
    plain = ClassificationTask(create_task().trainable_module, nn.CrossEntropyLoss())
    CheckpointSaver(
        plain.trainable_module, saver.optimizer, checkpoint_dir=str(tmp_path), task=plain
    ).save_checkpoint(0, metric=1.0)
    with pytest.raises(ValueError, match="--initial-checkpoint"):
        resume_task_checkpoint(create_task(), str(tmp_path / "last.pth.tar"))


def test_timm_losses(caplog):
    timm_loss = pytest.importorskip("timm.loss")
    from isda.integrations.timm import ISDATask

    model, weight = nn.Linear(3, C), torch.rand(C)
    with caplog.at_level("INFO", logger="isda.integrations.timm"):
        task = ISDATask(model, nn.CrossEntropyLoss(), dtype=torch.float16, device="meta")
        assert "ISDATask: ISDALoss(" in caplog.text
        caplog.clear()
        assert (task.dtype, task.device) == (torch.float16, "meta")
        task = ISDATask(model, nn.CrossEntropyLoss(weight, label_smoothing=0.2), verbose=False)
        assert not caplog.text
    torch.testing.assert_close(task.criterion.criterion.weight, weight)
    assert task.criterion.criterion.label_smoothing == 0.2
    task = ISDATask(model, timm_loss.SoftTargetCrossEntropy(), verbose=False, ramp="constant")
    assert task(torch.randn(5, 3), torch.randn(5, C).softmax(1))["loss"].isfinite()
    with pytest.raises(ValueError, match="got BinaryCrossEntropy: train without --bce-loss"):
        ISDATask(model, timm_loss.BinaryCrossEntropy(), verbose=False)


TIMM_SCRIPT = os.environ.get("ISDA_TIMM_TRAIN")  # train.py of timm, which its package leaves out


@pytest.mark.skipif(not TIMM_SCRIPT, reason="ISDA_TIMM_TRAIN is not set")
def test_timm_training_script(tmp_path):
    """timm's own train.py with the changes of docs/frameworks.md: train, save, resume."""
    script = Path(str(TIMM_SCRIPT)).read_text()
    page = (Path(__file__).parents[1] / "docs" / "frameworks.md").read_text()
    diff = page.split("```diff\n")[1].split("```")[0].splitlines()
    removed = [line[1:] for line in diff if line.startswith("-")]
    added = [line[1:] for line in diff if line.startswith("+")]
    assert (len(removed), len(added)) == (1, 3)
    script = script.replace("import yaml\n", f"import yaml\n{added[0]}\n", 1)
    assert script.count(removed[0]) == 1
    script = script.replace(removed[0], added[1])
    anchor = "    start_epoch = 0\n"
    assert script.count(anchor) == 1
    script = script.replace(anchor, f"{added[2]}\n{anchor}")
    (tmp_path / "train.py").write_text(script)
    torchvision = pytest.importorskip("torchvision")
    for split, number in (("train", 8), ("val", 4)):
        for label in range(2):
            folder = tmp_path / "data" / split / str(label)
            folder.mkdir(parents=True)
            for i in range(number):
                image = torch.randint(128, (3, 32, 32), dtype=torch.uint8) + 100 * label
                torchvision.io.write_png(image, str(folder / f"{i}.png"))
    command = [sys.executable, "train.py", "--data-dir", "data", "--model", "test_resnet"]
    command += ["--num-classes", "2", "--input-size", "3", "32", "32", "-b", "4", "-vb", "4"]
    command += ["--device", "cpu", "--workers", "0", "--model-ema", "--smoothing", "0.1"]
    command += ["--no-prefetcher", "--output", "out", "--warmup-epochs", "0", "--sched", "step"]
    command += ["--cooldown-epochs", "0"]

    def run(*options: str) -> dict[str, Any]:
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        name = options[options.index("--experiment") + 1]
        file = tmp_path / "out" / name / "last.pth.tar"
        with torch.serialization.safe_globals([argparse.Namespace]):
            state: dict[str, Any] = torch.load(file, weights_only=True)["task_state"]
        return state

    first = run("--epochs", "1", "--experiment", "first")
    assert first["criterion.step"] == 4
    checkpoint = "out/first/last.pth.tar"
    second = run("--epochs", "3", "--experiment", "second", "--resume", checkpoint)
    assert second["criterion.step"] == 12  # and not 8
    assert second["criterion.estimator.count"].sum() == 48


@pytest.mark.ddp
def test_timm_task_on_two_ranks(tmp_path):
    pytest.importorskip("timm")
    whole = create_task()
    run_task(whole, range(4))
    weights = [p.detach() for p in whole.trainable_module.parameters()]
    for ours in on_two_ranks(_run_task_on_ranks, tmp_path):
        close(ours["weights"], weights)
        close(ours["state"], whole.get_task_state())


def _run_task_on_ranks(folder: Path) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    task = create_task()
    task.prepare_distributed()
    rank = torch.distributed.get_rank()
    run_task(task, range(4), slice(4 * rank, 4 * rank + 4))
    weights = [p.detach() for p in task.get_trainable_module().parameters()]
    return {"weights": weights, "state": task.get_task_state()}


# Accelerate


def train_accelerate(folder: Path, *, batch_size: int, accumulation: int) -> dict[str, Any]:
    from accelerate import Accelerator

    def create() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, A), nn.ReLU(), nn.Linear(A, C))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(
            torch.randn(32, 3, generator=generator), torch.randint(C, (32,), generator=generator)
        )
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
        parts = accelerator.prepare(model, optimizer, DataLoader(data, batch_size))
        criterion = isda.attach(parts[0], lambda_0=2.0, total_steps=2 * len(parts[2]))
        accelerator.register_for_checkpointing(criterion)
        return accelerator, criterion, *parts

    accelerator, criterion, model, optimizer, loader = create()
    for epoch in range(2):
        if epoch == 1:  # simulate a restart
            accelerator.save_state(str(folder / "state"))
            accelerator.wait_for_everyone()
            accelerator, criterion, model, optimizer, loader = create()
            accelerator.load_state(str(folder / "state"))
        for x, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(criterion(model(x), target))
                optimizer.step()
                optimizer.zero_grad()
    weights = [p.detach() for p in model.parameters()]
    return {"weights": weights, "state": criterion.state_dict()}


@pytest.mark.ddp
def test_accelerate_on_two_ranks(tmp_path):
    pytest.importorskip("accelerate")
    whole = train_accelerate(tmp_path / "whole", batch_size=8, accumulation=2)
    assert whole["state"]["criterion.step"] == 8
    for ours in on_two_ranks(_train_accelerate_on_ranks, tmp_path / "ranks"):
        close(ours["weights"], whole["weights"])
        close(ours["state"], whole["state"])


def _train_accelerate_on_ranks(folder: Path) -> dict[str, Any]:
    return train_accelerate(folder, batch_size=4, accumulation=2)

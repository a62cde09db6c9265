"""Trainer of transformers: losses, steps, checkpoints, errors, and two ranks."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from framework_ranks import A, C, on_two_ranks
from ranks import close
from torch import nn
from torch.utils.data import Dataset

import isda

L = 5  # tokens
CHEAP = {"lambda_0": 2.0, "covariance": "identity", "ramp": "constant"}
"""A loss that does not depend on how the samples are divided into batches."""


class Tokens(Dataset):
    """Sequences with a label for each token, with a varying number of ignored ones."""

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
    new_callback: bool = False,
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
        if new_callback:
            trainer.remove_callback(ISDACallback)
            trainer.add_callback(ISDACallback(criterion))
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
    """The loss of four batches of 2 equals that of one of 8, and is not four times as large."""
    ours = train_tokens(tmp_path / "a", batch_size=2, accumulation=4)
    close(ours["losses"], whole["losses"])
    close(ours["weights"], whole["weights"])
    close(ours["evaluation"], whole["evaluation"])
    assert (whole["total_steps"], ours["total_steps"]) == (2, 8)
    wrong = train_tokens(tmp_path / "b", batch_size=2, accumulation=4, loss="mean")
    assert wrong["losses"][0] > 3 * whole["losses"][0]  # loss_func prevents this


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
    """Each rank has its own file."""
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
    """λ and the statistics continue from the checkpoint."""
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


def test_trainer_checkpoints_on_each_node(tmp_path):
    """Nodes without the first rank also save it if the Trainer saves there."""
    transformers = pytest.importorskip("transformers")
    from isda.integrations.transformers import ISDACallback

    (tmp_path / "checkpoint-3").mkdir()
    callback = ISDACallback(isda.attach(nn.Linear(A, C)))
    state = transformers.TrainerState(global_step=3, is_world_process_zero=False)
    arguments = transformers.TrainingArguments(str(tmp_path), use_cpu=True, save_on_each_node=True)
    callback.on_save(arguments, state, transformers.TrainerControl())
    assert (tmp_path / "checkpoint-3" / "isda.pt").exists()


@pytest.mark.parametrize("new_callback", [False, True])
def test_trainer_trains_twice(new_callback, tmp_path):
    """Each call of train() restarts the ramp, as does ``auto_find_batch_size``."""
    pytest.importorskip("transformers")
    again = {"then_epochs": 3, "new_callback": new_callback}
    ours = train_tokens(tmp_path, options={"lambda_0": 2.0}, **again)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 24
    given = {"lambda_0": 2.0, "total_steps": 32}
    ours = train_tokens(tmp_path / "given", options=given, **again)
    assert ours["total_steps"] == ours["state"]["criterion.step"] == 32


def test_trainer_whose_loss_is_another(tmp_path):
    """Configurations that would silently train with another loss."""
    transformers = pytest.importorskip("transformers")
    from isda.integrations.transformers import ISDACallback

    with pytest.raises(ValueError, match=r"pass label_smoothing=0\.1 to isda\.attach instead"):
        train_tokens(tmp_path, label_smoothing_factor=0.1)
    train_tokens(tmp_path, options={**CHEAP, "label_smoothing": 0.1}, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"without calling the criterion: pass compute_loss_func"):
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
    with pytest.raises(ValueError, match=r"must be created by isda\.attach\(model, …\), got Cross"):
        transformers.ISDACallback(nn.CrossEntropyLoss())
    compute_loss = transformers.loss_func(isda.attach(model, ramp="constant"))
    with pytest.raises(ValueError, match='the batch must contain "labels"'):
        compute_loss({"logits": model(torch.randn(2, A))}, None)
    state = pytest.importorskip("transformers").TrainerState(is_hyper_param_search=True)
    callback = transformers.ISDACallback(isda.attach(model))
    with pytest.raises(ValueError, match="create a separate Trainer for each trial"):
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
    """``labels.ne(-100).sum()`` counts the probabilities of all classes."""
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
    """Even in the first call, which may be an evaluation."""
    loss_func = pytest.importorskip("isda.integrations.transformers").loss_func
    model = nn.Linear(A, C).train(train)
    criterion = isda.attach(model, lambda_0=0.0, total_steps=5)
    labels = torch.randn(3, C, C).softmax(2) if soft else torch.randint(C, (3, C))
    with torch.no_grad():
        logits = model(torch.randn(3, C, A))
    loss = loss_func(criterion)({"logits": logits}, labels)
    close(loss, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1)))

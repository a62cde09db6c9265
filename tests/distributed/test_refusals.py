"""A batch that one rank rejects is rejected by all ranks, before any state changes."""

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import PATIENCE
from ranks import close, results_of
from torch import Tensor, nn

import isda

pytestmark = pytest.mark.ddp
N, C, A = 6, 5, 4
FAULTS = {  # what the second rank does wrong in an explicit call
    "features": lambda call: call | {"features": call["features"][:, 1:]},
    "weight": lambda call: call | {"weight": call["weight"].long()},
    "target": lambda call: call | {"target": call["target"].int()},
    "logits": lambda call: call | {"logits": torch.zeros(N, C + 1)},
    "progress": lambda call: call | {"progress": 1.5},
    "dtype": lambda call: call | {"features": call["features"].double()},
    "index": lambda call: call | {"covariance_index": call["target"][1:]},
}
ATTACHED = {  # and in a call of an attached criterion
    "changed logits": lambda model, x: 2 * model(x),
    "fewer logits": lambda model, x: model(x)[1:],
    "no pass": lambda model, x: torch.zeros(N, C),
    "a loss": lambda model, x: model(x).sum(),
}
OTHER = "another rank rejected its batch"


def message_of(function: Any, *args: Any, **options: Any) -> str:
    try:
        function(*args, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return ""


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "features": torch.randn(N, A, generator=generator),
        "weight": torch.randn(C, A, generator=generator),
        "target": torch.randint(C, (N,), generator=generator),
    }


def work(rank: int, world: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE),  # for ranks that would wait forever
    )
    messages: dict[str, str] = {}
    criterion = isda.ISDALoss(A, C, lambda_0=0.5, ramp="constant")
    criterion(**draw(rank))
    before = copy.deepcopy(criterion.state_dict())
    for name, fault in FAULTS.items():
        call = draw(rank)
        messages[name] = message_of(criterion, **(fault(call) if rank == 1 else call))
    after = copy.deepcopy(criterion.state_dict())
    loss = criterion(**draw(10 + rank))

    torch.manual_seed(0)
    model = nn.Linear(A, C)
    attached = isda.attach(model, ramp="constant")
    for name, fault in ATTACHED.items():
        call = draw(rank)
        logits = fault(model, call["features"]) if rank == 1 else model(call["features"])
        messages[name] = message_of(attached, logits, call["target"])
        model(call["features"])
        attached._captures[0].features = None
        dist.barrier()  # a rank that still waits for the other one fails here
    model.eval()  # no communication, so the first rank does not see the error
    call = draw(rank)
    logits = model(call["features"])
    messages["eval"] = message_of(attached, [logits] if rank == 1 else logits, call["target"])
    model.train()
    for name, module in (("eval of the loss", attached), ("explicit eval", criterion)):
        module.eval()
        given = [logits] if rank == 1 else logits
        arguments = (given, call["target"]) if module is attached else ()
        named = {} if arguments else call | ({"progress": 1.5} if rank == 1 else {})
        messages[name] = message_of(module, *arguments, **named)
        module.train()
    dist.barrier()
    binary = isda.ISDABCEWithLogitsLoss(A, C, ramp="constant")
    labels = torch.ones(N, C)[rank:]  # too few on the second rank
    call = draw(rank)
    messages["labels"] = message_of(binary, call["features"], call["weight"], labels)
    record = {"messages": messages, "states": [before, after], "loss": loss}
    torch.save(
        record | {"counts": [attached.estimator.count, binary.estimator.count]},
        f"{folder}/rank{rank}.pt",
    )
    dist.destroy_process_group()


def test_all_ranks_refuse(tmp_path: Path) -> None:
    first, second = results_of(work, 2, tmp_path)
    for name in (*FAULTS, *ATTACHED, "labels"):
        assert OTHER in first["messages"][name], name
        assert second["messages"][name], name
        assert OTHER not in second["messages"][name], name
    for name in ("eval", "eval of the loss", "explicit eval"):
        assert not first["messages"][name], name
    for name in ("eval", "eval of the loss"):
        assert "logits must be a tensor, got list" in second["messages"][name]
    assert "progress must be in [0, 1], got 1.5" in second["messages"]["explicit eval"]
    for record in (first, second):
        close(*record["states"])
        assert not any(count.any() for count in record["counts"])
    batches = [[draw(rank), draw(10 + rank)] for rank in range(2)]
    whole = isda.ISDALoss(A, C, lambda_0=0.5, ramp="constant")
    for step in range(2):
        parts = [batches[rank][step] for rank in range(2)]
        features, target = (
            torch.cat([part[key] for part in parts]) for key in ("features", "target")
        )
        whole.update(features, target)
    losses = [whole(**batches[rank][1], update=False) for rank in range(2)]
    close(torch.stack([first["loss"], second["loss"]]), torch.stack(losses))

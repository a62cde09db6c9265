"""Call the loss explicitly, with mixup, gradient accumulation, λ per epoch and checkpoints."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import isda

EPOCHS, BATCH, PARTS = 6, 128, 2  # each batch is split into PARTS forward passes


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16  # (1797, 64)
    target = torch.tensor(digits.target)

    body, head, criterion, optimizer = create()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        for epoch in range(EPOCHS):
            if epoch == EPOCHS // 2:  # simulate a restart: create everything again and load
                body, head, criterion, optimizer = create()
                state = torch.load(checkpoint)
                body.load_state_dict(state["body"])
                head.load_state_dict(state["head"])
                criterion.load_state_dict(state["criterion"])
                optimizer.load_state_dict(state["optimizer"])
                seen = criterion.state_dict()["estimator.count"].sum()
                print(f"resumed with statistics of {seen} samples")
            loss = train_epoch(
                body, head, criterion, optimizer, images, target, progress=epoch / EPOCHS
            )
            print(f"epoch {epoch + 1}: loss {loss:.3f}")
            state = {
                "body": body.state_dict(),
                "head": head.state_dict(),
                "criterion": criterion.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            torch.save(state, checkpoint)

    criterion.eval()  # ordinary cross entropy
    with torch.no_grad():
        features = body(images)
        error = (head(features).argmax(1) != target).float().mean()
        loss = criterion(features, head.weight, target, bias=head.bias).item()
    print(f"all digits: cross entropy {loss:.3f}, error {100 * error:.1f} %")


def create() -> tuple[nn.Module, nn.Linear, isda.ISDALoss, torch.optim.Optimizer]:
    body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
    head = nn.Linear(32, 10)
    criterion = isda.ISDALoss(num_features=32, num_classes=10, lambda_0=0.5)
    parameters = [*body.parameters(), *head.parameters()]  # the criterion has none
    return body, head, criterion, torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_epoch(
    body: nn.Module,
    head: nn.Linear,
    criterion: isda.ISDALoss,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    target: Tensor,
    *,
    progress: float,
) -> float:
    losses = []
    for batch in torch.randperm(len(target)).split(BATCH):
        optimizer.zero_grad()
        for part in batch.tensor_split(PARTS):
            mixed, mixed_target = mixup(images[part], target[part])
            features = body(mixed)
            loss = criterion(features, head.weight, mixed_target, bias=head.bias, progress=progress)
            (loss * len(part) / len(batch)).backward()
            losses.append(loss.item())
        optimizer.step()
    return sum(losses) / len(losses)


def mixup(images: Tensor, target: Tensor, alpha: float = 0.2) -> tuple[Tensor, Tensor]:
    """Mix random pairs of images and their class probabilities."""
    share = torch.distributions.Beta(alpha, alpha).sample()
    order = torch.randperm(len(target))
    probabilities = F.one_hot(target, 10).float()
    return images.lerp(images[order], share), probabilities.lerp(probabilities[order], share)


if __name__ == "__main__":
    main()

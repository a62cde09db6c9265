"""Segment generated shapes with a small FCN that upsamples its logits, in seconds on a CPU.

Compares cross entropy and ISDA with the same seeds. The border of each shape has the ignored label.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isda

CLASSES, IGNORE, SIZE = 4, 255, 32  # background, disc, square, stripe
STEPS, BATCH = 120, 16


class FCN(nn.Module):
    """Features at 1/4 of the resolution, a 1×1 convolution, and bilinear upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.classifier = nn.Conv2d(32, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.classifier(self.body(images))
        return F.interpolate(logits, images.shape[2:], mode="bilinear", align_corners=False)


def create_shapes(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images with one shape each, (N, 3, H, W), and their label maps, (N, H, W)."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    center = torch.randint(10, SIZE - 10, (2, number, 1, 1), generator=generator)
    radius = torch.randint(5, 10, (number, 1, 1), generator=generator)
    kind = torch.randint(1, CLASSES, (number, 1, 1), generator=generator)
    dx, dy = (x - center[0]).abs(), (y - center[1]).abs()
    distances = [(dx**2 + dy**2).sqrt(), torch.maximum(dx, dy).float(), dx + 0.2 * dy]
    distance = torch.stack(distances, 1)[torch.arange(number), kind.flatten() - 1]  # (N, H, W)
    target = torch.where(distance < radius, kind, 0)
    colors = 0.6 * torch.eye(3)[kind.flatten() - 1]  # color of the shape, plus noise
    colors = colors + 0.4 * torch.randn(number, 3, generator=generator)
    images = torch.where((target > 0)[:, None], colors[:, :, None, None], 0.0)
    images = images + 0.5 * torch.randn(number, 3, SIZE, SIZE, generator=generator)
    return images, torch.where((distance - radius).abs() < 1, IGNORE, target)


def train(method: str, seed: int) -> float:
    """Train one network and return its mean intersection over union on new images."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images, target = create_shapes(256, generator)
    model = FCN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    criterion: nn.Module = nn.CrossEntropyLoss(ignore_index=IGNORE)
    if method == "ISDA":
        criterion = isda.attach(model, lambda_0=0.5, total_steps=STEPS, ignore_index=IGNORE)
    for _ in range(STEPS):
        batch = torch.randint(len(images), (BATCH,), generator=generator)
        loss = criterion(model(images[batch]), target[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    images, target = create_shapes(512, torch.Generator().manual_seed(1000 + seed))
    with torch.no_grad():
        predicted = model(images).argmax(1)
    known = target != IGNORE
    scores = []
    for label in range(CLASSES):
        found, wanted = (predicted == label) & known, target == label
        scores.append((found & wanted).sum() / (found | wanted).sum())
    return torch.stack(scores).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    seeds = parser.parse_args().seeds
    for method in ("cross entropy", "ISDA"):
        scores = torch.tensor([train(method, seed) for seed in range(seeds)])
        spread = f" ± {scores.std():.3f} over {seeds} seeds" if seeds > 1 else ""
        print(f"{method}: mean IoU {scores.mean():.3f}{spread}")


if __name__ == "__main__":
    main()

"""Train a torchvision ResNet-18 with ISDA on scikit-learn's digits, in seconds on a CPU."""

import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torchvision.models import resnet18

import isda

STEPS = 40


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=24, mode="bilinear")  # (1797, 1, 24, 24)
    images = images.expand(-1, 3, -1, -1)
    target = torch.tensor(digits.target)

    model = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    criterion = isda.attach(model, lambda_0=0.5, total_steps=STEPS)  # was nn.CrossEntropyLoss()

    losses = []
    for step in range(STEPS):
        batch = torch.randint(len(target), (32,))
        loss = criterion(model(images[batch]), target[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 10 == 0:
            print(f"steps {step - 8:2d} to {step + 1:2d}: loss {sum(losses[-10:]) / 10:.3f}")

    model.eval()  # the criterion is now ordinary cross entropy
    with torch.no_grad():
        logits = model(images[:256])
        print(f"cross entropy of 256 digits: {criterion(logits, target[:256]).item():.3f}")


if __name__ == "__main__":
    main()

r"""Semantic segmentation with a model that upsamples its logits.

ISDA as in the authors' experiments on Cityscapes (TPAMI 2021), with the quadratic term at the full
resolution. The features a may have, for example, 1/8 of the resolution of the label map. U is
bilinear upsampling, y_p is the label of pixel p, and c_q the label of position q of the features,
by nearest neighbour:

    Σ_c    = covariance of a_q over the positions q with c_q = c
    z_p    = U(W a + b)_p
    loss_p = log Σ_j exp(z_pj + (λ/2) (w_j − w_y)ᵀ Σ_y (w_j − w_y)) − z_py      y = y_p
    loss   = mean of loss_p over the pixels with a label

In words: the statistics are computed at the resolution of the features, the loss at that of the
labels. The quadratic term depends only on the label, so one table of C × C numbers serves all
pixels, and no features are upsampled.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import isda

__all__ = ["segmentation_loss"]


def segmentation_loss(
    estimator: isda.Covariance,
    head: nn.Conv2d,  # 1×1
    features: Tensor,  # (N, A, h, w)
    target: Tensor,  # (N, H, W)
    *,
    strength: float,
    ignore_index: int = 255,
) -> Tensor:
    label = torch.where(target == ignore_index, -1, target)
    coarse = F.interpolate(label[:, None].float(), features.shape[2:])  # nearest neighbour
    estimator.update(features.detach().movedim(1, -1).flatten(0, 2), coarse.long().flatten())
    classes = torch.arange(head.out_channels, device=target.device)
    table = estimator.quadratic(head.weight.flatten(1), classes)  # (C, C)
    logits = F.interpolate(head(features), target.shape[1:], mode="bilinear")
    return isda.functional.isda_cross_entropy(
        logits.movedim(1, -1).flatten(0, 2),
        label.flatten(),
        table[label.flatten().clamp(min=0)],
        strength=strength,
        ignore_index=-1,
    )


def main() -> None:
    torch.manual_seed(0)
    labels = torch.randint(4, (32, 1, 4, 4)).float()
    target = F.interpolate(labels, (32, 32)).long()[:, 0]  # (32, 32, 32)
    images = torch.randn(4, 3)[target].movedim(-1, 1) + 0.5 * torch.randn(32, 3, 32, 32)
    target[:, :2] = 255  # pixels without a label
    body, head = nn.Sequential(nn.Conv2d(3, 16, 4, stride=4), nn.ReLU()), nn.Conv2d(16, 4, 1)
    estimator = isda.DiagonalCovariance(16, 4)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for step in range(40):
        batch = torch.randint(32, (8,))
        loss = segmentation_loss(
            estimator, head, body(images[batch]), target[batch], strength=0.5 * step / 40
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == 39:
            print(f"step {step + 1:2d}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()

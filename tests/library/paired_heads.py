"""Helpers for the tests of reshaped logits: a head, what follows it, and the explicit loss."""

import torch
from torch import Tensor, nn

from isda import ISDALoss, attach

__all__ = ["OPTIONS", "A", "C", "N", "Then", "check"]

N, C, A = 3, 5, 4
OPTIONS = {"lambda_0": 2.0, "ramp": "constant"}


class Then(nn.Module):
    """A head and what the model does to its output."""

    def __init__(self, head: nn.Module, then) -> None:
        super().__init__()
        self.head, self.then = head, then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.head(x))


def check(model, head, features, target, rows, target_rows, device, **options):
    """Compare two steps with the explicit loss on rows: loss, gradients and statistics."""
    criterion = attach(model, head=head, **OPTIONS, **options)
    explicit = ISDALoss(A, C, **OPTIONS, **options).to(device)
    weight = head.weight.flatten(1)
    for _ in range(2):
        loss = criterion(model(features), target)
        expected = explicit(rows, weight, target_rows, bias=head.bias)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        gradients = [torch.autograd.grad(each, head.parameters()) for each in (loss, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    for name, buffer in criterion.estimator.named_buffers():
        torch.testing.assert_close(
            buffer, explicit.estimator.get_buffer(name), rtol=1e-4, atol=1e-5
        )
    return criterion

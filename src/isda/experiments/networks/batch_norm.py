"""Batch norm over the images of all ranks: several processes give the same result as one."""

from typing import Any

import torch
from torch import Tensor, nn

from isda import distributed

__all__ = ["synchronize_batch_norm"]


def synchronize_batch_norm(network: nn.Module, device: torch.device) -> None:
    """Synchronise every batch norm of a network over all ranks, on CPUs as well."""
    if device.type == "cuda":
        from timm.layers import convert_sync_batchnorm  # torch's converter drops timm's activations

        convert_sync_batchnorm(network)
        return
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            active = hasattr(module, "act")  # timm's layers may include an activation
            module.__class__ = _RankedBatchNormAct2d if active else _RankedBatchNorm2d


class _RankedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm2d that takes mean and variance over all ranks in training."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        x = input.float()  # moments in float32, also for bfloat16 images
        number = distributed.sum_over_ranks(x.new_tensor(float(x.numel() // x.shape[1])))
        if number <= 1:  # as in torch
            raise ValueError("Expected more than 1 value per channel when training")
        mean = _SumOverRanks.apply(x.sum((0, 2, 3))) / number  # (C,)
        centred = x - mean[:, None, None]
        variance = _SumOverRanks.apply(centred.square().sum((0, 2, 3))) / number
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * number / (number - 1), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(input.dtype)


class _RankedBatchNormAct2d(_RankedBatchNorm2d):
    """The same for timm's BatchNormAct2d."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; the gradient is the sum of the gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return distributed.sum_over_ranks(tensor.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return distributed.sum_over_ranks(grads[0].clone())

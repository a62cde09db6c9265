"""Gradient descent on the latents of a generator (Appendix C), captured on a GPU."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from isda.experiments.errors import RunError
from isda.experiments.generators.trained_generator import TrainedGenerator
from isda.experiments.training.progress import show_progress
from isda.experiments.training.side_by_side import CapturedSteps, graph_sizes

__all__ = ["LatentSearch", "normalized", "with_codes"]


def normalized(latent: Tensor) -> Tensor:
    """(z - mean(z)) / std(z) of every row, the constraint of both steps.

    Shape:
        latent (N, noise); output (N, noise).
    """
    centred = latent - latent.mean(1, keepdim=True)
    return centred / centred.square().mean(1, keepdim=True).clamp(min=1e-12).sqrt()


def with_codes(latent: Tensor, generator: TrainedGenerator) -> Tensor:
    """Latents with codes of 0 behind them, for an infoGAN."""
    codes = generator.settings.codes
    return torch.cat([latent, latent.new_zeros(len(latent), codes)], 1) if codes else latent


class LatentSearch:
    """Minimises the sum of a loss over latents, each of which is independent of the others.

    Args:
        loss: function of normalised latents (N, noise) that returns the loss of each (N,).
        start: latents to start from.
        momentum: momentum of gradient descent.
        weight_decay: weight decay of the latents before they are normalised.
    """

    def __init__(
        self,
        loss: Callable[[Tensor], Tensor],
        start: Tensor,
        *,
        momentum: float,
        weight_decay: float,
    ) -> None:
        self.device = start.device
        self.latent = start.clone().requires_grad_()
        self.learning_rate = torch.zeros((), device=start.device)
        self.losses = torch.zeros(len(start), device=start.device)  # before the last iteration
        self._loss = loss
        self._optimizer = torch.optim.SGD(
            [self.latent],
            lr=self.learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            fused=True,
        )
        self._buffer = torch.zeros_like(start)
        self._optimizer.state[self.latent]["momentum_buffer"] = self._buffer
        if start.is_cuda:
            self.stream = torch.cuda.Stream(start.device)

    def step(self) -> None:
        """One iteration."""
        self.zero_grad()
        losses = self._loss(normalized(self.latent))
        losses.sum().backward()
        self._optimizer.step()
        self.losses.copy_(losses.detach())

    @torch.no_grad()
    def evaluate(self) -> Tensor:
        """The loss of each latent."""
        return self._loss(normalized(self.latent))

    def zero_grad(self) -> None:
        """Free the gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that an iteration changes."""
        yield self.latent
        yield self._buffer
        yield self.losses

    def run(
        self, iterations: int, learning_rate: float, *, capture: bool, label: str = ""
    ) -> Tensor:
        """Run all iterations; the rate is divided by 10 after each quarter of them.

        Args:
            iterations: number of iterations.
            learning_rate: rate of the first quarter.
            capture: capture the iterations in CUDA graphs on a GPU.
            label: label of a progress bar; empty: none.

        Returns:
            The loss of each latent at the end.
        """
        runner = CapturedSteps([self], capture=capture and self.device.type == "cuda")
        quarter = -(-iterations // 4)
        with show_progress(iterations, label, "iteration", show=bool(label)) as bar:
            for number in range(4):
                self.learning_rate.fill_(learning_rate / 10**number)
                left = min(quarter, iterations - number * quarter)
                for times in graph_sizes(max(0, left)):
                    runner.run(LatentSearch.step, times=times)
                    bar.update(times)
        losses = self.evaluate()
        if not losses.isfinite().all():
            raise RunError(
                f"gradient descent on the latents diverged at learning rate {learning_rate:g}: "
                "use lower --learning-rates"
            )
        return losses

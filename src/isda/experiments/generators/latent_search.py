"""Gradient descent on the latents of a generator (Appendix C), captured on a GPU."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from isda.experiments.errors import RunError
from isda.experiments.generators.stages import Stages
from isda.experiments.generators.trained_generator import TrainedGenerator
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
    """Minimises a loss over latents that are independent of each other.

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
        self._loss(normalized(self.latent)).sum().backward()
        self._optimizer.step()

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

    def state_dict(self) -> dict[str, Tensor]:
        """Latents and momentum, to continue from."""
        return {"latent": self.latent.detach(), "momentum": self._buffer}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the latents and the momentum of another search."""
        self.latent.copy_(state["latent"])
        self._buffer.copy_(state["momentum"])

    def run(
        self, stages: Stages, stage: str, iterations: int, learning_rate: float, *, capture: bool
    ) -> Tensor:
        """Run all iterations; the learning rate is divided by 10 after each quarter of them.

        Args:
            stages: the computation that the search is a stage of.
            stage: name of this stage.
            iterations: number of iterations.
            learning_rate: rate of the first quarter.
            capture: capture the iterations in CUDA graphs on a GPU.

        Returns:
            The loss of each latent at the end.
        """
        runner = CapturedSteps([self], capture=capture and self.device.type == "cuda")
        quarter = -(-iterations // 4)

        def step(done: int, times: int) -> None:
            self.learning_rate.fill_(learning_rate / 10 ** (done // quarter))
            runner.run(LatentSearch.step, times=times)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the time limit counts what has been done

        def size(done: int) -> int:
            if self.device.type != "cuda":
                return 1
            return next(graph_sizes(min(quarter - done % quarter, iterations - done)))

        stages.run(stage, iterations, step, {"search": self}, size=size)
        losses = self.evaluate()
        if not losses.isfinite().all():
            stages.clear()  # it could only continue with the same learning rate
            raise RunError(
                f"gradient descent on the latents diverged at learning rate {learning_rate:g}: "
                "use lower --learning-rates"
            )
        return losses

"""Settings of the inversion (Appendix C)."""

from dataclasses import dataclass

from isda.experiments.generators.gan_settings import require

__all__ = ["InversionSettings"]


@dataclass(frozen=True)
class InversionSettings:
    """How to invert; the paper's values but for those that it does not give."""

    draws: int = 5
    """Augmented pictures per image, and as many of the control."""

    restarts: int = 4
    """Latents to start step I from, of which the best counts; not in the paper."""

    start: str = "random"
    """Where step I starts: random, or decoder, a network from features to latents trained first."""

    decoder_steps: int = 2000
    """Training steps of this network."""

    eta: float = 0.1
    """Weight η of the pixels in step I; the paper does not give its value."""

    iterations: int = 10_000
    """Iterations of gradient descent in each step."""

    learning_rates: tuple[float, float] = (10.0, 1.0)
    """Initial learning rates of step I and step II, divided by 10 after each quarter."""

    momentum: float = 0.9
    """Momentum of gradient descent."""

    weight_decay: float = 1e-4
    """Weight decay of the latents."""

    def __post_init__(self) -> None:
        for field in ("draws", "restarts", "iterations", "decoder_steps"):
            require(getattr(self, field) >= 1, field, getattr(self, field), ">= 1")
        require(self.start in ("random", "decoder"), "start", self.start, "random or decoder")
        require(self.eta >= 0, "eta", self.eta, ">= 0")
        rates = self.learning_rates
        require(all(rate > 0 for rate in rates), "learning_rates", rates, "> 0")
        require(0 <= self.momentum < 1, "momentum", self.momentum, ">= 0 and < 1")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, ">= 0")

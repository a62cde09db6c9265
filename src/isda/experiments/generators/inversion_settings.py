"""Settings of the inversion (Appendix C)."""

from dataclasses import dataclass
from functools import partial

from isda.experiments.recipe_checks import require

__all__ = ["InversionSettings"]


@dataclass(frozen=True)
class InversionSettings:
    """How to invert; the defaults are the paper's values where it gives them."""

    draws: int = 5
    """Number of augmented pictures per image, and of control pictures."""

    restarts: int = 4
    """Number of initial latents for step I, of which the best result is kept; not in the paper."""

    start: str = "random"
    """Initial latents of step I: random, or decoder, a network that maps features to latents and is
    trained first."""

    decoder_steps: int = 2000
    """Number of training steps of the decoder."""

    eta: float = 0.1
    """Weight η of the pixel loss in step I; the paper does not give its value."""

    iterations: int = 10_000
    """Number of iterations of gradient descent in each step."""

    learning_rates: tuple[float, float] = (10.0, 1.0)
    """Initial learning rates of steps I and II, divided by 10 after each quarter of iterations."""

    momentum: float = 0.9
    """Momentum of gradient descent."""

    weight_decay: float = 1e-4
    """Weight decay of the latents."""

    def __post_init__(self) -> None:
        check = partial(require, self)
        for field in ("draws", "restarts", "iterations", "decoder_steps"):
            check(field, getattr(self, field) >= 1, ">= 1")
        check("start", self.start in ("random", "decoder"), "random or decoder")
        check("eta", self.eta >= 0, ">= 0")
        check("learning_rates", all(rate > 0 for rate in self.learning_rates), "> 0")
        check("momentum", 0 <= self.momentum < 1, ">= 0 and < 1")
        check("weight_decay", self.weight_decay >= 0, ">= 0")

"""One GAN and its training step: the steps of the critic and one of the generator.

The step never synchronises, draws its random numbers from a key, and can be captured as a whole,
like the step of a :class:`~isda.experiments.training.training_step.Lane`.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import ImageArrays
from isda.experiments.generators.gan_networks import Critic, Generator
from isda.experiments.generators.gan_settings import GanSettings
from isda.experiments.networks.network import seeded

__all__ = ["GanLane", "draw_latent", "to_bytes", "to_unit"]

_REAL, _LATENT, _MIX, _WEIGHTS, _FLIP = range(1, 6)  # key parts, one per use of random numbers


class GanLane:
    """Generator, critic and their optimizers.

    Args:
        settings: settings of the GAN.
        seed: seed of initial weights and of all draws.
        data: data set on the device.
        only: class that this GAN is trained for; None: all classes.
    """

    def __init__(
        self, settings: GanSettings, seed: int, data: ImageArrays, *, only: int | None = None
    ) -> None:
        self.settings, self.num_classes = settings, data.num_classes
        self.images, self.target = data.train_images, data.train_target
        if only is not None:
            mine = (self.target == only).nonzero()[:, 0]
            self.images, self.target = self.images[mine], self.target[mine]
        device = self.device = self.images.device
        part = 0 if only is None else only + 1
        labels = 0 if only is not None else data.num_classes
        shape = tuple(data.image_shape)
        with seeded(int(counter_rng.key(seed, _WEIGHTS, part))):
            self.generator = Generator(settings, labels, shape).to(device)
            self.critic = Critic(settings, data.num_classes, shape).to(device)
        self.average = copy.deepcopy(self.generator).requires_grad_(False).eval()
        self.key = counter_rng.key(seed, part, device=device)
        self.steps = torch.zeros((), dtype=torch.int64, device=device)  # of the generator
        self.totals = torch.zeros(2, device=device)  # losses of critic and generator in the epoch
        self.optimizers = [_adam(self.critic, settings), _adam(self.generator, settings)]
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)

    def step(self) -> None:
        """Some steps of the critic and one of the generator."""
        real, label, latent, mix = self._draw()
        for number in range(self.settings.critic_steps):
            self._critic_step(real[number], label[number], latent[number], mix[number])
        self._generator_step(label[-1], latent[-1])
        self._update_average()
        self.steps.add_(1)

    def zero_grad(self) -> None:
        """Free the gradients; the next step allocates new ones."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that a step changes."""
        for module in (self.generator, self.critic, self.average):
            yield from module.parameters()
            yield from module.buffers()
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from state.values()
        yield self.steps
        yield self.totals

    def state_dict(self) -> dict[str, Any]:
        """Contents of a checkpoint."""
        return {
            "steps": self.steps,
            "generator": self.generator.state_dict(),
            "average": self.average.state_dict(),
            "critic": self.critic.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint; before the step is captured."""
        self.steps.copy_(state["steps"])
        for name in ("generator", "average", "critic"):
            getattr(self, name).load_state_dict(state[name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Real images, labels, latents and shares of the mixture for all steps of the critic.

        Labels and latents have one more row, for the generator. Everything is drawn at once,
        because drawing for each step of the critic would take most of the kernels.
        """
        number, size = self.settings.critic_steps, self.settings.batch_size
        key = counter_rng.fold(self.key, self.steps)
        index = counter_rng.integers(
            (number + 1, size), counter_rng.fold(key, _REAL), high=len(self.images)
        )
        real = self.images[index[:-1]]
        if self.settings.flips:
            flip = counter_rng.bits((number, size, 1, 1, 1), counter_rng.fold(key, _FLIP)) % 2 == 0
            real = torch.where(flip, real.flip(-1), real)
        latent = draw_latent((number + 1) * size, counter_rng.fold(key, _LATENT), self.settings)
        mix = real.new_zeros((number, 0))
        if self.settings.penalty:
            mix = counter_rng.uniform((number, size, 1, 1, 1), counter_rng.fold(key, _MIX))
        return to_unit(real), self.target[index], latent.unflatten(0, index.shape), mix

    def _critic_step(self, real: Tensor, label: Tensor, latent: Tensor, mix: Tensor) -> None:
        with torch.no_grad():
            fake = self.generator(latent, label)
        self.zero_grad()
        both = label.repeat(2)
        score, logits, codes = self.critic(torch.cat([real, fake]), both)
        real_score, fake_score = score.chunk(2)
        if self.settings.penalty:
            penalty = self._gradient_penalty(torch.lerp(real, fake, mix), label)
            loss = fake_score.mean() - real_score.mean() + self.settings.penalty * penalty
        else:
            loss = F.relu(1 - real_score).mean() + F.relu(1 + fake_score).mean()
        if logits.shape[1]:
            loss = loss + 2 * F.cross_entropy(logits, both)  # that of real plus that of generated
        if codes.shape[1]:
            loss = loss + self._code_loss(codes[len(real) :], latent)
        loss.backward()
        self.optimizers[0].step()
        self.totals[0].add_(loss.detach() / self.settings.critic_steps)

    def _generator_step(self, label: Tensor, latent: Tensor) -> None:
        self.zero_grad()
        score, logits, codes = self.critic(self.generator(latent, label), label)
        loss = -score.mean()
        if logits.shape[1]:
            loss = loss + F.cross_entropy(logits, label)
        if codes.shape[1]:
            loss = loss + self._code_loss(codes, latent)
        loss.backward(inputs=list(self.generator.parameters()))
        self.optimizers[1].step()
        self.totals[1].add_(loss.detach())

    def _code_loss(self, codes: Tensor, latent: Tensor) -> Tensor:
        """Bound of infoGAN's mutual information for two codes: a normal of variance 1, but for a
        constant."""
        return F.mse_loss(codes, latent[:, self.settings.noise :])

    def _gradient_penalty(self, images: Tensor, label: Tensor) -> Tensor:
        """Mean of (‖gradient of the score‖ − 1)²."""
        images.requires_grad_()
        score = self.critic(images, label)[0].sum()
        (gradient,) = torch.autograd.grad(score, images, create_graph=True)
        # the square root has no gradient at 0
        length = (gradient.flatten(1).square().sum(1) + 1e-12).sqrt()
        return (length - 1).square().mean()

    @torch.no_grad()
    def _update_average(self) -> None:
        # at the start the decay is (1 + t) / (10 + t), so that the initial weights do not linger
        weight = (9 / (10 + self.steps)).float().clamp(min=1 - self.settings.average)
        averages, current = (
            [tensor for tensor in (*module.parameters(), *module.buffers())
             if tensor.is_floating_point()]
            for module in (self.average, self.generator)
        )  # fmt: skip
        change = torch._foreach_sub(current, averages)
        torch._foreach_mul_(change, weight)
        torch._foreach_add_(averages, change)


def draw_latent(size: int, key: Tensor, settings: GanSettings) -> Tensor:
    """Normal noise, and codes uniform in [-1, 1) behind it: (size, noise + codes)."""
    noise = counter_rng.normal((size, settings.noise), key)
    if not settings.codes:
        return noise
    codes = counter_rng.uniform((size, settings.codes), counter_rng.fold(key, 1))
    return torch.cat([noise, 2 * codes - 1], 1)


def to_unit(images: Tensor) -> Tensor:
    """uint8 images as float32 in [-1, 1], the range of a generator."""
    return images.float() * (2 / 255) - 1


def to_bytes(images: Tensor) -> Tensor:
    """Images in [-1, 1] as uint8; the inverse of :func:`to_unit`."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _adam(module: nn.Module, settings: GanSettings) -> torch.optim.Adam:
    parameters = list(module.parameters())
    optimizer = torch.optim.Adam(
        parameters,
        lr=settings.learning_rate,
        betas=(settings.beta_1, settings.beta_2),
        fused=True,
        capturable=parameters[0].is_cuda,
    )
    for parameter in parameters:  # zeros, so that the first step needs no special case
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer

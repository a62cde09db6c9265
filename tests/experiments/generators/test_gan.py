"""GANs: networks, losses against separate batches and loops, learning, averages, drawing."""

from dataclasses import replace

import pytest
import torch
from gans import small
from torch.nn import functional as F

from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import load_data
from isda.experiments.errors import InputError
from isda.experiments.generators.gan_networks import Critic, Generator, doublings
from isda.experiments.generators.gan_settings import CODES, GANS
from isda.experiments.generators.gan_step import GanLane, draw_latent, to_bytes, to_unit
from isda.experiments.generators.gan_training import create_lanes
from isda.experiments.generators.trained_generator import TrainedGenerator
from isda.experiments.settings import Options
from isda.experiments.training.device import choose_kernels
from isda.experiments.training.side_by_side import CapturedSteps


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (2, 16, 16), (3, 12, 12)])
@pytest.mark.parametrize("name", GANS)
def test_networks_fit_the_images(name: str, shape) -> None:
    settings = small(name)
    generator, critic = Generator(settings, 7, shape), Critic(settings, 7, shape)
    label = torch.tensor([0, 3, 6, 6, 1])
    latent = draw_latent(5, counter_rng.key(0), settings)
    assert latent.shape == (5, 100 + CODES * (name == "infogan"))
    images = generator(latent, label)
    assert images.shape == (5, *shape)
    assert images.abs().max() <= 1
    score, logits, codes = critic(images, label)
    assert score.shape == (5,)
    assert logits.shape == (5, 7 if name in ("acgan", "infogan") else 0)
    assert codes.shape == (5, CODES if name == "infogan" else 0)


def test_sizes_that_no_doubling_gives_are_refused() -> None:
    for side in (8, 28, 30, 96, 160, 224):
        small, number = doublings((3, side, side))
        assert 4 <= small <= 15
        assert number >= 1
        assert small * 2**number == side
    for shape in ((3, 4, 4), (3, 32, 16), (3, 2, 2), (3, 34, 34), (3, 299, 299)):
        with pytest.raises(InputError, match=r"square for a generator, .* got [0-9]+ x [0-9]+$"):
            doublings(shape)


def test_the_label_counts_where_it_should(digits) -> None:
    latent = draw_latent(2, counter_rng.key(1, device=digits.train_images.device), small("cgan"))
    one, other = (torch.full((2,), label, device=latent.device) for label in (1, 2))
    lane = GanLane(small("cgan"), 0, digits)
    assert not torch.equal(lane.generator(latent, one), lane.generator(latent, other))
    images = to_unit(digits.train_images[:2])
    assert not torch.equal(lane.critic(images, one)[0], lane.critic(images, other)[0])
    lane = GanLane(small("wgan"), 0, digits, only=4)
    assert torch.equal(lane.generator(latent, one), lane.generator(latent, other))
    assert lane.target.unique().tolist() == [4]


def test_pixels_survive_the_range_of_a_generator() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_bytes(to_unit(pixels)), pixels)
    assert to_unit(pixels).aminmax() == (-1, 1)


def test_gradient_penalty_is_that_of_a_loop(digits) -> None:
    lane = GanLane(small("wgan"), 0, digits, only=0)
    images = to_unit(digits.train_images[:5])
    label = digits.train_target[:5]
    expected = []
    for image, one in zip(images, label, strict=True):
        single = image[None].clone().requires_grad_()
        lane.critic(single, one[None])[0].backward()
        expected.append((single.grad.norm() - 1) ** 2)
    found = lane._gradient_penalty(images.clone(), label)
    torch.testing.assert_close(found, torch.stack(expected).mean())
    found.backward()  # twice differentiable
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in lane.critic.parameters())


@pytest.mark.parametrize("name", GANS)
def test_a_critic_learns_to_tell_real_from_generated(name: str, digits) -> None:
    """With a generator that stands still, the gap between the scores of both grows."""
    only = 3 if name == "wgan" else None
    lane = GanLane(small(name, batch_size=32, learning_rate=1e-3, width=8), 0, digits, only=only)
    key = counter_rng.key(7, device=lane.device)

    def gap() -> float:
        label = lane.target[:64]
        fake = lane.generator(draw_latent(64, key, lane.settings), label)
        with torch.no_grad():
            real_score = lane.critic(to_unit(lane.images[:64]), label)[0].mean()
            return float(real_score - lane.critic(fake, label)[0].mean())

    before = gap()
    for _ in range(150):
        lane._critic_step(*(drawn[0] for drawn in lane._draw()))
        lane.steps.add_(1)
    assert gap() > before + 0.5


@pytest.mark.parametrize("name", ["acgan", "infogan"])
def test_heads_find_class_and_codes_of_generated_images(name: str, digits) -> None:
    lane = GanLane(small(name, learning_rate=2e-3, width=16, batch_size=64), 0, digits)
    key = counter_rng.key(9, device=lane.device)
    latent = draw_latent(256, key, lane.settings)
    label = lane.target[:256]

    def losses() -> tuple[float, float]:
        with torch.no_grad():
            _, logits, codes = lane.critic(lane.generator(latent, label), label)
            error = F.mse_loss(codes, latent[:, 100:]) if codes.shape[1] else torch.zeros(())
            return float(F.cross_entropy(logits, label)), float(error)

    for _ in range(150):
        lane.step()
    entropy, error = losses()
    assert entropy < 1.2  # log 10 = 2.3 if the class were not in the image
    assert error < 0.25  # 1/3, the variance of a code, if it were not in the image


@pytest.mark.parametrize("name", GANS)
def test_losses_are_those_of_separate_batches(name: str, digits) -> None:
    """One pass of the critic over real and generated images, against a pass over each."""
    lane = GanLane(small(name, critic_steps=2), 0, digits, only=6 if name == "wgan" else None)
    lane.critic.eval()  # no step of the power iteration of the spectral norm
    real, label, latent, mix = (drawn[1] for drawn in lane._draw())
    with torch.no_grad():
        fake = lane.generator(latent, label)
        real_score, real_logits, _ = lane.critic(real, label)
        fake_score, fake_logits, found = lane.critic(fake, label)
    if name == "wgan":
        between = real + mix * (fake - real)
        penalty = lane._gradient_penalty(between, label).detach()
        expected = fake_score.mean() - real_score.mean() + 10 * penalty
        of_generator = -fake_score.mean()
    else:
        expected = (1 - real_score).clamp(min=0).mean() + (1 + fake_score).clamp(min=0).mean()
        of_generator = -fake_score.mean()
    if name in ("acgan", "infogan"):
        expected += F.cross_entropy(real_logits, label) + F.cross_entropy(fake_logits, label)
        of_generator += F.cross_entropy(fake_logits, label)
    if name == "infogan":
        error = (found - latent[:, 100:]).square().mean()
        expected, of_generator = expected + error, of_generator + error
    critic = [parameter.detach().clone() for parameter in lane.critic.parameters()]
    lane._generator_step(label, latent)
    torch.testing.assert_close(lane.totals[1], of_generator)
    assert all(parameter.grad is None for parameter in lane.critic.parameters())
    assert all(map(torch.equal, critic, lane.critic.parameters()))

    lane = GanLane(lane.settings, 0, digits, only=6 if name == "wgan" else None)
    lane.critic.eval()
    lane._critic_step(real, label, latent, mix)
    torch.testing.assert_close(lane.totals[0], expected / 2)  # the mean of two steps


def test_photographs_are_flipped_and_digits_are_not(digits) -> None:
    for settings in (small("cgan"), small("cgan", data="cifar10")):
        lane = GanLane(settings, 0, digits)
        real = lane._draw()[0].flatten(0, 1)
        found = (real[:, None] == to_unit(lane.images)[None]).flatten(2).all(2).any(1)
        mirrored = (real.flip(-1)[:, None] == to_unit(lane.images)[None]).flatten(2).all(2).any(1)
        assert (found | mirrored).all()
        assert found.all() == (settings.data == "digits")


def test_generators_of_all_classes_train_as_if_alone(digits) -> None:
    settings = small("wgan")
    lanes = create_lanes(settings, 0, digits)
    assert len(lanes) == 10
    CapturedSteps(lanes, capture=digits.train_images.is_cuda).run(GanLane.step, times=2)
    alone = GanLane(settings, 0, digits, only=7)
    for _ in range(2):
        alone.step()
    for one, other in zip(alone.tensors(), lanes[7].tensors(), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.equal(next(lanes[0].generator.parameters()),
                           next(lanes[1].generator.parameters()))  # fmt: skip


def test_the_average_is_that_of_the_weights(digits) -> None:
    lane = GanLane(small("cgan", average=0.25), 0, digits)
    expected = [parameter.detach().clone() for parameter in lane.generator.parameters()]
    for step in range(4):
        lane.step()
        decay = min(0.25, (1 + step) / (10 + step))  # 1/10, 2/11, 3/12, then 0.25
        pairs = zip(expected, lane.generator.parameters(), strict=True)
        expected = [decay * old + (1 - decay) * new.detach() for old, new in pairs]
    for averaged, one in zip(lane.average.parameters(), expected, strict=True):
        torch.testing.assert_close(averaged, one)


@pytest.mark.parametrize("name", ["wgan", "infogan"])
def test_a_trained_generator_draws_each_image_on_its_own(name: str, digits) -> None:
    settings, shape = small(name), tuple(digits.image_shape)
    lanes = create_lanes(settings, 0, digits)
    generator = TrainedGenerator.of_lanes(settings, shape, lanes)
    classes = [3, 0, 9, 3, 5]
    latent = draw_latent(5, counter_rng.key(3, device=generator.device), settings)
    images = generator.for_classes(classes)(latent)
    for index, one in enumerate(classes):
        network = lanes[one].average if name == "wgan" else lanes[0].average
        single = network(latent[[index]], torch.tensor([one], device=latent.device))
        torch.testing.assert_close(images[[index]], single)
    drawn = generator.draw(classes, counter_rng.key(4, device=generator.device))
    assert (drawn.dtype, drawn.shape) == (torch.uint8, (5, *shape))


def test_a_class_without_images_is_refused(digits) -> None:
    rest = digits.train_target != 4
    fewer = replace(digits, train_images=digits.train_images[rest],
                    train_target=digits.train_target[rest])  # fmt: skip
    with pytest.raises(InputError, match=r"wgan needs training images of every class.* no 4"):
        create_lanes(small("wgan"), 0, fewer)
    assert len(create_lanes(small("cgan"), 0, fewer)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", GANS)
def test_a_captured_step_equals_an_eager_one(name: str) -> None:
    data = load_data("digits").to("cuda")
    captured, eager = (create_lanes(small(name), 0, data) for _ in range(2))
    runner = CapturedSteps(captured, capture=True)
    # Adam divides by the size of a gradient, so noise of kernels in a small one would be large
    with choose_kernels(Options(deterministic=True), data.train_images.device):
        for times in (2, 1, 2):
            runner.run(GanLane.step, times=times)
        assert runner.capture  # no fallback
        CapturedSteps(eager, capture=False).run(GanLane.step, times=5)
    for one, other in zip(captured, eager, strict=True):
        for tensor, expected in zip(one.tensors(), other.tensors(), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-3, atol=1e-4)

"""Inversion of features: the search, the decoder, digests of weights, and the result."""

import hashlib
import tracemalloc
from dataclasses import replace

import pytest
import torch
from PIL import Image

from isda.experiments.data import counter_rng
from isda.experiments.errors import InputError, RunError, TimeUp
from isda.experiments.generators.feature_moves import choose_samples
from isda.experiments.generators.gan_step import draw_latent, to_bytes
from isda.experiments.generators.inversion import Inversion, show_inversion
from isda.experiments.generators.inversion_settings import InversionSettings
from isda.experiments.generators.latent_decoder import (
    LatentDecoder,
    create_generator,
    train_decoder,
)
from isda.experiments.generators.latent_search import LatentSearch, normalized, with_codes
from isda.experiments.generators.stages import Stages
from isda.experiments.generators.trained_generator import load_generator, weights_digest
from isda.experiments.settings import Options


def test_normalized_latents() -> None:
    latent = normalized(torch.randn(5, 100) * 7 + 3)
    torch.testing.assert_close(latent.mean(1), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(latent.std(1, unbiased=False), torch.ones(5))


def test_search_is_plain_gradient_descent(device, stages) -> None:
    """Momentum, weight decay and the divided rate, against a loop over one latent at a time."""
    start, target = (torch.randn(3, 6, device=device) for _ in range(2))

    def loss(latent):
        return (latent - target[: len(latent)]).square().sum(1)

    search = LatentSearch(loss, start, momentum=0.9, weight_decay=1e-2)
    losses = search.run(stages, "search", 10, 0.5, capture=True)
    for row in range(3):
        latent, velocity = start[row].clone(), torch.zeros(6, device=device)
        for step in range(10):
            latent.requires_grad_()
            value = (normalized(latent[None])[0] - target[row]).square().sum()
            (gradient,) = torch.autograd.grad(value, latent)
            with torch.no_grad():
                velocity = 0.9 * velocity + gradient + 1e-2 * latent
                latent = latent - 0.5 / 10 ** (step // 3) * velocity
        torch.testing.assert_close(search.latent[row].detach(), latent.detach())
        expected = (normalized(latent[None])[0] - target[row]).square().sum()
        torch.testing.assert_close(losses[row], expected.detach())


@pytest.mark.gpu
def test_a_captured_search_equals_an_eager_one(classifier, generator, stages) -> None:
    classes = [0, 1, 2]
    images_of = generator.for_classes(classes)
    wanted = classifier.all_features(classifier.data.train_images[:3])

    def loss(latent):
        return (classifier.features(images_of(latent)) - wanted).square().sum(1)

    start = torch.randn(3, 100, device=wanted.device)
    found = []
    for capture in (True, False):
        search = LatentSearch(loss, start, momentum=0.9, weight_decay=1e-4)
        search.run(stages, f"captured {capture}", 20, 0.1, capture=capture)
        found.append(search.latent.detach())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_the_time_limit_holds_after_every_iteration_on_a_cpu(tmp_path) -> None:
    """Also for the first ones of a stage, before their time is known."""
    options = Options(minutes=1e-9)
    stages = Stages(tmp_path, "stages", {"settings": {}}, options)
    search = LatentSearch(lambda z: z.sum(1), torch.ones(2, 3), momentum=0.0, weight_decay=0.0)
    with pytest.raises(TimeUp, match="1 of 40 iterations"):
        search.run(stages, "search", 40, 1.0, capture=True)


def test_a_search_that_diverges_says_so(device, stages) -> None:
    search = LatentSearch(lambda z: z.sum(1) / 0, torch.ones(2, 3, device=device),
                          momentum=0.0, weight_decay=0.0)  # fmt: skip
    with pytest.raises(RunError, match="use lower --learning-rates"):
        search.run(stages, "search", 4, 1.0, capture=False)


@pytest.mark.parametrize("name", ["acgan", "wgan"])
def test_an_image_of_the_generator_is_found_again(
    name, folder, classifier, tmp_path, device
) -> None:
    """Step I on an image that the generator can make; step II without a move stays there."""
    generator = load_generator(folder / "gans" / f"digits-{name}" / "0", device)
    chosen = choose_samples(classifier, 3, 0)
    classes = classifier.data.train_target[chosen].tolist()
    latent = normalized(draw_latent(3, counter_rng.key(5, device=device), generator.settings))
    images = to_bytes(generator.for_classes(classes)(latent))
    data = classifier.data
    pixels = data.train_images.clone()
    pixels[chosen] = images
    known = replace(classifier, data=replace(data, train_images=pixels))
    settings = InversionSettings(iterations=300, draws=1, restarts=3)
    options = Options(out=tmp_path)
    result = show_inversion(known, generator, settings, options, samples=3, strength=0.0)
    pictures = result["pictures"]
    assert pictures["reconstruction"]["residual"] < 0.1
    assert pictures["ISDA"]["residual"] < 0.1
    assert pictures["ISDA"]["judge_class"] is None
    grid = Image.open(tmp_path / "inversion.png")
    assert grid.size == (4 * 66 - 2 + 3 * 8, 3 * 66 - 2)


def test_a_start_that_is_better_than_the_end_is_kept(classifier, generator, stages, device) -> None:
    starts = draw_latent(6, counter_rng.key(7, device=device), generator.settings).view(3, 2, -1)
    classes = [4, 0, 4]
    images = to_bytes(generator.for_classes(classes)(normalized(starts[:, 1])))
    features = classifier.all_features(images)
    settings = InversionSettings(iterations=1, restarts=2, learning_rates=(1e3, 1.0))
    inversion = Inversion(classifier, generator, classes, settings, stages, capture=False)
    found, losses = inversion.reconstruct(images, features, starts)
    torch.testing.assert_close(found, normalized(starts[:, 1]))
    assert losses.max() < 0.1  # the images are rounded to bytes


def test_more_iterations_come_nearer_to_the_features(classifier, generator, tmp_path) -> None:
    def residual(iterations: int) -> float:
        settings = InversionSettings(iterations=iterations, draws=2, restarts=2)
        options = Options(out=tmp_path)
        result = show_inversion(classifier, generator, settings, options, samples=4, strength=1.0)
        return result["pictures"]["ISDA"]["residual_of_move"]

    assert residual(200) < 0.95 * residual(4)


def test_a_decoder_beats_random_latents_in_one_pass(classifier, generator, stages) -> None:
    data = classifier.data
    features, target = classifier.all_features(data.test_images), data.test_target
    decoder = train_decoder(classifier, generator, stages, eta=0.1, steps=36)
    assert isinstance(decoder, LatentDecoder)
    images_of = generator.for_classes(target.tolist())

    def distance(latent) -> float:
        found = classifier.features(images_of(with_codes(latent, generator)))
        return float((found - features).norm(dim=1).mean())

    random = normalized(torch.randn(len(target), 100, device=features.device))
    assert distance(decoder(features, target)) < 0.9 * distance(random)


def test_a_decoder_draws_one_order_per_epoch(classifier, generator, stages, monkeypatch) -> None:
    drawn, permutation = [], counter_rng.permutation

    def draw(length, key):
        drawn.append(length)
        return permutation(length, key)

    monkeypatch.setattr(counter_rng, "permutation", draw)
    train_decoder(classifier, generator, stages, eta=0.1, steps=25)
    assert drawn == 3 * [1438]  # an epoch has 12 steps


def test_a_digest_is_of_all_bytes_without_a_copy() -> None:
    module = torch.nn.Module()
    tensors = {"a": torch.randn(1000, 1000).T, "b": torch.tensor(7), "c": torch.empty(0, 3),
               "d": torch.randn(5).bfloat16(), "e": torch.tensor([True, False])}  # fmt: skip
    expected = hashlib.sha256()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
        content = tensor.view(torch.int16) if name == "d" else tensor
        expected.update(name.encode() + content.numpy().tobytes())
    tracemalloc.start()
    try:
        digest = weights_digest([module])
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # of 4 MB
    finally:
        tracemalloc.stop()
    assert digest == int.from_bytes(expected.digest()[:6], "big")


def test_without_a_gan_the_decoder_is_its_own_generator(classifier, stages, tmp_path) -> None:
    settings = InversionSettings(iterations=40, draws=2, restarts=1, decoder_steps=48,
                                 start="decoder")  # fmt: skip
    result = show_inversion(classifier, None, settings, Options(out=tmp_path), samples=5)
    assert result["generator"] == "trained with the decoder"
    assert result["pictures"]["reconstruction"]["residual"] < 0.5
    generator = create_generator(classifier)
    before = generator.digest
    train_decoder(classifier, generator, stages, eta=0.1, steps=12)
    assert generator.digest == before  # frozen
    other = Stages(tmp_path, "other", {"settings": {}}, Options())
    train_decoder(classifier, generator, other, eta=0.1, steps=12, with_generator=True)
    assert generator.digest != before
    assert not any(module.training for module in generator.modules())
    with pytest.raises(InputError, match="start must be decoder without a generator"):
        show_inversion(classifier, None, InversionSettings(), Options(out=tmp_path), samples=1)

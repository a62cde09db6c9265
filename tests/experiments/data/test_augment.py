"""Augmentation against loops over single images: numpy and Pillow."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from isda.experiments.data import augmentation, counter_rng
from isda.experiments.data.augmentation import Augmentation, crop_and_flip, cutout
from isda.experiments.data.autoaugment import (
    _OPERATIONS,
    POLICY,
    _variants,
    autoaugment,
    draw_policies,
)
from isda.experiments.errors import InputError


def images_of(*shape: int, device: torch.device) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8).to(device)


def naive_crop(image: np.ndarray, offset: np.ndarray, padding: int) -> np.ndarray:
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)), mode="reflect")
    return padded[:, offset[0] : offset[0] + height, offset[1] : offset[1] + width]


def naive_cutout(image: np.ndarray, centre: np.ndarray, size: int) -> np.ndarray:
    image = image.copy()
    for y in range(centre[0] - size // 2, centre[0] - size // 2 + size):
        for x in range(centre[1] - size // 2, centre[1] - size // 2 + size):
            if 0 <= y < image.shape[1] and 0 <= x < image.shape[2]:
                image[:, y, x] = 0
    return image


@pytest.mark.parametrize(
    ("shape", "padding"),
    [((50, 3, 32, 32), 4), ((7, 1, 8, 5), 3), ((5, 2, 6, 9), 0), ((0, 3, 8, 8), 4)],
)
def test_crop_and_flip(shape: tuple[int, ...], padding: int, device: torch.device) -> None:
    images = images_of(*shape, device=device)
    offsets = torch.randint(0, 2 * padding + 1, (shape[0], 2))
    flip = torch.randint(0, 2, (shape[0],)) == 1
    cropped = crop_and_flip(images, offsets.to(device), None, padding=padding)
    flipped = crop_and_flip(images, None, flip.to(device))
    both = crop_and_flip(images, offsets.to(device), flip.to(device), padding=padding)
    for result in (cropped, flipped, both):
        assert result.shape == shape
        assert result.dtype == torch.uint8
    for i in range(shape[0]):
        image = images[i].cpu().numpy()
        crop = naive_crop(image, offsets[i].numpy(), padding)
        step = -1 if flip[i] else 1
        np.testing.assert_array_equal(cropped[i].cpu(), crop)
        np.testing.assert_array_equal(flipped[i].cpu(), image[:, :, ::step])
        np.testing.assert_array_equal(both[i].cpu(), crop[:, :, ::step])


@pytest.mark.parametrize("size", [1, 4, 5, 16, 40])
def test_cutout_at_every_centre(size: int, device: torch.device) -> None:
    height, width = 9, 7  # every corner and border clips the hole somewhere
    centre = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    images = images_of(len(centre), 3, height, width, device=device).clamp(min=1)
    result = cutout(images, centre.to(device), size=size).cpu()
    for i in range(len(centre)):
        expected = naive_cutout(images[i].cpu().numpy(), centre[i].numpy(), size)
        np.testing.assert_array_equal(result[i], expected)


def test_padding_must_be_smaller_than_the_image(device: torch.device) -> None:
    images = images_of(2, 3, 4, 8, device=device)
    with pytest.raises(InputError, match="padding must be smaller than the image, got 4 for 4 x 8"):
        crop_and_flip(images, torch.zeros(2, 2, dtype=torch.int64, device=device), None)


def decode(result: Tensor) -> Tensor:
    """Index of the source pixel of every output pixel, for images that contain their indices."""
    return result[:, 0].long() + 256 * result[:, 1].long()


def test_draws_of_crop_and_flip(device: torch.device) -> None:
    number, size = 20_000, 32
    index = torch.arange(size * size).view(size, size)
    image = torch.stack((index % 256, index // 256)).to(torch.uint8)
    images = image.to(device).expand(number, -1, -1, -1)
    result = decode(Augmentation(("crop", "flip")).step(images, counter_rng.key(3, device=device)))
    middle = result[:, 16, 15:17].cpu()  # far from the border: no reflection
    row, column = middle // size, middle % size
    flipped = column[:, 0] > column[:, 1]
    # a fair coin deviates from a half by less than five standard deviations
    assert abs(flipped.double().mean() - 0.5) < 5 * 0.5 / number**0.5
    shift = torch.stack((row[:, 0] - 16, torch.where(flipped, column[:, 1], column[:, 0]) - 15), 1)
    assert shift.min() == -4
    assert shift.max() == 4
    count = torch.bincount((shift[:, 0] + 4) * 9 + shift[:, 1] + 4, minlength=81)
    assert len(count) == 81
    expected = number / 81
    chi_square = ((count - expected) ** 2 / expected).sum()
    assert chi_square < 80 + 5 * (2 * 80) ** 0.5  # mean 80, variance 160
    correlation = torch.corrcoef(torch.stack((shift[:, 0], shift[:, 1], flipped)).double())
    assert (correlation - torch.eye(3)).abs().max() < 5 / number**0.5


def test_draws_of_cutout(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 20_000
    images = torch.ones(number, 1, 6, 5, dtype=torch.uint8, device=device)
    monkeypatch.setattr(augmentation, "cutout", partial(cutout, size=1))
    result = Augmentation(("cutout",)).step(images, counter_rng.key(5, device=device))
    assert (result == 0).flatten(1).sum(1).eq(1).all()
    count = (result[:, 0] == 0).sum(0).double().cpu()
    expected = number / 30
    assert ((count - expected) ** 2 / expected).sum() < 29 + 5 * (2 * 29) ** 0.5


@pytest.mark.parametrize(
    "names", [(), ("crop",), ("flip",), ("cutout",), ("crop", "flip", "cutout")]
)
def test_step_of_a_slice_is_a_slice_of_the_step(
    names: tuple[str, ...], device: torch.device
) -> None:
    images = images_of(23, 3, 32, 32, device=device)
    key = counter_rng.key(1, 2, device=device)
    step = Augmentation(names).step
    whole = step(images, key)
    parts = [step(images[a:b], key, start=a) for a, b in ((0, 10), (10, 10), (10, 23))]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(step(images, key), whole)
    assert torch.equal(whole, images) == (not names)
    assert torch.equal(step(images, counter_rng.key(1, 3, device=device)), images) == (not names)


def test_step_is_the_functions_in_order(device: torch.device) -> None:
    images = images_of(64, 3, 32, 32, device=device)
    key = counter_rng.key(7, device=device)
    cropped = Augmentation(("crop",)).step(images, key)
    flipped = Augmentation(("flip",)).step(cropped, key)
    holes = Augmentation(("cutout",)).step(flipped, key)
    assert torch.equal(Augmentation(("cutout", "flip", "crop")).step(images, key), holes)


def test_step_compiles_to_one_graph(device: torch.device) -> None:
    images = images_of(9, 3, 32, 32, device=device)
    step = Augmentation(("crop", "flip", "cutout")).step
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for seed in range(3):
        key = counter_rng.key(seed, device=device)
        assert torch.equal(compiled(images, key), step(images, key))


@pytest.mark.gpu
def test_step_is_captured_in_a_cuda_graph() -> None:
    device = torch.device("cuda")
    images, key = images_of(128, 3, 32, 32, device=device), counter_rng.key(0, device=device)
    step = Augmentation(("crop", "flip", "cutout")).step
    step(images, key)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(images, key)
    for seed in (4, 5):
        key.copy_(counter_rng.key(seed, device=device))
        graph.replay()
        assert torch.equal(result, step(images, key))


def pillow_operation(image: Image.Image, name: str, level: int | None, sign: int) -> Image.Image:
    """An operation of AutoAugment on one image, with the settings of the authors' code."""
    fill = 128 if image.mode == "L" else (128, 128, 128)
    up_to = partial(np.linspace, 0, num=10)
    width, height = image.size
    enhance = {
        "Brightness": ImageEnhance.Brightness,
        "Color": ImageEnhance.Color,
        "Contrast": ImageEnhance.Contrast,
        "Sharpness": ImageEnhance.Sharpness,
    }
    if name in enhance:
        return enhance[name](image).enhance(1 + sign * up_to(0.9)[level])
    if name == "Rotate":  # always to the left
        return image.rotate(up_to(30)[level], fillcolor=fill)
    if name == "ShearY":
        matrix = (1, 0, 0, sign * up_to(0.3)[level], 1, 0)
        kind = Image.Resampling.BICUBIC
        return image.transform(image.size, Image.Transform.AFFINE, matrix, kind, fillcolor=fill)
    if name.startswith("Translate"):
        share = sign * up_to(150 / 331)[level]
        shift = (share * width, 0) if name == "TranslateX" else (0, share * height)
        matrix = (1, 0, shift[0], 0, 1, shift[1])
        return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=fill)
    if name == "Posterize":
        return ImageOps.posterize(image, int(np.round(np.linspace(8, 4, 10))[level]))
    if name == "Solarize":
        return ImageOps.solarize(image, np.linspace(256, 0, 10)[level])
    plain = {
        "AutoContrast": ImageOps.autocontrast,
        "Equalize": ImageOps.equalize,
        "Invert": ImageOps.invert,
    }
    return plain[name](image)


def pillow_autoaugment(images: Tensor, key: Tensor) -> Tensor:
    choice, applied, negative = (d.tolist() for d in draw_policies(len(images), key))
    results = []
    for i, pixels in enumerate(images.cpu()):
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy().squeeze())
        for position, (name, _, level) in enumerate(POLICY[choice[i]]):
            if applied[i][position]:
                image = pillow_operation(image, name, level, -1 if negative[i][position] else 1)
        results.append(torch.from_numpy(np.array(image)).view(*pixels.shape[1:], -1))
    return torch.stack(results).permute(0, 3, 1, 2).to(images.device)


@pytest.mark.parametrize("shape", [(3000, 3, 32, 32), (300, 1, 8, 8), (300, 3, 24, 40)])
@pytest.mark.parametrize("content", ["noise", "smooth"])
def test_autoaugment_equals_pillow(
    shape: tuple[int, ...], content: str, device: torch.device
) -> None:
    """Bit for bit: integers, and float32 or float64 in Pillow's order of operations."""
    images = images_of(*shape, device=device)
    if content == "smooth":  # values that repeat, channels that are constant, a narrow range
        rows = torch.arange(shape[2], device=device)[:, None] * 3 + 40
        images = (rows + images[..., :1, :1] % 90).expand(shape).to(torch.uint8).contiguous()
        images[::5, -1] = 77
    before, key = images.clone(), counter_rng.key(11, device=device)
    result = autoaugment(images, key)
    assert torch.equal(images, before)
    assert torch.equal(result, pillow_autoaugment(images, key))


@pytest.mark.parametrize("name", sorted({name for pair in POLICY for name, _, _ in pair}))
def test_every_operation_and_sign(name: str, device: torch.device) -> None:
    images = images_of(40, 3, 32, 32, device=device)
    levels = {level for pair in POLICY for other, _, level in pair if other == name}
    for level in levels:
        for sign in (1, -1):
            variants, table = _variants(32, 32)
            place = next((i, j) for i, pair in enumerate(POLICY) for j, one in enumerate(pair)
                         if (one[0], one[2]) == (name, level))  # fmt: skip
            operation, magnitude = variants[table[place[0]][place[1]][int(sign < 0)]]
            found = _OPERATIONS[operation](images, magnitude)
            for pixels, changed in zip(images.cpu(), found.cpu(), strict=True):
                image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
                expected = np.array(pillow_operation(image, name, level, sign))
                assert np.array_equal(changed.permute(1, 2, 0).numpy(), expected)


def test_outside_is_grey(device: torch.device) -> None:
    """torchvision's defaults would leave it black."""
    white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8, device=device)
    for name, magnitude in (("Rotate", 20.0), ("ShearY", 0.3), ("TranslateX", 14.5)):
        assert _OPERATIONS[name](white, magnitude).unique().tolist() == [128, 255]


def test_autoaugment_in_chunks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    images, key = images_of(300, 3, 32, 32, device=device), counter_rng.key(1, device=device)
    whole = autoaugment(images, key)
    monkeypatch.setattr("isda.experiments.data.autoaugment._CHUNK", 2 * 3 * 32 * 32)
    assert torch.equal(autoaugment(images, key), whole)
    assert autoaugment(images[:0], key).shape == (0, 3, 32, 32)


def test_draws_of_autoaugment(device: torch.device) -> None:
    number = 50_000
    choice, applied, negative = (
        d.cpu() for d in draw_policies(number, counter_rng.key(2, device=device))
    )
    count = choice.bincount(minlength=25).double()
    assert ((count - number / 25) ** 2 / (number / 25)).sum() < 24 + 5 * (2 * 24) ** 0.5
    assert ((negative.double().mean(0) - 0.5).abs() < 5 * 0.5 / number**0.5).all()
    for i, pair in enumerate(POLICY):
        rate = applied[choice == i].double().mean(0)
        for position, (_, probability, _) in enumerate(pair):
            deviation = (probability * (1 - probability) / count[i]).sqrt()
            assert abs(rate[position] - probability) <= 5 * deviation


def test_policy_is_the_published_one() -> None:
    # first and last pairs of the table of CIFAR-10 in the appendix of the AutoAugment paper
    assert len(POLICY) == 25
    assert POLICY[0] == (("Invert", 0.1, None), ("Contrast", 0.2, 6))
    assert POLICY[24] == (("TranslateY", 0.7, 9), ("AutoContrast", 0.9, None))
    assert POLICY[16] == (("Equalize", 0.2, None), ("Equalize", 0.8, None))  # in the authors' code


def test_epoch_part(device: torch.device) -> None:
    assert Augmentation(("crop", "flip", "cutout")).epoch is None
    images, key = images_of(40, 3, 32, 32, device=device), counter_rng.key(8, device=device)
    whole = Augmentation(("crop", "flip", "autoaugment", "cutout"))
    assert whole.epoch is not None
    shifted = Augmentation(("crop", "flip")).step(images, key)
    alone = Augmentation(("autoaugment",))
    assert alone.epoch is not None
    # the epoch part crops and flips, then augments; the step part is Cutout and nothing else
    assert torch.equal(whole.epoch(images, key), alone.epoch(shifted, key))
    assert torch.equal(whole.step(images, key), Augmentation(("cutout",)).step(images, key))
    assert torch.equal(alone.step(images, key), images)

"""Generator-based augmentation: the share in every batch, exact resume, refusals."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from isda.experiments.cli import main
from isda.experiments.commands.queue_lines import read_queue
from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import load_data
from isda.experiments.errors import InputError
from isda.experiments.generators.gan_settings import get_gan
from isda.experiments.generators.gan_training import train_gan
from isda.experiments.generators.synthetic_images import SyntheticImages, generator_of
from isda.experiments.generators.trained_generator import load_generator
from isda.experiments.recipes import Start, get_recipe, name_of
from isda.experiments.records import Run, summary
from isda.experiments.settings import Options
from isda.experiments.training.groups import same_steps
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.training_step import Lane

START = get_recipe("digits-resnet8-ce")
RECIPE = replace(START, generator="acgan", synthetic=1 / 6, epochs=2)


@pytest.fixture(scope="module")
def generators(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("generators")
    settings = replace(get_gan("acgan"), data="digits", epochs=1, width=4)
    train_gan(settings, 0, Options(out=out, device="cpu"))
    return out


@pytest.mark.parametrize("share", [1 / 6, 0.25, 0.4, 0.001])
def test_every_batch_has_the_share_and_every_real_image_comes_once(
    generators, digits, device, share: float
) -> None:
    generator = load_generator(generators / "digits-acgan" / "0", device)
    mixed = SyntheticImages(generator, digits, share)
    order = mixed.begin_epoch(counter_rng.key(1, device=device))
    number = len(digits.train_target)
    assert torch.equal(order.sort().values, torch.arange(len(mixed), device=device))
    synthetic = order >= number
    assert int(synthetic.sum()) == int(len(mixed) * share + 1e-6)
    for batch in synthetic.split(64)[:-1]:
        assert abs(int(batch.sum()) - 64 * share) < 1
    counts = torch.bincount(mixed.target[number:], minlength=10)
    assert counts.max() - counts.min() <= 1
    assert torch.equal(mixed.images[:number], digits.train_images)
    first = mixed.images[number:].clone()
    classes = mixed.target[number:].tolist()
    key = counter_rng.fold(counter_rng.key(1, device=device), 1)
    assert torch.equal(first, generator.draw(classes, key))
    mixed.begin_epoch(counter_rng.key(2, device=device))
    assert len(first) < 5 or not torch.equal(mixed.images[number:], first)


@pytest.mark.parametrize(("share", "number"), [(1e-4, 1438), (1 - 1e-4, 1438), (1e-3, 438)])
def test_a_share_of_nothing_or_everything_is_refused(
    generators, digits, device, share: float, number: int
) -> None:
    generator = load_generator(generators / "digits-acgan" / "0", device)
    data = digits if number == len(digits.train_target) else digits.hold_out(1000)
    with pytest.raises(InputError, match=rf"synthetic must be .* to {number}, got {share}"):
        SyntheticImages(generator, data, share)


def test_a_run_trains_on_the_mixture(generators, digits, device) -> None:
    options = Options(generators=generators)
    lane = Lane(RECIPE, 0, digits, device, generator=generator_of(RECIPE, digits, options, device))
    real = len(digits.train_target)
    assert lane.num_images == real + real // 5
    lane.begin_epoch()
    shown = []
    for size in lane.images.batch_sizes():
        images, target, _ = lane.images.batch(slice(0, size), lane.position, lane.steps)
        shown.append(target)
        lane.position.add_(size)
        assert len(images) == size
    assert torch.equal(torch.bincount(torch.cat(shown)),
                       torch.bincount(digits.train_target) + torch.bincount(
                           torch.arange(real // 5, device=device) % 10))  # fmt: skip


def test_resume_is_exact_and_needs_the_same_generator(generators, digits, device, tmp_path) -> None:
    recipe = replace(RECIPE, augment=("crop", "flip"))
    generator = generator_of(recipe, digits, Options(generators=generators), device)

    def lane() -> Lane:
        return Lane(recipe, 3, digits, device, generator=generator)

    whole, first, second = lane(), lane(), lane()
    for one in (whole, first):
        SideBySide([one], capture=False).train_epoch()
        one.epoch = 1
    second.load_state_dict(first.state_dict())
    for one in (whole, second):
        SideBySide([one], capture=False).train_epoch()
    for one, other in zip(whole.tensors(), second.tensors(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    settings = replace(get_gan("acgan"), data="digits", epochs=1, width=4, noise=50)
    other = train_gan(settings, 0, Options(out=tmp_path, device=str(device)))
    changed = Lane(recipe, 3, digits, device, generator=load_generator(other.folder, device))
    with pytest.raises(InputError, match="the acgan is not the one"):
        changed.load_state_dict(first.state_dict())


def test_command_line(generators, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits-resnet8-ce", "--epochs", "2", "--device", "cpu"]
    mixing = [*words, "--generator", "acgan", "--synthetic", "0.2"]

    def refused(*more: str) -> str:
        assert main([*mixing, *more]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert not Path("runs").exists()
        return line

    assert "train it with isda gan train acgan --data digits" in refused()
    shutil.copytree(generators, "generators")
    assert "was trained with hold_out 0, not with 100" in refused("--hold-out", "100")
    assert "generator must be none for digits" in refused("--images-per-class", "20")
    shutil.copytree("generators/digits-acgan", "generators/cifar10-acgan")
    assert main(mixing) == 0
    (folder,) = Path("runs").glob("*/0")
    run = Run(folder)
    assert summary(run).finished
    assert run.recipe.generator == "acgan"
    digest = load_generator("generators/digits-acgan/0", "cpu").digest
    assert [line["generator_digest"] for line in run.metrics()] == [digest] * 2


def test_a_generator_of_other_images_is_refused(generators, device, tmp_path) -> None:
    shutil.copytree(generators / "digits-acgan", tmp_path / "cifar10-acgan")
    recipe = get_recipe("cifar10-resnet110-acgan")
    data = load_data("digits")
    wrong = replace(data, train_images=torch.zeros(4, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(InputError, match=r"makes images of 1 x 8 x 8 .* takes 3 x 32 x 32"):
        generator_of(recipe, wrong, Options(generators=tmp_path), device)
    fewer = replace(data, class_names=data.class_names[:3])
    with pytest.raises(InputError, match=r"has 10 classes .* has 3"):
        generator_of(recipe, fewer, Options(generators=tmp_path), device)


def test_the_queue_of_table_4() -> None:
    (line,) = read_queue(Path(__file__).parents[3] / "generators.queue", Options())
    plans = line.task.plans()
    gans = [plan.recipe for plan in plans if plan.recipe.generator != "none"]
    assert [recipe.generator for recipe in gans] == ["wgan", "cgan", "acgan", "infogan"]
    assert all(same_steps(recipe, gans[0]) for recipe in gans)  # side by side
    assert [plan.name for plan in plans if plan.recipe not in gans] == ["cifar10-resnet110-ce"]


def test_names() -> None:
    assert name_of(RECIPE) == "digits-resnet8-acgan"
    assert (
        Start(START, "digits-resnet8-ce")
        .run_name(RECIPE)
        .startswith("digits-resnet8-ce+generator=acgan+synthetic=0.1666")
    )

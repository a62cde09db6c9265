"""The GANs of Table 4: networks, losses, training side by side, exact resume, refusals."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from isda.experiments.cli import main
from isda.experiments.data import counter_rng
from isda.experiments.data.arrays import load_data
from isda.experiments.errors import InputError, TimeUp
from isda.experiments.generators import gan_training
from isda.experiments.generators.gan_folder import GanFolder
from isda.experiments.generators.gan_networks import Critic, Generator, doublings
from isda.experiments.generators.gan_settings import CODES, GANS, GanSettings, get_gan
from isda.experiments.generators.gan_step import GanLane, draw_latent, to_bytes, to_unit
from isda.experiments.generators.gan_training import create_lanes, train_gan
from isda.experiments.generators.trained_generator import TrainedGenerator, load_generator
from isda.experiments.records import load_runs
from isda.experiments.settings import Options
from isda.experiments.training.device import choose_kernels
from isda.experiments.training.side_by_side import CapturedSteps


def small(name: str, **changes):
    size = 16 if name == "wgan" else 160  # two or nine steps in an epoch of digits
    fields = {"data": "digits", "epochs": 3, "width": 4, "batch_size": size, **changes}
    return replace(get_gan(name), **fields)


@pytest.fixture(scope="module")
def digits(device):
    return load_data("digits").to(device)


def options(out: Path, device, **changes) -> Options:
    return Options(out=out, device=str(device), deterministic=True, **changes)


def lane_states(folder: Path) -> list[torch.Tensor]:
    state = GanFolder(folder).load("checkpoint.pt")

    def flat(value):
        if isinstance(value, dict):
            return [one for key in sorted(value, key=str) for one in flat(value[key])]
        if isinstance(value, list):
            return [one for entry in value for one in flat(entry)]
        return [value] if isinstance(value, torch.Tensor) else []

    return flat(state["lanes"])


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
        with pytest.raises(InputError, match=r"squares for a generator, .* got [0-9]+ x [0-9]+$"):
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
def test_resume_is_exact(name: str, tmp_path: Path, device, monkeypatch) -> None:
    settings = small(name)
    whole = train_gan(settings, 5, options(tmp_path / "whole", device), progress=False)

    class Stops:
        def __init__(self, _):
            self.calls = 0

        def is_up(self, _: float) -> bool:
            self.calls += 1
            return self.calls == 2

    with monkeypatch.context() as patch:
        patch.setattr(gan_training, "Deadline", Stops)
        with pytest.raises(TimeUp, match="2 of 3 epochs done"):
            train_gan(settings, 5, options(tmp_path / "parts", device, minutes=1), progress=False)
    with pytest.raises(InputError, match=r"has no generator.pt of its last epoch, 3: continue"):
        load_generator(tmp_path / "parts" / settings.name / "5", device)
    parts = train_gan(settings, 5, options(tmp_path / "parts", device, resume=True), progress=False)
    for one, other in zip(lane_states(whole.folder), lane_states(parts.folder), strict=True):
        assert torch.equal(one, other)
    samples = sorted((whole.folder / "samples").iterdir())
    assert [path.name for path in samples] == [f"epoch_000{n}.png" for n in (1, 2, 3)]
    for path in samples:
        assert path.read_bytes() == (parts.folder / "samples" / path.name).read_bytes()
    other_seed = train_gan(settings, 6, options(tmp_path / "whole", device), progress=False)
    assert (
        samples[-1].read_bytes() != (other_seed.folder / "samples" / samples[-1].name).read_bytes()
    )


def test_epochs_may_change_on_resume(tmp_path: Path, device) -> None:
    """Nothing depends on their number: 2 epochs and 1 more are 3."""
    whole = train_gan(small("cgan"), 5, options(tmp_path / "whole", device), progress=False)
    resumed = options(tmp_path / "parts", device, resume=True)
    two, three = small("cgan", epochs=2), small("cgan", epochs=3)
    folder = train_gan(two, 5, resumed, progress=False).folder
    before = load_generator(folder, device).digest
    assert train_gan(three, 5, resumed, progress=False).settings == three
    assert load_generator(folder, device).digest == load_generator(whole.folder, device).digest
    assert load_generator(folder, device).digest != before
    more = small("cgan", epochs=5)
    stopping = options(tmp_path / "parts", device, resume=True, minutes=1e-9)
    with pytest.raises(TimeUp, match="4 of 5 epochs done"):
        train_gan(more, 5, stopping, sample_every=3, progress=False)
    with pytest.raises(InputError, match=r"has no generator.pt of its last epoch, 5"):
        load_generator(folder, device)
    four = small("cgan", epochs=4)  # finish there
    train_gan(four, 5, resumed, progress=False)
    assert load_generator(folder, device).settings == four
    assert (folder / "samples" / "epoch_0004.png").is_file()
    with pytest.raises(InputError, match="epochs must be >= 4, which are done, got 2"):
        train_gan(two, 5, resumed, progress=False)
    # a finished GAN is generator.pt; the checkpoint is needed only to continue
    (folder / "checkpoint.pt").unlink()
    train_gan(four, 5, resumed, progress=False)
    with pytest.raises(InputError, match=r"has no checkpoint.pt to continue from"):
        train_gan(more, 5, resumed, progress=False)
    assert load_generator(folder, device).settings == four


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


def test_normal_numbers() -> None:
    drawn = counter_rng.normal((200, 500), counter_rng.key(3)).double()
    assert drawn.isfinite().all()
    assert abs(drawn.mean()) < 0.02
    assert abs(drawn.var() - 1) < 0.03
    assert abs((drawn**4).mean() - 3) < 0.15
    within = [float((drawn.abs() < limit).double().mean()) for limit in (1.0, 2.0)]
    assert np.allclose(within, [0.6827, 0.9545], atol=0.01)


def test_command_line(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--data", "digits", "--epochs", "2", "--width", "4", "--device", "cpu"]
    assert main(["gan", "train", "acgan", *flags]) == 0
    folder = tmp_path / "generators" / "digits-acgan" / "0"
    assert capsys.readouterr().out.strip() == str(folder.relative_to(tmp_path))
    grid = Image.open(folder / "samples" / "epoch_0002.png")
    assert grid.size == (10 * 66 - 2, 10 * 66 - 2)
    assert len((folder / "losses.jsonl").read_text().splitlines()) == 2
    assert load_runs("generators") == []  # a report does not take it for a run

    def refused(*words: str) -> str:
        assert main(["gan", "train", *words]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    assert "already holds a GAN: use --resume" in refused("acgan", *flags)
    assert "width 4 → 8" in refused("acgan", *flags, "--resume", "--width", "8")
    assert "unknown GAN 'agan'; did you mean" in refused("agan")
    assert "needs the name of a GAN" in refused()
    assert "data must be one of digits" in refused("wgan", "--data", "imagenet")
    assert "epochs must be a whole number >= 1" in refused("wgan", "--epochs", "0")
    assert "seed must be different integers" in refused("wgan", "--seed", "-1")
    with pytest.raises(InputError, match="epochs must be a whole number >= 1, got inf"):
        GanSettings.from_dict({**get_gan("wgan").as_dict(), "epochs": float("inf")})
    assert "--gan cgan contradicts" in refused("wgan", "--gan", "cgan")
    (folder / "checkpoint.pt").write_bytes(b"PK")
    assert "checkpoint.pt is damaged" in refused("acgan", *flags, "--resume")
    assert main(["gan", "measur"]) == 2
    assert "unknown action of isda gan" in capsys.readouterr().err


def test_help_names_both_actions(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        assert main(["gan", *words]) == 0
        printed = capsys.readouterr().out
        assert "isda gan train {wgan,cgan,acgan,infogan} [FLAGS]" in printed
        assert "isda gan measure GENERATOR --classifier RUN [FLAGS]" in printed
    for words in (["train", "--help"], ["train", "wgan", "--help"], ["measure", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(["gan", *words])
        assert end.value.code == 0
        assert "--device STR" in capsys.readouterr().out


def test_a_flipped_bit_is_noticed(tmp_path: Path, device) -> None:
    settings, resumed = small("cgan", epochs=1), options(tmp_path, device, resume=True)
    folder = train_gan(settings, 0, resumed, progress=False).folder

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    digest = load_generator(folder, device).digest
    flip(folder / "generator.pt")
    with pytest.raises(InputError, match=r"generator.pt is damaged .* --resume writes it again"):
        load_generator(folder, device)
    train_gan(settings, 0, resumed, progress=False)
    assert load_generator(folder, device).digest == digest
    flip(folder / "checkpoint.pt")
    with pytest.raises(InputError, match=r"checkpoint.pt is damaged .*: train the GAN again"):
        train_gan(settings, 0, resumed, progress=False)


def test_files_of_other_networks_are_refused(tmp_path: Path, device) -> None:
    settings, resumed = small("cgan", epochs=1), options(tmp_path, device, resume=True)
    folder = train_gan(settings, 0, resumed, progress=False).folder
    for name, key in (("generator.pt", "networks"), ("checkpoint.pt", "lanes")):
        state = GanFolder(folder).load(name)
        state[key].append({})
        torch.save(state, folder / name)
    with pytest.raises(InputError, match=r"generator.pt is damaged .* --resume writes it again"):
        load_generator(folder, device)
    with pytest.raises(InputError, match=r"checkpoint.pt is damaged .*: train the GAN again"):
        train_gan(settings, 0, resumed, progress=False)


@pytest.mark.parametrize(
    "change",
    [{"history": 5}, {"history": [{}] * 5}, {"lanes": []}, {"lanes": [{}]}, {"lanes": None},
     {"image_shape": None}, {"num_images": "x"}],
)  # fmt: skip
def test_a_checkpoint_with_damaged_fields_is_not_used(change: dict, tmp_path: Path) -> None:
    folder = train_gan(small("cgan", epochs=1), 0, options(tmp_path, "cpu"), progress=False)
    state = folder.load("checkpoint.pt")
    torch.save({**state, **change}, folder.folder / "checkpoint.pt")
    with pytest.raises(InputError, match=r"\.pt is damaged|has changed since|epochs must be >= 5"):
        train_gan(small("cgan", epochs=1), 0, options(tmp_path, "cpu", resume=True))


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

"""Pictures of augmented features: moves, neighbours, inversion, decoder, quality, refusals."""

import hashlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import scipy.linalg
import torch
from PIL import Image

from isda.experiments.cli import main
from isda.experiments.data import counter_rng
from isda.experiments.errors import InputError, RunError, TimeUp
from isda.experiments.generators import trained_generator
from isda.experiments.generators.feature_moves import (
    choose_samples,
    draw_moves,
    eigenvector_moves,
    random_moves,
)
from isda.experiments.generators.gan_quality import frechet_distance, measure_gan
from isda.experiments.generators.gan_settings import get_gan
from isda.experiments.generators.gan_step import draw_latent, to_bytes, to_unit
from isda.experiments.generators.gan_training import train_gan
from isda.experiments.generators.inversion import Inversion, show_inversion
from isda.experiments.generators.inversion_settings import InversionSettings
from isda.experiments.generators.latent_decoder import (
    LatentDecoder,
    create_generator,
    train_decoder,
)
from isda.experiments.generators.latent_search import LatentSearch, normalized, with_codes
from isda.experiments.generators.neighbours import nearest, show_neighbours
from isda.experiments.generators.stages import Stages
from isda.experiments.generators.trained_classifier import load_classifier
from isda.experiments.generators.trained_generator import load_generator, weights_digest
from isda.experiments.recipes import get_recipe
from isda.experiments.records import export
from isda.experiments.settings import Options
from isda.experiments.training.loop import Plan, train
from isda.experiments.training.run_folder import RunFolder

ISDA = replace(get_recipe("digits-resnet8-isda"), epochs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, device) -> Path:
    """Two ISDA runs, one with cross entropy, and two GANs, all on digits."""
    out = tmp_path_factory.mktemp("chain")
    plans = [Plan("isda", ISDA, 0), Plan("isda", ISDA, 1), Plan("ce", ISDA.baseline(), 0)]
    train(plans, Options(out=out / "runs", device=str(device)), progress=False)
    for name, epochs in (("acgan", 25), ("wgan", 8)):
        settings = replace(get_gan(name), data="digits", width=16, epochs=epochs, average=0.9)
        train_gan(settings, 0, Options(out=out / "gans", device=str(device)), progress=False)
    return out


@pytest.fixture(scope="module")
def classifier(folder, device):
    return load_classifier(folder / "runs" / "isda" / "0", Options(), device)


@pytest.fixture(scope="module")
def generator(folder, device):
    return load_generator(folder / "gans" / "digits-acgan" / "0", device)


def test_a_classifier_is_the_network_of_its_run(folder, classifier) -> None:
    last = json.loads((folder / "runs/isda/0/metrics.jsonl").read_text().splitlines()[-1])
    wrong = classifier.predictions(classifier.data.test_images) != classifier.data.test_target
    assert 100 * float(wrong.double().mean()) == pytest.approx(last["test_error"], abs=1e-3)
    pixels = classifier.data.test_images[:7]
    torch.testing.assert_close(
        classifier.features(pixels), classifier.features(to_unit(pixels)), rtol=1e-4, atol=1e-5
    )


def test_draws_have_the_covariance_of_the_class(classifier) -> None:
    classes, number, strength = [3, 8], 20_000, 0.7
    key = counter_rng.key(0, device=classifier.data.train_images.device)
    moves = draw_moves(classifier, classes, number, strength, key).double()
    for index, one in enumerate(classes):
        expected = strength * classifier.class_covariance(one)
        found = moves[index].T @ moves[index] / number
        # the standard error of an entry is at most √(2 / number) of the largest variance
        assert (found - expected).abs().max() < 0.05 * expected.diagonal().max()
    assert draw_moves(classifier, [0], 2, 0.0, key).abs().max() == 0


def test_eigenvector_and_random_moves_are_as_long_as_draws(classifier) -> None:
    leading = eigenvector_moves(classifier, [5, 5, 2], 3, 0.5).double()
    for moves, one in zip(leading, (5, 5, 2), strict=True):
        covariance = classifier.class_covariance(one)
        length = (0.5 * covariance.trace()).sqrt()
        largest = torch.linalg.eigvalsh(covariance).flip(0)
        for move, value in zip(moves, largest, strict=False):
            torch.testing.assert_close(move.norm(), length, rtol=1e-5, atol=0)
            torch.testing.assert_close(covariance @ move, value * move, rtol=1e-3, atol=1e-5)
    control = random_moves(leading.float(), counter_rng.key(1, device=leading.device))
    torch.testing.assert_close(control.norm(dim=-1), leading.float().norm(dim=-1))
    cosine = torch.cosine_similarity(control, leading.float(), dim=-1)
    assert cosine.abs().max() < 0.6


def test_samples_are_of_all_classes_in_turn(classifier) -> None:
    chosen = choose_samples(classifier, 25, 0)
    assert len(chosen.unique()) == 25
    assert classifier.data.train_target[chosen].tolist() == [*range(10), *range(10), *range(5)]
    assert not torch.equal(chosen, choose_samples(classifier, 25, 1))
    assert torch.equal(chosen[:10], choose_samples(classifier, 10, 0))
    for number in (0, 100_000):
        with pytest.raises(InputError, match="samples must be between 1 and 1438"):
            choose_samples(classifier, number, 0)


def test_nearest_against_a_loop(device) -> None:
    queries, features = torch.randn(7, 3, 5, device=device), torch.randn(13, 5, device=device)
    own = torch.tensor([0, 5, 2, 12, 7, 7, 1], device=device)
    found = nearest(queries, features, own)
    for row in range(7):
        for column in range(3):
            distance = (features - queries[row, column]).norm(dim=1)
            distance[own[row]] = torch.inf
            assert found[row, column] == distance.argmin()


def test_neighbours(classifier, tmp_path: Path) -> None:
    result = show_neighbours(classifier, tmp_path, samples=4, measured=60, draws=2, eigenvectors=3)
    assert json.loads((tmp_path / "neighbours.json").read_text()) == result
    columns, rules = 1 + 1 + 2 + 2 + 2 + 3 + 3, 6
    size = columns * 66 - 2 + rules * 8, 4 * 66 - 2
    assert Image.open(tmp_path / "neighbours.png").size == size
    still = result["moves"]["none"]
    assert (still["changed"], still["relative_length"]) == (0, 0)
    assert still["relative_distance"] == pytest.approx(1)
    assert result["images"] == 60
    length, other, random, *_ = [one["relative_length"] for one in [*result["moves"].values()][1:]]
    assert length == pytest.approx(other)
    assert length == pytest.approx(random)
    nothing = show_neighbours(classifier, tmp_path, samples=4, measured=60, strength=0.0)
    assert all(one["changed"] == 0 for one in nothing["moves"].values())


def test_a_control_has_the_covariance_of_another_class(classifier, tmp_path, monkeypatch) -> None:
    drawn = []

    def draw(classifier, classes, *rest):
        drawn.append(classes)
        return draw_moves(classifier, classes, *rest)

    monkeypatch.setattr("isda.experiments.generators.neighbours.draw_moves", draw)
    show_neighbours(classifier, tmp_path, samples=2, measured=20)
    assert drawn == [[*range(10), *range(10)], [*range(1, 10), 0, *range(1, 10), 0]]


def test_normalized_latents() -> None:
    latent = normalized(torch.randn(5, 100) * 7 + 3)
    torch.testing.assert_close(latent.mean(1), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(latent.std(1, unbiased=False), torch.ones(5))


@pytest.fixture
def stages(tmp_path) -> Stages:
    """Stages that nothing stops."""
    return Stages(tmp_path, "stages", {"settings": {}}, Options(), progress=False)


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
    stages = Stages(tmp_path, "stages", {"settings": {}}, options, progress=False)
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
    other = Stages(tmp_path, "other", {"settings": {}}, Options(), progress=False)
    train_decoder(classifier, generator, other, eta=0.1, steps=12, with_generator=True)
    assert generator.digest != before
    assert not any(module.training for module in generator.modules())
    with pytest.raises(InputError, match="start must be decoder without a generator"):
        show_inversion(classifier, None, InversionSettings(), Options(out=tmp_path), samples=1)


def test_frechet_distance_against_scipy() -> None:
    one, other = torch.randn(50, 4).double(), torch.randn(70, 4).double() * 2 + 1
    moments = [(x.mean(0).numpy(), x.T.cov().numpy()) for x in (one, other)]
    (mean_1, cov_1), (mean_2, cov_2) = moments
    root = scipy.linalg.sqrtm(cov_1 @ cov_2).real
    expected = ((mean_1 - mean_2) ** 2).sum() + (cov_1 + cov_2 - 2 * root).trace()
    assert frechet_distance(one, other) == pytest.approx(expected)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-6)


def test_the_floor_does_not_depend_on_the_classes_drawn(classifier, generator, tmp_path) -> None:
    """Sets of as many images of each class are nearer to each other than random ones."""
    result = measure_gan(generator, classifier, tmp_path, epochs=1)
    images, number = classifier.data.train_images, result["images"]
    assert number == len(classifier.data.test_target)
    random = []
    for seed in range(5):
        order = counter_rng.permutation(len(images), counter_rng.key(seed, device=images.device))
        one, other = (classifier.all_features(images[part]) for part in order.split(number)[:2])
        random.append(frechet_distance(one, other))
    assert result["classifier_fid_floor"] < 0.8 * min(random)


def test_the_chain_on_the_command_line(folder, capsys, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    run, gan = "runs/isda/0", "gans/digits-acgan/0"

    def output(*words: str) -> str:
        assert main([*words, "--device", "cpu"]) == 0
        return capsys.readouterr().out

    text = output("gan", "measure", gan, "--classifier", run, "--epochs", "3")
    quality = json.loads(Path(gan, "quality.json").read_text())
    for real in ("floor", "test"):
        assert quality["classifier_fid"] > 2 * quality[f"classifier_fid_{real}"] > 0
    assert quality["error_of_synthetic"] > quality["error_of_real"]
    assert f"{quality['classifier_fid']:.3f}" in text
    assert "pictures/neighbours.png" in output("neighbours", run, "--measured", "50")
    words = ["invert", run, "--generator", gan, "--judge", "runs/isda/1", "--samples", "3",
             "--iterations", "20", "--start", "decoder", "--decoder-steps", "12"]  # fmt: skip
    text = output(*words)
    result = json.loads(Path("pictures/inversion.json").read_text())
    assert result["judge"] == "runs/isda/1"
    assert result["pictures"]["original"]["residual"] == 0
    assert all(0 <= one["judge_class"] <= 1 for one in result["pictures"].values())
    assert "| control" in text
    pictures = ["--pictures", "pictures", gan, "--runs", "runs", "--page", "page.html"]
    assert main(["report", *pictures]) == 0
    printed, page = capsys.readouterr().out, Path("page.html").read_text()
    for one in (result["pictures"]["ISDA"], result["pictures"]["control"]):
        assert f"{100 * one['residual_of_move']:.1f} %" in printed
        before = f"{100 * one['residual_of_move_before']:.1f} %"
        assert f"<td>{before} → {100 * one['residual_of_move']:.1f} %</td>" in page
        assert one["residual_of_move_before"] > one["residual_of_move"]
    assert f"<td>{quality['classifier_fid']:.3f}</td>" in page
    assert page.count("<img ") == 3
    assert "samples/epoch_0025.png" in printed  # of the GAN, after its last epoch
    assert main(["report", "--runs", "runs", "--pictures", "runs"]) == 2
    assert "has none of quality.json" in capsys.readouterr().err
    first = Path("pictures/inversion.png").read_bytes()
    output(*words)
    assert Path("pictures/inversion.png").read_bytes() == first
    assert Image.open("pictures/inversion.png").size == (13 * 66 - 2 + 3 * 8, 3 * 66 - 2)


def test_bad_input_is_one_line(folder, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(folder)
    run, gan = "runs/isda/0", "gans/digits-acgan/0"

    def refused(*words: str) -> str:
        assert main([*words, "--device", "cpu", "--out", str(tmp_path / "no")]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert not (tmp_path / "no").exists()
        return line

    invert = ["invert", run, "--generator", gan]
    assert "strength must be >= 0, got -0.5" in refused("neighbours", run, "--strength", "-0.5")
    assert "strength must be >= 0" in refused(*invert, "--strength", "-1")
    assert "trained with ce and has no ISDA statistics" in refused("neighbours", "runs/ce/0")
    assert "has no ISDA statistics" in refused("invert", "runs/ce/0", "--generator", gan)
    assert "holds no GAN" in refused("invert", run, "--generator", run)
    assert "is not a run record" in refused("neighbours", gan)
    assert "judge must be a different run" in refused(*invert, "--judge", run)
    assert "start must be random or decoder" in refused(*invert, "--start", "zero")
    assert "samples must be between" in refused(*invert, "--samples", "0")
    assert "samples must be between" in refused("neighbours", run, "--samples", "0")
    assert "eta must be >= 0" in refused(*invert, "--eta", "-1")
    assert "eigenvectors must be between 0 and 64" in refused(
        "neighbours", run, "--eigenvectors", "65"
    )
    kept = export(RunFolder(run), tmp_path / "records")
    assert "has no checkpoint" in refused("neighbours", str(kept))
    other = load_generator(gan, "cpu")
    monkeypatch.setattr(trained_generator, "load_generator", lambda *_: other)
    other.num_classes = 7
    assert "the generator has 7 classes (digits), the classifier has 10" in refused(*invert)
    other.num_classes, other.image_shape = 10, (3, 32, 32)
    assert "makes images of 3 x 32 x 32 (digits), the classifier takes 1 x 8 x 8" in refused(
        *invert
    )

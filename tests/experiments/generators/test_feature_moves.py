"""Moves of features, and the training images nearest to moved features."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from isda.experiments.data import counter_rng
from isda.experiments.errors import InputError
from isda.experiments.generators.feature_moves import (
    choose_samples,
    draw_moves,
    eigenvector_moves,
    random_moves,
)
from isda.experiments.generators.gan_step import to_unit
from isda.experiments.generators.neighbours import nearest, show_neighbours


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

"""Folders of GANs: exact resume, epochs that change, damage, and the commands."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gans import options, small
from PIL import Image

from isda.experiments.cli import main
from isda.experiments.errors import InputError, TimeUp
from isda.experiments.generators import gan_training
from isda.experiments.generators.gan_folder import GanFolder
from isda.experiments.generators.gan_settings import GANS, get_gan
from isda.experiments.generators.gan_training import train_gan
from isda.experiments.generators.trained_generator import load_generator
from isda.experiments.records import load_runs


def lane_states(folder: Path) -> list[torch.Tensor]:
    state = GanFolder(folder).load("checkpoint.pt")

    def flat(value):
        if isinstance(value, dict):
            return [one for key in sorted(value, key=str) for one in flat(value[key])]
        if isinstance(value, list):
            return [one for entry in value for one in flat(entry)]
        return [value] if isinstance(value, torch.Tensor) else []

    return flat(state["lanes"])


@pytest.mark.parametrize("name", GANS)
def test_resume_is_exact(name: str, tmp_path: Path, device, monkeypatch) -> None:
    settings = small(name)
    whole = train_gan(settings, 5, options(tmp_path / "whole", device))

    class Stops:
        def __init__(self, _):
            self.calls = 0

        def is_up(self, _: float) -> bool:
            self.calls += 1
            return self.calls == 2

    with monkeypatch.context() as patch:
        patch.setattr(gan_training, "Deadline", Stops)
        with pytest.raises(TimeUp, match="2 of 3 epochs done"):
            train_gan(settings, 5, options(tmp_path / "parts", device, minutes=1))
    with pytest.raises(InputError, match=r"has no generator.pt of its last epoch, 3: continue"):
        load_generator(tmp_path / "parts" / settings.name / "5", device)
    parts = train_gan(settings, 5, options(tmp_path / "parts", device, resume=True))
    for one, other in zip(lane_states(whole.folder), lane_states(parts.folder), strict=True):
        assert torch.equal(one, other)
    samples = sorted((whole.folder / "samples").iterdir())
    assert [path.name for path in samples] == [f"epoch_000{n}.png" for n in (1, 2, 3)]
    for path in samples:
        assert path.read_bytes() == (parts.folder / "samples" / path.name).read_bytes()
    other_seed = train_gan(settings, 6, options(tmp_path / "whole", device))
    assert (
        samples[-1].read_bytes() != (other_seed.folder / "samples" / samples[-1].name).read_bytes()
    )


def test_epochs_may_change_on_resume(tmp_path: Path, device) -> None:
    """Nothing depends on their number: 2 epochs and 1 more are 3."""
    whole = train_gan(small("cgan"), 5, options(tmp_path / "whole", device))
    resumed = options(tmp_path / "parts", device, resume=True)
    two, three = small("cgan", epochs=2), small("cgan", epochs=3)
    folder = train_gan(two, 5, resumed).folder
    before = load_generator(folder, device).digest
    assert train_gan(three, 5, resumed).settings == three
    assert load_generator(folder, device).digest == load_generator(whole.folder, device).digest
    assert load_generator(folder, device).digest != before
    more = small("cgan", epochs=5)
    stopping = options(tmp_path / "parts", device, resume=True, minutes=1e-9)
    with pytest.raises(TimeUp, match="4 of 5 epochs done"):
        train_gan(more, 5, stopping, sample_every=3)
    with pytest.raises(InputError, match=r"has no generator.pt of its last epoch, 5"):
        load_generator(folder, device)
    four = small("cgan", epochs=4)  # finish there
    train_gan(four, 5, resumed)
    assert load_generator(folder, device).settings == four
    assert (folder / "samples" / "epoch_0004.png").is_file()
    with pytest.raises(InputError, match=r"epochs must be >= 4 \(already done\), got 2"):
        train_gan(two, 5, resumed)
    # a finished GAN is generator.pt; the checkpoint is needed only to continue
    (folder / "checkpoint.pt").unlink()
    train_gan(four, 5, resumed)
    with pytest.raises(InputError, match=r"has no checkpoint.pt to continue from"):
        train_gan(more, 5, resumed)
    assert load_generator(folder, device).settings == four


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
        replace(get_gan("wgan"), epochs=float("inf"))
    assert "--gan cgan contradicts" in refused("wgan", "--gan", "cgan")
    (folder / "checkpoint.pt").write_bytes(b"PK")
    assert "checkpoint.pt is damaged" in refused("acgan", *flags, "--resume")
    (folder / "checkpoint.pt").unlink()
    os.mkfifo(folder / "checkpoint.pt")
    assert "checkpoint.pt is not a file" in refused("acgan", *flags, "--resume")
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
    folder = train_gan(settings, 0, resumed).folder

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    digest = load_generator(folder, device).digest
    flip(folder / "generator.pt")
    with pytest.raises(InputError, match=r"generator.pt is damaged .* --resume writes it again"):
        load_generator(folder, device)
    train_gan(settings, 0, resumed)
    assert load_generator(folder, device).digest == digest
    flip(folder / "checkpoint.pt")
    with pytest.raises(InputError, match=r"checkpoint.pt is damaged .*: train the GAN again"):
        train_gan(settings, 0, resumed)


def test_files_of_other_networks_are_refused(tmp_path: Path, device) -> None:
    settings, resumed = small("cgan", epochs=1), options(tmp_path, device, resume=True)
    folder = train_gan(settings, 0, resumed).folder
    for name, key in (("generator.pt", "networks"), ("checkpoint.pt", "lanes")):
        state = GanFolder(folder).load(name)
        state[key].append({})
        torch.save(state, folder / name)
    with pytest.raises(InputError, match=r"generator.pt is damaged .* --resume writes it again"):
        load_generator(folder, device)
    with pytest.raises(InputError, match=r"checkpoint.pt is damaged .*: train the GAN again"):
        train_gan(settings, 0, resumed)


@pytest.mark.parametrize(
    "change",
    [{"history": 5}, {"history": [{}] * 5}, {"lanes": []}, {"lanes": [{}]}, {"lanes": None},
     {"image_shape": None}, {"num_images": "x"}],
)  # fmt: skip
def test_a_checkpoint_with_damaged_fields_is_not_used(change: dict, tmp_path: Path) -> None:
    folder = train_gan(small("cgan", epochs=1), 0, options(tmp_path, "cpu"))
    state = folder.load("checkpoint.pt")
    torch.save({**state, **change}, folder.folder / "checkpoint.pt")
    with pytest.raises(InputError, match=r"\.pt is damaged|has changed since|epochs must be >= 5"):
        train_gan(small("cgan", epochs=1), 0, options(tmp_path, "cpu", resume=True))

"""`isda gan measure`, `neighbours` and `invert` on the command line, and what they refuse."""

import json
from pathlib import Path

from PIL import Image

from isda.experiments.cli import main
from isda.experiments.generators import trained_generator
from isda.experiments.generators.trained_generator import load_generator
from isda.experiments.records import export
from isda.experiments.training.run_folder import RunFolder


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
    assert "samples must be >= 1, got 0" in refused("neighbours", run, "--samples", "0")
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

"""Temperature scaling against scipy, naive metrics, and a run of digits from end to end."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.nn import functional as F

from isda.experiments.calibration import load_calibration
from isda.experiments.cli import TIME_UP, main
from isda.experiments.data.arrays import load_data, normalize
from isda.experiments.errors import InputError
from isda.experiments.networks import create_network
from isda.experiments.records import export, load_runs
from isda.experiments.report.blocks import BLOCKS
from isda.experiments.temperature import LIMITS, fit_temperature
from isda.experiments.training import loop

QUICK = ["--epochs", "2", "--batch-size", "128", "--hold-out", "500", "--device", "cpu"]
QUICK += ["--images-per-class", "40"]
CHANGES = "+epochs=2+batch_size=128+images_per_class=40+hold_out=500"


def test_temperature_against_scipy() -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(300, 7, dtype=torch.float64)
    target = (logits + 3 * torch.randn(300, 7)).argmax(1)

    def loss(log_t: float) -> float:
        return F.cross_entropy(logits / math.exp(log_t), target).item()

    expected = math.exp(minimize_scalar(loss, bounds=(-4, 4), options={"xatol": 1e-9}).x)
    found = fit_temperature(logits, target)
    assert found == pytest.approx(expected, rel=1e-5)
    # three times the logits need three times the temperature
    assert fit_temperature(3 * logits, target) == pytest.approx(3 * found, rel=1e-9)


def test_temperature_recovers_the_sampling_distribution() -> None:
    torch.manual_seed(1)
    logits = 2 * torch.randn(200_000, 5)
    target = torch.multinomial((logits / 2.5).softmax(1), 1)[:, 0]
    assert fit_temperature(logits, target) == pytest.approx(2.5, rel=0.02)  # 5 standard errors


def test_temperature_stays_within_its_limits() -> None:
    right = torch.eye(3) * 2
    assert fit_temperature(right, torch.arange(3)) == pytest.approx(LIMITS[0], rel=1e-6)
    assert fit_temperature(right, torch.tensor([1, 2, 0])) == pytest.approx(LIMITS[1], rel=1e-6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("calibrated")
    assert main(["calibrate", *QUICK, "--seeds", "0", "1", "--out", str(out)]) == 0
    return out


def naive_metrics(logits: np.ndarray, target: np.ndarray) -> tuple[float, float, float]:
    """Error in percent, NLL and ECE with 15 bins, one image at a time."""
    wrong, losses, bins = 0, [], {}
    for row, y in zip(logits.astype(np.float64), target.tolist(), strict=True):
        p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        wrong += int(row.argmax() != y)
        losses.append(-math.log(p[y]))
        bins.setdefault(math.ceil(15 * p.max()), []).append((p.argmax() == y) - p.max())
    ece = sum(abs(sum(gaps)) for gaps in bins.values()) / len(target)
    return 100 * wrong / len(target), sum(losses) / len(losses), ece


@pytest.mark.parametrize("method", ["ce", "label_smoothing", "isda"])
def test_record_against_the_checkpoint(runs: Path, method: str) -> None:
    """The test images of the data set, with and without T; T from the held-out images alone."""
    (run,) = (r for r in load_runs(runs) if (r.recipe.method, r.seed) == (method, 1))
    assert run.name == f"digits-resnet8-{method}{CHANGES}"
    found = load_calibration(run)
    assert found is not None
    state = torch.load(run.folder / "checkpoint.pt", weights_only=True)
    network = create_network("resnet8", num_classes=10, in_channels=1)
    network.load_state_dict(state["network"])
    network.eval()
    whole = load_data("digits")
    held_out = whole.hold_out(500)
    with torch.no_grad():
        test, held = (network(normalize(data.test_images, data.mean, data.std))
                      for data in (whole, held_out))  # fmt: skip
    assert (found.test_images, found.held_out_images) == (len(test), 500)
    assert found.temperature == pytest.approx(fit_temperature(held, held_out.test_target), rel=1e-4)
    for scale, expected in (
        (1.0, (found.test_error, found.test_loss, found.test_ece)),
        (found.temperature, (found.test_error, found.scaled_loss, found.scaled_ece)),
    ):
        naive = naive_metrics((test / scale).numpy(), whole.test_target.numpy())
        assert naive == pytest.approx(expected, rel=1e-3, abs=1e-4)  # float32 sums
    # the validation loss of the last epoch is that of the held-out images
    assert run.metrics()[-1]["test_loss"] == pytest.approx(found.held_out_loss, rel=1e-5)
    assert found.held_out_scaled_loss <= found.held_out_loss + 1e-6


def test_calibrated_runs_are_not_calibrated_again(runs: Path, capsys) -> None:
    files = {path: path.stat().st_mtime_ns for path in runs.rglob("calibration.json")}
    assert len(files) == 6
    words = ["calibrate", *QUICK, "--seeds", "0", "1", "--out", str(runs)]
    assert main(words) == 2  # without --resume
    assert "already holds a run" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "Cross entropy", "Label smoothing", "ISDA, λ₀ = 0.5"
    ]  # fmt: skip
    assert files == {path: path.stat().st_mtime_ns for path in runs.rglob("calibration.json")}


def test_queue_skips_what_the_records_have(runs: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    line = " ".join(["calibrate", *QUICK, "--methods", "ce", "isda"])
    Path("queue").write_text(f"{line} --seeds 0 1\n")
    for run in load_runs(runs):
        if (run.recipe.method, run.seed) != ("isda", 1):
            export(run, "results")
    assert main(["queue", "queue"]) == 0
    folders = [run.folder.as_posix() for run in load_runs("runs")]
    assert folders == [f"runs/digits-resnet8-isda{CHANGES}/1"]
    assert f"{folders[0]}: temperature" in capsys.readouterr().out
    original = runs / f"digits-resnet8-isda{CHANGES}/1/calibration.json"
    assert (Path(folders[0]) / "calibration.json").read_bytes() == original.read_bytes()


def test_export_adds_a_calibration(runs: Path, tmp_path: Path) -> None:
    run = load_runs(runs)[0]
    folder = export(run, tmp_path)
    content = (folder / "calibration.json").read_bytes()
    (folder / "calibration.json").unlink()
    export(run, tmp_path)
    assert (folder / "calibration.json").read_bytes() == content
    (folder / "calibration.json").write_bytes(content.replace(b"1", b"2"))
    with pytest.raises(InputError, match="different or damaged"):
        export(run, tmp_path)


def test_damaged_calibration(runs: Path, tmp_path: Path) -> None:
    first, other = load_runs(runs)[:2]
    copy = load_runs(export(first, tmp_path).parent)[0]
    path = copy.folder / "calibration.json"
    right = path.read_bytes()
    record = json.loads(right)
    record["scaled_ece"] = 0.0
    for wrong in (
        json.dumps(record).encode(),
        b"{}",
        right[:-20],
        (other.folder / "calibration.json").read_bytes(),
    ):
        path.write_bytes(wrong)
        with pytest.raises(InputError, match=r"calibration\.json is damaged"):
            load_calibration(copy)


def test_block_of_a_page(runs: Path) -> None:
    rows = BLOCKS["calibration"](load_runs(runs)).splitlines()
    assert len(rows) == 7
    found = [load_calibration(run) for run in load_runs(runs) if run.recipe.method == "ce"]
    mean = sum(one.scaled_loss for one in found if one) / 2
    training = "digits, ResNet-8, 2 epochs, batches of 128, 40 images per class"
    assert rows[0] == f"{training}, 500 images held out:"
    assert rows[4].startswith("| Cross entropy | ")
    assert rows[4].split(" | ")[5].startswith(f"{mean:.3f} ± ")
    assert "no records" in BLOCKS["calibration"]([])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "ce", "focl"], "unknown method 'focl'; did you mean focal"),
        (["--methods", "ce", "ce"], "methods must be different names, got ce ce"),
        (["digits-resnet8-ce"], "method must be isda, got 'ce'"),
        (["--hold-out", "1437"], "hold_out must leave training images of every class, got 1437 of"),
    ],
)
def test_wrong_arguments(words: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert main(["calibrate", *words, "--out", str(tmp_path / "runs"), "--device", "cpu"]) == 2
    assert capsys.readouterr().err.startswith(f"isda: {message}")
    assert not (tmp_path / "runs").exists()


def test_finished_runs_are_calibrated_when_the_time_is_up(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    """Their checkpoints need not be kept for the next command."""
    asked = itertools.count(1)  # before the first and after every epoch
    monkeypatch.setattr(loop.Deadline, "is_up", lambda *_: next(asked) == 4)
    words = ["calibrate", *QUICK, "--seeds", "0", "--out", str(tmp_path), "--minutes", "60"]
    assert main(words) == TIME_UP
    done = {run.recipe.method: load_calibration(run) for run in load_runs(tmp_path)}
    finished = [method for method, found in done.items() if found is not None]
    assert finished == ["ce"]
    assert "1 of 3 runs finished" in capsys.readouterr().err

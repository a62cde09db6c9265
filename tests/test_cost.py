"""Costs against the paper, torchvision and a manual count, and measurements of tiny networks."""

import csv
import errno
import functools
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision import models

from isda import ISDALoss
from isda.covariance import DiagonalCovariance, FullCovariance
from isda.experiments.cli import run as run_command
from isda.experiments.cost_records import (
    CASES,
    MeasuredCost,
    TheoreticalCost,
    cost_lines,
    cost_table,
    costs_markdown,
    measured_lines,
    write_costs,
)
from isda.experiments.errors import InputError
from isda.experiments.losses.baselines import CrossEntropyLoss
from isda.experiments.published import COST
from isda.experiments.recipes import get_recipe
from isda.experiments.theoretical_cost import multiply_adds, theoretical_cost
from isda.experiments.training import step_cost
from isda.experiments.training.environment import environment
from isda.experiments.training.memory import peak_host_memory
from isda.experiments.training.side_by_side import SideBySide
from isda.experiments.training.step_cost import measured_cost, random_images

main = functools.partial(run_command, "cost")

WEIGHTS = {  # with torchvision's counts of parameters and multiply-adds
    "resnet50": models.ResNet50_Weights.IMAGENET1K_V1,
    "resnet101": models.ResNet101_Weights.IMAGENET1K_V1,
    "resnet152": models.ResNet152_Weights.IMAGENET1K_V1,
    "densenet121": models.DenseNet121_Weights.IMAGENET1K_V1,
    "resnext50_32x4d": models.ResNeXt50_32X4D_Weights.IMAGENET1K_V1,
    "resnext101_32x8d": models.ResNeXt101_32X8D_Weights.IMAGENET1K_V1,
}
NOT_THE_FORMULA = {"densenet121": 0.18, "densenet265": 0.23}  # the paper prints 0.20 and 0.24


@functools.cache
def usual(network: str) -> TheoreticalCost:
    return theoretical_cost(network)


@pytest.mark.parametrize("network", COST)
def test_theoretical_cost_is_the_papers(network: str) -> None:
    result = usual(network)
    expected = NOT_THE_FORMULA.get(network, COST[network].theoretical)
    assert round(result.theoretical_percent, 2) == expected
    assert result.paper == COST[network]


@pytest.mark.parametrize("network", WEIGHTS)
def test_size_is_torchvisions(network: str) -> None:
    result = usual(network)
    assert result.parameters == WEIGHTS[network].meta["num_params"]
    known = WEIGHTS[network].meta["_ops"]  # rounded to 0.001 G
    assert result.multiply_adds / 1e9 == pytest.approx(known, abs=1e-3)


def test_multiply_adds_by_hand() -> None:
    class Pooled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3))

    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False),
        Pooled(),
        nn.Linear(6, 5),
    )
    first = 4 * (3 * 9) * 8 * 10  # output channels × taps × output pixels
    second = 6 * (4 // 2 * 9) * 4 * 5
    head = 6 * 5
    assert multiply_adds(network, (3, 8, 10)) == first + second + head


@pytest.mark.parametrize(
    ("network", "num_classes", "image_size", "num_features"),
    [
        ("wide_resnet28_10", 100, 32, 640),
        ("shake_shake26_2x32d", 100, 32, 128),
        ("resnet8", 10, 8, 64),
        ("timm:resnet18", 1000, 224, 512),
        ("timm:swinv2_tiny_window8_256", 1000, 256, 768),  # accepts no other size
        ("timm:pit_ti_224", 1000, 224, 256),  # blocks with parameters as inputs
        ("timm:resnetv2_18", 1000, 224, 512),  # head is a convolution
    ],
)
def test_sizes_by_default(
    network: str, num_classes: int, image_size: int, num_features: int
) -> None:
    result = usual(network)
    assert (result.num_classes, result.image_size) == (num_classes, image_size)
    assert result.num_features == num_features
    assert result.paper is None
    share = 5 * num_classes * num_features / result.multiply_adds
    assert result.theoretical_percent == pytest.approx(100 * share)


def test_sizes_given() -> None:
    full, other = usual("resnet50"), theoretical_cost("resnet50", num_classes=13)
    assert full.parameters - other.parameters == (1000 - 13) * (2048 + 1)
    assert full.multiply_adds - other.multiply_adds == (1000 - 13) * 2048
    assert other.paper is None
    small = theoretical_cost("resnet50", image_size=112)
    body, head = full.multiply_adds - 1000 * 2048, 1000 * 2048
    # a quarter of the pixels in every stage but the last, where 7 becomes 4, not 3.5
    assert body / 4 < small.multiply_adds - head < 1.1 * body / 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"network": "resnet5"}, r"unknown network 'resnet5'; did you mean .*resnet50"),
        ({"network": "timm:nonsense"}, "unknown timm model 'nonsense'"),
        ({"network": "resnet32", "num_classes": 1}, "num_classes must be >= 2, got 1"),
        ({"network": "resnet32", "image_size": 0}, "image_size must be >= 1, got 0"),
        ({"network": "densenet121", "image_size": 8}, "densenet121 does not accept 8 x 8 images"),
        (
            {"network": "timm:botnet26t_256", "image_size": 224},
            "timm:botnet26t_256 does not accept 224 x 224 images: the model was designed for size",
        ),
    ],
)
def test_errors_of_sizes(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        theoretical_cost(**arguments)


def test_random_images(device: torch.device) -> None:
    options = {"num_classes": 13, "shape": (3, 5, 7), "device": device}
    data = random_images(230, **options)
    assert data.train_images.shape == (230, 3, 5, 7)
    assert data.train_images.dtype == torch.uint8
    assert data.test_images.shape == (1, 3, 5, 7)
    assert len(data.train_images.unique(dim=0)) == 230  # also across chunks
    images = data.train_images.double()
    deviation = 255 / math.sqrt(12)  # of a uniform number; 5 standard errors
    assert abs(images.mean() - 127.5) < 5 * deviation / math.sqrt(images.numel())
    assert sorted(Counter(data.train_target.tolist())) == list(range(13))
    assert data.num_classes == 13
    again = random_images(230, **options)
    assert torch.equal(again.train_images, data.train_images)
    assert torch.equal(again.train_target, data.train_target)


@pytest.mark.parametrize("network", ["resnet8", "timm:test_resnet"])
def test_measured_cost(network: str, device: torch.device) -> None:
    image_size = 8 if network == "resnet8" else 32
    rows = measured_cost(
        network,
        device=device,
        num_classes=7,
        image_size=image_size,
        batch_size=5,
        steps=2,
        repeats=2,
    )
    assert [row.case for row in rows] == list(CASES)
    on_gpu = device.type == "cuda"
    for row in rows:
        assert row.batch_size == 5
        assert row.precision == ("bf16" if on_gpu and network != "resnet8" else "fp32")
        assert row.milliseconds is not None
        assert row.milliseconds > 0
        assert row.added_percent == pytest.approx(
            100 * (row.milliseconds / rows[0].milliseconds - 1)
        )
        assert row.mebibytes is not None
        assert row.mebibytes > 0
        assert row.added_mebibytes == row.mebibytes - rows[0].mebibytes
        assert row.note == ""
    assert rows[0].added_percent == 0


def test_peak_host_memory() -> None:
    before = torch.empty(5, 2**18)  # not counted

    def step() -> torch.Tensor:
        nonlocal before
        first = torch.empty(2**18)  # 1 MiB
        second = torch.empty(2, 2**18)
        del first, before
        return second.add(1).sum()  # takes 2 MiB more, before the sum

    assert 4 * 2**20 <= peak_host_memory(step) < 4 * 2**20 + 100  # and a few numbers
    assert peak_host_memory(lambda: None) == 0


def test_host_memory_is_measured_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    peak_host_memory(lambda: torch.empty(3).sum())
    assert capfd.readouterr() == ("", "")
    os.write(2, b"heard again")
    assert capfd.readouterr().err == "heard again"


def test_added_memory_is_the_state(device: torch.device) -> None:
    rows = measured_cost(
        "resnet8", device=device, num_classes=1000, batch_size=8, steps=2, repeats=1
    )
    state = {"ce": 0, "diagonal": 2 * 1000 * 64, "full": 1000 * 64 * (64 + 1)}
    for row in rows:
        assert row.added_mebibytes is not None
        least = 4 * state[row.case] / 2**20
        assert least <= row.added_mebibytes < least + 8  # other memory of a step


def test_criteria_are_exchanged(device: torch.device) -> None:
    data = random_images(12, num_classes=10, shape=(1, 8, 8), device=device)
    recipe = get_recipe("digits-resnet8-isda")
    trained = step_cost._Bench(recipe, data, device)
    lane = trained._lane
    weight = lane.network.get_classifier().weight
    for case, structure in (("diagonal", DiagonalCovariance), ("full", FullCovariance)):
        assert trained.seconds(case) > 0
        criterion, _ = trained._cases[case]
        before = int(criterion.estimator.count.sum())
        with trained._using(criterion):
            assert isinstance(lane.criterion, ISDALoss)
            assert type(lane.criterion.estimator) is structure
            SideBySide([lane], capture=False).train_epoch()
            assert lane.criterion.estimator.count.sum() == before + 12
            assert before == 24  # one warm-up, one timed
            assert float(lane.progress) == 0.5  # λ > 0
            assert weight.grad is not None
        assert weight.grad is None
    assert isinstance(lane.criterion, CrossEntropyLoss)


class Machine:
    """Stand-in for a bench that slows down with every measurement and has limited memory."""

    def __init__(self, *, room: int = 3) -> None:
        self.clock, self.asked, self.room = 1.0, [], room

    def peak(self, case: str) -> int:
        self._require(case)
        return {"ce": 100, "diagonal": 101, "full": 300}[case] * 2**20

    def seconds(self, case: str) -> float:
        self._require(case)
        self.asked.append(case)
        self.clock *= 1.001
        return {"ce": 1.0, "diagonal": 1.05, "full": 1.5}[case] * self.clock

    def _require(self, case: str) -> None:
        if CASES.index(case) >= self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")


def measure(create: Callable[[], object], repeats: int = 5) -> list[MeasuredCost]:
    times, peaks = step_cost._take_turns(create, repeats)
    return step_cost._summary(times, peaks, batch_size=4, precision="fp32")


def test_cases_take_turns() -> None:
    machine = Machine()
    rows = measure(lambda: machine)
    assert machine.asked == [*CASES] * 5
    # without interleaving, the drift would have been 0.5 and 1.0 percent
    assert rows[1].added_percent == pytest.approx(5, abs=0.15)
    assert rows[2].added_percent == pytest.approx(50, abs=0.4)
    assert [row.mebibytes for row in rows] == [100, 101, 300]
    assert [row.added_mebibytes for row in rows] == [0, 1, 200]


def test_medians() -> None:
    times = {"ce": [2.0, 100.0, 1.0], "diagonal": [2.2, 2.4, 2.0], "full": [3.0, 3.0, 3.0]}
    rows = step_cost._summary(times, {}, batch_size=4, precision="fp32")
    assert [row.milliseconds for row in rows] == pytest.approx([2000, 2200, 3000])
    assert [row.added_percent for row in rows] == pytest.approx([0, 10, 50])
    assert [row.spread_percent for row in rows] == pytest.approx([4900, 100 / 11, 0])
    assert [row.mebibytes for row in rows] == [None, None, None]


def test_cases_that_do_not_fit_in_memory() -> None:
    rows = measure(lambda: Machine(room=2))
    assert [row.note for row in rows] == ["", "", "does not fit"]
    assert rows[1].added_percent is not None
    assert rows[2].milliseconds is rows[2].added_percent is rows[2].mebibytes is None

    def no_room() -> Machine:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("capture was not ended")  # as in a failed capture

    assert [row.note for row in measure(no_room)] == ["does not fit"] * 3

    alone = step_cost._summary({"full": [1.0]}, {}, batch_size=4, precision="fp32")
    assert alone[2].note == "does not fit"  # no baseline

    def broken() -> Machine:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        measure(broken)


def test_statistics_larger_than_host_memory_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    full = 4 * 10 * 64 * 64  # bytes of ten matrices
    options = {"device": torch.device("cpu"), "batch_size": 4, "steps": 1, "repeats": 1}
    monkeypatch.setattr(step_cost, "host_memory", lambda: 2 * full)
    assert [row.note for row in measured_cost("resnet8", **options)] == ["", "", "does not fit"]
    others = 10_000  # bytes of means and counts
    monkeypatch.setattr(step_cost, "host_memory", lambda: 2 * (full + others))
    assert [row.note for row in measured_cost("resnet8", **options)] == ["", "", ""]


def write(
    path: Path, theory: list[TheoreticalCost], measured: dict[str, list[MeasuredCost]]
) -> None:
    write_costs(path, cost_lines(theory, measured, environment("cpu")))


def test_table() -> None:
    theory = [usual(name) for name in ("resnet50", "densenet121", "resnet32")]
    lines = cost_table(cost_lines(theory, {}, {})).splitlines()
    assert re.split(" {2,}", lines[2]) == ["resnet50", "25.6", "4.09", "2048", "0.25 %", "0.25 %"]
    assert re.split(" {2,}", lines[3]) == ["densenet121", "8.0", "2.83", "1024", "0.18 %", "0.20 %"]
    assert len(re.split(" {2,}", lines[4])) == 5  # the paper prints no cost
    assert lines[-1].startswith("densenet121: the paper prints a different number")

    measured = {"resnet50": measure(lambda: Machine(room=2))}
    lines = cost_table(cost_lines(theory[:2], measured, {})).splitlines()
    cells = re.split(" {2,}", lines[2])[6:]
    assert cells == ["1005.01", "+5.11 %", "does not fit", "7.6 %", "100", "1"]
    assert lines[3].split()[-1] == "%"  # not measured
    assert "batch size 4 (fp32)" in lines[-3]

    lines = cost_table(cost_lines([usual(name) for name in COST], {}, {})).splitlines()
    assert lines[-2].startswith("densenet121, densenet265: the paper prints a different number")
    sizes = "resnet101, resnet152: the paper prints a different number of parameters, 44.6, 60.3 M"
    assert lines[-1] == sizes


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cost.csv"
    theory = [usual(name) for name in ("resnet50", "resnet32")]
    measured = measure(lambda: Machine(room=2))
    write(path, theory, {})
    assert len(read(path)) == 2
    write(path, theory, {"resnet50": measured})
    rows = read(path)
    assert [(row["network"], row["case"]) for row in rows] == [
        *(("resnet50", case) for case in CASES),
        ("resnet32", ""),
    ]
    for row, expected in zip(rows, measured, strict=False):
        assert int(row["multiply_adds"]) == theory[0].multiply_adds
        assert float(row["theoretical_percent"]) == theory[0].theoretical_percent
        assert (row["paper_theoretical_percent"], row["paper_wall_percent"]) == ("0.25", "7.6")
        assert row["note"] == expected.note
        assert row["torch"] == torch.__version__
        for name in ("milliseconds", "added_percent", "mebibytes", "added_mebibytes"):
            value = getattr(expected, name)
            assert row[name] == ("" if value is None else str(value))
    assert rows[3]["paper_wall_percent"] == rows[3]["milliseconds"] == ""


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    write(path, [usual("resnet50")], {"resnet50": measure(Machine)})
    before = path.read_text()
    with pytest.raises(InputError, match=r"cost\.csv already exists: use --resume"):
        main(["--networks", "resnet8", "--out", str(path)])
    assert path.read_text() == before


@pytest.mark.parametrize("crash_at", ["fsync", "replace"])
def test_a_full_disk_keeps_the_measurements(
    crash_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "cost.csv"
    write(path, [usual("resnet50")], {"resnet50": measure(Machine)})
    before = path.read_text()
    monkeypatch.setattr(os, crash_at, full)
    with pytest.raises(InputError, match="No space left") as caught:
        write(path, [usual("resnet32")], {})
    assert "earlier files are intact" in str(caught.value)
    assert path.read_text() == before
    assert [one.name for one in tmp_path.iterdir()] == ["cost.csv"]


def test_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Existing measurements are kept, and missing ones are added."""
    device = torch.device("cpu")
    path = tmp_path / "cost.csv"
    theory = [usual(name) for name in ("resnet50", "resnet8")]
    write(path, theory, {"resnet50": measure(Machine)})
    old = path.read_text().replace(torch.__version__, "1.0")
    path.write_text(old)
    words = ["--batch-size", "4", "--steps", "1", "--repeats", "1", "--device", device.type]
    main(["--networks", "resnet8", "resnet50", *words, "--out", str(path), "--resume"])
    lines = path.read_text().splitlines()
    assert lines[:4] == old.splitlines()[:4]
    assert [row["network"] for row in read(path)[3:]] == ["resnet8"] * 3
    assert read(path)[3]["torch"] == torch.__version__
    for change in (["--batch-size", "3"], ["--num-classes", "7"], ["--image-size", "9"]):
        main(["--networks", "resnet8", *words, *change, "--out", str(path), "--resume"])
        assert [row["network"] for row in read(path)[-6:]] == ["resnet8"] * 6
        assert path.read_text().splitlines()[: len(lines)] == lines
        lines = path.read_text().splitlines()
    assert len(lines) == 1 + 3 * 5
    path.write_text(path.read_text().replace(environment(device)["device"], "another machine"))
    main(["--networks", "resnet8", *words, "--out", str(path), "--resume"])
    assert len(read(path)) == 3 * 6
    capsys.readouterr()
    main(["--networks", "resnet8", *words, "--out", str(path), "--resume"])  # nothing left to do
    assert len(read(path)) == 3 * 6
    assert capsys.readouterr().out == f"All of {path}:\n\n{costs_markdown([path])}\n"
    with pytest.raises(InputError, match="--resume needs --out"):
        main(["--networks", "resnet8", "--resume"])


def test_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row per measured network; the last measurement counts."""
    paths = [tmp_path / "old.csv", tmp_path / "new.csv"]
    theory = [usual(name) for name in ("resnet50", "resnet32")]
    old = {name.network: measure(Machine, repeats=1) for name in theory}
    write(paths[0], theory, old)
    new = {"resnet50": measure(lambda: Machine(room=2))}
    write(paths[1], theory, new)
    main(["--table", *map(str, paths)])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in _lines(capsys)]
    assert [line[0] for line in lines[2:]] == ["resnet50", "resnet32"]
    shares = [f"{row.added_percent:+.2f} %" for row in (new["resnet50"][1], *old["resnet32"][1:])]
    assert lines[2][4:] == [shares[0], "does not fit", "7.6 %", "1", ""]
    assert lines[3][4:] == [*shares[1:], "", "1", "200"]
    with pytest.raises(InputError, match="table must name CSV files, got missing"):
        main(["--table", "missing"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "a,b\n1,2\n", "is not a CSV file of isda cost: it has no column network"),
        (lambda text: "", "is not a CSV file of isda cost: it has no column network"),
        (lambda text: text.replace("milliseconds", "ms"), "it has no column milliseconds"),
        (lambda text: text.replace("resnet8,", "resnet9,", 1), "must have ce, diagonal, full for"),
        (lambda text: text.replace(",fp32,", ",fp32,x"), r"has milliseconds 'x\d+.* resnet8, ce$"),
        (lambda text: re.sub(",fp32,.*", "", text, count=1), "has milliseconds '' for resnet8, ce"),
        (lambda text: text.replace("\r\n", ",1,2\r\n").replace(",1,2", "", 1), "more cells than"),
        (lambda text: text.encode() + b"\xff", "cannot be read: 'utf-8' codec"),
        (lambda text: text + '"' + "x" * 200_000, "cannot be read: field larger"),
    ],
)
def test_invalid_files(change: Callable[[str], str | bytes], message: str, tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    theory = [usual("resnet8")]
    write(path, theory, {"resnet8": measure(Machine)})
    changed = change(path.read_bytes().decode())
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    for words in (["--table", str(path)], ["--out", str(path), "--resume"]):
        with pytest.raises(InputError, match=message) as caught:
            main(words)
        assert str(caught.value).startswith(str(path))
        assert "\n" not in str(caught.value)


def test_file_without_measurements(tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    for theory in ([], [usual("resnet8")]):
        write(path, theory, {})
        with pytest.raises(InputError, match=r"cost\.csv has no measurements"):
            main(["--table", str(path)])
    path.unlink()
    with pytest.raises(InputError, match=r"cost\.csv cannot be read: No such file or directory$"):
        measured_lines(path)


def test_resume_keeps_unknown_columns(tmp_path: Path) -> None:
    path = tmp_path / "cost.csv"
    theory = [usual("resnet8")]
    write(path, theory, {"resnet8": measure(Machine)})
    lines = path.read_text().splitlines()
    more = [line + end for line, end in zip(lines, (",weather", *[",fair"] * 3), strict=True)]
    path.write_text("\n".join(more))
    words = ["--networks", "resnet8", "--batch-size", "4", "--device", "cpu"]
    main([*words, "--out", str(path), "--resume"])
    assert path.read_text().splitlines() == more


def test_table_in_the_docs_matches_the_records() -> None:
    root = Path(__file__).parents[1]
    records = [
        root / f"results/benchmarks/cost_{name}_h200.csv" for name in ("cifar100", "imagenet")
    ]
    page = (root / "docs" / "speed.md").read_text()
    table = page.split("<!-- table:cost_h200 -->\n")[1].split("\n<!-- /table -->")[0]
    assert table == costs_markdown(records)


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_command(tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.csv"
    words = ["--networks", "resnet8", "--batch-size", "4", "--steps", "1", "--repeats", "1"]
    main([*words, "--device", device.type, "--out", str(path)])
    assert [row["case"] for row in read(path)] == list(CASES)
    assert float(read(path)[0]["milliseconds"]) > 0
    shown = capsys.readouterr().out
    assert shown.startswith("Measured on ")
    assert "resnet8 " in shown

    main(["--no-measure", "--networks", "resnet8", "resnet32", "--num-classes", "10"])
    shown = capsys.readouterr().out
    assert "resnet32 " in shown
    assert "CE ms" not in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--networks resnet8 resnet5", "unknown network 'resnet5'"),
        ("--networks resnet8 --device tpu", "device must be auto, cpu, cuda or cuda:N"),
        ("--networks resnet8 --batch-size 1", "batch_size must be >= 2, got 1"),
        ("--networks resnet8 --steps 0", "steps must be >= 1, got 0"),
        ("--networks resnet8 --repeats 0", "repeats must be >= 1, got 0"),
        ("--networks resnet8 --out .", "is a folder: give the path of a file"),
    ],
)
def test_errors_of_the_command(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    def never(*_: object) -> None:
        raise AssertionError("measured before the mistake was found")

    monkeypatch.setattr(step_cost, "_take_turns", never)
    with pytest.raises(InputError, match=message):
        main(words.split())


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))

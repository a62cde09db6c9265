"""The kernel table: bytes at the floor, what is timed and with which kernels, CSV, table, plot."""

import csv
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts import RECORDS, load, table_of
from test_benchmark_loss import PEER

import isda
from isda import ops

PIECES = ["update", "quadratic", "update and quadratic", "quadratic backward", "loss"]


@pytest.fixture
def kernels() -> ModuleType:
    return load("kernels")


def create_row(kernels: ModuleType, piece: str, form: str = "kernels", **numbers: Any) -> Any:
    shape = numbers.pop("shape", (7, 13, 5, "diagonal"))
    return kernels.Row("GPU", "2.15", piece, form, *shape, "", 4000.0, **numbers)


def test_every_piece_is_measured(
    kernels: ModuleType,
    tmp_path: Path,
    device: torch.device,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cpu":  # test_compile.py compiles
        monkeypatch.setattr(torch, "compile", lambda function, mode: function)
    out, plot = tmp_path / "new" / "kernels.csv", tmp_path / "kernels.png"
    flags = ["--device", device.type, "--repeat", "2", "--out", str(out)]
    kernels.main([*flags, "--shapes", "7,13,5,full", "--precision", "medium"])
    kernels.main([*flags, "--shapes", "9,4,3,diagonal", "--plot", str(plot)])
    rows = list(csv.DictReader(out.open()))
    expected = [(piece, form) for piece in PIECES for form in ("kernels", "functional form")]
    expected.append(("cross entropy", "functional form"))
    expected += [("loss, eager", "kernels"), ("loss, eager", "functional form")]
    expected.append(("loss, compiled", "kernels"))
    expected.append(("cross entropy, eager", "functional form"))
    assert [(row["piece"], row["form"]) for row in rows] == 2 * expected
    lines = [line for line in capsys.readouterr().out.splitlines() if "GB/s" not in line]
    assert len(lines) == len(rows)
    for row, line in zip(rows, lines, strict=True):
        full = row["structure"] == "full"
        sizes = (row["N"], row["C"], row["A"], row["precision"])
        assert sizes == (("7", "13", "5", "medium") if full else ("9", "4", "3", ""))
        assert line.startswith(f"{row['N']}, {row['C']}, {row['A']} {row['structure']}")
        assert row["torch"] == torch.__version__
        assert (row["note"] == "none here") == (device.type == "cpu" and row["form"] == "kernels")
        assert (row["extra_mebibytes"] == "") == (device.type == "cpu")
        seconds = float(row["microseconds"]) / 1e6
        if row["piece"] not in PIECES[:3]:
            assert row["floor_bytes"] == row["floor_multiple"] == row["bandwidth_share"] == ""
            continue
        at_floor = float(row["floor_bytes"]) / float(row["copy_gigabytes_per_second"]) / 1e9
        assert float(row["floor_multiple"]) == pytest.approx(seconds / at_floor, rel=0.01)
        assert float(row["bandwidth_share"]) == pytest.approx(
            at_floor / seconds, rel=0.01, abs=1e-4
        )
    assert plot.read_bytes().startswith(b"\x89PNG")
    kernels.main(["--table", str(out)])
    # lines of two shapes, with three pieces that have a floor, and of two losses under a head
    assert capsys.readouterr().out.count("\n| ") == 2 * 3 + 1 + 2


@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_floor_is_the_size_of_what_is_read_and_written(kernels: ModuleType, structure: str) -> None:
    samples, classes, width = 7, 13, 5
    features, weight = torch.randn(samples, width), torch.randn(classes, width)
    target = torch.tensor([3, 0, 3, 12, 0, 3, 7])
    estimator = {"full": isda.FullCovariance, "diagonal": isda.DiagonalCovariance}[structure](
        width, classes
    )
    estimator.update(features, target)
    state = estimator.covariance if structure == "full" else estimator.variance
    merged = features.nbytes
    read = weight.nbytes + estimator.quadratic(weight, target).nbytes
    sigma = 0
    for index in {3, 0, 12, 7}:
        sigma += state[index].nbytes
        merged += 2 * (state[index].nbytes + estimator.mean[index].nbytes)  # in and out
    shape = (samples, classes, width, structure)
    assert kernels.floor_bytes("update", shape, 4) == merged
    assert kernels.floor_bytes("quadratic", shape, 4) == sigma + read
    assert kernels.floor_bytes("update and quadratic", shape, 4) == merged + read
    assert kernels.floor_bytes("loss", shape, 4) is None


def test_floor_takes_the_classes_of_the_batches(kernels: ModuleType) -> None:
    row = create_row(kernels, "update", shape=(50, 2, 3, "full"))  # all batches have both classes
    kernels.measure(row, "cpu", repeat=1)
    assert row.floor_bytes == kernels.floor_bytes("update", row.shape, 2)


def test_kernels_are_turned_on_and_off(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    update = isda.DiagonalCovariance.update

    def spy(self: isda.DiagonalCovariance, *batch: torch.Tensor) -> None:
        seen.add(ops._ENABLED)
        update(self, *batch)

    monkeypatch.setattr(isda.DiagonalCovariance, "update", spy)
    for before in (False, True):
        monkeypatch.setattr(ops, "_ENABLED", before)
        for form, setting in (("kernels", before), ("functional form", False)):
            seen.clear()
            kernels.measure(create_row(kernels, "loss", form), "cpu", repeat=1)
            assert seen == {setting}
            assert ops._ENABLED is before


def test_time_is_that_of_one_call(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def quadratic(*_: object) -> None:
        now[0] += 0.003

    monkeypatch.setattr(isda.DiagonalCovariance, "quadratic", quadratic)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    row = create_row(kernels, "quadratic")
    kernels.measure(row, "cpu", repeat=3)
    assert row.microseconds == pytest.approx(3000)


@pytest.mark.parametrize("piece", ["loss, eager", "loss, compiled", "cross entropy, eager"])
def test_eager_is_the_line_of_a_script(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, piece: str
) -> None:
    heads, attached, compiled = [], [], []
    forward, loss = torch.nn.Linear.forward, isda.AttachedLoss.forward

    def spy_head(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        heads.append(x.requires_grad)
        return forward(self, x)

    def spy_loss(self: isda.AttachedLoss, *batch: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.criterion, isda.ISDALoss)
        attached.append(self.criterion)
        return loss(self, *batch)

    def spy_compile(criterion: isda.AttachedLoss, *, mode: str) -> isda.AttachedLoss:
        compiled.append(mode)
        return criterion

    monkeypatch.setattr(torch.nn.Linear, "forward", spy_head)
    monkeypatch.setattr(isda.AttachedLoss, "forward", spy_loss)
    monkeypatch.setattr(torch, "compile", spy_compile)
    kernels.measure(create_row(kernels, piece), "cpu", repeat=1)
    assert len(heads) > kernels.EAGER_STEPS
    assert all(heads)
    assert len(attached) == len(heads) * piece.startswith("loss")
    assert compiled == ["reduce-overhead"] * (piece == "loss, compiled")


def test_bandwidth_counts_both_ways(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "seconds_per_call", lambda *_, **__: 0.5)
    assert kernels.copy_bandwidth("cpu", repeat=1) == 2 * 4 * 2**22 / 0.5 / 1e9


def test_what_does_not_fit_is_noted(kernels: ModuleType, device: torch.device) -> None:
    row = create_row(kernels, "update", shape=(1, 3, 2**22, "full"))  # 192 TiB of Σ
    kernels.measure(row, device.type, repeat=1)
    assert (row.microseconds, row.note) == (None, "does not fit in memory")
    assert "does not fit in memory" in kernels.markdown([row])


def test_other_errors_are_raised(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(isda.DiagonalCovariance, "update", fail)
    before = ops._ENABLED
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernels.measure(create_row(kernels, "update", "functional form"), "cpu", repeat=1)
    assert ops._ENABLED is before


def test_table_sets_the_forms_side_by_side(kernels: ModuleType) -> None:
    floor = {"floor_bytes": 4e5, "bandwidth_share": 0.8, "floor_multiple": 1.25}
    rows = [
        create_row(kernels, "update", microseconds=500.0),  # measured again below
        create_row(kernels, "update", microseconds=125.0, extra_mebibytes=0.5, **floor),
        create_row(kernels, "update", "functional form", microseconds=1500.0, extra_mebibytes=64.0),
        create_row(kernels, "cross entropy", "functional form", microseconds=9.0),
    ]
    pieces, losses = kernels.markdown(rows).split("\n\n")
    assert pieces.splitlines()[2:] == [
        "| 7, 13, 5 | diagonal | update | 0.4 MB | 125 µs, 0.5 MiB | 80 % | 1.25 | "
        "1500 µs, 64 MiB | 12.0× |",
    ]
    assert losses.splitlines() == [
        "| N, C, A | covariance | cross entropy |",
        "|---|---|---:|",
        "| 7, 13, 5 | diagonal | 9 µs |",
    ]
    rows.append(create_row(kernels, "loss, eager", "authors' file", microseconds=3600.0))
    assert kernels.markdown(rows).splitlines()[-1].endswith("| 9 µs | 3600 µs |")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cpu", "--peer", __file__], "--peer needs --device cuda"),
        (["--device", "cpu", "--repeat", "0"], "--repeat must be >= 1, got 0"),
        (["--device", "cpu", "--shapes", "7,13,5"], "invalid shape value: '7,13,5'"),
        (["--device", "cpu", "--shapes", "7,13,5,shared"], "invalid shape value"),
        (["--table", "missing.csv"], "no such file: missing.csv"),
    ],
)
def test_wrong_options_are_refused(
    kernels: ModuleType, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        kernels.main(flags)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_plot_needs_a_floor(kernels: ModuleType, tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--shapes", "7,13,5,full", "--repeat", "1"]
    with pytest.raises(SystemExit, match="nothing to draw"):
        kernels.main([*flags, "--pieces", "cross entropy", "--plot", str(tmp_path / "x.png")])


@pytest.mark.gpu
def test_peer_is_timed(kernels: ModuleType, tmp_path: Path) -> None:
    peer, out = tmp_path / "ISDA.py", tmp_path / "kernels.csv"
    arguments = "self, model, fc, x, target_x, ratio"
    peer.write_text(PEER.format(shape="c, a, a", arguments=arguments, body="y = fc(model(x))"))
    shapes = ["7,13,5,full", "7,13,5,diagonal"]
    flags = ["--pieces", "loss, eager", "--repeat", "2", "--peer", str(peer), "--out", str(out)]
    kernels.main(["--device", "cuda", "--shapes", *shapes, *flags])
    rows = [row for row in csv.DictReader(out.open()) if row["form"] == "authors' file"]
    assert [row["structure"] for row in rows] == ["full"]
    assert float(rows[0]["microseconds"]) > 0


def test_table_of_the_page_is_that_of_its_record(
    kernels: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels.main(["--table", str(RECORDS / "kernels_h200.csv")])
    assert capsys.readouterr().out.strip() == table_of("docs/speed.md", "kernels_h200")

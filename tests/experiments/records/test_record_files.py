"""Records with unusual files: edited, of a newer version, huge, or not files at all."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from run_folders import change_config

from isda._version import __version__
from isda.experiments.calibration import load_calibration
from isda.experiments.errors import InputError
from isda.experiments.predictions import load_predictions
from isda.experiments.records import Run, export, load_runs, summary
from isda.experiments.report.blocks import update_markdown
from isda.experiments.report.feature_tables import read_features
from isda.experiments.report.pages import write_report_page
from isda.experiments.settings import Recipe
from isda.experiments.training.run_folder import RunFolder

RECIPE = Recipe(
    data="digits", network="resnet8", augment=("crop",), epochs=2, batch_size=4, learning_rate=0.1,
    weight_decay=0.0, milestones=(1,), lambda_0=0.5,
)  # fmt: skip
WEIGHTS = {"file": "r.safetensors", "sha256": "0" * 64, "tensors": 3, "new": ["fc.weight"]}

PICTURES = {
    "generator": "g", "classifier_fid": 10**400, "error_of_synthetic": 1.0,
    "classifier_fid_floor": 1.0, "error_of_real": 1.0, "data": "digits", "classifier": "c",
    "epochs": 1,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The copy of a finished record, without checkpoints."""
    run = RunFolder.create(tmp_path / "runs", "digits-resnet8-isda", RECIPE, 0)
    for epoch in range(RECIPE.epochs):
        run.append({"epoch": epoch, "test_error": 20.0, "seconds": 1.0})
    return export(run, tmp_path / "kept")


def damage_of(folder: Path) -> str:
    (run,) = load_runs(folder)
    assert run.damage is not None
    assert not summary(run).finished
    return run.damage


def test_a_flipped_bit_of_every_byte_of_the_config_is_found(folder: Path) -> None:
    """Also in the environments, which the checksums of the metrics do not cover."""
    path = folder / "config.json"
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"config\.json is not a run record"):
            Run(folder)
    path.write_bytes(content)
    assert Run(folder).verified


@pytest.mark.parametrize("change", ["field", "recipe"])
def test_a_record_of_another_version(change: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config if change == "field" else config["recipe"])["novelty"] = 3
    config["environments"][-1]["isda"] = "9.1.0"
    change_config(folder, config)
    assert "'novelty'" in damage_of(folder)
    assert f"written by torch-isda '9.1.0', this is {__version__}" in damage_of(folder)


def test_a_checksum_cannot_be_taken_from_some_lines(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    bare = [re.sub(', "check": "[0-9a-f]{16}"', "", line) for line in lines]
    path.write_text(lines[0] + bare[1])
    assert "line 2 has no checksum, but the line before it has one" in damage_of(folder)
    path.write_text(bare[0] + lines[1])
    assert "line 2 does not match its checksum" in damage_of(folder)
    path.write_text(lines[0] + lines[1].replace("}", "} "))
    assert "line 2 does not match its checksum" in damage_of(folder)
    path.write_text("".join(bare))
    assert not Run(folder).verified


def test_layout_of_the_config_does_not_matter(folder: Path) -> None:
    change_config(folder, {})
    assert Run(folder).verified


def test_a_config_without_checksum(folder: Path) -> None:
    """As written by earlier versions."""
    config = json.loads((folder / "config.json").read_text())
    del config["check"]
    (folder / "config.json").write_text(json.dumps(config))
    assert Run(folder).verified


def test_the_checksum_follows_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "digits-resnet8-isda"
    RunFolder.create(tmp_path, name, RECIPE, 0)
    monkeypatch.setattr(
        "isda.experiments.training.run_folder.environment", lambda device: {"commit": "another"}
    )
    with pytest.warns(UserWarning, match="different environment"):
        run = RunFolder.create(tmp_path, name, RECIPE, 0, resume=True)
    assert Run(run.folder).environments[-1] == {"commit": "another"}


@pytest.mark.parametrize(
    "weights", [[], "x", {}, WEIGHTS | {"new": 3}, WEIGHTS | {"new": [3]}, WEIGHTS | {"file": None}]
)
def test_weights_of_another_kind(weights: object, folder: Path) -> None:
    change_config(folder, {"weights": weights})
    assert "weights" in damage_of(folder)


def replaced(create: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        create(path)

    return replace


@pytest.mark.parametrize("file", ["config.json", "metrics.jsonl", "predictions.npz"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced(os.mkfifo), "is not a file"),
        (replaced(Path.mkdir), "is not a file"),
        (replaced(lambda path: path.symlink_to(os.devnull)), "is not a file"),
        (lambda path: (path.touch(), os.truncate(path, 2**40)), "bytes, more than the"),
    ],
    ids=["pipe", "folder", "device", "huge"],
)  # fmt: skip
def test_files_that_cannot_be_read_in_one_go(
    change: Callable[[Path], None], message: str, file: str, folder: Path
) -> None:
    change(folder / file)
    if file == "predictions.npz":
        with pytest.raises(InputError, match=message):
            load_predictions(Run(folder))
    else:
        assert message in damage_of(folder)
        with pytest.raises(InputError, match=re.escape(str(folder))):
            export(load_runs(folder)[0], folder.parents[2] / "again")


def test_a_calibration_that_is_a_pipe(folder: Path) -> None:
    os.mkfifo(folder / "calibration.json")
    with pytest.raises(InputError, match="is not a file"):
        load_calibration(Run(folder))
    with pytest.raises(InputError, match="is not a file"):
        export(Run(folder), folder.parents[2] / "again")


@pytest.mark.parametrize("content", ["[" * 100_000, json.dumps(PICTURES), "[1]", "{", "null"])
def test_damaged_records_of_pictures(content: str, tmp_path: Path) -> None:
    (tmp_path / "quality.json").write_text(content)
    with pytest.raises(InputError, match=r"quality\.json is damaged"):
        read_features([tmp_path])


def test_names_in_tables_of_features(tmp_path: Path) -> None:
    """A name is escaped in Markdown, and shown as it is on a page."""
    name = "a|b_ *c*"
    share = {"same_class": 0.9, "changed": 0.5, "relative_length": 0.3, "relative_distance": 1.2}
    record = {"moves": {name: share}, "images": 10, "data": "digits", "strength": 0.5}
    (tmp_path / "neighbours.json").write_text(json.dumps(record))
    (table,) = read_features([tmp_path])
    assert r"| a\|b\_ \*c\* |" in table.markdown
    write_report_page(tmp_path / "page.html", [], pictures=[table])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    cells = "</td><td>".join([name, "90.0 %", "50.0 %", "0.30", "1.20"])
    assert f"<tr><td>{cells}</td></tr>" in page


def test_pictures_in_a_markdown_file(tmp_path: Path) -> None:
    for name, kept in (("one", 0.25), ("two", 0.75)):
        share = {"same_class": kept, "changed": 0.5, "relative_length": 1, "relative_distance": 1}
        record = {"moves": {"none": share}, "images": 10, "data": "*birds*", "strength": 0.5}
        folder = tmp_path / "docs" / "figures" / name
        folder.mkdir(parents=True)
        (folder / "neighbours.json").write_text(json.dumps(record))
    (folder / "neighbours.png").write_bytes(b"")
    page = tmp_path / "docs" / "page.md"
    page.write_text("<!-- runs:two:pictures -->\n<!-- /runs -->\n")
    with pytest.raises(InputError, match="a folder of records called two: give it with"):
        update_markdown(page, [], pictures=read_features([folder.parent / "one"]))
    pictures = read_features([folder.parent / "one", folder])
    assert update_markdown(page, [], pictures=pictures)
    text = page.read_text()
    title = "Training images nearest to augmented features"
    assert f"-->\n\n![{title}](figures/two/neighbours.png)\n\n| move |" in text
    assert "| none | 75.0 % |" in text
    assert r"10 training images of \*birds\*, λ = 0.5." in text
    assert "25.0" not in text
    assert not update_markdown(page, [], pictures=pictures)


def test_links_in_a_circle(folder: Path) -> None:
    os.symlink(folder.parents[1], folder / "again")
    assert [run.damage for run in load_runs(folder.parents[1])] == [None]
    (folder / "metrics.jsonl").unlink()
    os.symlink("metrics.jsonl", folder / "metrics.jsonl")
    assert "0 of 2 epochs" in damage_of(folder)


def test_export_into_a_linked_folder(folder: Path, tmp_path: Path) -> None:
    """A link to a folder is followed; a link in the place of the record is not written through."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    copy = export(Run(folder), tmp_path / "link")
    assert [run.damage for run in load_runs(tmp_path / "elsewhere")] == [None]
    shutil.rmtree(copy)
    copy.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="cannot write"):
        export(Run(folder), tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()
    assert copy.is_symlink()

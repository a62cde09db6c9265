"""Records of generators and of augmented features, as tables with pictures."""

import base64
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isda.experiments.errors import InputError
from isda.experiments.report.text import escape_markdown, markdown_rows

__all__ = [
    "FeatureTable",
    "inversion_table",
    "neighbours_table",
    "quality_table",
    "read_features",
    "read_table",
]


@dataclass(frozen=True)
class FeatureTable:
    """The table of a record, with its picture if there is one."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str
    folder: Path = Path()
    """Folder of the record."""

    path: Path | None = None
    """PNG file."""

    @property
    def text(self) -> str:
        """Markdown table and note."""
        return f"{markdown_rows(self.header, self.rows)}\n\n{self.note}"

    @property
    def markdown(self) -> str:
        """Title, table, note and the path of the picture."""
        return f"## {self.title}\n\n{self.text}" + (f"\n\n`{self.path}`" if self.path else "")

    def block(self, page: Path) -> str:
        """Picture, table and note for a Markdown page."""
        picture = ""
        if self.path is not None:
            address = Path(os.path.relpath(self.path, page.parent)).as_posix()
            picture = f"![{self.title}]({address})\n\n"
        table = markdown_rows(self.header, self.rows, pad=False)
        return f"{picture}{table}\n\n{escape_markdown(self.note)}"

    @property
    def address(self) -> str | None:
        """The picture as a data URL."""
        if self.path is None:
            return None
        return f"data:image/png;base64,{base64.b64encode(self.path.read_bytes()).decode()}"


def read_features(folders: Iterable[Path]) -> list[FeatureTable]:
    """The records in output folders of isda gan measure, neighbours or invert."""
    found = []
    for folder in folders:
        names = [name for name in _TABLES if (folder / f"{name}.json").is_file()]
        if not names:
            files = ", ".join(f"{name}.json" for name in _TABLES)
            raise InputError(f"{folder} has none of {files}")
        found += [read_table(folder, name) for name in names]
    return found


def read_table(folder: Path, name: str) -> FeatureTable:
    """The record NAME.json in a folder: quality, neighbours or inversion."""
    path, picture = folder / f"{name}.json", folder / f"{name}.png"
    if name == "quality":  # the samples of the last epoch
        samples = sorted(folder.glob("samples/epoch_*.png"), key=lambda p: (len(p.name), p))
        picture = samples[-1] if samples else picture
    try:
        table = _TABLES[name](json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError,
            RecursionError) as error:  # fmt: skip
        raise InputError(f"{path} is damaged: {error!r}") from error
    return replace(table, folder=folder, path=picture if picture.is_file() else None)


def quality_table(result: dict[str, Any]) -> FeatureTable:
    """The measurements of ``isda gan measure``."""
    rows = [
        [
            f"{result['generator']}",
            f"{result['classifier_fid']:.3f}",
            f"{result['error_of_synthetic']:.2f} %",
        ],
        [
            "other training images",
            f"{result['classifier_fid_floor']:.3f}",
            f"{result['error_of_real']:.2f} %",
        ],
        ["test images", f"{result['classifier_fid_test']:.3f}", "–"],
    ]
    header = ["images", "classifier FID", "test error of a network trained on them"]
    note = (
        f"Classifier FID: distance of {result['images']} images from as many training images of "
        f"{result['data']}, over the features of {result['classifier']}; it cannot be compared "
        "with an Inception FID. The classifier was trained on the training images, so test images "
        "show about what a perfect generator would reach. Network: resnet8, "
        f"{result['epochs']} epoch{'s' * (result['epochs'] != 1)}. Picture: a row of samples for "
        "each class."
    )
    return FeatureTable("Quality of a generator", header, rows, note)


def neighbours_table(result: dict[str, Any]) -> FeatureTable:
    """The shares of ``isda neighbours``."""
    rows = [
        [
            name,
            f"{100 * one['same_class']:.1f} %",
            f"{100 * one['changed']:.1f} %",
            f"{one['relative_length']:.2f}",
            f"{one['relative_distance']:.2f}",
        ]
        for name, one in result["moves"].items()
    ]
    header = ["move", "neighbour of the same class", "other neighbour", "length", "distance"]
    note = (
        f"{result['images']} training images of {result['data']}, λ = {result['strength']:g}. "
        "Other neighbour: not the one without a move. Length of the move, and distance of the "
        "neighbour: medians, relative to the distance of the neighbour without a move. "
        "Picture, from left to right: the image, then the neighbours in the order of the rows."
    )
    return FeatureTable("Training images nearest to augmented features", header, rows, note)


def inversion_table(result: dict[str, Any]) -> FeatureTable:
    """The measurements of ``isda invert``."""

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f} %"

    def move(one: dict[str, float | None]) -> str:
        if one["residual_of_move"] is None:
            return "–"
        return f"{percent(one['residual_of_move_before'])} → {percent(one['residual_of_move'])}"

    rows = [
        [
            name,
            percent(one["residual"]),
            move(one),
            percent(one["own_class"]),
            percent(one["judge_class"]),
        ]
        for name, one in result["pictures"].items()
    ]
    header = ["pictures", "residual", "residual of the move", "class kept", "judge: class kept"]
    judge = "there is no judge, give one with --judge"
    if result["judge"] is not None:
        judge = f"the judge is {result['judge']}"
    note = (
        f"{result['samples']} images of {result['data']}, λ = {result['strength']:g}, generator "
        f"{result['generator']}. Residual: median distance of the features of a picture from those "
        "wanted, relative to their length, or to the length of the move, before → after step II. "
        "Class kept: share of the pictures that the inverted classifier, or the judge, assigns to "
        f"the class; {judge}. "
        "Control: moves of equal length in random directions. Picture, from left to right: in the "
        "order of the rows."
    )
    return FeatureTable("Augmented features as pictures (Appendix C)", header, rows, note)


_TABLES = {"quality": quality_table, "neighbours": neighbours_table, "inversion": inversion_table}

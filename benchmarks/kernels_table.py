"""The results of kernels.py: a line of its CSV, its Markdown tables, and its plot."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import three_digits

__all__ = ["COMPILED", "FLOORED", "Row", "Shape", "draw", "line", "markdown"]

Shape = tuple[int, int, int, str]  # N, C, A and the structure of the covariance

FLOORED = ("update", "quadratic", "update and quadratic")  # pieces that have a floor
COMPILED = "loss, compiled"
COLOURS = {"kernels": "#2a6f97", "functional form": "#e07a5f"}


@dataclass
class Row:
    """One line of the CSV: a case and, once measured, its numbers."""

    device: str
    torch: str
    piece: str  # one of PIECES
    form: str  # "kernels", "functional form" or "authors' file"
    N: int
    C: int
    A: int
    structure: str  # of the covariance
    precision: str  # of the products of full covariances
    copy_gigabytes_per_second: float | None = None
    microseconds: float | None = None  # of one call
    floor_bytes: float | None = None  # mean over the batches
    bandwidth_share: float | None = None  # of the copy's: floor_bytes in this time
    floor_multiple: float | None = None  # this time, where the floor's is 1
    extra_mebibytes: float | None = None  # peak of one call above what is held before it
    note: str = ""  # what is amiss
    commit: str = ""  # of torch-isda

    @property
    def shape(self) -> Shape:
        return self.N, self.C, self.A, self.structure


def markdown(rows: list[Row]) -> str:
    """Markdown tables of the pieces and of the losses; the last of several equal rows counts."""
    found: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        shape, structure = f"{row.N}, {row.C}, {row.A}", f"{row.structure} {row.precision}".strip()
        found.setdefault((shape, structure), {})[row.piece, row.form] = row
    tables = [_pieces_table(found), _losses_table(found)]
    return "\n\n".join("\n".join(table) for table in tables if len(table) > 2)


def _pieces_table(found: dict[tuple[str, str], dict[tuple[str, str], Row]]) -> list[str]:
    """Lines of the table of pieces that have a floor."""
    head = ["N, C, A", "covariance", "piece", "read and written once", "kernels"]
    head += ["of copy bandwidth", "× floor", "functional form", "÷ kernels"]
    table = [f"| {' | '.join(head)} |", "|---|---|---|" + "---:|" * (len(head) - 3)]
    for key, cells in found.items():
        for piece in FLOORED:
            fast, plain = cells.get((piece, "kernels")), cells.get((piece, "functional form"))
            either = fast or plain
            if either is None:
                continue
            moved = f"{three_digits(either.floor_bytes / 1e6)} MB" if either.floor_bytes else ""
            share = f"{100 * fast.bandwidth_share:.0f} %" if fast and fast.bandwidth_share else ""
            ratio = ""
            if fast and plain and fast.microseconds and plain.microseconds:
                ratio = f"{plain.microseconds / fast.microseconds:.1f}×"
            line = [*key, piece, moved, _cell(fast), share, _multiple(fast), _cell(plain), ratio]
            table.append(f"| {' | '.join(line)} |")
    return table


def _losses_table(found: dict[tuple[str, str], dict[tuple[str, str], Row]]) -> list[str]:
    """Lines of the table of losses, one for each shape."""
    columns = {
        "backward of the quadratic term": ("quadratic backward", "kernels"),
        "loss": ("loss", "kernels"),
        "cross entropy": ("cross entropy", "functional form"),
        "loss, eager": ("loss, eager", "kernels"),
        "loss, compiled": (COMPILED, "kernels"),
        "cross entropy, eager": ("cross entropy, eager", "functional form"),
        "functional form, eager": ("loss, eager", "functional form"),
        "authors' file, eager": ("loss, eager", "authors' file"),
    }
    used = [
        title for title, case in columns.items() if any(case in cells for cells in found.values())
    ]
    table = [
        f"| {' | '.join(['N, C, A', 'covariance', *used])} |",
        "|---|---|" + "---:|" * len(used),
    ]
    for key, cells in found.items():
        line = [_cell(cells.get(columns[title])) for title in used]
        if any(line):
            table.append(f"| {' | '.join([*key, *line])} |")
    return table


def draw(rows: list[Row], path: Path) -> None:
    """Plot multiples of the floor on logarithmic axes, with a panel for each piece.

    The plot is 7 inches wide, a column of text. ``NAME-dark`` beside it is for dark backgrounds.
    """
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    for ink, file in {"#24292f": path, "#d7dde3": path.with_stem(f"{path.stem}-dark")}.items():
        names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        style: Any = dict.fromkeys(names, ink) | {"font.size": 8, "svg.hashsalt": "isda"}
        with matplotlib.rc_context(style):
            figure = _figure([row for row in rows if row.floor_multiple], ink)
            metadata = {"Date": None} if file.suffix == ".svg" else None
            figure.savefig(file, dpi=150, transparent=True, metadata=metadata)


def _figure(rows: list[Row], ink: str) -> Any:
    from matplotlib.figure import Figure

    pieces = [piece for piece in FLOORED if any(row.piece == piece for row in rows)]
    shapes = list(dict.fromkeys((*row.shape, row.precision) for row in rows))
    figure = Figure(figsize=(7, 1.2 + 0.24 * len(shapes)), layout="constrained")
    panels = figure.subplots(1, len(pieces), sharex=True, sharey=True, squeeze=False)[0]
    for panel, piece in zip(panels, pieces, strict=True):
        for form, colour in COLOURS.items():
            found = {  # multiple of the floor, by its line
                shapes.index((*row.shape, row.precision)): row.floor_multiple
                for row in rows
                if (row.piece, row.form) == (piece, form)
            }
            panel.plot(found.values(), found.keys(), "o", markersize=4, color=colour, label=form)
            for place, multiple in found.items():
                if form == "kernels":
                    panel.annotate(  # beside the panel, where there are no dots
                        three_digits(multiple),
                        (1.02, place),
                        xycoords=("axes fraction", "data"),
                        va="center",
                        color=colour,
                    )
        panel.axvline(1, color=ink, linewidth=0.8, zorder=0)
        panel.set_xscale("log")
        panel.margins(x=0.1)
        panel.set_title(piece, loc="left", fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    ticks = [" ".join((f"{n}, {c}, {a}", *rest)).strip() for n, c, a, *rest in shapes]
    panels[0].set_yticks(range(len(shapes)), ticks)
    panels[0].invert_yaxis()
    handles, titles = panels[0].get_legend_handles_labels()
    figure.legend(handles, titles, frameon=False, ncols=2, loc="outside upper right")
    figure.supxlabel("multiple of the floor (the line), all read once and written once", fontsize=9)
    return figure


def line(row: Row) -> str:
    """A row as text for a terminal."""
    shape = f"{row.N}, {row.C}, {row.A} {row.structure} {row.precision}"
    floor = f"{_multiple(row)} x floor" if row.floor_multiple else ""
    return f"{shape:<28} {row.piece:<21} {row.form:<16} {_cell(row):<24} {floor}".rstrip()


def _cell(row: Row | None) -> str:
    if row is None or row.microseconds is None:
        return row.note if row else ""
    # what a graph holds is not seen
    known = row.extra_mebibytes is not None and row.piece != COMPILED
    memory = f", {three_digits(row.extra_mebibytes)} MiB" if known else ""
    return f"{three_digits(row.microseconds)} µs{memory}{row.note and f' ({row.note})'}"


def _multiple(row: Row | None) -> str:
    return three_digits(row.floor_multiple) if row and row.floor_multiple else ""

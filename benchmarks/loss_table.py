"""The results of loss.py: a line of its CSV, its Markdown tables, and its bar chart."""

from dataclasses import dataclass
from pathlib import Path

from rows import three_digits

__all__ = ["FORMS", "Row", "draw", "markdown"]

FORMS = {  # title and colour
    "ce": ("cross entropy", "#9aa5b1"),
    "library": ("torch-isda", "#2a6f97"),
    "direct": ("direct form", "#e07a5f"),
    "peer": ("authors' file", "#6d597a"),
    "focal": ("focal", "#81b29a"),
    "lq": ("L_q", "#f2cc8f"),
    "disturb_label": ("disturb label", "#b56576"),
    "center": ("center", "#457b9d"),
    "large_margin": ("large margin", "#3d405b"),
}

Case = tuple[int, int, int, str]  # N, C, A, structure
Groups = dict[Case, dict[str, "Row"]]  # rows of a case by form


@dataclass
class Row:
    """One line of the CSV."""

    device: str
    form: str
    structure: str
    N: int
    C: int
    A: int
    milliseconds: float | None  # median of the repeats
    extra_mebibytes: float | None  # peak of one step above what is held before it
    torch: str
    threads: int
    note: str  # why there is no number


def markdown(rows: list[Row]) -> str:
    """Markdown tables: the covariance structures, then the baselines, if there are any."""
    groups = _groups(rows)
    structured = {case: group for case, group in groups.items() if case[3] != "none"}
    baselines = {case: group for case, group in groups.items() if case[3] == "none"}
    return "\n\n".join(_table(part) for part in (structured, baselines) if part)


def draw(rows: list[Row], path: Path) -> None:
    """Draw a bar chart of times and extra memory on logarithmic axes."""
    from matplotlib.figure import Figure

    groups = _groups(rows)
    figure = Figure(figsize=(2.5 + 0.75 * len(groups), 6.5), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, quantity, heading in zip(
        panels,
        ("milliseconds", "extra_mebibytes"),
        ("milliseconds a step", "extra mebibytes at the peak"),
        strict=True,
    ):
        for form, (title, colour) in FORMS.items():
            bars = []  # left edge, height, width
            for place, group in enumerate(groups.values()):
                present = [name for name in FORMS if name in group]
                width = 0.8 / len(present)
                value = getattr(group.get(form), quantity, None)
                if value is not None:
                    bars.append((place - 0.4 + width * present.index(form), value, width))
            if bars:
                panel.bar(*zip(*bars, strict=True), align="edge", color=colour, label=title)
        panel.set_yscale("log")
        panel.set_title(heading, loc="left", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    panels[1].set_xticks(
        range(len(groups)),
        [
            f"{'baselines' if structure == 'none' else structure}\n{n}, {c}, {a}"
            for n, c, a, structure in groups
        ],
        rotation=60,
        fontsize=8,
    )
    handles, titles = panels[0].get_legend_handles_labels()
    figure.legend(handles, titles, frameon=False, fontsize=8, ncols=4, loc="outside upper left")
    figure.supxlabel("covariance and N, C, A", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _groups(rows: list[Row]) -> Groups:
    """Rows of each shape and structure; cross entropy belongs to every one."""
    others = [row for row in rows if row.form != "ce"] or rows
    groups: Groups = {(row.N, row.C, row.A, row.structure): {} for row in others}
    for (*shape, structure), group in groups.items():
        for row in rows:
            if shape == [row.N, row.C, row.A] and (row.form == "ce" or row.structure == structure):
                group[row.form] = row
    return groups


def _table(groups: Groups) -> str:
    """A line for each shape and structure, a column for each form."""
    structured = next(iter(groups))[3] != "none"
    forms = [form for form in FORMS if any(form in group for group in groups.values())]
    head = ["N, C, A", *["covariance"] * structured, *(FORMS[form][0] for form in forms)]
    head += ["direct ÷ torch-isda"] * structured
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (*shape, structure), group in groups.items():
        cells = [", ".join(map(str, shape)), *[structure] * structured]
        cells += [_cell(group.get(form)) for form in forms]
        if structured:
            cells.append(_ratio(group.get("direct"), group.get("library")))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None or row.milliseconds is None:
        return row.note if row else ""
    return f"{three_digits(row.milliseconds)} ms, {three_digits(row.extra_mebibytes)} MiB"


def _ratio(slow: Row | None, fast: Row | None) -> str:
    if not (slow and slow.milliseconds and fast and fast.milliseconds):
        return ""
    assert slow.extra_mebibytes is not None
    assert fast.extra_mebibytes is not None
    time_ratio = slow.milliseconds / fast.milliseconds
    memory_ratio = slow.extra_mebibytes / max(fast.extra_mebibytes, 0.01)
    return f"{time_ratio:.1f}× time, {memory_ratio:.1f}× memory"

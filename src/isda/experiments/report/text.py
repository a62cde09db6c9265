"""Tables as Markdown and as text, laid out for the width of the terminal."""

import itertools
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

__all__ = [
    "OURS",
    "escape_markdown",
    "fit",
    "markdown_rows",
    "printable",
    "show",
    "terminal_width",
    "text_table",
    "titled_table",
]

OURS = "ours (n)"
"""Title of a column that belongs to the one before it."""


def printable(text: str) -> str:
    """Text with a replacement character for each control character and each byte not in UTF-8."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def escape_markdown(text: str) -> str:
    r"""Text that Markdown shows as it is, such as the name of a run or a path.

    >>> escape_markdown("a|b <i> wide_resnet16_8 _x_")
    'a\\|b \\<i\\> wide_resnet16_8 \\_x\\_'
    """
    return re.sub(r"[\\`*\[\]<>|~&$#]|\b_|_\b|(?<!\w)_(?!\w)", r"\\\g<0>", printable(text))


def markdown_rows(
    header: list[str],
    rows: list[list[str]],
    left: Iterable[int] = (0,),
    *,
    code: Iterable[int] = (),
    pad: bool = True,
) -> str:
    """Markdown table, padded to be readable as text; cells are escaped.

    Args:
        header: titles.
        rows: cells.
        left: left-aligned columns.
        code: columns to show as code.
        pad: pad cells to the width of their column.
    """
    left, code = set(left), set(code)
    rows = [[_code(cell) if n in code else escape_markdown(cell) for n, cell in enumerate(row)]
            for row in rows]  # fmt: skip
    columns = []
    for n, column in enumerate(zip(header, *rows, strict=True)):
        width = max(map(len, column)) if pad else 0
        rule = "-" * max(width, 3) if n in left else "-" * max(width - 1, 3) + ":"
        width = max(width, len(rule)) if pad else 0
        cells = (column[0], rule, *column[1:])
        columns.append([f"{cell:{'<' if n in left else '>'}{width}}" for cell in cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in zip(*columns, strict=True))


def titled_table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """Markdown table below its title, which is escaped, for a page."""
    return f"{escape_markdown(title)}:\n\n{markdown_rows(header, rows, pad=False)}"


def terminal_width() -> int:
    """Columns of the terminal, or of ``COLUMNS``; no limit if the output goes elsewhere."""
    return max(shutil.get_terminal_size((_UNLIMITED, 24)).columns, 40)


def show(text: str) -> None:
    """Print Markdown or text in the width of the terminal."""
    print(fit(text, terminal_width()), flush=True)


def fit(text: str, width: int) -> str:
    """Markdown that is at most ``width`` characters wide.

    Paragraphs are wrapped. The columns of a wide table are distributed over up to four tables that
    repeat its labels; if that is not enough, the rows become a list, without the title of the
    labels and without empty cells. Lines with columns of their own, see :func:`text_table`, and
    words longer than a line stay as they are.
    """
    parts: list[str] = []
    for is_table, lines in itertools.groupby(text.split("\n"), lambda line: line.startswith("| ")):
        if is_table:
            parts.append(_fit_table(list(lines), width))
        else:
            parts += [_wrap(line, width) for line in lines]
    return "\n".join(parts)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns without Markdown, several tables if the terminal is too narrow for one.

    The first column is left-aligned and repeated in every table, the others are right-aligned.
    """
    padded = [[*row, *[""] * (len(header) - len(row))] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    room = terminal_width() - widths[0]
    others = [[column] for column in range(1, len(widths))]
    tables: list[str] = []
    for columns in _distribute(others, [2 + width for width in widths], room):
        lines = [
            "".join([row[0].ljust(widths[0]), *("  " + row[n].rjust(widths[n]) for n in columns)])
            for row in padded
        ]
        rule = "─" * len(lines[0])
        tables.append("\n".join([lines[0].rstrip(), rule, *(line.rstrip() for line in lines[1:])]))
    return "\n\n".join(tables)


_MOST_TABLES, _UNLIMITED = 4, 10**6


def _code(text: str) -> str:
    """Text as code in a cell of a table."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return fence + space + printable(text).replace("|", r"\|") + space + fence


def _wrap(line: str, width: int) -> str:
    if len(line) <= width or "  " in line:  # two spaces: columns of a table
        return line
    item = "* " if line.startswith("* ") else ""
    words = [  # names of runs that are longer than a line are broken behind a plus
        word.replace("+", "+\0 ") if len(item + word) > width else word
        for word in line.removeprefix(item).split(" ")
    ]
    filled = textwrap.fill(
        " ".join(words),
        width,
        initial_indent=item,
        subsequent_indent=" " * len(item),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("\0 ", "").replace("\0", "")


def _fit_table(lines: list[str], width: int) -> str:
    if max(map(len, lines)) <= width or len(lines) < 3:
        return "\n".join(lines)
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    titles = [title.strip() for title in rows[0]]
    numbers = [rule.strip().endswith(":") for rule in rows[1]]
    labels = range(numbers.index(True) if any(numbers) else 1)
    groups: list[list[int]] = []  # columns that stay together
    for column in range(len(labels), len(titles)):
        if titles[column] == OURS and groups:
            groups[-1].append(column)
        else:
            groups.append([column])
    widths = [1 + max(map(len, column)) for column in zip(*rows, strict=True)]
    room = width - 1 - sum(widths[column] for column in labels)
    tables = _distribute(groups, widths, room)
    too_wide = any(sum(widths[column] for column in columns) > room for columns in tables)
    if too_wide or len(tables) > _MOST_TABLES:
        return "\n".join(_item(titles, row, width) for row in rows[2:])
    return "\n\n".join(
        "\n".join("|" + "|".join(row[n] for n in [*labels, *columns]) + "|" for row in rows)
        for columns in tables
    )


def _distribute(groups: Sequence[list[int]], widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns of each table, as many groups in one as there is room for."""
    tables: list[list[int]] = [[]]
    for group in groups:
        if tables[-1] and sum(widths[column] for column in tables[-1] + group) > room:
            tables.append([])
        tables[-1] += group
    return tables


def _item(titles: list[str], row: list[str], width: int) -> str:
    """A row of a table as an item of a list: its first cell, then the others with their titles."""
    first, *cells = (" ".join(cell.split()) for cell in row)
    lines = [_wrap(f"* {first}", width)]
    others = [f"{title}: {cell}" for title, cell in zip(titles[1:], cells, strict=True) if cell]
    if others:
        lines.append(textwrap.indent(_wrap("; ".join(others), width - 2), "  "))
    return "\n".join(lines)

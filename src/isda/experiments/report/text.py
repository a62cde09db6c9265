"""Tables as plain text: aligned for a terminal, or as Markdown."""

from collections.abc import Iterable, Sequence

__all__ = ["markdown_rows", "text_table"]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Table for a terminal; the first column is left-aligned, the others right-aligned."""
    padded = [[*row, *[""] * (len(header) - len(row))] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in padded
    ]
    return "\n".join([lines[0], "─" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def markdown_rows(
    header: list[str], rows: list[list[str]], left: Iterable[int] = (0,), *, pad: bool = True
) -> str:
    """Markdown table, padded to be readable as text; ``left`` has the left-aligned columns."""
    left = set(left)
    columns = zip(header, *rows, strict=True)
    widths = [max(map(len, column)) if pad else 0 for column in columns]
    rule = ["-" * max(width, 3) if n in left else "-" * max(width - 1, 3) + ":"
            for n, width in enumerate(widths)]  # fmt: skip
    widths = [max(width, len(text)) if pad else 0 for width, text in zip(widths, rule, strict=True)]
    lines = [
        [
            cell.ljust(widths[n]) if n in left else cell.rjust(widths[n])
            for n, cell in enumerate(line)
        ]
        for line in (header, rule, *rows)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

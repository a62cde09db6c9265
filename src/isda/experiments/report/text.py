"""Markdown tables, and text that is safe in them."""

import re
from collections.abc import Iterable

__all__ = ["escape_markdown", "markdown_rows", "printable"]


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
    code = set(code)
    rows = [[_code(cell) if n in code else escape_markdown(cell) for n, cell in enumerate(row)]
            for row in rows]  # fmt: skip
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


def _code(text: str) -> str:
    """Text as code in a cell of a table."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return fence + space + printable(text).replace("|", r"\|") + space + fence

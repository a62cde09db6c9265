"""MkDocs hook: runs a script of cells and makes a page of its text, code, output and figures.

Cells begin with ``# %%``, cells of text with ``# %% [markdown]``. A script that fails, or draws
nothing, ends the build.
"""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import matplotlib

__all__ = ["SCRIPTS", "on_files", "to_markdown"]

SCRIPTS = {"two_dimensions.md": Path(__file__).parents[1] / "examples" / "two_dimensions.py"}
"""Script of each page."""

_INK = "#010203"  # becomes the colour of the page's text


def on_files(files: Any, *, config: Any, **_unused: Any) -> Any:
    from mkdocs.structure.files import File  # the tests run without the extra "docs"

    for page, script in SCRIPTS.items():
        files.append(File.generated(config, page, content=to_markdown(script)))
    return files


def to_markdown(script: Path) -> str:
    """Run a script cell by cell, and return its page."""
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names: dict[str, Any] = {"__name__": "__main__"}
    parts: list[str] = []
    drawn = 0
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = dict.fromkeys(colours, _INK) | {"svg.fonttype": "none", "font.size": 10}
    show = plt.show
    plt.show = lambda: None  # figures are collected at the end of a cell
    try:
        with matplotlib.rc_context(style):
            for head, body in _cells(script.read_text(encoding="utf-8")):
                if "[markdown]" in head:
                    parts.append(re.sub(r"(?m)^# ?", "", body))
                    continue
                output = io.StringIO()
                with contextlib.redirect_stdout(output):
                    exec(compile(body, str(script), "exec"), names)
                parts.append(f"```python\n{body}\n```")
                if output.getvalue():
                    parts.append(f"```text\n{output.getvalue().rstrip()}\n```")
                for number in plt.get_fignums():
                    parts.append(_inline(plt.figure(number), f"{script.stem}-{drawn}"))
                    drawn += 1
                plt.close("all")
    finally:
        plt.show = show
        plt.close("all")
    if not drawn:
        raise ValueError(f"{script} draws nothing")
    return "\n\n".join(parts) + "\n"


def _cells(text: str) -> list[tuple[str, str]]:
    _, *pieces = re.split(r"(?m)^(# %%.*)$", text)
    return [(head, body.strip("\n")) for head, body in zip(pieces[::2], pieces[1::2], strict=True)]


def _inline(figure: Any, salt: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"\n\s*", " ", svg)  # one line: no Markdown inside
    titles = "; ".join(axes.get_title(loc="left") for axes in figure.axes)
    svg = svg.replace("<svg", f'<svg class="figure" role="img" aria-label="{titles}"', 1)
    return f"<div>{svg.replace(_INK, 'currentColor')}</div>"

"""MkDocs hook: TeX formulas become SVG when the site is built, with matplotlib and its fonts.

The pages need no script, no font and no network for them, and they have the colour of the text.
Formulas are ``$…$`` and ``$$…$$``. In the latter ``\\\\`` begins a line and ``&`` aligns lines.
"""

import functools
import html
import pathlib
import re
from typing import Any

import matplotlib
from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.path import Path
from matplotlib.textpath import TextPath, TextToPath

__all__ = ["on_page_content", "to_svg"]

for _path in pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf").glob("*.ttf"):
    fontManager.addfont(_path)  # matplotlib's list of fonts may be that of another installation

_SIZE = 20.0  # units of an SVG per em
_SCALE = 1.12  # em of the formula per em of the text
_COMMANDS = {
    Path.MOVETO: ("M", 1),
    Path.LINETO: ("L", 1),
    Path.CURVE3: ("Q", 2),
    Path.CURVE4: ("C", 3),
}


def on_page_content(html: str, **_unused: Any) -> str:
    html = re.sub(
        r'<span class="arithmatex">\\\((.*?)\\\)</span>',
        lambda match: f'<span class="formula">{to_svg(_unescape(match[1]))}</span>',
        html,
        flags=re.DOTALL,
    )
    return re.sub(
        r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>',
        lambda match: _display(_unescape(match[1])),
        html,
        flags=re.DOTALL,
    )


@functools.cache
def to_svg(tex: str) -> str:
    """A formula on one line as SVG, whose baseline is that of the text."""
    text = f"${_spaced(tex.strip())}$"
    with matplotlib.rc_context({"mathtext.fontset": "cm"}):
        font = FontProperties(size=_SIZE)
        try:
            width, height, depth = TextToPath().get_text_width_height_descent(text, font, True)
            outline = TextPath((0, 0), text, size=_SIZE, prop=font)
        except ValueError as error:
            raise ValueError(f"cannot typeset {text}: {error}") from error
    outline_top = float(outline.vertices[:, 1].max(initial=0.0))  # marks above letters
    height = max(height, depth + outline_top) + 0.5
    depth += 0.5
    em = _SCALE / _SIZE
    label = html.escape(tex.strip(), quote=True)
    return (
        f'<svg role="img" aria-label="{label}" '
        f'style="width:{width * em:.3f}em;height:{(height + 0.5) * em:.3f}em;'
        f'vertical-align:{-depth * em:.3f}em" '
        f'viewBox="0 {depth - height - 0.5:.2f} {width:.2f} {height + 0.5:.2f}">'
        f'<path transform="scale(1,-1)" d="{_commands(outline)}"/></svg>'
    )


def _spaced(tex: str) -> str:
    """The thin spaces of TeX after a sum, and before it and functions, that matplotlib omits."""
    tex = re.sub(r"(\\sum(?:[_^](?:\{[^{}]*\}|\w))*) *(?:\\, *)?(?=\S)", r"\1\\, ", tex)
    before = r"(\)(?:\^(?:\\\w+|\w))?|\}|\\alpha) *(?:\\, *)?(?=\\(?:exp|log|sum)(?![a-z]))"
    return re.sub(before, r"\1\\, ", tex)


def _commands(path: Path) -> str:
    parts, vertices, codes, place = [], path.vertices, path.codes, 0
    while place < len(vertices):
        if codes[place] == Path.CLOSEPOLY:
            parts.append("Z")
            place += 1
            continue
        letter, count = _COMMANDS[codes[place]]
        points = vertices[place : place + count].ravel()
        parts.append(letter + " ".join(f"{value:.2f}" for value in points))
        place += count
    return "".join(parts)


def _display(tex: str) -> str:
    tex = re.sub(r"\\(begin|end)\{aligned\}", "", tex)
    lines = [line.split("&") for line in re.split(r"\\\\", tex) if line.strip()]
    columns = max(map(len, lines))
    cells = "".join(
        f"<span>{to_svg(part) if part.strip() else ''}</span>"
        for line in lines
        for part in [*line, *[""] * (columns - len(line))]
    )
    return f'<div class="formula formula-{columns}">{cells}</div>'


def _unescape(tex: str) -> str:
    return html.unescape(re.sub(r"\s+", " ", tex))

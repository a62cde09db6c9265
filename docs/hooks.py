"""MkDocs hook: the docstrings' Sphinx roles, such as :func:`x`, become plain code.

Code of at most 24 characters has the class ``short``, so that it is not broken at a hyphen. In
longer code, each flag has it. In the text, names such as ResNet-32 and numbers with their units
are not broken either.
"""

import re
from typing import Any

__all__ = ["on_page_content"]

_VERBATIM = re.compile(r"(<(pre|code|svg)\b.*?</\2>|<[^>]*>)", re.DOTALL)  # and tags
_NAME = re.compile(r"\b[A-Z]\w*(?:-\w+)*-\d[\w-]*")
_SPACE = re.compile(r"(?<=\d) (?=(?:%|[µm]?s\b|[MG]i?B\b))|(?<=±) |(?<=λ₀) (?==)|(?<=λ₀ =) ")
_SHAPE = re.compile(r"^\d+, \d+, \d+$")


def on_page_content(html: str, **_unused: Any) -> str:
    html = re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)
    html = re.sub(r"<code>(?=(?:[^<&\n]|&\w+;){1,24}</code>)", '<code class="short">', html)
    html = re.sub(r"<code>[^<\n]*</code>", _mark_flags, html)
    parts = _VERBATIM.split(html)  # text, match, name of its tag, text, …
    parts[::3] = map(_keep_together, parts[::3])
    del parts[2::3]
    return "".join(parts)


def _mark_flags(code: re.Match[str]) -> str:
    return re.sub(r"(?<=[> ])--[\w-]+", r'<span class="short">\g<0></span>', code[0])


def _keep_together(text: str) -> str:
    text = _SPACE.sub("\N{NO-BREAK SPACE}", text)
    text = _SHAPE.sub(lambda shape: shape[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
    return _NAME.sub(r'<span class="short">\g<0></span>', text)

"""MkDocs hook: the docstrings' Sphinx roles, such as :func:`x`, become plain code.

Code of at most 24 characters has the class ``short``, so that it is not broken at a hyphen. In
longer code, each flag has it.
"""

import re
from typing import Any

__all__ = ["on_page_content"]


def on_page_content(html: str, **_unused: Any) -> str:
    html = re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)
    html = re.sub(r"<code>(?=(?:[^<&\n]|&\w+;){1,24}</code>)", '<code class="short">', html)
    return re.sub(r"<code>[^<\n]*</code>", _mark_flags, html)


def _mark_flags(code: re.Match[str]) -> str:
    return re.sub(r"(?<=[> ])--[\w-]+", r'<span class="short">\g<0></span>', code[0])

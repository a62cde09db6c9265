"""MkDocs hook: the docstrings' Sphinx roles, such as :func:`x`, become plain code."""

import re
from typing import Any

__all__ = ["on_page_content"]


def on_page_content(html: str, **_unused: Any) -> str:
    return re.sub(r":(?:attr|class|data|func|meth|mod):(?=<code>)", "", html)

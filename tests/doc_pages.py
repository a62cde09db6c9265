"""What the tests of the documentation share: pages and their blocks."""

import re
from pathlib import Path

import pytest

__all__ = ["DOCS", "GENERATED", "PAGES", "ROOT", "blocks", "pages"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
GENERATED = {"two_dimensions.md"}  # made when the site is built

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of the code blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)

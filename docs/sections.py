"""Griffe extension: a docstring's ``Example:`` is what Griffe calls ``Examples:``."""

import re
from typing import Any

import griffe

__all__ = ["ExampleSections"]


class ExampleSections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_unused: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )

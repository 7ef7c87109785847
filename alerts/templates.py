"""Texts with names in braces, checked when they are read: nothing is evaluated, and no text can fail later."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


class TemplateFault(ValueError):
    """A text that is no template; says what is wrong and what to write instead."""


@dataclass(frozen=True, slots=True)
class Template:
    """`parts` are pairs of literal text and the name that follows it, "" at the end."""

    text: str
    parts: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises TemplateFault. A brace that is meant as such is doubled."""
        parts = []
        try:
            for literal, name, form, conversion in string.Formatter().parse(text):
                if form or conversion or (name is not None and not name.isidentifier()):
                    more = (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
                    raise TemplateFault(
                        f"{{{name}{more}}} is not a plain name in braces; write {{name}}, and {{{{ for a brace"
                    )
                parts.append((literal, name or ""))
        except TemplateFault:
            raise
        except ValueError as error:
            raise TemplateFault(f"a brace stands alone ({error}); write {{{{ or }}}} where a brace is meant") from error
        return cls(text, tuple(parts))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for _, name in self.parts if name)

    def render(self, values: Mapping[str, str]) -> str:
        """The text; a name without a value becomes "unknown"."""
        return "".join(literal + (values.get(name, "unknown") if name else "") for literal, name in self.parts)

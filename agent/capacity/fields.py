"""Reads a config.json by field: aliases of older names, nested sections, and errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_shim.errors import SettingsError

# Sections that hold the language model of a multimodal file, in the order in which they are looked for.
TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "language_model", "decoder", "text_model", "llm")
LAYER_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers",
               "num_transformer_layers")  # fmt: skip
HIDDEN_NAMES = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
MAX_TEXT = 4096  # characters: a letter for each of some thousand layers is the longest
MAX_COUNT = 10**9  # of any count in a config; above, a file is not a model's


class Fields:
    """One section of a config.json. Values of the wrong type raise SettingsError with the field's name."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    @property
    def names(self) -> tuple[str, ...]:
        """Fields that are there and not null."""
        return tuple(name for name, value in self._values.items() if value is not None)

    def raw(self, *names: str) -> Any:
        """The first that is there, of whatever type; None where none is."""
        return self._first(names)[1]

    def _first(self, names: Sequence[str]) -> tuple[str, Any]:
        found = ((name, self._values[name]) for name in names if self._values.get(name) is not None)
        return next(found, (names[0], None))

    def count(self, *names: str, least: int = 1) -> int | None:
        """A whole number under the first of these names that is there."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int):
                raise SettingsError(
                    f"{self._where}{name}={show(value)} in the config is no whole number; mend the file"
                )
            if not least <= value <= MAX_COUNT:
                raise SettingsError(f"{self._where}{name}={value} in the config is not in {least} to {MAX_COUNT}")
            return value
        return None

    def count_at(self, index: int, *names: str, least: int = 1) -> int | None:
        """As `count`, of one layer where the file has a list of them; the list must reach so far."""
        name, value = self._first(names)
        if not isinstance(value, list):
            return self.count(*names, least=least)
        return Fields({name: value[index]}, self._where).count(name, least=least)

    def largest(self, *names: str) -> int | None:
        """As `count`, and the largest entry where the file has a list of them."""
        _, value = self._first(names)
        if not isinstance(value, list):
            return self.count(*names, least=0) or None
        return max((self.count_at(index, *names, least=0) or 0 for index in range(len(value))), default=0) or None

    def need(self, *names: str, why: str) -> int:
        """As `count`, with SettingsError where none of the names is there."""
        found = self.count(*names)
        if found is None:
            raise SettingsError(f"the config has no {self._where}{names[0]} ({why}); add it to the file")
        return found

    def truth(self, name: str, default: bool) -> bool:
        """A true or false value."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SettingsError(f"{self._where}{name}={show(value)} in the config is neither true nor false")
        return value

    def text(self, *names: str) -> str | None:
        """A string under the first of these names that is there."""
        name, value = self._first(names)
        if value is not None and not isinstance(value, str):
            raise SettingsError(f"{self._where}{name}={show(value)} in the config is no text")
        if value is not None and (len(value) > MAX_TEXT or not value.isprintable()):
            raise SettingsError(f"{self._where}{name}={show(value)} in the config is no name that can be shown")
        return value

    def listed(self, *names: str) -> Sequence[Any] | None:
        """A list under the first of these names that is there."""
        name, value = self._first(names)
        if value is not None and not isinstance(value, list):
            raise SettingsError(f"{self._where}{name}={show(value)} in the config is no list")
        return value

    def indices(self, name: str, end: int, *, start: int = 0) -> frozenset[int] | None:
        """A list of layers' numbers, from `start` to before `end`."""
        value = self.listed(name)
        for one in value or ():
            if isinstance(one, bool) or not isinstance(one, int) or not start <= one < end:
                raise SettingsError(
                    f"{self._where}{name} in the config has {show(one)}, no layer of {start} to {end - 1}"
                )
        return None if value is None else frozenset(value)

    def section(self, name: str) -> Fields | None:
        """A nested section."""
        value = self._values.get(name)
        return Fields(value, f"{self._where}{name}.") if isinstance(value, Mapping) else None


def text_section(config: Mapping[str, Any]) -> Fields:
    """The section of the language model: the file itself, or the first nested one that has layers."""
    top = Fields(config)
    pending = [top]
    while pending:
        fields = pending.pop(0)
        if fields.raw(*LAYER_NAMES) is not None and (fields is not top or not _has_layers_below(top)):
            return fields
        pending.extend(one for name in (*TEXT_SECTIONS, "thinker_config") if (one := fields.section(name)) is not None)
    return top


def rival_sections(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of nested sections at the top that each describe a language model, where there is more than one."""
    top = Fields(config)
    found = [name for name in TEXT_SECTIONS if (one := top.section(name)) is not None and one.raw(*LAYER_NAMES)]
    differ = any(config[name] != config[found[0]] for name in found)
    return tuple(found) if differ else ()


def _has_layers_below(top: Fields) -> bool:
    """A nested text section is the truth where a file repeats some of its numbers at the top."""
    return any(
        (one := top.section(name)) is not None and one.raw(*LAYER_NAMES) is not None
        for name in ("text_config", "llm_config", "language_config")
    )


def printable(text: str) -> str:
    """The text, with what cannot be shown replaced, and its beginning alone where it is long."""
    return "".join(one if one.isprintable() else "?" for one in text[:200])


def show(value: Any) -> str:
    """The beginning of a value of whatever type, for messages."""
    text = repr(value[:60] if isinstance(value, str | list) else value)
    return text if len(text) <= 60 else text[:57] + "..."

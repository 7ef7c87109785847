"""YAML with the line of everything in it, and faults that are gathered instead of raised one by one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from unicodedata import category

import yaml

from alerts.errors import AlertsConfigError

MAX_BYTES = 1 << 18
MOST_FAULTS = 200  # named of one file
_HIDDEN = frozenset({"Cc", "Cs"})  # control characters, and halves of others
_SHOWN = 60  # characters of a value in a fault


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One thing that is wrong in a file, and what to write instead."""

    file: str
    line: int
    what: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}; {self.instead}"


class FileInvalid(AlertsConfigError):
    """A file that cannot be used; `faults` has every reason, in the order of the lines."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(sorted(set(faults)))
        super().__init__("\n".join(map(str, self.faults)))


class Faults:
    """Gathers what is wrong."""

    def __init__(self) -> None:
        self.found: list[Fault] = []

    def add(self, node: yaml.Node, what: str, instead: str) -> None:
        """Raises FileInvalid where there are more than anybody would read."""
        self.found.append(Fault(node.start_mark.name, node.start_mark.line + 1, what, instead))
        if len(self.found) >= MOST_FAULTS:
            raise FileInvalid([*self.found, Fault(self.found[-1].file, self.found[-1].line, "and more", "mend these")])

    def raise_any(self) -> None:
        if self.found:
            raise FileInvalid(self.found)


def compose(text: str, file: str) -> yaml.Node | None:
    """The nodes of the one document in it; None where there is none. Raises FileInvalid where it is not YAML."""
    if len(text) > MAX_BYTES:
        raise FileInvalid([Fault(file, 1, f"{len(text):,} characters", f"write at most {MAX_BYTES:,}")])
    try:
        loader = yaml.SafeLoader(text)
        loader.name = file
        return loader.get_single_node()
    except RecursionError:
        raise FileInvalid([Fault(file, 1, "nested too deep", "write lists of plain rules")]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        line = mark.line + 1 if mark is not None else 1
        raise FileInvalid([Fault(file, line, f"not YAML: {what}", "mend the syntax there")]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"the character U+{error.character:04X} may not stand in YAML"
        raise FileInvalid([Fault(file, line, what, "remove it")]) from error


def fields_of(node: yaml.Node, allowed: Iterable[str], what: str, faults: Faults) -> dict[str, yaml.Node]:
    """The values of a mapping by name; unknown and repeated names are faults."""
    names = tuple(allowed)
    found: dict[str, yaml.Node] = {}
    if not isinstance(node, yaml.MappingNode):
        faults.add(node, f"{what} is {kind_of(node)}", f"write names with values: {', '.join(names)}")
        return found
    for key, value in node.value:
        name = key.value if isinstance(key, yaml.ScalarNode) else None
        if name not in names:
            faults.add(key, f"{what} has no {shown(key)}", suggestion(name or "", names))
        elif name in found:
            first = found[name].start_mark.line + 1
            faults.add(key, f"{name} stands twice", f"keep one; the other is in line {first}")
        else:
            found[name] = value
    return found


def items_of(node: yaml.Node | None, what: str, faults: Faults, *, most: int) -> Iterator[yaml.Node]:
    """The entries of a list; nothing for None. By aliases a short file may hold any number."""
    if node is None:
        return
    if isinstance(node, yaml.SequenceNode) and len(node.value) > most:
        faults.add(node, f"{what} has {len(node.value):,} entries", f"write at most {most:,}")
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
    else:
        faults.add(node, f"{what} is {kind_of(node)}", "write a list: lines that begin with '- '")


def text_of(node: yaml.Node, what: str, faults: Faults, *, longest: int) -> str | None:
    """A text that is not empty; None with a fault where it is none."""
    if not isinstance(node, yaml.ScalarNode):
        faults.add(node, f"{what} is {kind_of(node)}", "write a text")
    elif not node.value.strip():
        faults.add(node, f"{what} is empty", "write a text")
    elif len(node.value) > longest:
        faults.add(node, f"{what} has {len(node.value):,} characters", f"write at most {longest:,}")
    elif hidden := next((one for one in node.value if one not in "\r\n\t" and category(one) in _HIDDEN), None):
        faults.add(node, f"{what} holds the character U+{ord(hidden):04X}, which cannot be shown", "remove it")
    else:
        return " ".join(str(node.value).split())
    return None


def kind_of(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


def shown(node: yaml.Node) -> str:
    """A value as it stands in the file, for a fault."""
    if not isinstance(node, yaml.ScalarNode):
        return kind_of(node)
    text = str(node.value)
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")


def suggestion(name: str, names: Iterable[str] | Mapping[str, object]) -> str:
    """What to write instead of a name that is unknown."""
    known = sorted(names)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"

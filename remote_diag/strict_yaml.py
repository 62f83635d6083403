"""YAML without surprises: hosts.yaml and parameter files, with the position of every value.

YAML has two standards in use. A plain scalar is taken for what it looks like only where nobody could be surprised:
``true``, ``false``, ``null``, decimal integers and plain floats; everything else is text. What a YAML 1.1 reader
would silently turn into something that was not meant (``no`` into false, ``22:22`` into 1342, ``0755`` into 493, a
date into an object) is refused, and the message says how to write it. So are duplicate keys, anchors, aliases, merge
keys, tags, directives, several documents, keys that are no text, deep nesting and large files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeAlias, Union

from .errors import ConfigError
from .files import MAX_BYTES, read_file
from .text import safe

if TYPE_CHECKING:
    from pathlib import Path

    import yaml

__all__ = ["MAX_BYTES", "MAX_DEPTH", "Document", "Key", "Node", "Plain", "Position", "load", "load_file", "read_file"]

MAX_DEPTH = 32
"""How deep mappings and lists may be nested."""
MAX_DIGITS = 30
"""Longest integer; more digits are an accident or an attack."""

Plain: TypeAlias = Union[bool, int, float, str, "list[Plain]", "dict[str, Plain]", None]
Key: TypeAlias = str | int


class Position(NamedTuple):
    """A place in a file, both counted from 1; columns are characters."""

    line: int
    column: int


@dataclass(frozen=True)
class Node:
    """One value of the file and what is known of it."""

    value: Plain
    position: Position
    text: str | None = None
    """The source text of a plain (unquoted) scalar, None for everything else."""
    members: Mapping[str, Node] = field(default_factory=dict)
    keys: Mapping[str, Position] = field(default_factory=dict)
    """Where the keys of a mapping stand."""
    items: Sequence[Node] = ()

    def child(self, key: Key) -> Node | None:
        """Return the node below ``key`` (a mapping's key or a list's index), None where there is none."""
        if isinstance(key, str):
            return self.members.get(key)
        return self.items[key] if 0 <= key < len(self.items) else None


@dataclass(frozen=True)
class Document:
    """A YAML file that has been read: plain data, and the position of each part of it."""

    source: str
    """The file's name as errors show it."""
    root: Node

    @property
    def data(self) -> Plain:
        """The content as plain Python; None for an empty file."""
        return self.root.value

    def position(self, path: Sequence[Key], *, key: bool = False) -> Position:
        """Return where ``path`` stands; for a path that is not there, where its innermost existing parent does.

        Args:
            path: mapping keys and list indexes from the root.
            key: give the place of the last key itself instead of its value's.
        """
        node = self.root
        for depth, part in enumerate(path):
            if key and depth == len(path) - 1 and isinstance(part, str) and part in node.keys:
                return node.keys[part]
            below = node.child(part)
            if below is None:
                break
            node = below
        return node.position

    def where(self, path: Sequence[Key], *, key: bool = False) -> str:
        """Return :meth:`position` as ``file:line:column``."""
        line, column = self.position(path, key=key)
        return f"{self.source}:{line}:{column}"

    def text(self, path: Sequence[Key]) -> str | None:
        """Return the plain scalar at ``path`` exactly as it was written; None for anything else."""
        node: Node | None = self.root
        for part in path:
            node = node.child(part) if node else None
        return node.text if node else None

    def error(self, path: Sequence[Key], message: str, *, hint: str | None = None, key: bool = False) -> ConfigError:
        """Return the ConfigError that says ``message`` about ``path``."""
        return ConfigError(f"{self.where(path, key=key)}: {message}", hint=hint)


def load_file(path: Path) -> Document:
    """Read the file at ``path``; raises ConfigError as :func:`files.read_file` and :func:`load` do."""
    return load(read_file(path, limit=MAX_BYTES), source=str(path))


def load(data: bytes, *, source: str) -> Document:
    """Read one YAML document.

    Args:
        data: the bytes of the file: UTF-8, a byte order mark at the beginning is tolerated.
        source: the file's name, for errors.

    Raises:
        ConfigError: the message begins with ``source:line:column`` and the hint says what to write instead.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{source}: larger than {MAX_BYTES} bytes", hint="check that this is the right file")
    return _Reader(_decode(data, source), source).read()


# What YAML 1.1 readers make of plain scalars, where that differs from what most people mean.
_WORDS_FOR_TRUTH = frozenset({"yes", "no", "on", "off", "y", "n"})
_SURPRISES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"=\Z"), "a default value"),
    (re.compile(r"[-+]?0[0-9_]+\Z"), "an octal number"),
    (re.compile(r"[-+]?0[xXbBoO][0-9a-fA-F_]+\Z"), "a hexadecimal, binary or octal number"),
    (re.compile(r"[-+]?[0-9][0-9_]*(?::[0-9_]+)+(?:\.[0-9_]*)?\Z"), "a number in base 60"),
    (re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt \t].*)?\Z", re.DOTALL), "a date"),
    (re.compile(r"[-+]?\.(?:inf|nan)\Z", re.IGNORECASE), "a number that is not finite"),
    (re.compile(r"[-+]?[0-9][0-9_]*\Z"), "a number"),
    (re.compile(r"[-+]?[0-9_]*\.[0-9_]+(?:[eE][-+]?[0-9]+)?\Z|[-+]?[0-9][0-9_]*\.\Z"), "a number"),
)
_NOTHING = frozenset({"", "~", "null", "Null", "NULL"})
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)\Z")
_FLOAT = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\Z")


class _SurpriseError(ValueError):
    """A plain scalar that would not be what it seems."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def _quoted(text: str) -> str:
    """Return ``text`` as a YAML string, for hints."""
    shown = text if len(text) <= 60 else text[:57] + "..."
    if "'" in shown or "\n" in shown:
        return '"' + shown.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    return f"'{shown}'"


def _plain(text: str) -> bool | int | float | str | None:
    """Return what an unquoted scalar means; raise _SurpriseError where readers of YAML would differ."""
    if text in _NOTHING:
        return None
    if text in _TRUTH:
        return _TRUTH[text]
    if text.lower() in _WORDS_FOR_TRUTH:
        word = "true" if text.lower() in {"yes", "on", "y"} else "false"
        raise _SurpriseError(
            f"{text!r} without quotes is {word} to some YAML readers and text to others",
            f"for text, quote it: {_quoted(text)}; for a truth value, write {word}",
        )
    if _INTEGER.match(text):
        if len(text) > MAX_DIGITS:
            raise _SurpriseError(f"a number of {len(text)} digits", f"at most {MAX_DIGITS}; for text, quote it")
        return int(text)
    if _FLOAT.match(text):
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise _SurpriseError(f"the number {text[:40]} is too large", "for text, quote it")
        return number
    if text == "<<":
        raise _SurpriseError("merge keys (<<) are not allowed", "write the fields out")
    for pattern, meaning in _SURPRISES:
        if pattern.match(text):
            shown = text if len(text) <= 60 else text[:57] + "..."
            raise _SurpriseError(
                f"{shown!r} without quotes is {meaning} to some YAML readers",
                f"for text, quote it: {_quoted(text)}; a number is written in decimal, without leading zeros",
            )
    return text


_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_WIDE_MARKS = (b"\xff\xfe", b"\xfe\xff")


def _decode(data: bytes, source: str) -> str:
    if data.startswith(_WIDE_MARKS):
        raise ConfigError(f"{source}:1:1: the file is UTF-16 or UTF-32", hint="save it as UTF-8")
    start = 3 if data.startswith(b"\xef\xbb\xbf") else 0
    try:
        text = data[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        line, column = _place(data[start : start + error.start].decode("utf-8"))
        byte = data[start + error.start]
        raise ConfigError(
            f"{source}:{line}:{column}: the byte 0x{byte:02x} is not UTF-8",
            hint="save the file as UTF-8; an editor may call its present encoding Latin-1 or Windows-1252",
        ) from None
    found = _FORBIDDEN.search(text)
    if found:
        line, column = _place(text[: found.start()])
        code = ord(found.group())
        hint = f'remove it, or write "\\u{code:04x}" inside double quotes' if code else "remove it"
        raise ConfigError(f"{source}:{line}:{column}: the invisible character U+{code:04X} is not allowed", hint=hint)
    return text


def _place(before: str) -> Position:
    lines = before.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return Position(len(lines), len(lines[-1]) + 1)


class _Reader:
    """Builds the tree from the events of PyYAML's parser, so that nothing is constructed before it was checked."""

    def __init__(self, text: str, source: str) -> None:
        import yaml

        self._yaml = yaml
        self._loader = yaml.SafeLoader(text)
        self._text = text
        self._source = source

    def read(self) -> Document:
        try:
            return Document(self._source, self._document())
        except self._yaml.MarkedYAMLError as error:
            self._explain(error)
        except (self._yaml.YAMLError, ValueError, OverflowError, LookupError, RecursionError) as error:
            # PyYAML lets these escape, for example for the escape "\UFFFFFFFF".
            at = Position(self._loader.line + 1, self._loader.column + 1)
            self._fail(at, f"not valid YAML: {error}", "check the escapes in double quotes")
        finally:
            self._loader.dispose()

    def _fail(self, at: Position, message: str, hint: str) -> NoReturn:
        raise ConfigError(f"{self._source}:{at.line}:{at.column}: {safe(message, limit=300)}", hint=hint) from None

    def _explain(self, error: yaml.MarkedYAMLError) -> NoReturn:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or "not valid YAML"
        if mark is None:
            self._fail(Position(1, 1), problem, "check the syntax")
        at = Position(mark.line + 1, mark.column + 1)
        if "'\\t'" in problem:
            self._fail(at, "a tab is used where YAML allows blanks only", "replace the tab by blanks")
        inside = ""
        if error.context and error.context_mark and error.context_mark.line != mark.line:
            inside = f" ({error.context}, which begins at line {error.context_mark.line + 1})"
        hint = next((hint for part, hint in _SYNTAX_HINTS if part in problem), "check the indentation and the quotes")
        self._fail(at, problem + inside, hint)

    def _document(self) -> Node:
        events = self._yaml.events
        self._next()  # the start of the stream
        event = self._next()
        if isinstance(event, events.StreamEndEvent):
            return Node(None, Position(1, 1))
        if getattr(event, "version", None) or getattr(event, "tags", None):
            self._fail(_position(event), "directives are not allowed", "remove the line that begins with %")
        root = self._node(self._next(), depth=1)
        self._next()  # the end of the document
        event = self._next()
        if not isinstance(event, events.StreamEndEvent):
            self._fail(_position(event), "a second document begins here", "keep one document: remove the line ---")
        return root

    def _next(self) -> yaml.Event:
        event: yaml.Event = self._loader.get_event()  # type: ignore[no-untyped-call]
        return event

    def _node(self, event: yaml.Event, *, depth: int) -> Node:
        events = self._yaml.events
        at = _position(event)
        if isinstance(event, events.AliasEvent):
            self._fail(at, f"the alias *{event.anchor} is not allowed", "write the value out; or quote it, if it is text")
        self._refuse_properties(event)
        if isinstance(event, events.ScalarEvent):
            return self._scalar(event)
        if depth > MAX_DEPTH:
            self._fail(at, f"nested more than {MAX_DEPTH} deep", "flatten the structure")
        if isinstance(event, events.SequenceStartEvent):
            return self._sequence(at, depth)
        return self._mapping(at, depth)

    def _refuse_properties(self, event: yaml.Event) -> None:
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        unwanted = f"the anchor &{anchor}" if anchor is not None else f"the tag {tag}" if tag is not None else None
        if unwanted:
            self._fail(_position(event), f"{unwanted} is not allowed", "remove it; or quote the value, if it is text")

    def _scalar(self, event: yaml.ScalarEvent) -> Node:
        at = _position(event)
        if event.style is not None:
            return Node(self._paired(event.value, at), at)
        try:
            return Node(_plain(event.value), at, text=event.value)
        except _SurpriseError as surprise:
            self._fail(at, str(surprise), surprise.hint)

    def _paired(self, text: str, at: Position) -> str:
        r"""Join the surrogate pairs that JSON writes (``"\ud83d\ude00"``); a lone one is no character."""
        try:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            self._fail(at, "half of a surrogate pair is no character", "correct the \\u escape")

    def _sequence(self, at: Position, depth: int) -> Node:
        items: list[Node] = []
        while True:
            event = self._next()
            if isinstance(event, self._yaml.events.SequenceEndEvent):
                return Node([item.value for item in items], at, items=items)
            items.append(self._node(event, depth=depth + 1))

    def _mapping(self, at: Position, depth: int) -> Node:
        members: dict[str, Node] = {}
        keys: dict[str, Position] = {}
        while True:
            event = self._next()
            if isinstance(event, self._yaml.events.MappingEndEvent):
                return Node({key: node.value for key, node in members.items()}, at, members=members, keys=keys)
            key = self._key(event)
            place = _position(event)
            if key in members:
                self._fail(place, f"duplicate key {key!r}; the first is at line {keys[key].line}", "remove one of the two")
            keys[key] = place
            members[key] = self._node(self._next(), depth=depth + 1)

    def _key(self, event: yaml.Event) -> str:
        at = _position(event)
        if not isinstance(event, self._yaml.events.ScalarEvent):
            self._fail(at, "a key must be text", "write `name: value`")
        self._refuse_properties(event)
        if event.style is not None or event.value in {"y", "n", "Y", "N"}:
            # No reader in use takes these letters for a truth value when they are keys.
            return self._paired(event.value, at)
        try:
            key = _plain(event.value)
        except _SurpriseError as surprise:
            self._fail(at, str(surprise), surprise.hint)
        if not isinstance(key, str):
            found = f"{event.value} is none" if event.value else "this one is empty"
            self._fail(at, f"a key must be text; {found}", f"quote it: {_quoted(event.value)}")
        return key


def _position(event: yaml.Event) -> Position:
    mark = event.start_mark
    assert mark is not None  # noqa: S101 - only events made by hand have none
    return Position(mark.line + 1, mark.column + 1)


_SYNTAX_HINTS = (
    ("mapping values are not allowed", "quote a value that holds ': '; otherwise check the indentation"),
    ("could not find expected ':'", "write `name: value`, with a blank after the colon"),
    ("that cannot start any token", "quote a value that begins with this character"),
    ("unexpected end of stream", "a quote is opened and not closed"),
    ("expected ',' or ']'", "a [ is opened and not closed, or a comma is missing"),
    ("expected ',' or '}'", "a { is opened and not closed, or a comma is missing"),
    ("expected the node content", "a bracket is opened and not closed, or a value is missing"),
    ("unknown escape character", "inside double quotes a backslash is written \\\\; single quotes need no escapes"),
)

"""Hides what names a person or a machine in a result: for reports that leave the house."""

from __future__ import annotations

import dataclasses
import getpass
import os
import re
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping, TypeVar

    T = TypeVar("T")

_ADDRESSES = (
    (re.compile(r"\b(GPU|MIG)-[0-9a-f]{8}-[0-9a-f-]{20,}", re.IGNORECASE), r"\1-(hidden)"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE), "(uuid)"),
    (re.compile(r"\b(?:[0-9a-f]{2}:){5}[0-9a-f]{2}\b", re.IGNORECASE), "(mac)"),
    (re.compile(r"(?<![\d.])(?!127\.)(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}(?![\d.])"), "(address)"),
    (re.compile(r"(?<![\w:])[0-9a-f]{1,4}(?:::?[0-9a-f]{1,4}){3,7}(?![\w:])", re.IGNORECASE), "(address)"),
    (re.compile(r"/(home|Users|users)/[^/\s:,;]+"), r"/\1/(user)"),
)

PEERS = frozenset({"MASTER_ADDR", "NCCL_COMM_ID", "NCCL_RAS_ADDR"})
"""Variables that name a host, often another one, whose name cannot be known here."""


class Redactor:
    """Replaces names of this host and user, home folders, addresses, UUIDs.

    Args:
        names: further names to hide.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self._words: list[tuple[re.Pattern[str], str]] = []
        home = os.path.expanduser("~")
        if home not in {"/", "~", ""}:
            self._words.append((re.compile(re.escape(home.rstrip("/")) + r"(?=/|:|$|\s)"), "~"))
        hosts = {socket.gethostname(), socket.gethostname().partition(".")[0], os.uname().nodename}
        self.add(hosts | set(names), "(host)")
        try:
            users = {getpass.getuser()}
        except (OSError, KeyError):
            users = set()
        # Everybody's name, and part of many paths.
        self.add(users - {"root"}, "(user)")

    def add(self, words: set[str], instead: str) -> None:
        """Hide further ``words``, whole ones in any case, behind ``instead``."""
        for word in sorted(words, key=len, reverse=True):
            if len(word) > 1 and word != "localhost":
                # Part of a longer name too, gpu8-ib0 or gpu8_data; a letter or digit beside it makes it another word.
                self._words.append((re.compile(r"(?<![^\W_])%s(?![^\W_])" % re.escape(word), re.IGNORECASE), instead))

    def text(self, text: str) -> str:
        """Return ``text`` without them."""
        for pattern, instead in (*self._words, *_ADDRESSES):
            text = pattern.sub(instead, text)
        return text

    def hide_peers(self, variables: Mapping[str, str]) -> None:
        """Hide the hosts that variables name, wherever they occur; addresses are hidden without it."""
        for name in PEERS & variables.keys():
            host = re.sub(r":\d+\Z", "", variables[name].strip())
            if re.fullmatch(r"[A-Za-z0-9_.-]*[A-Za-z][A-Za-z0-9_.-]*", host):
                self.add({host, host.partition(".")[0]}, "(host)")

    def value(self, value: T) -> T:
        """Return ``value`` (dataclasses, tuples, dicts, scalars) with every text in it redacted."""
        result: Any = value
        if isinstance(value, str):
            result = self.text(value)
        elif isinstance(value, (tuple, list)):
            result = type(value)(self.value(item) for item in value)
        elif isinstance(value, dict):
            result = {self.text(key): self.value(item) for key, item in value.items()}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: self.value(getattr(value, field.name)) for field in dataclasses.fields(value)}
            result = dataclasses.replace(value, **fields)
        return result  # type: ignore[no-any-return]

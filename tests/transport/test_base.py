"""The only text that a remote shell ever sees: what may be in it, and that nothing else is executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from remote_diag.host import Host
from remote_diag.transport.base import SafeCommand, SafePath
from remote_diag.transport.local import LocalTransport
from remote_diag.transport.ssh import SshTransport

HARMLESS = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._/-")


@pytest.mark.parametrize(("kind", "allowed"), [(SafeCommand, HARMLESS | {" "}), (SafePath, HARMLESS)])
def test_every_character_that_a_shell_could_interpret_is_refused(kind: Callable[[str], str], allowed: set[str]) -> None:
    for character in map(chr, (*range(256), 0x2028, 0xFF04, 0x1F600)):
        if character in allowed:
            assert kind(f"a{character}b") == f"a{character}b"
            continue
        for text in (f"a{character}b", f"ab{character}", f"{character}ab"):
            with pytest.raises(ValueError, match="may be sent to a shell"):
                kind(text)


@pytest.mark.parametrize("text", ["", "-c id", "sh  a", " sh", "sh ", "sh a\n", "sh a\r", "sh\ta"])
def test_no_other_shape_of_a_command(text: str) -> None:
    with pytest.raises(ValueError, match="may be sent to a shell"):
        SafeCommand(text)


@pytest.mark.parametrize("text", ["", "-a", "a b", "../a", "a/../b", "a//b", "a/", "~/a", "$HOME"])
def test_no_other_shape_of_a_path(text: str) -> None:
    with pytest.raises(ValueError, match="may be sent to a shell"):
        SafePath(text)


@pytest.mark.parametrize("transport", [LocalTransport, SshTransport])
def test_a_transport_executes_nothing_else(transport: Callable[[Host], Any]) -> None:
    host = Host("anywhere", transport="local" if transport is LocalTransport else "ssh", address="127.0.0.1")
    with pytest.raises(TypeError, match="only a SafeCommand"):
        transport(host).execute("sh harmless")

"""``--redact``: what goes to stdout, so that it can be handed on, names no host as its owner does.

The probe hides on the host what that host knows of itself. What only this side knows, the inventory's name, the ssh
alias and the address, is hidden here: the hosts become host-1, host-2... in the order in which they were asked for,
the same in text and in ``--json``. stderr speaks to whoever sits here and goes on using the real names.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import RdiagError

if TYPE_CHECKING:
    from ..host import Host
    from ..outcome import Outcome


class StandIns:
    """Gives each of ``hosts`` another name, by its place among them."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        from .parse import provide_probe_code

        provide_probe_code()
        from probes.lib.env.redact import Redactor

        self._names = {host.name: f"host-{place}" for place, host in enumerate(hosts, 1)}
        self._redactor = Redactor()
        for host in hosts:
            # "local" is what every inventory calls this machine, and a part of many paths.
            words = {host.ssh, host.address, None if host.transport == "local" else host.name}
            self._redactor.add({word for word in words if word is not None}, self._names[host.name])
            self._redactor.add({host.user} - {"root"} if host.user is not None else set(), "(user)")

    def text(self, text: str) -> str:
        """Return ``text`` without names of hosts and user, addresses, home folders."""
        return self._redactor.text(text)

    def outcome(self, outcome: Outcome[Any]) -> Outcome[Any]:
        """Return what a host answered under its other name; result and findings were redacted where they were made."""
        return replace(
            outcome,
            host=self._names[outcome.host],
            message=self.text(outcome.message),
            notes=tuple(map(self.text, outcome.notes)),
        )

    def error(self, error: RdiagError) -> RdiagError:
        """Return ``error`` as a program may read it on stdout."""
        hidden = copy.copy(error)
        hidden.host = self._names.get(error.host or "", error.host)
        hidden.message = self.text(error.message)
        hidden.hint = None if error.hint is None else self.text(error.hint)
        hidden.details = tuple(map(self.text, error.details))
        return hidden

    def entry(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return one entry of the list of hosts that ``--json`` prints, under the host's other name."""
        return {**entry, "host": self._names.get(entry["host"], entry["host"])}

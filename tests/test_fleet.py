from __future__ import annotations

import resource
import threading

import pytest

from remote_diag import fleet
from remote_diag.errors import InternalError, RdiagError, UnreachableError
from remote_diag.host import Host


@pytest.mark.parametrize(
    ("hosts", "limit", "expected"),
    [(0, 1024, 1), (3, 1024, 3), (1000, 65536, 64), (1000, resource.RLIM_INFINITY, 64), (30, 64, 3), (30, 10, 1)],
)
def test_sessions_fit_into_the_table_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, hosts: int, limit: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert fleet.at_once(hosts) == expected


def test_what_each_host_gave_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_AT_ONCE", 2)
    busy = threading.Semaphore(2)

    def run(host: Host) -> str:
        assert busy.acquire(blocking=False), "more at once than allowed"
        try:
            if host.name == "dead":
                raise UnreachableError("nobody is there", host=host.name)
            if host.name == "broken":
                raise KeyError("a bug")
            return host.name.upper()
        finally:
            busy.release()

    hosts = [Host(name=name) for name in ("a", "dead", "b", "broken", "c")]
    answers: dict[str, str | RdiagError] = {host.name: answer for host, answer in fleet.run_on_all(hosts, run)}
    assert {name: answers[name] for name in "abc"} == {"a": "A", "b": "B", "c": "C"}
    assert isinstance(answers["dead"], UnreachableError)
    assert isinstance(answers["broken"], InternalError)

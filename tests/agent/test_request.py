"""A request is checked before anything of it is used."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remote_diag.agent.request import Request, RequestError

GOOD: dict[str, Any] = {
    "protocol": 1,
    "run_id": "20250101-abc.1_x",
    "probe": {"name": "vocab-compare", "sha256": "0" * 64},
    "params": {"a": [1, {"b": None}]},
    "effects": ["reads-files"],
    "env": {"NCCL_P2P_LEVEL": "SYS", "EMPTY": ""},
    "workdir": None,
    "deadline_s": 600,
    "lease_s": 30.5,
    "keep": False,
    "force": True,
    "output_bytes": 0,
    "result_bytes": 8 << 20,
    "environment": {"kind": "venv", "value": "/root/ml-env"},
}


def request(**changes: Any) -> Request:
    return Request(json.dumps({**GOOD, **changes}).encode())


def test_a_good_request_is_understood() -> None:
    parsed = request(workdir="/data/eagle3", client="0.1.0")
    assert (parsed.run_id, parsed.probe_name, parsed.probe_sha256) == ("20250101-abc.1_x", "vocab-compare", "0" * 64)
    assert (parsed.params, parsed.env, parsed.workdir) == (GOOD["params"], GOOD["env"], "/data/eagle3")
    assert (parsed.deadline_s, parsed.lease_s, parsed.keep, parsed.force) == (600.0, 30.5, False, True)
    assert not parsed.active
    assert request(effects=["reads-files", "cuda"]).active


@pytest.mark.parametrize("missing", sorted(set(GOOD) - {"protocol"}))
def test_every_part_is_needed(missing: str) -> None:
    with pytest.raises(RequestError, match=missing):
        Request(json.dumps({name: value for name, value in GOOD.items() if name != missing}).encode())


WRONG: dict[str, list[Any]] = {
    "run_id": ["", ".", "..", "../x", "a/b", "-x", "a b", "a\n", "é", "x" * 65, 1, None],
    "probe": [
        None,
        {},
        {"name": "x", "sha256": "0" * 63},
        {"name": "x/y", "sha256": "0" * 64},
        {"name": "x", "sha256": "A" * 64},
    ],
    "params": [None, [], "x"],
    "effects": [None, "cuda", ["root"], [1]],
    "env": [None, [], {"": "x"}, {"A=B": "x"}, {"A": 1}, {"A": "\0"}, {"\0": ""}, {"A": "\ud800"}],
    "workdir": ["", 1, "/a\0b"],
    "deadline_s": [0, -1, "1", True, None, 1e30],
    "lease_s": [0, None],
    "keep": [0, "yes", None],
    "force": [0, None],
    "output_bytes": [-1, 1.5, True, None],
    "result_bytes": [-1, (8 << 20) + 1, True],
    "environment": [None, {}, {"kind": "venv"}, {"kind": "nix", "value": ""}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_part_that_does_not_fit_is_named(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        request(**{name: value})


def test_bytes_that_are_no_text_may_be_in_values() -> None:
    assert request(env={"A": "\udcff"}).env == {"A": "\udcff"}


def test_another_protocol_is_explained() -> None:
    with pytest.raises(RequestError, match="client speaks protocol 2 and this agent protocol 1"):
        request(protocol=2)


@pytest.mark.parametrize("payload", [b"", b"[]", b"{", b"\xff"])
def test_what_is_no_object_is_refused(payload: bytes) -> None:
    with pytest.raises(RequestError):
        Request(payload)


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(RequestError, match="sudo"):
        request(sudo=True)

from __future__ import annotations

import json
from pathlib import Path

from tests.support import model_servers as stand_in
from tests.support.cli import rdiag


def test_a_server_of_the_host(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.sglang()) as up:
        ran = rdiag("serving", up.url, "--interval", "0", "--json", home=tmp_path)
        assert ran.code == 0, ran.err
        assert ran.json["result"]["servers"][0]["drafting"]["accept_length"] == 2.8
        stand_in.generating(up, 0.01, 2.0)
        ran = rdiag("serving", up.url, "--interval", "0", "--measure", "--requests", "3", "--max-tokens", "8", home=tmp_path)
    assert ran.code == 0, ran.err
    assert "3 requests of 8 tokens, 1 at a time" in ran.out
    assert len([1 for method, _, _, _ in up.asked if method == "POST"]) == 3


def test_a_dry_run_shows_the_load_and_sends_nothing(tmp_path: Path) -> None:
    ran = rdiag("serving", "--measure", "--requests", "3", "--dry-run", "--json", home=tmp_path)
    assert json.loads(ran.out)["request"]["params"]["requests"] == 3
    assert json.loads(ran.out)["request"]["effects"] == ["network", "reads-files"]


def test_misuse(tmp_path: Path) -> None:
    assert rdiag("serving", "--requests", "3", home=tmp_path).code == 2
    assert rdiag("serving", "http://ada:secret@127.0.0.1:1", home=tmp_path).code == 2
    assert rdiag("serving", "ftp://127.0.0.1:1", home=tmp_path).code == 7

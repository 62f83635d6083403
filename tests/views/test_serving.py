from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from probes import serving
from remote_diag.findings import status
from remote_diag.outcome import Outcome, Timing
from remote_diag.testing import RecordingContext
from remote_diag.views.serving import render
from tests.support import model_servers as stand_in


def shown(tmp_path: Path, **params: Any) -> str:
    context = RecordingContext(tmp_path)
    result = serving.run(serving.Params(interval_s=0, **params), context)
    found = tuple(context.findings)
    outcome: Outcome[Any] = Outcome("gpu8", "serving", "run", status(found), result, found, Timing(0, 0, 0, 0))
    page = io.StringIO()
    Console(file=page, width=80, color_system=None).print(render(outcome))
    return page.getvalue()


def test_two_servers_in_two_columns(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.vllm()) as fast, stand_in.serving(stand_in.vllm(speculation=False)) as slow:
        stand_in.generating(fast, 0.02, 2.5)
        stand_in.generating(slow, 0.1, None)
        text = shown(tmp_path, url=fast.url, baseline_url=slow.url, measure=True, requests=2, max_tokens=20)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert "tokens/s with speculation" in " ".join(lines[:2])
    assert next(line for line in lines if line.startswith("speculation")).split() == ["speculation", "on", "off"]
    assert any(line.startswith("measured tokens/s") for line in lines)
    assert lines[-1].rstrip() == "sent to each: 2 requests of 20 tokens, 1 at a time"


def test_a_server_cannot_steer_the_terminal(tmp_path: Path) -> None:
    answers = {**stand_in.sglang(), "/v1/models": stand_in.models("sglang", "a\x1b[2J\u202e")}
    with stand_in.serving(answers) as up:
        text = shown(tmp_path, url=up.url)
    assert not {"\x1b", "\u202e"} & set(text)
    assert text.startswith("gpu8: serving: ok - sglang, acceptance length 2.80, 86.5 tokens/s\n")


def test_nothing_to_show() -> None:
    outcome: Outcome[Any] = Outcome("gpu8", "serving", "run", "skipped", None, (), Timing(0, 0, 0, 0), message="why")
    page = io.StringIO()
    Console(file=page, width=80).print(render(outcome))
    assert page.getvalue() == "gpu8: serving: skipped - why\n"

"""Real collectives over gloo, through the real agent: sums are exact, and ranks that fail are named, bounded and gone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probes import collectives_cpu
from probes.lib.comm import collectives, workers
from remote_diag.errors import RdiagError
from remote_diag.host import Environment, Host
from remote_diag.messages import Progress
from remote_diag.outcome import Outcome
from remote_diag.session import Session
from remote_diag.testing import RecordingContext
from tests.support import processes
from tests.support.cli import rdiag
from tests.support.sshd import TestSshd

PYTHON = Environment("python", sys.executable)


def ranks_below(folder: Path) -> list[str]:
    """Return the live ranks whose files are in ``folder``."""
    return processes.running("worker_main.py", str(folder))


def test_two_ranks_from_the_command_line(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text(f"hosts:\n  here: {{transport: local, environment: {{python: {sys.executable}}}}}\n")
    ran = rdiag(
        "nccl", "--backend", "gloo", "--sizes", "8,4K,2M", "-H", "here", "-i", str(inventory), "--json", home=tmp_path
    )
    assert ran.code == 0, ran.err
    result = ran.json["result"]
    assert (result["collective"], result["ranks"], result["complete"]) == ("all_reduce", 2, True)
    assert (result["correctness"], result["damaged_rows"], result["failure"]) == ("ok", 0, None)
    assert [(row["size_bytes"], row["in_place"], row["wrong"]) for row in result["rows"]] == [
        (8, True, 0), (4096, True, 0), (2 << 20, True, 0),
    ]  # fmt: skip
    for row in result["rows"]:
        assert row["algbw_gbs"] == pytest.approx(row["size_bytes"] / row["time_us"] / 1e3)
        # 2 (n - 1) / n of two ranks is 1.
        assert row["busbw_gbs"] == pytest.approx(row["algbw_gbs"])
        times = row["latency"]
        assert 0 < times["min_us"] <= times["p50_us"] <= times["p99_us"] <= times["max_us"]
    assert result["peak_size_bytes"] == 2 << 20
    assert processes.gone("worker_main.py", str(tmp_path)) == []


def test_eight_ranks_on_a_server(zsh_server: TestSshd) -> None:
    with Session(zsh_server.host(environment=PYTHON)) as session:
        outcome = session.run("collectives-cpu", {"ranks": 8, "sizes": "64,1M", "dtype": "bf16", "iterations": 5})
    result = outcome.result
    assert (result.ranks, result.complete, result.correctness) == (8, True, "ok")
    assert [(row.size_bytes, row.wrong) for row in result.rows] == [(64, 0), (1 << 20, 0)]
    assert len(result.devices) == 8
    assert result.rows[1].busbw_gbs == pytest.approx(result.rows[1].algbw_gbs * 14 / 8)
    assert outcome.status == "ok"
    assert processes.gone("worker_main.py", str(zsh_server.home)) == []


def measure_and(act: Callable[[list[int]], None], home: Path) -> Outcome[Any]:
    """Measure on this host; when the first size is done, ``act`` gets the process ids of the ranks, by rank."""
    acted: list[bool] = []

    def on_event(event: object) -> None:
        if acted or not isinstance(event, Progress) or event.done < 1:
            return
        acted.append(True)
        pids = {line.rpartition("rank-")[2]: int(line.partition(":")[0]) for line in ranks_below(home)}
        act([pids[name] for name in sorted(pids)])

    params = {"ranks": 2, "sizes": "8,1M,2M,4M", "iterations": 3000, "step_timeout_s": 30.0}
    with Session(Host(name="here", transport="local", environment=PYTHON), on_event=on_event) as session:
        outcome = session.run("collectives-cpu", params)
    assert acted
    return outcome


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGKILL, "killed"), (signal.SIGSTOP, "frozen")], ids=["killed", "frozen"]
)
def test_a_rank_that_is_gone_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, kind: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    begun = time.monotonic()
    outcome = measure_and(lambda pids: os.kill(pids[1], number), tmp_path)
    assert time.monotonic() - begun < 60
    result = outcome.result
    assert result.failure is not None
    assert (result.failure.kind, result.failure.rank) == (kind, 1)
    assert result.failure.size_bytes in (1 << 20, 2 << 20)
    assert not result.complete
    assert (result.rows[0].size_bytes, result.rows[0].wrong) == (8, 0)
    assert result.rows[0].time_us is not None
    (finding,) = [finding for finding in outcome.findings if finding.level == "fail"]
    assert (finding.code, finding.subject) == (f"rank-{kind}", "rank 1")
    assert processes.gone("worker_main.py", str(tmp_path)) == []


def test_ranks_end_with_an_agent_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    def kill_the_agent(pids: list[int]) -> None:
        # Frozen ranks cannot end by themselves.
        os.kill(pids[0], signal.SIGSTOP)
        agent = processes.parent(processes.parent(pids[0]))
        os.kill(agent, signal.SIGKILL)

    with pytest.raises(RdiagError):
        measure_and(kill_the_agent, tmp_path)
    assert processes.gone("worker_main.py", str(tmp_path)) == []


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        params = collectives_cpu.Params(port=holder.getsockname()[1])
        context = RecordingContext(tmp_path)
        result = collectives_cpu.run(params, context)
    assert result.failure is not None
    assert result.failure.kind == "port-taken"
    assert [(finding.level, finding.code) for finding in context.findings] == [("unknown", "port-taken")]


def test_a_port_that_is_taken_after_it_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "taken", lambda _: False)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        params = collectives_cpu.Params(port=holder.getsockname()[1], start_timeout_s=40.0)
        result = collectives_cpu.run(params, RecordingContext(tmp_path))
    assert result.failure is not None
    assert result.failure.kind == "port-taken"
    assert processes.gone(workers.PROGRAM, str(tmp_path)) == []


def test_sendrecv_needs_two(tmp_path: Path) -> None:
    from remote_diag.testing import Leave

    with pytest.raises(Leave, match="two ranks"):
        collectives_cpu.run(collectives_cpu.Params(collective="sendrecv", ranks=1), RecordingContext(tmp_path))


@pytest.mark.parametrize(
    "wrong",
    [{"sizes": "8:"}, {"sizes": ""}, {"ranks": 0}, {"ranks": 65}, {"iterations": 1}, {"port": 0}, {"step_timeout_s": 0.0},
     {"graph": True}],
)  # fmt: skip
def test_params_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        collectives_cpu.Params(**wrong)

"""rdiag logs beside what people use instead: ssh with tail -F, and sftp.

Three questions, asked of both in turn: how long a line takes from the job's write to the file here; how long 200 MB of
backlog take, from the start of the process to its end; what an idle follower costs the host.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "scripts"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from benchlib import rig  # noqa: E402
from benchlib.aims import Aim  # noqa: E402
from tests.support.cli import command, environment  # noqa: E402
from tests.support.jobs import FakeJob  # noqa: E402
from tests.support.sshd import Missing, TestSshd, tool, wait_until  # noqa: E402

WRITER = """
for number in range(int(arguments[0])):
    time.sleep(random.uniform(0.005, 0.06))
    put(b"%d %.9f %s\\n" % (number, time.monotonic(), b"loss=1.2345 lr=5e-5 " * 3))
"""
LINE = b"2025-01-01 00:00:00 step 000000 loss=1.234567 accuracy=0.654321 lr=5.000e-05 grad_norm=0.98 tokens/s=12345.6\n"
_MODIFIED = 0x2
_TICKS = os.sysconf("SC_CLK_TCK")


def tell(text: str) -> None:
    """Say how far it is."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


class Arrivals:
    """Notes when each line is there, in a file that somebody else writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._library = ctypes.CDLL(None)
        self.delays: list[float] = []

    def watch(self, lines: int, seconds: float) -> None:
        """Wait until ``lines`` lines with times in them have arrived; raises TimeoutError."""
        descriptor = self._library.inotify_init()
        self._library.inotify_add_watch(descriptor, os.fsencode(self._path), _MODIFIED)
        until = time.monotonic() + seconds
        rest = b""
        with self._path.open("rb", buffering=0) as file:
            while len(self.delays) < lines:
                data = file.read()
                now = time.monotonic()
                *whole, rest = (rest + data).split(b"\n")
                self.delays += [now - float(line.split()[1]) for line in whole if line[:1].isdigit()]
                if now > until:
                    raise TimeoutError(f"{len(self.delays)} of {lines} lines arrived")
                if select.select([descriptor], [], [], 0.5)[0]:
                    os.read(descriptor, 1 << 16)
        os.close(descriptor)


def percentile(values: list[float], share: float) -> float:
    """Return the value that ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Bench:
    """One server, one place, and the commands of both sides."""

    def __init__(self, server: TestSshd, place: rig.Place) -> None:
        self.server = server
        self.place = place
        self.folder = place.directory
        self.number = 0

    def job(self) -> FakeJob:
        """Return another running job."""
        self.number += 1
        return FakeJob(self.server.home, f"bench{self.number}.v1")

    def rdiag(self, job: FakeJob, output: Path, *arguments: str) -> list[str]:
        """Return the command that mirrors the log of ``job`` to ``output``."""
        return command("logs", job.id, "-H", "bench", "-i", str(self.place.inventory), "--output", str(output), *arguments)

    def ssh(self, program: str, *arguments: str) -> list[str]:
        """Return an ssh or sftp command."""
        return [tool(program), "-F", str(self.place.ssh_config), *arguments]

    @contextlib.contextmanager
    def following(self, argv: list[str], stdout: Any) -> Iterator[subprocess.Popen[bytes]]:
        """Run a follower, and end it."""
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.DEVNULL, env=environment(self.folder)
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(10)

    def delays(self, who: str, lines: int) -> list[float]:
        """Return the seconds from write to file, one a line."""
        job, output = self.job(), self.folder / f"{who}-{self.number}.log"
        output.touch()
        with self._follower(who, job, output):
            job.append(b"ready\n")
            if not wait_until(lambda: output.stat().st_size > 0, 15):
                raise TimeoutError(f"{who} does not follow")
            time.sleep(0.3)
            arrivals = Arrivals(output)
            thread = threading.Thread(target=arrivals.watch, args=(lines, 120.0))
            thread.start()
            job.run(WRITER, lines)
            thread.join()
            job.finished()
        return arrivals.delays

    @contextlib.contextmanager
    def _follower(self, who: str, job: FakeJob, output: Path) -> Iterator[None]:
        if who == "rdiag":
            with self.following(self.rdiag(job, output, "-f"), subprocess.DEVNULL):
                yield
        else:
            with output.open("wb") as file:
                tail = self.ssh("ssh", "bench", f"tail -n +1 -F {job.stdout}")
                with self.following(tail, file):
                    yield

    def backlog(self, who: str, job: FakeJob) -> float:
        """Return the seconds that fetching the whole log takes, process start included."""
        output = self.folder / f"{who}-backlog.log"
        output.unlink(missing_ok=True)
        batch = f"get {job.stdout} {output}\n".encode()
        argv = self.rdiag(job, output) if who == "rdiag" else self.ssh("sftp", "-b", "-", "bench")
        started = time.perf_counter()
        subprocess.run(argv, input=batch, stdout=subprocess.DEVNULL, check=True, env=environment(self.folder))
        took = time.perf_counter() - started
        if output.stat().st_size != job.stdout.stat().st_size:
            raise RuntimeError(f"{who} fetched {output.stat().st_size} bytes")
        return took

    def idle(self, who: str, seconds: float) -> float:
        """Return the share of one core that the host's side of an idle follower takes."""
        job, output = self.job(), self.folder / f"{who}-idle.log"
        output.touch()
        with self._follower(who, job, output):
            job.append(b"ready\n")
            wait_until(lambda: output.stat().st_size > 0, 15)
            time.sleep(1.0)
            before = self._host_ticks()
            time.sleep(seconds)
            return (self._host_ticks() - before) / _TICKS / seconds

    def _host_ticks(self) -> int:
        total = 0
        for pid in self.server.session_pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total


def measure(bench: Bench, *, lines: int, rounds: int, size: int, idle_s: float) -> dict[str, Any]:
    """Ask the three questions."""
    answer: dict[str, Any] = {}
    delays: dict[str, list[float]] = {"rdiag": [], "tail": []}
    for number in range(rounds):
        tell(f"delay of a line, round {number + 1} of {rounds}")
        for who, found in delays.items():
            found.extend(bench.delays(who, lines))
    for who, found in delays.items():
        answer[who] = {
            "lines": len(found),
            "median_ms": statistics.median(found) * 1000,
            "p99_ms": percentile(found, 0.99) * 1000,
            "max_ms": max(found) * 1000,
        }
    job = bench.job()
    job.append(LINE * (size // len(LINE)))
    job.end()
    times: dict[str, list[float]] = {"rdiag": [], "sftp": []}
    for number in range(rounds + 1):
        tell(f"{size // 1_000_000} MB of backlog, round {number} of {rounds}")
        for who, took in times.items():
            took.append(bench.backlog(who, job))
    for who, took in times.items():
        # The first round only warms up.
        answer.setdefault(who, {})["backlog_s"] = statistics.median(took[1:])
        answer[who]["backlog_mb_s"] = size / 1e6 / statistics.median(took[1:])
    for who in ("rdiag", "tail"):
        tell(f"an idle follower for {idle_s:g} s: {who}")
        answer[who]["idle_percent_of_a_core"] = 100 * bench.idle(who, idle_s)
    return answer


def aims(answer: dict[str, Any]) -> list[Aim]:
    """Return what is aimed at, and whether it is reached."""
    ours, tail, sftp = answer["rdiag"], answer["tail"], answer["sftp"]
    return [
        Aim("median delay, of that of ssh tail -F", ours["median_ms"] / tail["median_ms"], 5.0),
        Aim("p99 delay, of that of ssh tail -F", ours["p99_ms"] / tail["p99_ms"], 5.0),
        Aim("p99 delay", ours["p99_ms"], 10.0, "ms"),
        Aim("time for the backlog, of that of sftp get", ours["backlog_s"] / sftp["backlog_s"], 1 / 0.8),
        Aim("idle follower, on the host", ours["idle_percent_of_a_core"], 0.5, "% of a core"),
    ]


def main() -> int:
    """Measure and print; 0 when every aim is met, 1 when one is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench_logs", description=__doc__)
    parser.add_argument("--lines", type=int, default=300, metavar="N", help="lines in each round [300]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of each [3]")
    parser.add_argument("--megabytes", type=int, default=200, metavar="N", help="size of the backlog [200]")
    parser.add_argument("--idle", type=float, default=20.0, metavar="S", help="seconds to be idle [20]")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rdiag-bench-") as name, rig.server() as server:
        folder = Path(name) / "place"
        with rig.place(server, folder, 0.0) as place:
            answer = measure(
                Bench(server, place),
                lines=chosen.lines,
                rounds=chosen.rounds,
                size=chosen.megabytes * 1_000_000,
                idle_s=chosen.idle,
            )
        shutil.rmtree(folder, ignore_errors=True)
    found = aims(answer)
    if chosen.json:
        print(json.dumps({"schema_version": 1, **answer, "aims": [aim.as_dict() for aim in found]}, indent=2))
    else:
        from benchlib import report

        for who, values in answer.items():
            print(who.ljust(6), "  ".join(f"{key} {value:.2f}" for key, value in values.items()))
        report.show(report.aims_table(found))
    return 0 if all(aim.met for aim in found) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Missing as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

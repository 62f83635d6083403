"""Long trials of following a log, over a real sshd on loopback.

Connections that are reset every 0.5 to 1 second for a minute; a thousand jobs that end in the moment they write their
last line, by hand and launched. Each copy is compared with the log on the host, byte for byte.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from remote_diag.follower import Follower, FollowEvent, Wanted  # noqa: E402
from remote_diag.host import Host  # noqa: E402
from remote_diag.jobs import JobSpec  # noqa: E402
from remote_diag.session import Session  # noqa: E402
from tests.support.jobs import FakeJob  # noqa: E402
from tests.support.proxy import Proxy  # noqa: E402
from tests.support.sshd import Missing, TestSshd  # noqa: E402

WRITER = """
rng = random.Random(int(arguments[1]))
until = time.monotonic() + float(arguments[0])
while time.monotonic() < until:
    put(rng.randbytes(rng.randrange(1, 6000)) + b"\\n")
    put(b"warning \\xff\\n", err)
    time.sleep(rng.uniform(0, 0.01))
put(b"the end")
end()
"""
LAST = "import sys; sys.stdout.write('the last line of ' + sys.argv[1])"


class Kept(Session):
    """A session that outlives its ``with`` statement."""

    def __init__(self, session: Session) -> None:
        self.__dict__ = session.__dict__

    def __exit__(self, *_: object) -> None:
        """Stay."""


def say(text: str) -> None:
    """Say how far it is."""
    print(f"soak: {text}", flush=True)


def compare(here: Path, there: Path) -> None:
    """Stop unless both are the same."""
    if here.read_bytes() != there.read_bytes():
        sys.exit(f"soak: {here} differs from {there}")


def resets(server: TestSshd, folder: Path, seconds: float, seed: int) -> None:
    """Reset the connection again and again while a job writes."""
    rng = random.Random(seed)  # noqa: S311 - the same every time
    job = FakeJob(server.home, "resets.v1")
    notes: list[FollowEvent] = []
    with Proxy(server.port) as proxy:
        host = replace(server.host(), port=proxy.port, host_key=" ".join(server.host_key()))
        wanted = Wanted(directory=folder, show=False)
        with Follower(host, job.id, wanted, on_event=notes.append, insist=True) as follower:
            thread = threading.Thread(target=follower.run)
            thread.start()
            job.run(WRITER, seconds, seed)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                time.sleep(rng.uniform(0.5, 1.0))
                proxy.cut()
            thread.join(60)
            if thread.is_alive():
                sys.exit("soak: the follower does not end")
        say(f"{proxy.connections} connections, {job.stdout.stat().st_size} bytes")
    job.finished()
    compare(folder / "resets.v1.log", job.stdout)
    compare(folder / "resets.v1.err.log", job.stderr)


def last_lines(host: Host, folder: Path, count: int, make: Callable[[Session, int], tuple[str, Path]]) -> None:
    """Follow ``count`` jobs to their last line."""
    with Session(host) as session:
        for number in range(count):
            job, log = make(session, number)
            with Follower(
                host, job, Wanted(directory=folder, show=False), connect=lambda _host, _tell: Kept(session)
            ) as follower:
                follower.run()
            if log.read_bytes() != b"the last line of %s" % job.encode():
                sys.exit(f"soak: {job} wrote {log.read_bytes()!r}")
            compare(folder / f"{job}.log", log)
            # Hosts do not hold thousands of jobs, and what they take to look at them is not what is tried here.
            shutil.rmtree(log.parent)
            if (number + 1) % 100 == 0:
                say(f"{number + 1} of {count} last lines")


def by_hand(server: TestSshd) -> Callable[[Session, int], tuple[str, Path]]:
    """Return what makes a job that ends at once, or a few milliseconds later, at any moment of the reader's life."""

    def make(_session: Session, number: int) -> tuple[str, Path]:
        job = FakeJob(server.home, f"last{number}.v1")

        def write() -> None:
            job.append(b"the last line of %s" % job.id.encode())
            job.end()

        threading.Timer(number % 50 * 0.001, write).start()
        return job.id, job.stdout

    return make


def launched(session: Session, number: int) -> tuple[str, Path]:
    """Launch a job whose whole life is one line."""
    name = f"real{number}"
    record = session.launch(JobSpec(name=name, argv=(sys.executable, "-c", LAST, f"{name}.v1")))
    return record.job, Path(record.log or "")


def main() -> int:
    """Do it all; 0 when nothing was lost."""
    parser = argparse.ArgumentParser(prog="scripts/soak_logs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long connections are reset [60]")
    parser.add_argument("--last-lines", type=int, default=1000, metavar="N", help="jobs made by hand [1000]")
    parser.add_argument("--launched", type=int, default=1000, metavar="N", help="jobs that are launched [1000]")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="for what is random [1]")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rdiag-soak-") as name, TestSshd(shell="zsh") as server:  # noqa: S604
        folder = Path(name)
        say(f"resets for {chosen.seconds:g} s")
        resets(server, folder, chosen.seconds, chosen.seed)
        say("last lines")
        last_lines(server.host(), folder, chosen.last_lines, by_hand(server))
        last_lines(server.host(), folder, chosen.launched, launched)
    say("nothing was lost")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Missing as error:
        sys.exit(f"soak: {error}")
    except KeyboardInterrupt:
        sys.exit(130)

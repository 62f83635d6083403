from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from remote_diag.host import Host
from remote_diag.host_survey import Limit, Survey, parse, survey
from remote_diag.paths import survey_script
from remote_diag.transport.base import SafePath
from remote_diag.transport.local import LocalTransport

NONCE = os.urandom(16).hex()
"""Its own for each process: the survey makes a folder in /tmp that is named after it."""
SHELLS = {"dash": ["dash"], "bash": ["bash", "--posix"], "zsh": ["zsh", "--emulate", "sh"]}


def answer(*lines: str, before: bytes = b"", end: bool = True) -> bytes:
    ours = [f"{NONCE} {line}" if not line.startswith("!") else line[1:] for line in ("begin", *lines, *(["end"] * end))]
    return before + b"\n" + "".join(f"{line}\n" for line in ours).encode()


def by_shell(shell: str, home: Path, cache: str = ".cache/rdiag", **variables: str) -> Survey:
    if shutil.which(SHELLS[shell][0]) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [*SHELLS[shell], "-s", NONCE, cache],
        cwd=home,
        env={"PATH": "/usr/bin:/bin", "HOME": str(home), "SHELL": "/bin/of-the-test", **variables},
        input=survey_script().read_bytes(),
        capture_output=True,
        timeout=30,
    )
    assert done.stderr == b""
    return parse(done.stdout, NONCE, exit_status=done.returncode, window=(0.0, 0.0))


def mount_points() -> list[str]:
    return [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_posix_shell_gives_the_whole_survey(shell: str, tmp_path: Path) -> None:
    home = tmp_path / "a home"
    home.mkdir()
    found = by_shell(shell, home)
    assert found.complete
    assert found.noise_bytes == 0
    assert found.stopped_at is None
    assert found.shell == "/bin/of-the-test"
    assert found.directory == found.home == str(home)
    assert found.home_exists
    assert found.umask is not None
    assert found.uid is not None
    assert found.clock is not None
    assert found.clock.uncertainty_s < 0.5
    assert set(found.limits) >= {"open_files", "processes", "locked_memory_bytes", "core_file_bytes"}
    for place, path in ((found.cache, home / ".cache/rdiag"), (found.temporary, Path("/tmp"))):
        assert place is not None
        assert place.path == str(path)
        assert place.writable
        assert place.executable
        assert place.error is None
        # In a chroot nothing that is mounted need hold the folder.
        covered = any(Path(point) in (Path(path), *Path(path).parents) for point in mount_points())
        assert (bool(place.mount_point), bool(place.file_system), bool(place.mount_options)) == (covered,) * 3
        assert place.free_bytes
        assert place.total_bytes
        assert place.free_bytes <= place.total_bytes
    assert list((home / ".cache/rdiag").iterdir()) == []


@pytest.mark.parametrize("shell", SHELLS)
def test_a_home_that_is_a_file_is_reported_not_fatal(shell: str, tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("in the way")
    found = by_shell(shell, tmp_path, HOME=str(tmp_path / "missing"))
    assert found.complete
    assert found.home_exists is False
    assert found.cache is not None
    assert found.cache.writable is False
    assert found.cache.executable is None
    assert found.cache.error
    assert found.cache.path == str(tmp_path)


def test_free_figures_are_those_of_df(tmp_path: Path) -> None:
    found = by_shell("dash", tmp_path).cache
    usage = shutil.disk_usage(tmp_path)
    assert found is not None
    assert found.total_bytes is not None
    assert found.free_bytes is not None
    assert abs(found.total_bytes - usage.total) < 4096
    assert abs(found.free_bytes - usage.free) < 256 << 20


def test_a_script_cut_short_does_nothing(tmp_path: Path) -> None:
    script = survey_script().read_bytes().rstrip(b"\n")
    whole = len(script)
    for cut in (*range(0, whole, 211), *range(whole - 25, whole)):
        done = subprocess.run(
            ["dash", "-s", NONCE, "cache"], cwd=tmp_path, input=script[:cut], capture_output=True, check=False
        )
        assert NONCE.encode() not in done.stdout, cut
        assert list(tmp_path.iterdir()) == [], cut


def test_parsing_takes_only_our_lines() -> None:
    output = answer(
        "umask=0077",
        "!umask=0000",
        f"!{'f' * 32} umask=0000",
        "shell=/bin/zsh",
        "python=/usr/bin/python3.11",
        "python=/opt/conda/bin/python",
        "limit=Max open files            1024                 unlimited            files",
        "limit=Max nonsense              x y",
        before=b"Welcome\x1b[2J to gpu8\nsecond line",
    )
    found = parse(output, NONCE)
    assert found.answered
    assert found.complete
    assert found.umask == 0o077
    assert found.pythons == ("/usr/bin/python3.11", "/opt/conda/bin/python")
    assert found.limits == {"open_files": Limit(1024, None)}
    assert found.noise_bytes == len(b"Welcome\x1b[2J to gpu8\nsecond line")
    assert found.noise == ("Welcome\\x1b[2J to gpu8", "second line")


def test_an_answer_that_stops_says_where() -> None:
    found = parse(answer("stage=/home/me/.cache/rdiag", "cache.wanted=/home/me/.cache/rdiag", end=False), NONCE)
    assert found.answered
    assert not found.complete
    assert found.stopped_at == "/home/me/.cache/rdiag"
    assert found.cache is not None
    assert found.cache.writable is None
    assert found.cache.free_bytes is None


def test_no_answer_keeps_what_was_printed() -> None:
    found = parse(b"This account is currently not available.\n", NONCE, exit_status=1)
    assert not found.answered
    assert found.noise == ("This account is currently not available.",)


@pytest.mark.parametrize(
    ("line", "total", "free"),
    [
        ("/dev/sda1  1000 400 600 40% /", 1000 << 10, 600 << 10),
        ("server:/a share with blanks 1000 1100 -100 110% /mnt", 1000 << 10, 0),
        ("overlay - - - - /", None, None),
        ("df: /x: Stale file handle", None, None),
        ("", None, None),
    ],
)
def test_df_lines(line: str, total: int | None, free: int | None) -> None:
    place = parse(answer("cache.wanted=/c", f"cache.space={line}"), NONCE).cache
    assert place is not None
    assert (place.total_bytes, place.free_bytes) == (total, free)


def test_a_file_system_without_inode_counts_is_not_full() -> None:
    place = parse(answer("cache.wanted=/c", "cache.inodes=/dev/sda1 0 0 0 - /"), NONCE).cache
    assert place is not None
    assert place.total_inodes is None
    assert place.free_inodes is None


def test_a_program_that_may_not_start_says_why() -> None:
    output = answer("tmp.wanted=/tmp", "tmp.writable=yes", "tmp.program=126 sh: 1: /tmp/x: Permission denied")
    place = parse(output, NONCE).temporary
    assert place is not None
    assert place.writable
    assert place.executable is False
    assert place.error == "sh: 1: /tmp/x: Permission denied"


@pytest.mark.parametrize(
    ("said", "offset", "uncertainty"),
    [("1000000005.500000000", 5.0, 0.5), ("1000000005.%N", 5.0, 1.0), ("1000000005.", 5.0, 1.0)],
)
def test_the_clock_is_an_interval(said: str, offset: float, uncertainty: float) -> None:
    clock = parse(answer(f"now={said}"), NONCE, window=(1_000_000_000.0, 1_000_000_001.0)).clock
    assert clock is not None
    assert (clock.offset_s, clock.uncertainty_s) == (offset, uncertainty)


@pytest.mark.parametrize("said", ["", "yesterday", "-5", "9" * 40])
def test_a_clock_that_makes_no_sense_is_unknown(said: str) -> None:
    assert parse(answer(f"now={said}"), NONCE, window=(0.0, 0.0)).clock is None


def test_hostile_values_are_bounded_and_escaped() -> None:
    lines = [f"python=/p{number}" for number in range(5000)]
    found = parse(answer("shell=\x1b]0;x\x07" + "A" * 10_000, "uid=" + "9" * 4000, *lines), NONCE)
    assert found.shell is not None
    assert found.shell.startswith("\\x1b]0;x\\x07AAA")
    assert len(found.shell) < 2100
    assert found.uid is None
    assert len(found.pythons) == 100


def test_a_file_system_that_hangs_costs_only_what_comes_after_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "df").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "df").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    transport = LocalTransport(Host("local", transport="local"))
    transport.connect()
    try:
        found = survey(transport, SafePath("cache"), timeout=1.0)
    finally:
        transport.close()
    assert found.answered
    assert not found.complete
    assert found.stopped_at == str(tmp_path / "cache")
    assert found.umask is not None
    assert found.cache is not None
    assert found.cache.free_bytes is None
    assert found.temporary is None


class Endless:
    """A login that prints for ever."""

    def __init__(self) -> None:
        self.received = 0
        self.closed = False

    def send(self, data: bytes) -> None: ...

    def send_eof(self) -> None: ...

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:  # noqa: ARG002
        self.received += 1
        return b"spam " * 20_000, b""

    def exit_status(self, timeout: float) -> int | None:  # noqa: ARG002
        return None

    def close(self) -> None:
        self.closed = True


def test_endless_noise_is_cut_off() -> None:
    channel = Endless()

    class Transport:
        def execute(self, command: object) -> Endless:  # noqa: ARG002
            return channel

    found = survey(Transport(), SafePath("cache"))  # type: ignore[arg-type]
    assert not found.answered
    assert found.noise_bytes >= 1 << 20
    assert channel.received < 50
    assert channel.closed

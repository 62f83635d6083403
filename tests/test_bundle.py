from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from remote_diag import bundle
from remote_diag.agent.digest import bundle_digest
from remote_diag.errors import ConfigError
from remote_diag.host import Environment

NONCE = "0123456789abcdef" * 2
SHELLS = [name for name in ("sh", "dash", "bash", "zsh", "busybox") if shutil.which(name)]


def run_installer(script: bytes, *arguments: str, shell: str = "sh", cwd: Path) -> subprocess.CompletedProcess[bytes]:
    command = [shell] if shell != "busybox" else ["busybox", "sh"]
    return subprocess.run([*command, "-s", *arguments], input=script, cwd=cwd, capture_output=True, timeout=20)


def test_the_same_inputs_give_the_same_bytes() -> None:
    bundle.build.cache_clear()
    first = bundle.build(Environment())
    bundle.build.cache_clear()
    assert bundle.build(Environment()).installer() == first.installer()


def test_another_environment_is_another_bundle() -> None:
    digests = {
        bundle.build(environment).digest
        for environment in (
            Environment(),
            Environment("python", "/usr/bin/python3"),
            Environment("venv", "/opt/a"),
            Environment("venv", "/opt/b"),
            Environment("conda", "ml"),
            Environment("docker", "trainer"),
        )
    }
    assert len(digests) == 6


@pytest.mark.parametrize("shell", SHELLS)
def test_what_is_unpacked_has_the_hash_it_is_named_after(tmp_path: Path, shell: str) -> None:
    built = bundle.build(Environment("venv", "/opt/$(touch pwned) 'a' `b` \\ \"c\""))
    done = run_installer(built.installer(), "deep/cache", NONCE, "keep", shell=shell, cwd=tmp_path)
    assert b"installed" in done.stdout, done.stderr
    place = tmp_path / "deep/cache" / built.digest
    assert bundle_digest(str(place)) == built.digest
    assert {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()} == {
        name for name, _ in built.files
    }
    assert not list(tmp_path.rglob("pwned"))
    assert stat.S_IMODE((tmp_path / "deep/cache").stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) in {0o600, 0o700} for path in place.rglob("*"))


def test_an_archive_cut_short_installs_nothing(tmp_path: Path) -> None:
    script = bundle.build(Environment()).installer()
    # The last line is the call; up to there nothing may happen, wherever the cut is.
    for end in [*range(0, len(script) - 1, max(1, len(script) // 40)), *range(len(script) - 12, len(script) - 4)]:
        done = run_installer(script[:end], "cache", NONCE, "keep", cwd=tmp_path)
        assert b"installed" not in done.stdout
        assert not (tmp_path / "cache").exists(), f"cut at {end} of {len(script)}"


def test_installing_twice_keeps_what_is_there_and_replace_mends_it(tmp_path: Path) -> None:
    built = bundle.build(Environment())
    script = built.installer()
    run_installer(script, "cache", NONCE, "keep", cwd=tmp_path)
    place = tmp_path / "cache" / built.digest
    (place / "enter").write_text("damaged")
    run_installer(script, "cache", NONCE, "keep", cwd=tmp_path)
    assert (place / "enter").read_text() == "damaged"
    done = run_installer(script, "cache", NONCE, "replace", cwd=tmp_path)
    assert b"installed" in done.stdout
    assert bundle_digest(str(place)) == built.digest
    assert sorted(os.listdir(tmp_path / "cache")) == [built.digest]


def test_many_at_once_leave_one_whole_bundle(tmp_path: Path) -> None:
    built = bundle.build(Environment())
    running = []
    for index in range(8):
        process = subprocess.Popen(
            ["sh", "-s", "cache", f"{index:032x}", "replace" if index % 2 else "keep"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=tmp_path,
        )
        running.append(process)
    answers = [process.communicate(built.installer(), timeout=30)[0] for process in running]
    assert any(b"installed" in answer for answer in answers)
    assert bundle_digest(str(tmp_path / "cache" / built.digest)) == built.digest
    assert os.listdir(tmp_path / "cache") == [built.digest]


def test_who_comes_second_leaves_the_first_ones_files_alone(tmp_path: Path) -> None:
    built = bundle.build(Environment())
    script = built.installer()
    # The second client finds nothing, then writes its files, and meanwhile the first one is done: agents run from them.
    place = tmp_path / "cache" / built.digest
    first_is_done = f'sh "$RDIAG_FIRST" cache {NONCE} keep </dev/null >/dev/null; '.encode()
    assert script.count(b"mkdir \"$new\"") == 1
    second = script.replace(b"mkdir \"$new\"", b"{ " + first_is_done + b"touch -d 2020-01-01 \"$place\"; }; mkdir \"$new\"")
    (tmp_path / "first").write_bytes(script)
    done = subprocess.run(
        ["sh", "-s", "cache", "f" * 32, "keep"],
        input=second,
        cwd=tmp_path,
        env={**os.environ, "RDIAG_FIRST": str(tmp_path / "first")},
        capture_output=True,
        timeout=20,
    )
    assert b"installed" in done.stdout, done.stderr
    assert place.stat().st_mtime < 1_600_000_000, "the folder was replaced under the agents that run from it"
    assert os.listdir(tmp_path / "cache") == [built.digest]
    assert bundle_digest(str(place)) == built.digest


@pytest.mark.parametrize("shell", SHELLS)
def test_what_broken_connections_left_is_removed_a_day_later(tmp_path: Path, shell: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    stem = f"{'0a' * 32}.{NONCE}"
    for name in (stem, f"{stem}.old"):
        (cache / name / "agent").mkdir(parents=True)
    for name in (f"{stem}.install", f"{stem}.install.0123456789abcdef.part"):
        (cache / name).touch()
    left = set(cache.iterdir())
    young = cache / f"{stem}.install.00.part"
    others = {young, cache / "runs", cache / ("0a" * 32), cache / "notes.txt", cache / f"My {stem}"}
    for path in others:
        path.touch()
    for path in (left | others) - {young}:
        os.utime(path, (0, 0))
    done = run_installer(bundle.build(Environment()).installer(), "cache", NONCE, "keep", shell=shell, cwd=tmp_path)
    assert b"installed" in done.stdout
    assert set(cache.iterdir()) == others | {cache / bundle.build(Environment()).digest}


def test_a_cache_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").symlink_to("elsewhere")
    done = run_installer(bundle.build(Environment()).installer(), "cache", NONCE, "keep", cwd=tmp_path)
    assert b"cannot-create" in done.stdout
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("nonce", ["", "x", "0123;id", "$(id)", "ABC"])
def test_a_nonce_that_is_none_does_nothing(tmp_path: Path, nonce: str) -> None:
    done = run_installer(bundle.build(Environment()).installer(), "cache", nonce, "keep", cwd=tmp_path)
    assert done.returncode == 65
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", ["python", "venv", "conda", "docker"])
@pytest.mark.parametrize("value", ["", "a\nb", "a\0b"])
def test_a_value_that_is_not_one_line_is_refused(kind: str, value: str) -> None:
    with pytest.raises(ConfigError):
        bundle.build(Environment(kind, value))  # type: ignore[arg-type]

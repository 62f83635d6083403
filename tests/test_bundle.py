from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_diag import bundle, environment, paths
from remote_diag.agent.digest import bundle_digest, digest, expected_library, library_digest
from remote_diag.errors import ConfigError
from remote_diag.host import Environment, Host
from remote_diag.private_cache import Folder
from remote_diag.session import Session

NONCE = "0123456789abcdef" * 2
SHELLS = [name for name in ("sh", "dash", "bash", "zsh", "busybox") if shutil.which(name)]


def run_installer(script: bytes, *arguments: str, shell: str = "sh", cwd: Path) -> subprocess.CompletedProcess[bytes]:
    command = [shell] if shell != "busybox" else ["busybox", "sh"]
    return subprocess.run([*command, "-s", *arguments], input=script, cwd=cwd, capture_output=True, timeout=20)


def test_the_same_inputs_give_the_same_bytes() -> None:
    forget()
    first = bundle.build(Environment())
    forget()
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
    assert library_digest(str(place)) == expected_library(str(place))
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


def test_installing_twice_keeps_what_is_whole_and_replace_replaces_it(tmp_path: Path) -> None:
    built = bundle.build(Environment())
    place = tmp_path / "cache" / built.digest
    run_installer(built.installer(), "cache", NONCE, "keep", cwd=tmp_path)
    (place / "of the first").touch()
    run_installer(built.installer(), "cache", NONCE, "keep", cwd=tmp_path)
    assert (place / "of the first").exists()
    done = run_installer(built.installer(), "cache", NONCE, "replace", cwd=tmp_path)
    assert b"installed" in done.stdout
    assert not (place / "of the first").exists()
    assert bundle_digest(str(place)) == built.digest
    assert sorted(os.listdir(tmp_path / "cache")) == [built.digest]


@pytest.mark.parametrize("shell", SHELLS)
def test_compiled_files_may_be_what_kept_an_agent_from_answering(tmp_path: Path, shell: str) -> None:
    built = bundle.build(Environment())
    run_installer(built.installer(), "cache", NONCE, "keep", cwd=tmp_path)
    place = tmp_path / "cache" / built.digest
    for folder in ("agent", "probes/lib/gpu"):
        (place / folder / "__pycache__").mkdir()
        (place / folder / "__pycache__/digest.cpython-312.pyc").write_bytes(b"damaged")
    assert b"installed" in run_installer(built.installer(), "cache", NONCE, "keep", shell=shell, cwd=tmp_path).stdout
    assert not list(place.rglob("__pycache__"))
    assert bundle_digest(str(place)) == built.digest


@pytest.mark.parametrize("shell", SHELLS)
def test_without_cmp_sizes_must_do(tmp_path: Path, shell: str) -> None:
    built = bundle.build(Environment())
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in (shell, "cat", "mkdir", "mv", "rm", "find", "wc"):
        (tools / name).symlink_to(str(shutil.which(name)))
    place = tmp_path / "cache" / built.digest

    def install(mode: str = "keep") -> None:
        command = [str(tools / shell), *(["sh"] if shell == "busybox" else []), "-s", "cache", NONCE, mode]
        done = subprocess.run(
            command, input=built.installer(), cwd=tmp_path, capture_output=True, timeout=20, env={"PATH": str(tools)}
        )
        assert b"installed" in done.stdout, done.stderr

    install()
    (place / "of the first").touch()
    install()
    assert (place / "of the first").exists()
    (place / "agent/digest.py").write_bytes(b"cut")
    install()
    assert bundle_digest(str(place)) == built.digest
    (place / "agent/digest.py").write_bytes(bytes((place / "agent/digest.py").stat().st_size))
    install("replace")
    assert bundle_digest(str(place)) == built.digest


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "zeros", "folder-gone", "a-folder-instead"])
def test_an_installation_that_lacks_something_is_no_installation(tmp_path: Path, shell: str, damage: str) -> None:
    built = bundle.build(Environment())
    run_installer(built.installer(), "cache", NONCE, "keep", cwd=tmp_path)
    place = tmp_path / "cache" / built.digest
    victim = place / "agent" / "digest.py"
    if damage == "folder-gone":
        shutil.rmtree(place / "agent")
    elif damage in {"cut", "empty"}:
        victim.write_bytes(victim.read_bytes()[: 100 if damage == "cut" else 0])
    elif damage == "zeros":
        # As file systems leave it that lose power: the size is right already.
        victim.write_bytes(bytes(victim.stat().st_size))
    else:
        victim.unlink()
        if damage != "gone":
            victim.mkdir()
    done = run_installer(built.installer(), "cache", NONCE, "keep", shell=shell, cwd=tmp_path)
    assert b"installed" in done.stdout, done.stderr
    assert bundle_digest(str(place)) == built.digest
    assert os.listdir(tmp_path / "cache") == [built.digest]


@pytest.mark.parametrize("shell", SHELLS)
def test_what_is_damaged_is_mended_under_the_agents_that_run_from_the_rest(tmp_path: Path, shell: str) -> None:
    built = bundle.build(Environment())
    place = tmp_path / "cache" / built.digest
    run_installer(built.installer(), "cache", NONCE, "keep", cwd=tmp_path)
    shutil.rmtree(place / "probes/lib/gpu")
    (place / "agent/run.py").unlink()
    (place / "agent/run.py").mkdir()
    (place / "enter").write_bytes(bytes((place / "enter").stat().st_size))
    before = {path: path.stat().st_ino for path in place.rglob("*") if path.is_file() and path.name != "enter"}
    done = run_installer(built.installer(), "cache", NONCE, "replace", shell=shell, cwd=tmp_path)
    assert b"installed" in done.stdout, done.stderr
    assert bundle_digest(str(place)) == built.digest
    assert library_digest(str(place)) == expected_library(str(place))
    assert {path: path.stat().st_ino for path in before} == before
    assert os.listdir(tmp_path / "cache") == [built.digest]


def _add_file(place: Path) -> None:
    (place / "agent/\n").touch()


def _link_file(place: Path) -> None:
    (place / "agent/run.py").rename(place.parent / "run.py")
    (place / "agent/run.py").symlink_to(place.parent / "run.py")


def _link_folder(place: Path) -> None:
    (place / "probes/lib").rename(place.parent / "lib")
    (place / "probes/lib").symlink_to(place.parent / "lib")


def _block_folder(place: Path) -> None:
    shutil.rmtree(place / "agent")
    (place / "agent").touch()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("spoil", [_add_file, _link_file, _link_folder, _block_folder])
def test_what_belongs_to_no_bundle_goes(tmp_path: Path, shell: str, spoil: Callable[[Path], None]) -> None:
    built = bundle.build(Environment())
    place = tmp_path / "cache" / built.digest
    run_installer(built.installer(), "cache", NONCE, "keep", cwd=tmp_path)
    spoil(place)
    done = run_installer(built.installer(), "cache", NONCE, "replace", shell=shell, cwd=tmp_path)
    assert b"installed" in done.stdout, done.stderr
    assert bundle_digest(str(place)) == built.digest
    assert library_digest(str(place)) == expected_library(str(place))
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {built.digest, "run.py", "lib"}


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


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of what is carried, to be changed, and a cache folder of its own; as if all of it had been there for long."""
    for name, root in (("agent", paths.agent_source()), ("probes/lib", paths.shipped_probes() / "lib")):
        shutil.copytree(root, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(paths.entry_script(), tmp_path / "enter.sh")
    monkeypatch.setattr(paths, "agent_source", lambda: tmp_path / "agent")
    monkeypatch.setattr(paths, "shipped_probes", lambda: tmp_path / "probes")
    monkeypatch.setattr(paths, "entry_script", lambda: tmp_path / "enter.sh")
    monkeypatch.setattr(environment, "entry_script", lambda: tmp_path / "enter.sh")
    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(bundle, "_SETTLED_NS", 0)
    yield tmp_path
    forget()


def forget() -> None:
    """Forget what this process knows, as the next one would."""
    bundle._built.cache_clear()


def known(target: Environment = Environment()) -> str:  # noqa: B008 - frozen
    forget()
    return bundle.digest_for(target)


def built(target: Environment = Environment()) -> str:  # noqa: B008 - frozen
    forget()
    return bundle.build(target).digest


def entries(sources: Path) -> list[Path]:
    folder = sources / "cache" / "bundles"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def forge(sources: Path) -> Path:
    """Let the one entry name another digest; it shows whether the entry was used."""
    known()
    (entry,) = entries(sources)
    bundle._DIGESTS.write(entry.name, b"f" * 64)
    return entry


def test_a_digest_is_known_without_reading_the_files(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built()
    assert known() == first
    with monkeypatch.context() as patched:
        patched.setattr(bundle, "_built", lambda *_: pytest.fail("the files were read"))
        assert bundle.digest_for(Environment()) == first
    assert [stat.S_IMODE(path.stat().st_mode) for path in entries(sources)] == [0o600]


@pytest.mark.parametrize("name", ["agent/runner.py", "agent/jobs/launch.py", "probes/lib/gpu/occupancy.py", "enter.sh"])
def test_a_file_that_changes_is_noticed(sources: Path, name: str) -> None:
    before = known()
    path = sources / name
    status = path.stat()
    content = path.read_bytes()
    # As many bytes, and the time of change put back: what an unpacked archive or rsync --times does.
    path.write_bytes(content.replace(b"#", b"%").replace(b"import", b"Import"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    after = known()
    assert before != after == built()
    path.write_bytes(content)
    assert known() == before


def test_files_that_come_go_and_move_are_noticed(sources: Path) -> None:
    before = known()
    (sources / "probes/lib/more.csv").write_text("a,b\n")
    more = known()
    (sources / "probes/lib/more.csv").rename(sources / "probes/lib/other.csv")
    other = known()
    (sources / "probes/lib/other.csv").unlink()
    assert known() == before
    assert len({before, more, other}) == 3
    (sources / "agent/__pycache__").mkdir()
    (sources / "agent/__pycache__/x.py").touch()
    (sources / "agent/notes.txt").touch()
    (sources / "probes/lib/.#text.py").symlink_to("somebody@here.1234:1700000000")
    (sources / "agent/._run.py").write_bytes(b"\0")
    assert known() == before == built()


def test_every_environment_has_an_entry_of_its_own(sources: Path) -> None:
    targets = [Environment(), Environment("python", "/a"), Environment("venv", "/a"), Environment("venv", "/b")]
    digests = [known(target) for target in targets]
    assert len(set(digests)) == len(entries(sources)) == 4
    assert [known(target) for target in targets] == digests == [built(target) for target in targets]


def test_a_bad_value_is_refused_every_time(sources: Path) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError):
            known(Environment("venv", "a\nb"))
    assert entries(sources) == []


def test_what_changed_a_moment_ago_is_not_trusted(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(paths, "agent_source", lambda: sources / "agent")
    monkeypatch.setattr(paths, "cache_dir", lambda: sources / "cache")
    (sources / "agent/runner.py").write_text("x = 1\n")
    assert known() == built()
    assert entries(sources) == []


def test_what_changes_while_it_is_read_is_not_kept(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = bundle._built

    def change(*arguments: Any) -> bundle.Bundle:
        made = read(*arguments)
        (sources / "agent/runner.py").write_text("x = 1\n")
        return made

    with monkeypatch.context() as patched:
        patched.setattr(bundle, "_built", change)
        bundle.digest_for(Environment())
    assert entries(sources) == []


def test_a_damaged_entry_is_not_used(sources: Path) -> None:
    real = built()
    entry = forge(sources)
    assert known() == "f" * 64, "a forged entry that is whole would be used"
    good = entry.read_bytes()
    for position in range(len(good)):
        entry.write_bytes(good[:position])
        assert known() == real
        entry.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        assert known() == real


@pytest.mark.parametrize("body", [b"", b"f" * 63, b"f" * 65, b"F" * 64, b"f" * 64 + b"\n", b"../" * 21 + b"f", b"\xff" * 64])
def test_an_entry_that_is_no_digest_is_not_used(sources: Path, body: bytes) -> None:
    real = known()
    bundle._DIGESTS.write(entries(sources)[0].name, body)
    assert known() == real


def test_an_entry_that_others_may_write_is_not_used(sources: Path) -> None:
    real = built()
    forge(sources).chmod(0o620)
    assert known() == real


def test_where_nothing_can_be_remembered_the_digest_is_right_all_the_same(sources: Path) -> None:
    (sources / "cache").write_text("in the way")
    assert known() == known() == built()


def test_few_digests_are_kept(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "_DIGESTS", Folder("bundles", b"rdiag bundle 1", kept=3))
    for number in range(5):
        known(Environment("venv", f"/{number}"))
    assert len(entries(sources)) == 3


def test_what_is_uploaded_goes_by_the_digest_of_what_was_read(sources: Path) -> None:
    session = Session(Host("here", transport="local"))
    forge(sources)
    forget()
    assert session.bundle_digest == "f" * 64
    assert session.bundle.digest == bundle_digest_of(session.bundle) == session.bundle_digest
    assert f"/{session.bundle.digest}/enter" in session.enter_command


def test_a_change_is_noticed_by_the_next_session_of_the_same_process(sources: Path) -> None:
    before = bundle.digest_for(Environment())
    assert bundle.build(Environment()).digest == before
    assert bundle.build(Environment()) is bundle.build(Environment())
    (sources / "agent/runner.py").write_text("x = 1\n")
    assert bundle.digest_for(Environment()) == bundle.build(Environment()).digest != before


def bundle_digest_of(made: bundle.Bundle) -> str:
    return digest(item for item in made.files if not item[0].startswith("probes/"))

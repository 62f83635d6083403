"""One probe, end to end, on every kind of host."""

from __future__ import annotations

import dataclasses
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import remote_diag
from remote_diag.errors import ConfigError, EnvironmentUnfit, ProbeError, RdiagError, UsageProblem
from remote_diag.events import Event, Note, Progress, Started
from remote_diag.host import Environment, Host
from remote_diag.probe import Probe, load
from remote_diag.session import Session

from .support.fake_docker import make_docker
from .support.places import OBSTACLES, SHELL_PLACES, Place, open_place
from .support.probe_files import write_probe
from .support.sshd import TestSshd, wait_until

SAFE = re.compile(r"[A-Za-z0-9._/ -]+\Z")
ECHO = """
import os
context.progress(1, 2, unit="steps", label="echo")
return Result(
    text=params.text,
    items=params.items,
    variable=os.environ.get("CARRIED", ""),
    directory=os.getcwd(),
    opened=open(params.path, encoding="utf-8").read() if params.path else "",
)
"""


@pytest.fixture(scope="module", params=[*SHELL_PLACES, *OBSTACLES])
def place(
    request: pytest.FixtureRequest,
    start_sshd: Callable[..., TestSshd],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    with open_place(request.param, start_sshd, tmp_path_factory.mktemp("home")) as opened:
        yield opened
        # While the host still answers: what a session made there for itself goes away with it.
        for session in _OPEN.values():
            session.close()
        _OPEN.clear()


lasting = pytest.mark.parametrize(
    "place", [name for name in (*SHELL_PLACES, *OBSTACLES) if name != "read-only-home"], indirect=True
)
"""For what stays on a host after a session; where there is no place to write to, nothing does."""


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Probe[Any, Any]:
    return load(
        write_probe(
            tmp_path_factory.mktemp("probes"),
            "echo",
            ECHO,
            params={"text": 'str = ""', "items": "tuple[str, ...] = ()", "path": 'str = ""'},
            result={"text": "str", "items": "tuple[str, ...]", "variable": "str", "directory": "str", "opened": "str"},
            effects=("reads-files",),
        )
    )


def test_a_probe_runs_and_only_constant_commands_are_sent(place: Place, echo: Probe[Any, Any]) -> None:
    events: list[Event] = []
    with Session(place.host, on_event=events.append) as session:
        first = session.run(echo, {"text": "a & b) $(x)"})
        installed = len([event for event in events if isinstance(event, Note)])
        second = session.run(echo, {"text": "again"})
    assert (first.result.text, second.result.text) == ("a & b) $(x)", "again")
    assert first.status == second.status == "ok"
    assert first.run_id != second.run_id
    assert second.timing.upload_s == 0.0
    assert installed >= 1
    assert len([event for event in events if isinstance(event, Note)]) == installed, "nothing is installed twice"
    assert any(isinstance(event, Started) for event in events)
    assert Progress(1, 2, "steps", "echo") in events
    for command in place.commands():
        assert SAFE.match(command), command
    runs = list(place.home.glob(".cache/rdiag/runs/*"))
    assert not runs, "a run leaves nothing behind"


@lasting
def test_a_second_session_finds_everything_installed(place: Place, echo: Probe[Any, Any]) -> None:
    with Session(place.host) as session:
        session.run(echo)
    before = len(place.commands())
    events: list[Event] = []
    with Session(place.host, on_event=events.append) as session:
        session.run(echo)
    assert not [event for event in events if isinstance(event, Note)]
    if place.server:
        assert place.commands()[before:] == [f"sh .cache/rdiag/{session.bundle.digest}/enter"]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=300))
@example(text="-rf")
@example(text="--help")
@example(text="'\"`$(touch pwned)` & ) ; | > < ! * ? ~ # \\ {a,b} %s $HOME")
@example(text="line\nline\r\n\ttab\x1b[2J\x7f")
@example(text="\U0001f680 caf\u00e9 \u202e \ufeff")
@example(text="x" * 100_000)
@example(text="")
def test_any_text_arrives_as_it_was_given(place: Place, echo: Probe[Any, Any], text: str) -> None:
    target = place.host
    with_variable = dataclasses.replace(target, env=(("CARRIED", text),))
    with _shared(place, with_variable) as session:
        got = session.run(echo, {"text": text, "items": (text, "", text)}).result
    assert got.text == text
    assert got.items == (text, "", text)
    assert got.variable == text
    assert not list(place.home.rglob("pwned"))


_OPEN: dict[str, Session] = {}


class _shared:  # noqa: N801 - reads as a function where it is used
    """One connection for all examples of a place; the environment of the host changes from run to run."""

    def __init__(self, place: Place, host: Host) -> None:
        self._place, self._host = place, host

    def __enter__(self) -> Session:
        session = _OPEN.get(self._place.name)
        if session is None:
            session = _OPEN[self._place.name] = Session(self._host)
            session.connect()
        session.host = self._host
        return session

    def __exit__(self, *_: object) -> None:
        return None


def test_a_name_that_is_not_utf8_arrives_byte_for_byte(place: Place, tmp_path: Path) -> None:
    probe = write_probe(tmp_path, "raw", "import os\nreturn Result(value=os.fsencode(params.text).hex())", params={"text": "str"})
    with _shared(place, place.host) as session:
        assert session.run(probe, {"text": "caf\udce9"}).result.value == b"caf\xe9".hex()


@pytest.mark.parametrize("name", ["plain", "-dash", "sp ace", "q'u\"o", "$(touch pwned)", "a&b)", "\U0001f680", "new\nline"])
def test_any_path_is_opened_and_entered(place: Place, echo: Probe[Any, Any], tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / name).write_text(f"content of {name}")
    with _shared(place, dataclasses.replace(place.host, workdir=str(folder))) as session:
        got = session.run(echo, {"path": str(folder / name)}).result
    assert got.opened == f"content of {name}"
    assert got.directory == str(folder)


def test_nul_is_refused_before_anything_is_sent(place: Place, echo: Probe[Any, Any]) -> None:
    before = len(place.commands())
    with Session(place.host) as session, pytest.raises(UsageProblem, match="NUL"):
        session.run(echo, {"text": "a\0b"})
    assert len(place.commands()) == before


@lasting
def test_a_damaged_installation_is_mended(place: Place, echo: Probe[Any, Any]) -> None:
    with Session(place.host) as session:
        session.run(echo)
        digest = session.bundle.digest
    damaged = place.home / ".cache/rdiag" / digest / "agent/runner.py"
    damaged.write_text("raise SystemExit('never run')\n")
    with Session(place.host) as session:
        assert session.run(echo, {"text": "x"}).result.text == "x"
    assert "never run" not in damaged.read_text()


@lasting
@pytest.mark.parametrize(
    ("name", "damage"),
    [("enter", "gone"), ("enter", "zeros"), ("python", "cut"), ("agent/__main__.py", "zeros"), ("agent/supervisor.py", "gone")],
)
def test_an_installation_that_lost_a_file_is_mended(place: Place, echo: Probe[Any, Any], name: str, damage: str) -> None:
    with Session(place.host) as session:
        session.run(echo)
        damaged = place.home / ".cache/rdiag" / session.bundle.digest / name
    kept = damaged.read_bytes()
    if damage == "gone":
        damaged.unlink()
    else:
        # Zeros are what a loss of power leaves of a file whose contents had not reached the disk.
        damaged.write_bytes(bytes(len(kept)) if damage == "zeros" else kept[: len(kept) // 2])
    with Session(place.host) as session:
        assert session.run(echo, {"text": "x"}).result.text == "x"
    assert damaged.read_bytes() == kept


@pytest.mark.parametrize("damaged", ["enter", "agent/digest.py", "agent/runner.py", "probes/lib/eagle.py"])
def test_a_damaged_installation_in_a_container_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, echo: Probe[Any, Any], damaged: str
) -> None:
    make_docker(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    host = Host(name="box", transport="local", environment=Environment("docker", "box"))
    with Session(host) as session:
        session.run(echo)
        place = tmp_path / "inside the box/.cache/rdiag" / session.bundle.digest / damaged
    kept = place.read_bytes()
    place.write_bytes(bytes(len(kept)))
    with Session(host) as session:
        session.agent().close()
        assert session.run(echo, {"text": "x"}).result.text == "x"
    assert place.read_bytes() == kept


@lasting
def test_a_damaged_library_is_mended_before_a_probe_that_uses_it_runs(
    place: Place, echo: Probe[Any, Any], tmp_path: Path
) -> None:
    traces = tmp_path / "traces"
    body = f"open({str(traces)!r}, 'a').write('run ')\nfrom probes.lib import eagle\nreturn Result(value=eagle.__name__)"
    user = write_probe(tmp_path, "user", body, params={"text": "str"})
    with Session(place.host) as session:
        session.run(echo)
        library = place.home / ".cache/rdiag" / session.bundle.digest / "probes/lib"
    shutil.rmtree(library / "gpu")
    cut = library / "__init__.py"
    cut.write_text("raise SystemExit('never run')\n")
    told: list[Event] = []
    with Session(place.host, on_event=told.append) as session:
        assert session.run(echo, {"text": "x"}).result.text == "x"
        assert not any(isinstance(event, Note) for event in told)
        assert "never run" in cut.read_text(), "what is not used is not looked at"
        assert session.run(user, {"text": "x"}).result.value == "probes.lib.eagle"
        assert session.run(user, {"text": "x"}).result.value == "probes.lib.eagle"
    assert traces.read_text() == "run run "
    assert "never run" not in cut.read_text()
    assert len([event for event in told if isinstance(event, Note) and "installing" in event.text]) == 1


@lasting
def test_whoever_asks_an_agent_for_anything_else_gets_a_whole_one(place: Place) -> None:
    with Session(place.host) as session:
        session.hello()
        library = place.home / ".cache/rdiag" / session.bundle.digest / "probes/lib/__init__.py"
    damaged = b"raise SystemExit('never run')\n"
    library.write_bytes(damaged)
    with Session(place.host) as session:
        # What ends a job must work on a full disk, where nothing can be installed anew.
        session.agent(library=False).close()
        assert library.read_bytes() == damaged
        session.agent().close()
        assert library.read_bytes() != damaged


@lasting
def test_keep_leaves_a_run_that_can_be_run_again(place: Place, echo: Probe[Any, Any]) -> None:
    with Session(place.host) as session:
        kept = session.run(echo, {"text": "kept"}, keep=True)
    assert kept.kept is not None
    folder = Path(kept.kept)
    assert {"request.json", "probe.py", "stdout", "stderr", "result.json"} <= {item.name for item in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert kept.rerun is not None
    assert kept.rerun.endswith(str(folder))


def test_a_read_only_home_is_said_and_worked_around(
    start_sshd: Callable[..., TestSshd], tmp_path: Path, echo: Probe[Any, Any]
) -> None:
    with open_place("read-only-home", start_sshd, tmp_path) as opened:
        with Session(opened.host) as session:
            outcome = session.run(echo, {"text": "x"})
            temporary = session.enter_command.split()[1].split("/")[:3]
        assert outcome.result.text == "x"
        assert "using /" in outcome.notes[-1]
        assert not Path("/".join(temporary)).exists(), "the session's folder goes away with it"
        named = dataclasses.replace(opened.host, cache_dir=f"{opened.home}/named")
        with Session(named) as session, pytest.raises(EnvironmentUnfit, match="named"):
            session.run(echo)


def test_a_start_script_that_changes_the_directory(
    start_sshd: Callable[..., TestSshd], tmp_path: Path, echo: Probe[Any, Any]
) -> None:
    shell = tmp_path / "shell"
    shell.write_text(f'#!/bin/sh\nmkdir -p {tmp_path}/elsewhere && cd {tmp_path}/elsewhere && exec /bin/sh "$@"\n')
    shell.chmod(0o755)
    with start_sshd(shell=str(shell)) as server, Session(server.host()) as session:
        assert session.run(echo, {"text": "x"}).result.text == "x"


def test_a_cache_directory_of_ones_own(start_sshd: Callable[..., TestSshd], tmp_path: Path, echo: Probe[Any, Any]) -> None:
    with start_sshd(shell="zsh") as server:
        place = tmp_path / "my-cache"
        with Session(server.host(cache_dir=str(place))) as session:
            session.run(echo)
        assert [item for item in place.iterdir() if len(item.name) == 64]
        assert not (server.home / ".cache").exists()


@pytest.mark.parametrize("text", ["This account is currently not available.", ""])
def test_an_account_without_a_shell(
    start_sshd: Callable[..., TestSshd], tmp_path: Path, echo: Probe[Any, Any], text: str
) -> None:
    shell = tmp_path / "nologin"
    shell.write_text(f'#!/bin/sh\necho "{text}"\nexit 1\n')
    shell.chmod(0o755)
    with (
        start_sshd(shell=str(shell)) as server,
        Session(server.host()) as session,
        pytest.raises(RdiagError) as caught,
    ):
        session.run(echo)
    assert int(caught.value.exit_code) == 5
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("exec cat", 5, "sends back what it is sent"),
        ("while :; do echo 'who are \x1b[31myou?'; sleep 0.1; done", 4, "begin 'who are \\x1b[31myou?"),
        ("sleep 100", 4, "said nothing"),
    ],
)
def test_an_account_that_does_something_else(
    *,
    start_sshd: Callable[..., TestSshd],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    echo: Probe[Any, Any],
    shell: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr("remote_diag.session.START_LIMIT", 1.5)
    program = tmp_path / "odd"
    program.write_text(f"#!/bin/sh\n{shell}\n")
    program.chmod(0o755)
    with (
        start_sshd(shell=str(program)) as server,
        Session(server.host(connect_timeout=1.0)) as session,
        pytest.raises(RdiagError) as caught,
    ):
        session.run(echo)
    assert int(caught.value.exit_code) == code
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Environment("venv", "/nowhere/ml env"), "/nowhere/ml env/bin/python"),
        (Environment("python", "/nowhere/python3"), "/nowhere/python3"),
        (Environment("conda", "nowhere"), "nowhere"),
    ],
)
def test_a_missing_environment_names_what_is_missing(zsh_server: TestSshd, environment: Environment, said: str) -> None:
    with Session(zsh_server.host(environment=environment)) as session, pytest.raises(EnvironmentUnfit) as caught:
        session.run("hello")
    assert said in caught.value.message
    assert caught.value.hint


def test_a_host_without_python(start_sshd: Callable[..., TestSshd], tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sh", "cat", "mkdir", "mv", "rm", "zsh"):
        target = next(path for path in (Path("/bin") / name, Path("/usr/bin") / name) if path.exists())
        (tmp_path / "bin" / name).symlink_to(target)
    with start_sshd(shell="zsh", env={"PATH": str(tmp_path / "bin")}) as server:
        # The default candidates include absolute paths, which this machine may have.
        host = server.host(environment=Environment("python", "python3"))
        with Session(host) as session, pytest.raises(EnvironmentUnfit, match="no Python interpreter was found") as caught:
            session.run("hello")
    assert "install" in str(caught.value.hint) or "python" in str(caught.value.hint)


def test_a_python_that_is_none(start_sshd: Callable[..., TestSshd], tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\necho this is another program\n")
    other.chmod(0o755)
    with start_sshd(shell="zsh") as server:
        host = server.host(environment=Environment("python", str(other)))
        with Session(host) as session, pytest.raises(EnvironmentUnfit) as caught:
            session.run("hello")
    assert caught.value.message.startswith(f"{other} ended without running the agent (exit status 0)")
    assert caught.value.message.endswith(": this is another program")
    assert "a Python that works" in (caught.value.hint or "")


def test_a_python_that_is_too_old(zsh_server: TestSshd, tmp_path: Path) -> None:
    old = next(
        (path for name in ("2.7.18", "3.6.15", "3.7.16") if (path := Path.home() / f".pyenv/versions/{name}/bin/python").exists()),
        None,
    )
    if old is None:
        pytest.skip("no Python older than 3.8 is installed")
    host = zsh_server.host(environment=Environment("python", str(old)))
    with Session(host) as session, pytest.raises(EnvironmentUnfit, match=r"needs (Python )?3\.8 or newer"):
        session.run("hello")


def test_a_missing_module_is_named_with_what_to_install(zsh_server: TestSshd, tmp_path: Path) -> None:
    probe = write_probe(tmp_path, "needs", 'context.require("no_such_module_at_all")\nreturn Result(value="")')
    with Session(zsh_server.host()) as session, pytest.raises(EnvironmentUnfit, match="no_such_module_at_all") as caught:
        session.run(probe)
    assert "pip install" in str(caught.value.hint)


def test_results_are_typed_all_the_way(zsh_server: TestSshd) -> None:
    with Session(zsh_server.host()) as session:
        outcome = session.run(remote_diag.load_probe("hello"), {"name": "Ada"})
    assert outcome.result.greeting == "Hello, Ada!"
    plain = outcome.as_dict()
    assert list(plain)[:8] == ["schema_version", "host", "probe", "run_id", "status", "result", "findings", "timing"]


def test_a_crash_shows_the_probes_own_lines(zsh_server: TestSshd, tmp_path: Path) -> None:
    probe = write_probe(tmp_path, "crash", 'print("printed", flush=True)\nraise ValueError("\\x1b[31mbad")')
    with Session(zsh_server.host()) as session, pytest.raises(ProbeError, match="ValueError") as caught:
        session.run(probe)
    assert "\x1b" not in str(caught.value.as_dict())
    assert any("crash" in line or "probe.py" in line for line in caught.value.details)


def test_prepare_overlaps_and_its_error_comes_from_run() -> None:
    host = Host(name="gone", address="127.0.0.1", port=1, user="nobody")
    session = Session(host)
    session.prepare()
    with pytest.raises(RdiagError) as caught:
        session.run("hello")
    assert int(caught.value.exit_code) == 4
    session.close()


def test_close_ends_a_prepared_agent(zsh_server: TestSshd, echo: Probe[Any, Any]) -> None:
    before = threading.active_count()
    session = Session(zsh_server.host())
    session.prepare()
    session.hello()
    session.close()
    assert wait_until(lambda: threading.active_count() <= before, 5.0)


def test_an_unknown_probe_is_a_configuration_error(zsh_server: TestSshd) -> None:
    with Session(zsh_server.host()) as session, pytest.raises(ConfigError):
        session.run("no-such-probe")

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remote_diag import inventory, inventory_cache, inventory_models, paths
from remote_diag.cli.hosts import _fields
from remote_diag.errors import ConfigError
from remote_diag.exitcodes import ExitCode
from remote_diag.host import Environment, Host
from remote_diag.strict_yaml import load as load_yaml
from tests.support.home import make_private_home

CASES = Path(__file__).parent / "cases" / "inventory"
TWO_HOSTS = "hosts:\n  gpu8: {ssh: a}\n  gpu9: {ssh: b}\ngroups:\n  lab: [gpu9, gpu8]\n"


@pytest.fixture(autouse=True)
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home, and no way out: reading an inventory uses no network and starts no program."""
    work = make_private_home(monkeypatch, tmp_path)
    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a socket was opened"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a program was started"))
    return work


def write(path: Path, text: str = TWO_HOSTS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    return path


def parse(text: str) -> inventory_cache.Contents:
    return inventory_models.parse(load_yaml(text.encode(), source="hosts.yaml"))


# --- The cases: files that carry what is expected of them in lines that begin with #! ---


def expectations(path: Path) -> list[tuple[str, str]]:
    lines = [line[3:].strip() for line in path.read_bytes().split(b"\n") if line.startswith(b"#! ")]
    return [(word, rest) for word, _, rest in (line.decode().partition(" ") for line in lines)]


@pytest.mark.parametrize("path", sorted(CASES.glob("ok-*.yaml")), ids=lambda path: path.stem)
def test_a_valid_file_gives_these_hosts(path: Path) -> None:
    loaded = inventory.load(path)
    expected = expectations(path)
    assert expected
    for word, rest in expected:
        if word == "groups":
            assert {name: list(members) for name, members in loaded.groups.items()} == json.loads(rest)
            continue
        assert word == "host"
        name, _, fields = rest.replace("OUR-PYTHON", sys.executable).partition(" ")
        wanted: dict[str, Any] = json.loads(fields)
        found = {**_fields(loaded.host(name)), "groups": loaded.groups_of(name)}
        assert {field: found[field] for field in wanted} == wanted
    # The second time, what was remembered is used; it must not differ.
    assert inventory.load(path) == loaded


@pytest.mark.parametrize("path", sorted(CASES.glob("bad-*.yaml")), ids=lambda path: path.stem)
def test_an_invalid_file_is_refused_at_this_place(path: Path) -> None:
    expected = dict(expectations(path))
    for _ in range(2):  # an error is never remembered as anything else
        with pytest.raises(ConfigError) as caught:
            inventory.load(path)
        error = caught.value
        assert error.exit_code == ExitCode.CONFIG
        assert error.message.startswith(f"{path}:{expected['at']}: ")
        assert expected["message"] in error.message
        assert expected.get("hint", "") in (error.hint or "")


def test_every_problem_is_told_in_the_order_of_the_file() -> None:
    lines = ["hosts:", "  gpu8:", "    address: -x", *(f"    field{number}: 1" for number in range(20))]
    with pytest.raises(ConfigError, match=r"^hosts.yaml:3:14: .*\(and 20 more\)") as caught:
        parse("\n".join(lines))
    assert [detail.split(": ")[0] for detail in caught.value.details] == [f"hosts.yaml:{line}:5" for line in range(4, 10)]


@pytest.mark.parametrize("content", ["", "\ufeff"])
def test_an_empty_file_is_refused(work: Path, content: str) -> None:
    write(work / "hosts.yaml", content)
    with pytest.raises(ConfigError, match="the file holds nothing"):
        inventory.load()


def test_the_shipped_file_works_at_once() -> None:
    loaded = inventory.load(paths.shipped_inventory())
    assert list(loaded.hosts) == ["local"]
    assert loaded.host("local").transport == "local"


def test_the_example_in_the_shipped_file_is_valid() -> None:
    shipped = paths.shipped_inventory().read_text()
    uncommented = "\n".join(line[1:] if line.startswith("#  ") else line for line in shipped.splitlines())
    hosts, groups = parse(uncommented)
    assert hosts["gpu8"].environment == Environment("venv", "/root/ml-env")
    assert hosts["gpu8"].gpus == 8
    assert groups == {"lab": ("gpu8",)}


def test_a_host_says_where_it_stands(work: Path) -> None:
    write(work / "hosts.yaml")
    assert inventory.load().host("gpu9").source == "hosts.yaml:3"


def test_home_is_expanded_in_paths_of_this_machine() -> None:
    hosts, _ = parse("defaults: {known_hosts: ~/kh}\nhosts: {a: {ssh: a, identity_file: ~/.ssh/id}}\n")
    assert hosts["a"].identity_file == Path.home() / ".ssh/id"
    assert hosts["a"].known_hosts == Path.home() / "kh"


# --- Which file wins ---


def test_without_a_file_there_is_local() -> None:
    loaded = inventory.load()
    assert loaded.path is None
    ours = Environment("python", sys.executable)
    assert loaded.hosts == {"local": Host(name="local", transport="local", environment=ours)}
    assert loaded.expand(["all"]) == [loaded.host("local")]


def test_this_machine_runs_probes_in_our_own_python_unless_told_otherwise(work: Path) -> None:
    path = write(
        work / "hosts.yaml",
        "hosts:\n  here: {transport: local}\n  there: {transport: local, environment: {python: python3}}\n  far: {ssh: far}\n",
    )
    for _ in range(2):  # the second time from what was remembered
        hosts = inventory.load(path).hosts
        assert hosts["here"].environment == Environment("python", sys.executable)
        assert hosts["there"].environment == Environment("python", "python3")
        assert hosts["far"].environment == Environment()


def test_the_order_of_search(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, variable = write(work / "named.yaml"), write(work / "variable.yaml")
    here, user = write(work / "hosts.yaml"), write(paths.user_inventory())
    monkeypatch.setenv("RDIAG_HOSTS", str(variable))

    found = inventory.find(named)
    assert (found.path, found.why) == (named, "-i/--inventory")
    assert [place.path for place in inventory.overlooked(named)] == [variable, Path("hosts.yaml"), user]
    found = inventory.find()
    assert (found.path, found.why) == (variable, "RDIAG_HOSTS")
    monkeypatch.setenv("RDIAG_HOSTS", "")
    found = inventory.find()
    assert (found.path, found.why) == (Path("hosts.yaml"), "./hosts.yaml")
    assert [place.path for place in inventory.overlooked()] == [user]
    here.unlink()
    found = inventory.find()
    assert (found.path, found.why) == (user, "the user's configuration folder")
    assert inventory.overlooked() == []
    user.unlink()
    assert inventory.find().path is None
    assert inventory.overlooked() == []


def test_a_file_is_not_overlooked_when_it_is_the_winner_by_another_name(work: Path) -> None:
    here = write(work / "hosts.yaml")
    assert inventory.overlooked(here) == []


def test_a_named_file_must_exist(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work / "hosts.yaml")
    with pytest.raises(ConfigError, match=r"nope\.yaml: there is no such file; it was named by -i/--inventory"):
        inventory.load(Path("nope.yaml"))
    monkeypatch.setenv("RDIAG_HOSTS", "gpu8")
    with pytest.raises(ConfigError, match="gpu8: there is no such file; it was named by RDIAG_HOSTS") as caught:
        inventory.load()
    assert "RDIAG_HOST" in str(caught.value.hint)


def test_a_tilde_in_a_named_path_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    write(Path.home() / "mine.yaml")
    monkeypatch.setenv("RDIAG_HOSTS", "~/mine.yaml")
    assert "gpu8" in inventory.load().hosts
    assert "gpu8" in inventory.load(Path("~/mine.yaml")).hosts


def test_what_exists_and_is_no_file_is_refused(work: Path) -> None:
    (work / "hosts.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"hosts.yaml: is a folder.*chosen by ./hosts.yaml"):
        inventory.load()
    (work / "hosts.yaml").rmdir()
    (work / "hosts.yaml").symlink_to("missing")
    with pytest.raises(ConfigError, match="there is no such file"):
        inventory.load()
    (work / "hosts.yaml").unlink()
    os.mkfifo(work / "hosts.yaml")
    with pytest.raises(ConfigError, match="a pipe"):
        inventory.load()


def test_a_file_that_everybody_may_write_is_used_only_when_named(work: Path) -> None:
    path = write(work / "hosts.yaml")
    path.chmod(0o646)
    with pytest.raises(ConfigError, match="everybody may write to this file") as caught:
        inventory.load()
    assert "rdiag -i hosts.yaml" in str(caught.value.hint)
    assert "gpu8" in inventory.load(path).hosts


def test_a_file_of_somebody_else_in_a_shared_folder_is_used_only_when_named(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(work / "hosts.yaml")
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "gpu8" in inventory.load().hosts  # a colleague's checkout is fine
    work.chmod(0o1777)
    with pytest.raises(ConfigError, match="belongs to another user"):
        inventory.load()
    assert "gpu8" in inventory.load(path).hosts


# --- Names ---


def test_hosts_and_groups_are_expanded_once_in_order(work: Path) -> None:
    write(work / "hosts.yaml")
    loaded = inventory.load()

    def names(*asked: str) -> list[str]:
        return [host.name for host in loaded.expand(asked)]

    assert names("lab") == ["gpu9", "gpu8"]
    assert names("gpu8", "lab", "gpu8", "local") == ["gpu8", "gpu9", "local"]
    assert names("all") == ["gpu8", "gpu9"]
    assert names() == []
    assert loaded.groups_of("gpu8") == ["lab"]
    assert loaded.groups_of("local") == []


def test_local_of_the_file_is_part_of_all(work: Path) -> None:
    write(work / "hosts.yaml", "hosts: {local: {transport: local}, a: {ssh: a}}\n")
    assert [host.name for host in inventory.load().expand(["all"])] == ["local", "a"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("gpu88", "did you mean gpu8?"), ("GPU9", "did you mean gpu9?"), ("zzz", "known are: local, gpu8, gpu9"), ("", "known")],
)
def test_an_unknown_name_is_refused_with_the_nearest(work: Path, name: str, hint: str) -> None:
    write(work / "hosts.yaml")
    loaded = inventory.load()
    for call in (loaded.host, lambda name: loaded.expand([name])):
        with pytest.raises(ConfigError, match="there is no host") as caught:
            call(name)
        assert hint in str(caught.value.hint)


def test_a_group_is_no_host(work: Path) -> None:
    write(work / "hosts.yaml")
    with pytest.raises(ConfigError, match="'lab' is a group") as caught:
        inventory.load().host("lab")
    assert "gpu9, gpu8" in str(caught.value.hint)


# --- Any text is accepted exactly as it is, or refused ---

ANY_TEXT = st.text(st.characters(), max_size=50) | st.text(st.sampled_from("ab8-._/~:@%$ \n\0é😀"), max_size=12)
_POPEN = subprocess.Popen
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def accepted(document: dict[str, Any]) -> inventory_cache.Contents | None:
    """Return what becomes of ``document``, None when it is refused."""
    try:
        return parse(json.dumps(document))
    except ConfigError as error:
        problem = error.message
    assert problem.startswith("hosts.yaml:")
    assert not any(unicodedata.category(character) in {"Cc", "Cs"} for character in problem)
    return None


@QUICK
@given(ANY_TEXT)
def test_any_host_name_is_kept_or_refused(name: str) -> None:
    contents = accepted({"hosts": {name: {"ssh": "x"}}})
    lower_case = "abcdefghijklmnopqrstuvwxyz0123456789"
    fits = 0 < len(name) <= 64 and name[0] in lower_case and set(name) <= set(lower_case + "._-") and name != "all"
    assert (contents is not None) is fits
    if contents is not None:
        assert list(contents[0]) == [name]


@QUICK
@given(ANY_TEXT)
def test_any_environment_value_is_kept_exactly_or_refused(value: str) -> None:
    contents = accepted({"hosts": {"a": {"ssh": "x", "env": {"A": value}}}})
    if contents is None:
        assert "\0" in value or "\x7f" in value or not _is_encodable(value)
    else:
        assert contents[0]["a"].env == (("A", value),)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@QUICK
@given(
    st.sampled_from(("ssh", "address", "user", "jump", "host_key", "identity_file", "known_hosts", "workdir", "cache_dir")),
    ANY_TEXT,
)
def test_any_text_in_any_field_is_kept_or_refused(field: str, value: str) -> None:
    host = {"address": "x", field: value}
    if field == "ssh":
        del host["address"]
    contents = accepted({"hosts": {"a": host}})
    if contents is not None:
        kept = str(getattr(contents[0]["a"], field))
        assert not kept.startswith("-")
        assert not any(character in kept for character in "\n\r\0\x1b")
        if field in {"ssh", "address", "user", "jump"}:
            assert kept == value
            assert not set(kept) & set(" ;&|<>$`'\"(){}*?~!#=")


def test_a_long_environment_value_is_kept_and_a_longer_one_refused() -> None:
    for length, fits in ((100_000, True), (128 * 1024, False)):
        contents = accepted({"hosts": {"a": {"ssh": "x", "env": {"A": "é" * (length // 2)}}}})
        assert (contents is not None) is fits
    assert accepted({"hosts": {"a": {"ssh": "x", "env": {"A" * 1000: "x" * (128 * 1024 - 1000)}}}}) is None


# --- What was validated is remembered ---


def entries() -> list[Path]:
    folder = paths.cache_dir() / "inventory"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def loaded_modules(code: str) -> set[str]:
    """Run ``code`` in a fresh interpreter and return which of the slow modules it imported."""
    script = f"{code}\nimport sys\nprint(*sorted({{'yaml', 'pydantic', 'rich', 'difflib'}} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", _POPEN)
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment
        )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_second_reading_imports_neither_yaml_nor_pydantic(work: Path) -> None:
    write(work / "hosts.yaml")
    code = "from remote_diag.inventory import load; assert load().host('gpu8').ssh == 'a'"
    assert {"yaml", "pydantic"} <= loaded_modules(code)
    assert loaded_modules(code) == set()


def test_an_entry_is_private(work: Path) -> None:
    write(work / "hosts.yaml")
    inventory.load()
    (entry,) = entries()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700


def test_everything_about_a_host_is_remembered(work: Path) -> None:
    everything = Host(
        name="a",
        ssh="x",
        address="y",
        user="u",
        port=1,
        identity_file=Path("/i"),
        jump="j",
        known_hosts=Path("/k"),
        host_key="h",
        environment=Environment("conda", "e"),
        workdir="/w",
        env=(("A", "\ud800 \0 é"),),
        gpus=8,
        cache_dir="c",
        connect_timeout=1.5,
        timeout=2.5,
        lease=3.5,
        source="s:1",
    )
    defaults = Host(name="b")
    # Every field differs from its default, so a forgotten one is noticed.
    same = [field.name for field in dataclasses.fields(Host) if getattr(everything, field.name) == getattr(defaults, field.name)]
    assert same == ["transport"]
    contents: inventory_cache.Contents = ({"a": everything, "b": defaults}, {"g": ("a", "b")})
    inventory_cache.write("0", contents)
    assert inventory_cache.read("0") == contents


def forge(work: Path) -> Path:
    """Make an entry for hosts.yaml that holds something else, and return it: whoever uses it shows it."""
    write(work / "hosts.yaml")
    name = inventory_cache.key((work / "hosts.yaml").read_bytes(), "hosts.yaml")
    inventory_cache.write(name, ({"forged": Host(name="forged", transport="local")}, {}))
    (entry,) = entries()
    assert "forged" in inventory.load().hosts
    return entry


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o622])
def test_an_entry_that_others_may_write_is_not_used(work: Path, mode: int) -> None:
    forge(work).chmod(mode)
    assert "gpu8" in inventory.load().hosts


def test_entries_in_a_folder_that_others_may_write_are_not_used(work: Path) -> None:
    forge(work).parent.chmod(0o777)
    assert "gpu8" in inventory.load().hosts


def test_an_entry_of_somebody_else_is_not_used(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = forge(work)
    if os.geteuid() == 0:
        os.chown(entry, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "gpu8" in inventory.load().hosts


def test_an_entry_that_is_a_link_or_a_fifo_is_not_used(work: Path) -> None:
    entry = forge(work)
    kept = entry.rename(work / "kept")
    entry.symlink_to(kept)
    assert "gpu8" in inventory.load().hosts
    entry.unlink()
    os.mkfifo(entry, 0o600)
    assert "gpu8" in inventory.load().hosts


def test_a_damaged_entry_is_not_used(work: Path) -> None:
    entry = forge(work)
    good = entry.read_bytes()
    name = entry.stem
    for position in range(len(good)):
        entry.write_bytes(good[:position])
        assert inventory_cache.read(name) is None
        entry.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        assert inventory_cache.read(name) is None
    entry.write_bytes(good)
    assert inventory_cache.read(name) is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda stored: stored["hosts"][0].pop("port"),
        lambda stored: stored["hosts"][0].update(more=1),
        lambda stored: stored["hosts"][0].update(port="22"),
        lambda stored: stored["hosts"][0].update(port=True),
        lambda stored: stored["hosts"][0].update(environment=["venv"]),
        lambda stored: stored["hosts"][0].update(env=[1]),
        lambda stored: stored.update(hosts=3),
        lambda stored: stored.update(groups=[]),
        lambda stored: stored.pop("groups"),
    ],
)
def test_an_entry_of_another_shape_is_not_used(work: Path, change: Any) -> None:
    entry = forge(work)
    stored = json.loads(entry.read_bytes().partition(b"\n")[2])
    change(stored)
    body = json.dumps(stored).encode()
    entry.write_bytes(b"rdiag inventory 1 " + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert "gpu8" in inventory.load().hosts


def test_another_text_name_or_home_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {inventory_cache.key(b"a", "b"), inventory_cache.key(b"ab", ""), inventory_cache.key(b"a", "c")}
    monkeypatch.setenv("HOME", "/elsewhere")
    keys.add(inventory_cache.key(b"a", "b"))
    assert len(keys) == 4


def test_few_entries_are_kept(work: Path) -> None:
    for number in range(12):
        write(work / "hosts.yaml", f"hosts: {{h{number}: {{ssh: x}}}}\n")
        assert f"h{number}" in inventory.load().hosts
    assert len(entries()) == 8


def test_where_nothing_can_be_remembered_everything_still_works(work: Path) -> None:
    write(work / "hosts.yaml")
    paths.cache_dir().parent.mkdir(parents=True, exist_ok=True)
    paths.cache_dir().write_text("in the way")
    assert "gpu8" in inventory.load().hosts
    assert "gpu8" in inventory.load().hosts


def test_root_leaves_nothing_in_the_cache_of_a_user(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(work / "hosts.yaml")
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert "gpu8" in inventory.load().hosts
    assert entries() == []

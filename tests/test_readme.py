"""README.md is kept true: every block in it is run, or compared with what the code says.

A comment before each block, ``<!-- test: NAME -->``, says which test below that is.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from remote_diag import exitcodes, inventory
from remote_diag.cli.entry import COMMANDS, SECTIONS
from remote_diag.exitcodes import ExitCode
from tests.support import cli
from tests.support.fake_smi import FakeSmi, rtx_pro_6000
from tests.support.sshd import TestSshd

README = (cli.CHECKOUT / "README.md").read_text(encoding="utf-8")
_BLOCK = re.compile(r"(?:<!-- test: (?P<name>[a-z-]+)[^\n]*-->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    name: str | None
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """What a person types, line by line, comments included."""
        return [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]


BLOCKS = [Block(match["name"], match["language"], match["text"]) for match in _BLOCK.finditer(README)]


def block(name: str) -> Block:
    (found,) = [one for one in BLOCKS if one.name == name]
    return found


@dataclass(frozen=True)
class Desk:
    """Where a reader sits: an empty home, ``rdiag`` on the PATH, a working directory."""

    home: Path

    @property
    def env(self) -> dict[str, str]:
        env = cli.environment(self.home)
        return {**env, "PATH": f"{self.home / 'bin'}:{env['PATH']}"}

    def sh(self, command: str, *, cwd: Path | None = None, shell: str = "sh", **extra: str) -> cli.Ran:
        done = subprocess.run(
            [shell, "-c", command],
            cwd=cwd or self.home,
            env={**self.env, **extra},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        return cli.Ran(done.returncode, done.stdout.decode(), done.stderr.decode())

    def sh_on_a_terminal(self, command: str, typed: bytes) -> int:
        leader, follower = os.openpty()
        process = subprocess.Popen(
            ["sh", "-c", command], cwd=self.home, env=self.env, stdin=follower, stdout=follower, stderr=follower
        )
        os.close(follower)
        try:
            os.write(leader, typed)
            return process.wait(60)
        finally:
            os.close(leader)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "rdiag"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m remote_diag.cli.entry \"$@\"\n")
    program.chmod(0o755)
    return Desk(tmp_path)


@pytest.fixture
def gpu8(desk: Desk, zsh_server: TestSshd) -> Desk:
    """The README's hosts.yaml and its server, both as they are there, but for the names."""
    data = desk.home / "data"
    for side, folder in (("a", data / "eagle3" / "drafter"), ("b", data / "run7")):
        folder.mkdir(parents=True)
        arrays = np.load(cli.CHECKOUT / "examples" / "mappings" / f"{side}.npz")
        for name in ("d2t", "t2d"):
            np.save(folder / f"{name}.npy", arrays[name])
    text = block("inventory").text
    substitutes = {
        "203.0.113.7": "127.0.0.1",
        "user: root": f"user: {zsh_server.user}",
        "port: 22": f"port: {zsh_server.port}",
        "~/.ssh/id_ed25519": str(zsh_server.identity_file),
        "{venv: /root/ml-env}": f"{{python: {sys.executable}}}",
        "/data/eagle3": str(data / "eagle3"),
    }
    for shown, real in substitutes.items():
        assert shown in text, f"the sample inventory no longer says {shown}"
        text = text.replace(shown, real)
    (desk.home / "hosts.yaml").write_text(text)
    (desk.home / "hosts.yaml").chmod(0o600)
    return desk


def on_data(desk: Desk, text: str) -> str:
    return text.replace("/data", str(desk.home / "data"))


def test_every_block_says_how_it_is_tested() -> None:
    assert [one for one in BLOCKS if one.name is None] == []
    known = {"scripts", "skip", "vocab-compare", "completion", "inventory", "server", "case", "doctor", "gpus", "python", "typed", "new-probe", "probe"}
    assert {one.name for one in BLOCKS} == known
    assert README.count("```") == 2 * len(BLOCKS)


def test_the_two_commands_are_there() -> None:
    names = [command.split()[0] for command in block("scripts").commands]
    assert names == ["./scripts/demo", "./scripts/test"]
    for name in names:
        assert os.access(cli.CHECKOUT / name, os.X_OK)
        subprocess.run(["sh", "-n", cli.CHECKOUT / name], check=True)


def test_the_comparison_prints_what_is_shown(desk: Desk) -> None:
    (command,) = block("vocab-compare").commands
    ran = desk.sh(command, cwd=cli.CHECKOUT, RDIAG_HOSTS=str(cli.CHECKOUT / "hosts.yaml"))
    assert ran.code == ExitCode.FINDINGS, ran.err
    shown = [line.replace("/home/ada/rdiag", str(cli.CHECKOUT)) for line in block("vocab-compare").text.splitlines()[1:]]
    # A line `...` stands for any number of lines, here and there; the output's own `...` is one of them.
    pattern = "\n".join(r"(?:.*\n)*?.*" if line == "..." else re.escape(line) for line in shown)
    printed = "\n".join(line.rstrip() for line in ran.out.splitlines())
    assert re.fullmatch(pattern, printed), printed


def test_the_sample_inventory_is_valid_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "hosts.yaml"
    path.write_text(block("inventory").text)
    loaded = inventory.load(path)
    assert (loaded.host("gpu8").environment.kind, loaded.host("gpu8").gpus) == ("venv", 8)
    assert [host.name for host in loaded.expand(["lab"])] == ["gpu8"]


def test_the_way_to_a_real_server(gpu8: Desk) -> None:
    commands = block("server").commands
    assert [command.split()[1] for command in commands] == ["trust", "check", "vocab-compare", "run", "run"]
    trust, check, compare, run, dry_run = (on_data(gpu8, command) for command in commands)
    assert gpu8.sh(run).code == ExitCode.HOST_KEY
    assert gpu8.sh_on_a_terminal(trust, b"y\n") == ExitCode.OK
    checked = gpu8.sh(check)
    # The machine of the tests may lack eight GPUs, which is a finding.
    assert checked.code in {ExitCode.OK, ExitCode.FINDINGS}, checked.err
    compared = gpu8.sh(compare)
    assert compared.code == ExitCode.FINDINGS, compared.err
    assert "132 of 32,000 rows agree" in compared.out
    greeted = gpu8.sh(run)
    assert greeted.code == ExitCode.OK, greeted.err
    assert "Hello, Ada!" in greeted.out
    planned = gpu8.sh(dry_run)
    assert planned.code == ExitCode.OK, planned.err
    assert re.search(r"sh \.cache/rdiag/[0-9a-f]{64}/enter", planned.out)


def test_the_way_from_a_random_loss_to_a_repaired_drafter(desk: Desk) -> None:
    for name, text in (("hosts.yaml", block("inventory").text), ("case.yaml", block("case").text)):
        (desk.home / name).write_text(text)
    commands = block("doctor").commands
    assert [command.split()[1] for command in commands] == ["triage", "vocab-keep", "vocab-remap", "drafter-check"]
    for command in commands:
        typed, _, comment = command.partition("#")
        ran = desk.sh(f"{typed} --dry-run {'# ' + comment if comment else ''}")
        assert ran.code == ExitCode.OK, ran.err
        assert "gpu8" in ran.out


def test_what_the_gpus_say(gpu8: Desk) -> None:
    smi = FakeSmi(gpu8.home / "bin", rtx_pro_6000(8))
    smi.lspci()
    smi.kernel_log()
    inventory = gpu8.home / "hosts.yaml"
    inventory.write_text(
        inventory.read_text().replace("{NCCL_P2P_LEVEL: SYS}", f'{{PATH: "{smi.path}"}}')
    )
    commands = block("gpus").commands
    assert [command.split()[1] for command in commands] == ["gpu", "topo", "env", "nccl", "p2p", "comm-share", "serving"]
    for command in commands:
        typed, _, comment = command.partition("#")
        ran = gpu8.sh(f"{typed} --dry-run {'# ' + comment if comment else ''}")
        assert ran.code == ExitCode.OK, ran.err
        assert "gpu8" in ran.out
    assert gpu8.sh_on_a_terminal("rdiag trust gpu8", b"y\n") == 0
    ran = gpu8.sh(commands[0])
    assert ran.code == ExitCode.OK, ran.out + ran.err
    assert ran.out.startswith("gpu8: gpu: ok - 8 of 8 GPUs usable")
    assert ran.out.count("1x16/5x16") == 8
    assert "8 x RTX PRO 6000" in ran.out


def test_the_same_from_python(gpu8: Desk) -> None:
    assert gpu8.sh_on_a_terminal("rdiag trust gpu8", b"y\n") == 0
    (gpu8.home / "readme.py").write_text(on_data(gpu8, block("python").text))
    ran = gpu8.sh(f"'{sys.executable}' readme.py")
    assert ran.code == 0, ran.err
    first, *findings = ran.out.splitlines()
    assert first == "fail different 132"
    assert any(line.startswith("fail ") for line in findings)
    assert ran.err == ""


def test_a_probe_of_ones_own(gpu8: Desk) -> None:
    new, run, describe = block("new-probe").commands
    assert gpu8.sh(new).code == 0
    ran = gpu8.sh(run)
    assert ran.code in {ExitCode.OK, ExitCode.FINDINGS}, ran.err
    assert "free_bytes" in ran.out
    described = gpu8.sh(describe)
    assert described.code == 0, described.err
    assert "free_bytes" in described.out
    assert gpu8.sh(f"'{sys.executable}' -m pytest -q -p no:cacheprovider tests/test_disk_speed.py").code == 0
    # The typed way, with the module in hand.
    assert gpu8.sh_on_a_terminal("rdiag trust gpu8", b"y\n") == 0
    (gpu8.home / "typed.py").write_text(on_data(gpu8, block("typed").text))
    typed = gpu8.sh(f"'{sys.executable}' typed.py", PYTHONPATH=f"{cli.CHECKOUT}:{gpu8.home / 'probes'}")
    assert re.fullmatch(r"\d+% free\n", typed.out), typed.err


def test_a_type_checker_knows_the_result(desk: Desk) -> None:
    assert desk.sh(block("new-probe").commands[0]).code == 0
    (desk.home / "typed.py").write_text(block("typed").text + "reveal_type(outcome.result.free_bytes)\n")
    ran = desk.sh(
        f"'{sys.executable}' -m mypy --strict --no-error-summary --hide-error-context typed.py",
        MYPYPATH=f"{cli.CHECKOUT}:{desk.home / 'probes'}",
    )
    assert re.fullmatch(r'typed\.py:\d+: note: Revealed type is "(builtins\.)?int"\n', ran.out), ran.out + ran.err


def test_the_probe_shown_works(desk: Desk) -> None:
    (desk.home / "probes").mkdir()
    (desk.home / "probes" / "count_files.py").write_text(block("probe").text)
    (desk.home / "full").mkdir()
    (desk.home / "full" / "one").touch()
    ran = desk.sh("rdiag run count-files --json --set folder=full")
    assert ran.code == ExitCode.OK, ran.err
    assert ran.json["result"] == {"files": 1}
    (desk.home / "full" / "one").unlink()
    assert desk.sh("rdiag run count-files --json --set folder=full").code == ExitCode.FINDINGS
    assert "Count the files in a folder." in desk.sh("rdiag probes").out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_installed_by_one_line(desk: Desk, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (line,) = [command for command in block("completion").commands if shell in command]
    env = {**desk.env, "XDG_CONFIG_HOME": str(desk.home / ".config"), "TERM": "dumb"}
    installed = subprocess.run(["sh", "-c", line], cwd=desk.home, env=env, capture_output=True, text=True, timeout=60)
    assert installed.returncode == 0, installed.stderr
    ask = {
        "bash": "COMP_WORDS=(rdiag vocab-); COMP_CWORD=1; "
        "_rdiag_completion rdiag; printf '%s\\n' \"${COMPREPLY[@]}\"",
        "zsh": "print -r -- $_comps[rdiag]",
        "fish": "complete -C 'rdiag vocab-'",
    }[shell]
    done = subprocess.run(
        [shell, "-i", "-c", ask], cwd=desk.home, env=env, stdin=subprocess.DEVNULL,
        capture_output=True, timeout=60, start_new_session=True,
    )  # fmt: skip
    assert ("_rdiag_completion" if shell == "zsh" else "vocab-compare") in done.stdout.decode(), done.stderr.decode()


def test_completion_offers_commands_hosts_and_probes(gpu8: Desk) -> None:
    def offered(words: str) -> set[str]:
        ran = gpu8.sh("rdiag", COMP_WORDS=words, COMP_CWORD=str(len(words.split()) - 1), _RDIAG_COMPLETE="bash_complete")
        return {line.partition(",")[2] for line in ran.out.splitlines()}

    assert offered("rdiag vocab-c") == {"vocab-compare"}
    assert offered("rdiag run hel") == {"hello"}
    assert offered("rdiag run hello --host l") == {"lab", "local"}
    assert offered("rdiag check gp") == {"gpu8"}


def test_the_table_of_exit_codes() -> None:
    tree = ast.parse(Path(exitcodes.__file__).read_text(encoding="utf-8"))
    (codes,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    expected = {}
    for statement, doc in zip(codes.body, codes.body[1:], strict=False):
        if isinstance(statement, ast.Assign) and isinstance(doc, ast.Expr):
            expected[ast.literal_eval(statement.value)] = ast.literal_eval(doc.value)
    assert set(expected) == {int(code) for code in ExitCode}
    shown = {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.+) \|$", README, re.M)}
    assert shown == expected


def test_the_table_of_commands() -> None:
    shown = re.findall(r"^\| `rdiag ([a-z][a-z0-9-]*)` \| (.+) \|$", README, re.M)
    names = [name for section in SECTIONS.values() for name in section]
    assert sorted(names) == sorted(COMMANDS)
    assert shown == [(name, COMMANDS[name][1]) for name in names]


def test_commands_options_and_paths_that_are_named_exist(desk: Desk) -> None:
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", README)
    typed = [command for one in BLOCKS for command in one.commands]
    named = {match[1] for text in (*inline, *typed) if (match := re.match(r"rdiag ([a-z][a-z0-9-]*)", text))}
    assert named <= set(COMMANDS)
    helps = "".join(desk.sh(f"rdiag {name} --help").out for name in COMMANDS)
    for option in set(re.findall(r"`(--[a-z-]+)`", README)) - {"--help"}:
        assert option in helps
    for path in re.findall(r"`((?:remote_diag|probes|tests|scripts|examples)/[\w./]*)`", README):
        assert (cli.CHECKOUT / path).exists() or path == "probes/disk_speed.py", path

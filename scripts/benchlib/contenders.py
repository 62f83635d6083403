"""The ways to run one probe on one host, each as a fresh process with a cold connection."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .clock import Contender, Step
from .rig import Place
from .workload import Workload

Argv = list[str | Path]

RDIAG = "rdiag"
SCP_SSH = "scp + ssh"
SSH_STDIN = "ssh python3 -"
SSH_CURVE = "ssh python3 - (curve25519)"
FABRIC = "fabric put + run"
ANSIBLE = "ansible script"
PYINFRA = "pyinfra put + shell"

_FABRIC_PLAIN = """\
import sys

from fabric import Connection

port, user, key, script, params = sys.argv[1:]
host = Connection("127.0.0.1", user=user, port=int(port), connect_kwargs={"key_filename": key})
host.put(script, "script.py")
host.put(params, "params.json")
print(host.run("python3 script.py params.json", hide=True).stdout)
"""


def rdiag_program() -> Path:
    """Return the installed ``rdiag``."""
    return Path(sys.executable).parent / "rdiag"


def rdiag_env(directory: Path) -> dict[str, str]:
    """Return variables that keep rdiag to folders of its own below ``directory``; makes the folders."""
    folders = {f"XDG_{name.upper()}_HOME": directory / name for name in ("config", "cache", "state")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return {name: str(folder) for name, folder in folders.items()}


def peers(directory: Path) -> Path:
    """Return the virtual environment into which ``--with-peers`` installs ansible and pyinfra."""
    return directory / "peers"


def install_peers(directory: Path, tell: Callable[[str], None]) -> None:
    """Install ansible and pyinfra there; raises CalledProcessError."""
    venv = peers(directory)
    if not (venv / "bin" / "pyinfra").exists():
        tell("installing ansible-core and pyinfra into .bench/peers")
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*pip, "ansible-core", "pyinfra"], check=True)


def everyone(here: Place, work: Workload, directory: Path, tell: Callable[[str], None]) -> list[Contender]:
    """Return all contenders that this machine has; says who is missing."""
    contenders = [
        rdiag(here, work, directory),
        ssh_stdin(here, work),
        ssh_stdin(here, work, kex="curve25519-sha256"),
        scp_ssh(here, work),
        fabric(here, work),
    ]
    for name, make in (("ansible", ansible), ("pyinfra", pyinfra)):
        program = shutil.which(name, path=str(peers(directory) / "bin")) or shutil.which(name)
        if program is None:
            tell(f"{name} is not installed: left out (--with-peers installs it below .bench)")
        else:
            contenders.append(make(here, work, program))
    return contenders


def rdiag(here: Place, work: Workload, directory: Path) -> Contender:
    """Return rdiag as a person starts it; the first, uncounted round installs its agent on the host."""
    argv: Argv = [rdiag_program(), "run", work.probe, "--params", work.params, "--json", "-i", here.inventory]
    return Contender(RDIAG, [Step([*argv, "--host", "bench"])], work.digest, env=rdiag_env(directory / "rdiag"))


def ssh_stdin(here: Place, work: Workload, kex: str | None = None) -> Contender:
    """Return ``ssh HOST python3 - < script``, with OpenSSH's own choice of key exchange or with ``kex``."""
    options: Argv = ["-F", here.ssh_config, *(["-o", f"KexAlgorithms={kex}"] if kex else [])]
    argv: Argv = ["ssh", *options, "bench", "python3 -"]
    return Contender(SSH_CURVE if kex else SSH_STDIN, [Step(argv, stdin=work.single)], work.digest)


def scp_ssh(here: Place, work: Workload) -> Contender:
    """Return the habit: copy two files, then run."""
    return Contender(
        SCP_SSH,
        [
            Step(["scp", "-q", "-F", here.ssh_config, work.script, work.params, "bench:"]),
            Step(["ssh", "-F", here.ssh_config, "bench", "python3 script.py params.json"]),
        ],
        work.digest,
    )


def fabric(here: Place, work: Workload) -> Contender:
    """Return fabric as its documentation uses it (it accepts any host key)."""
    program = here.directory / "fabric_plain.py"
    program.write_text(_FABRIC_PLAIN)
    argv: Argv = [sys.executable, program, str(here.port), here.user, here.identity_file, work.script, work.params]
    return Contender(FABRIC, [Step(argv)], work.digest)


def ansible(here: Place, work: Workload, program: str) -> Contender:
    """Return ansible with pipelining, and without the connection that it would keep open for the next call."""
    inventory = here.directory / "ansible.ini"
    inventory.write_text("bench ansible_python_interpreter=python3\n")
    argv: Argv = [program, "bench", "-i", inventory, "-m", "ansible.builtin.script"]
    env = {
        "ANSIBLE_PIPELINING": "1",
        "ANSIBLE_SSH_ARGS": f"-F {here.ssh_config}",
        "ANSIBLE_LOCALHOST_WARNING": "0",
        "ANSIBLE_NOCOWS": "1",
        "ANSIBLE_HOME": str(here.directory / "ansible"),
    }
    return Contender(ANSIBLE, [Step([*argv, "-a", f"{work.single} executable=python3"])], work.digest, env=env)


def pyinfra(here: Place, work: Workload, program: str) -> Contender:
    """Return pyinfra: put, put, run."""
    inventory = here.directory / "pyinfra_inventory.py"
    data = {
        "ssh_port": here.port,
        "ssh_user": here.user,
        "ssh_key": str(here.identity_file),
        "ssh_known_hosts_file": str(here.known_hosts),
    }
    inventory.write_text(f"hosts = [('127.0.0.1', {data!r})]\n")
    deploy = here.directory / "pyinfra_deploy.py"
    deploy.write_text(
        "from pyinfra.operations import files, server\n"
        f"files.put(src={str(work.script)!r}, dest='script.py', force=True)\n"
        f"files.put(src={str(work.params)!r}, dest='params.json', force=True)\n"
        "server.shell(commands=['python3 script.py params.json'])\n"
    )
    return Contender(PYINFRA, [Step([program, "-y", "-vvv", inventory, deploy])], work.digest, cwd=here.directory)

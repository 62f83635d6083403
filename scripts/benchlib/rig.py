"""The place where everything is measured: a real sshd on loopback, with zsh as login shell, near or far."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.proxy import Proxy
from tests.support.sshd import TestSshd


@dataclass(frozen=True)
class Place:
    """How the server is reached over one distance."""

    rtt_ms: float
    port: int
    user: str
    identity_file: Path
    known_hosts: Path
    directory: Path
    """Files of this place: ssh_config, hosts.yaml, ansible's and pyinfra's inventories."""

    @property
    def ssh_config(self) -> Path:
        """A configuration in which the server is called ``bench``."""
        return self.directory / "ssh_config"

    @property
    def inventory(self) -> Path:
        """A hosts.yaml in which the server is called ``bench``."""
        return self.directory / "hosts.yaml"


@contextlib.contextmanager
def server() -> Iterator[TestSshd]:
    """Start the server; raises tests.support.sshd.Missing when a program is not installed."""
    with TestSshd(shell="zsh") as sshd:  # noqa: S604 - a login shell, not subprocess's option
        yield sshd


@contextlib.contextmanager
def place(sshd: TestSshd, directory: Path, rtt_ms: float) -> Iterator[Place]:
    """Reach ``sshd`` directly, or over a proxy that is ``rtt_ms`` away."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        port = sshd.port
        if rtt_ms:
            port = stack.enter_context(Proxy(sshd.port, delay_ms=rtt_ms / 2)).port
        known_hosts = directory / "known_hosts"
        known_hosts.write_text(f"[127.0.0.1]:{port} {' '.join(sshd.host_key())}\n")
        here = Place(rtt_ms, port, sshd.user, sshd.identity_file, known_hosts, directory)
        _write_settings(here)
        yield here


def _write_settings(here: Place) -> None:
    here.ssh_config.write_text(
        f"""Host bench
    HostName 127.0.0.1
    Port {here.port}
    User {here.user}
    IdentityFile {here.identity_file}
    IdentitiesOnly yes
    UserKnownHostsFile {here.known_hosts}
    StrictHostKeyChecking yes
    BatchMode yes

Host *
    ControlMaster no
    ControlPath none
"""
    )
    here.inventory.write_text(
        f"""hosts:
  bench:
    address: 127.0.0.1
    port: {here.port}
    user: {here.user}
    identity_file: {here.identity_file}
    known_hosts: {here.known_hosts}
"""
    )
    here.inventory.chmod(0o600)

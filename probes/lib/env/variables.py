"""Settings of CUDA, NCCL and torch: which ones there are, and who makes them.

Only variables of an allow-list are ever looked at; what does not begin as they do stays where it is.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

PREFIXES = ("NCCL_", "TORCH_NCCL_", "CUDA_")
NAMES = frozenset({
    "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_CUDA_ARCH_LIST", "OMP_NUM_THREADS",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
    "FI_PROVIDER", "FI_EFA_USE_DEVICE_RDMA", "UCX_NET_DEVICES", "UCX_TLS",
})  # fmt: skip
"""Variables besides those of PREFIXES. A new one must not be able to hold a secret."""
_WORDS = r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|BEARER|COOKIE|SIGNATURE"
_SECRET = re.compile(_WORDS + r"|(?:^|_)(?:KEYS?|PWD|PASS|AUTH|JWT)(?:_|$)", re.IGNORECASE)
# To the last @ before a space: a password may hold anything that an address may not.
_LOGIN = re.compile(r"\b(\w+://)\S*@")
_NAMED = r"(?:%s|(?<![A-Za-z])(?:key|pwd|pass|auth|sig|jwt))s?(?:[_-]\w+)*" % _WORDS
_ASSIGNED = re.compile(
    r"((?:%s[\"']?\s*[=:]|--?[\w-]*%s(?=\s)|\bbearer(?=\s))\s*(?:(?:basic|bearer)\s+)?)[\"']?[^\s\"'&;,}]+" % (_NAMED, _NAMED), re.IGNORECASE
)
_TOKEN = re.compile(
    r"\b(?:hf_\w{16,}|gh[a-z]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|(?:sk|pk|rk)-[\w-]{16,}|nvapi-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|wandb_v\d_\w{16,}|eyJ[\w-]{8,}(?:\.[\w-]+){1,2})"
)
"""Forms that issuers of tokens give them, so that they are recognised."""
_VALUE = 500
HIDDEN = "(hidden)"

CONF_FILE = "NCCL_CONF_FILE"
SYSTEM_CONF = "/etc/nccl.conf"
STARTUP_FILES = (
    "/etc/environment", "/etc/profile", "/etc/bash.bashrc", "/etc/bashrc", "/etc/zsh/zshenv", "/etc/zshenv",
    "/etc/security/pam_env.conf", "~/.profile", "~/.bash_profile", "~/.bash_login", "~/.bashrc", "~/.zshenv", "~/.zprofile",
    "~/.zshrc", "~/.cshrc", "~/.tcshrc", "~/.login", "~/.config/fish/config.fish", "~/.pam_environment", "~/.ssh/environment",
)  # fmt: skip
STARTUP_FOLDERS = ("/etc/profile.d", "/etc/environment.d", "~/.config/fish/conf.d")
_MAX_FILE = 1 << 20
_MAX_FILES = 200
_SETTING = re.compile(r"^\s*(?:export\s+|declare\s+-x\s+|setenv\s+|set\s+(?:-\w+\s+)*)?([A-Z][A-Z0-9_]*)(?:\s*=|\s+(?:DEFAULT|OVERRIDE)=|\s+\S)")


@dataclass(frozen=True)
class ConfLine:
    """One line of a conf file of NCCL."""

    file: str
    line: int
    name: str
    value: str
    read: bool
    """Whether NCCL takes it: it strips no spaces, so a name with one is another name."""


@dataclass(frozen=True)
class Mention:
    """A startup file that sets a variable."""

    name: str
    file: str
    line: int


def allowed(name: str) -> bool:
    """Return whether a variable may be looked at."""
    return name in NAMES or (name.startswith(PREFIXES) and re.fullmatch(r"[A-Z0-9_]+", name) is not None)


def shown(name: str, value: str) -> str:
    """Return a value as it may be shown: nothing of a secret, no login in an address, not endless."""
    if _SECRET.search(name):
        return HIDDEN
    # The end goes first: patterns need not look at a megabyte, and half a secret at the cut is one no more.
    cut, value = len(value) > _VALUE, without_secrets(value[: 8 * _VALUE])
    return value[:_VALUE] + "..." if cut or len(value) > _VALUE else value


def without_secrets(text: str) -> str:
    """Return ``text`` without logins in addresses, and without what its form or the word before it says is a secret."""
    text = _LOGIN.sub(r"\1" + HIDDEN + "@", text.encode("utf-8", "backslashreplace").decode("utf-8"))
    return _TOKEN.sub(HIDDEN, _ASSIGNED.sub(r"\1" + HIDDEN, text))


def of_process(pid: int | str) -> dict[str, str]:
    """Return the allowed variables that a process was started with.

    Raises:
        OSError: there is no such process, or it belongs to somebody else.
    """
    with open("/proc/%s/environ" % pid, "rb") as file:
        data = file.read(4 << 20)
    found = {}
    for variable in data.split(b"\0"):
        name, mark, value = variable.partition(b"=")
        text = name.decode("ascii", "replace")
        if mark and allowed(text):
            found[text] = os.fsdecode(value)
    return found


def conf_files(variables: dict[str, str], home: str) -> list[str]:
    """Return the conf files that NCCL reads, the one that wins first; a variable wins over both."""
    own = variables.get(CONF_FILE)
    own = os.path.expanduser(own) if own else os.path.join(home, ".nccl.conf")
    return [own, SYSTEM_CONF]


def read_conf(path: str) -> list[ConfLine]:
    """Return the settings of a conf file.

    Raises:
        OSError: it cannot be read; FileNotFoundError for the usual case that there is none.
    """
    found = []
    for number, line in enumerate(_lines(path), 1):
        if line.startswith("#") or "=" not in line:
            continue
        name, _, value = line.partition("=")
        bare = name.strip()
        if bare.startswith("#") or not allowed(bare):
            continue
        found.append(ConfLine(path, number, bare, shown(bare, value), name == bare and bare.startswith("NCCL_")))
    return found


def mentions(home: str) -> tuple[list[Mention], list[str]]:
    """Return which startup files of shells set allowed variables, and which files may not be read."""
    files = [_at_home(path, home) for path in STARTUP_FILES]
    for folder in STARTUP_FOLDERS:
        try:
            names = sorted(os.listdir(_at_home(folder, home)))
        except OSError:
            continue
        files += [os.path.join(_at_home(folder, home), name) for name in names[:_MAX_FILES]]
    found, unreadable = [], []
    for path in files:
        try:
            for number, line in enumerate(_lines(path), 1):
                match = _SETTING.match(line)
                if match is not None and allowed(match[1]):
                    found.append(Mention(match[1], path, number))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except OSError:
            unreadable.append(path)
    return found, unreadable


def _at_home(path: str, home: str) -> str:
    return home + path[1:] if path.startswith("~/") else path


def _lines(path: str) -> list[str]:
    # Not waited for: somebody may have put a FIFO there.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, _MAX_FILE)
    finally:
        os.close(descriptor)
    return data.decode("utf-8", "replace").splitlines()

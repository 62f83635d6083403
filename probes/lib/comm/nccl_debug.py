"""Reads what NCCL says of itself (NCCL_DEBUG=INFO or WARN): its version, how ranks reach each other, and its warnings."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from .nccl_text import unlabelled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable

_SAMPLE = 300
_MESSAGE = re.compile(r"\bNCCL (INFO|WARN|CALL|TRACE|VERSION) ?(.*)$")
_VERSION = re.compile(r"\bNCCL version (\d+(?:\.\d+)+\S*)")
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via ([A-Za-z0-9]+)(\S*)")
_RANKS = re.compile(r"\bnranks (\d+)\b")
_SETTING = re.compile(r"\b(NCCL_[A-Z0-9_]+) set by environment to (\S+?)\.?$")
_ALGORITHM = re.compile(r"-> Algo (\w+) proto (\w+)")
_NETWORK = re.compile(r"Using network (\S+)")
_NVLS = re.compile(r"NVLS (?:Created|Creating) Multicast group|NVLS comm 0x\S+ .*nHeads|Connected NVLS tree")
_HARMLESS = (
    re.compile(r"\[Service thread\] Accept failed Resource temporarily unavailable"),
    re.compile(r"\[Service thread\] Could not receive type from localRank \d+, res=\d+, closed=0"),
    re.compile(r"\[Proxy Service \d+\] Failed to execute operation Close from rank \d+"),
)
"""What versions before 2.28 say when ranks end one after the other; nothing is lost by it."""


@dataclass
class Said:
    """What NCCL said."""

    lines: int = 0
    """Lines of NCCL."""
    version: str | None = None
    ranks: int | None = None
    """Ranks of the largest communicator."""
    transports: dict[str, int] = field(default_factory=dict)
    """P2P, SHM or NET -> channels that go that way, as said by all ranks."""
    ways: dict[str, int] = field(default_factory=dict)
    """The same in full: P2P/CUMEM, SHM/direct/direct, NET/Socket/0."""
    network: str | None = None
    nvls: bool = False
    """Whether the switch reduces (NVLS)."""
    algorithms: dict[str, int] = field(default_factory=dict)
    """Such as RING SIMPLE -> calls."""
    settings: dict[str, str] = field(default_factory=dict)
    """NCCL_ variables that it found in its environment."""
    warnings: int = 0
    """Warnings, without harmless ones."""
    first_warning: str | None = None
    harmless: int = 0
    """Warnings that come when ranks end, and mean nothing."""

    @property
    def recognised(self) -> bool:
        """Whether NCCL said anything at all."""
        return self.lines > 0 or self.version is not None


def read(lines: Iterable[str]) -> Said:
    """Read the lines of a log; those of others are passed over."""
    said = Said()
    transports: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    algorithms: Counter[str] = Counter()
    for raw in lines:
        line = unlabelled(raw[:4096].strip())[1]
        version = _VERSION.search(line)
        if version is not None and said.version is None:
            said.version = version.group(1)
        message = _MESSAGE.search(line)
        if message is None:
            continue
        said.lines += 1
        kind, text = message.groups()
        if kind == "WARN":
            _warn(said, line, text)
            continue
        _take(said, text)
        channel, algorithm = _CHANNEL.search(text), _ALGORITHM.search(text)
        if channel is not None:
            transports[channel.group(3)] += 1
            ways[channel.group(3) + channel.group(4)] += 1
        if algorithm is not None:
            algorithms["%s %s" % algorithm.groups()] += 1
    said.transports, said.ways, said.algorithms = dict(transports), dict(ways), dict(algorithms)
    return said


def _take(said: Said, text: str) -> None:
    ranks, setting, network = _RANKS.search(text), _SETTING.search(text), _NETWORK.search(text)
    if ranks is not None:
        said.ranks = max(said.ranks or 0, int(ranks.group(1)))
    if setting is not None:
        said.settings[setting.group(1)] = setting.group(2)[:200]
    if network is not None:
        said.network = network.group(1)
    said.nvls = said.nvls or _NVLS.search(text) is not None


def _warn(said: Said, line: str, text: str) -> None:
    if any(pattern.search(text) for pattern in _HARMLESS):
        said.harmless += 1
        return
    said.warnings += 1
    if said.first_warning is None:
        said.first_warning = line[:_SAMPLE]

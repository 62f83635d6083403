"""Servers side by side: the verdict, the findings, then a column for each server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import headline, opening

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..outcome import Outcome

_TEXT = 60


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the servers; 80 columns are enough."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts = opening(outcome, _sentence(result))
    parts.append(_table(result.servers))
    load = next((server.measurement for server in result.servers if server.measurement), None)
    if load is not None:
        parts.append(
            Text(f"sent to each: {load.requests} requests of {load.max_tokens} tokens, {load.concurrency} at a time", "dim")
        )
    return Group(*parts)


def _sentence(result: Any) -> str:
    if result.comparison is not None:
        told = result.comparison
        return f"{told.tokens_per_s:.1f} tokens/s with speculation, {told.baseline_tokens_per_s:.1f} without: {told.speedup:.2f} times"
    server = result.servers[0]
    if not server.reached:
        return f"nothing answers at {safe(server.url)}"
    words = [safe(server.kind if server.kind != "unknown" else "an unknown server")]
    length = _accept_length(server)
    if length is not None:
        words.append(f"acceptance length {length:.2f}")
    speed = _speed(server)
    if speed is not None:
        words.append(f"{speed:.1f} tokens/s")
    return ", ".join(words)


def _accept_length(server: Any) -> float | None:
    measured = server.measurement
    told: float | None = server.drafting.accept_length
    return measured.accept_length if measured is not None and measured.accept_length is not None else told


def _speed(server: Any) -> float | None:
    measured: float | None = server.measurement.tokens_per_s if server.measurement is not None else None
    now: float | None = server.generation_tokens_per_s
    return measured if measured is not None else (now if now is not None else server.told_tokens_per_s)


def _number(digits: int, unit: str = "") -> Callable[[Any], str]:
    return lambda value: "-" if value is None else f"{value:,.{digits}f}{unit}"


def _percent(value: Any) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _text(value: Any) -> str:
    return "-" if value is None else safe(str(value), limit=_TEXT)


def _flag(value: Any) -> str:
    return {True: "on", False: "off", None: "not told"}[value]


_ROWS: tuple[tuple[str, Callable[[Any], Any], Callable[[Any], str]], ...] = (
    ("url", lambda server: server.url, _text),
    ("server", lambda server: f"{server.kind} {server.version or ''}".strip(), _text),
    ("model", lambda server: server.model, _text),
    ("speculation", lambda server: server.drafting.enabled, _flag),
    ("algorithm", lambda server: server.drafting.algorithm, _text),
    ("draft steps, tokens", lambda server: _pair(server.drafting.steps, server.drafting.draft_tokens), _text),
    ("acceptance length", lambda server: server.drafting.accept_length, _number(2)),
    ("acceptance rate", lambda server: server.drafting.accept_rate, _percent),
    ("tokens/s now", lambda server: server.generation_tokens_per_s, _number(1)),
    ("tokens/s it tells", lambda server: server.told_tokens_per_s, _number(1)),
    ("running, waiting", lambda server: _pair(server.running, server.waiting), _text),
    ("KV cache used", lambda server: server.kv_usage, _percent),
    ("prefix cache hits", lambda server: server.cache_hit_rate, _percent),
)
_MEASURED: tuple[tuple[str, Callable[[Any], Any], Callable[[Any], str]], ...] = (
    ("measured tokens/s", lambda load: load.tokens_per_s, _number(1)),
    ("  of one request", lambda load: load.request_tokens_per_s, _number(1)),
    ("  latency p50", lambda load: load.latency_p50_s, _number(2, " s")),
    ("  latency p99", lambda load: load.latency_p99_s, _number(2, " s")),
    ("  acceptance length", lambda load: load.accept_length, _number(2)),
    ("  answered", lambda load: f"{load.done} of {load.requests}", _text),
)


def _pair(first: Any, second: Any) -> str | None:
    if first is None and second is None:
        return None
    return ", ".join("-" if value is None else f"{value:g}" for value in (first, second))


def _table(servers: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", style="cyan", no_wrap=True)
    for server in servers:
        table.add_column(server.role, overflow="fold")
    for name, value, shown in _ROWS:
        cells = [shown(value(server)) for server in servers]
        if set(cells) != {"-"}:
            table.add_row(name, *cells)
    loads = [server.measurement for server in servers]
    if any(loads):
        for name, value, shown in _MEASURED:
            table.add_row(name, *("-" if load is None else shown(value(load)) for load in loads))
    return table

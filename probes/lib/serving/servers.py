"""What SGLang and vLLM say of themselves, as one kind of answer; what a server does not tell stays unknown."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from time import monotonic

from probes.lib.legible import legible
from probes.lib.serving.http import Client, NoAnswer, parse
from probes.lib.serving.metrics import Metrics

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_TEXT = 200


@dataclass
class Said:
    """What one server said; None for what it did not."""

    kind: str = "unknown"
    """sglang, vllm, unknown."""
    version: str | None = None
    model: str | None = None
    reached: bool = False
    algorithm: str | None = None
    """Of speculation: EAGLE3, ...; ``none`` where the server says that there is none."""
    steps: int | None = None
    draft_tokens: int | None = None
    told_accept_length: float | None = None
    """Of SGLang's internal state: since the start, or the last flush of the cache."""
    told_throughput: float | None = None
    tried: list[tuple[str, str]] = field(default_factory=list)
    """(path, what came of it)."""
    metrics: Metrics | None = None
    taken_at: float = 0.0
    """When the metrics were taken, on the monotonic clock."""


def ask(client: Client) -> Said:
    """Ask a server what it is and how it does; a path that fails costs what it would have told."""
    said = Said()
    models = _json(client, "/v1/models", said)
    entry = _first(models.get("data")) if isinstance(models, dict) else {}
    said.model = _text(entry.get("id"))
    owner = _text(entry.get("owned_by"))
    if said.tried and not said.reached:
        return said
    scrape(client, said)
    if said.metrics is not None:
        if said.metrics.has("sglang:"):
            said.kind = "sglang"
        elif said.metrics.has("vllm:"):
            said.kind = "vllm"
    if said.kind == "unknown" and owner in {"sglang", "vllm"}:
        said.kind = owner or "unknown"
    if said.kind != "vllm":
        _sglang(client, said)
    if said.kind != "sglang":
        version = _json(client, "/version", said)
        if isinstance(version, dict) and said.kind == "vllm":
            said.version = _text(version.get("version"))
    if said.model is None and said.metrics is not None:
        said.model = next((_text(name) for name in said.metrics.models()), None)
    return said


def scrape(client: Client, said: Said) -> None:
    """Read the metrics, again."""
    said.metrics, said.taken_at = None, monotonic()
    data = _get(client, "/metrics", said)
    if data is not None:
        metrics = Metrics(data.decode("utf-8", "replace"))
        said.taken_at = monotonic()
        if metrics:
            said.metrics = metrics
        else:
            said.tried[-1] = ("/metrics", "no metrics in the answer")


def _sglang(client: Client, said: Said) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = _json(client, path, said)
        if not isinstance(info, dict) or not ("internal_states" in info or "speculative_algorithm" in info):
            continue
        said.kind = "sglang"
        # The answer holds all arguments of the server, its keys among them: only these are looked at.
        said.version = _text(info.get("version"))
        said.model = said.model or _text(info.get("served_model_name")) or _text(info.get("model_path"))
        if "speculative_algorithm" in info:
            said.algorithm = _text(info["speculative_algorithm"]) or "none"
        said.steps = _whole(info.get("speculative_num_steps"))
        said.draft_tokens = _whole(info.get("speculative_num_draft_tokens"))
        states = info.get("internal_states")
        states = [state for state in states if isinstance(state, dict)] if isinstance(states, list) else []
        lengths = [value for value in (_number(state.get("avg_spec_accept_length")) for state in states) if value]
        speeds = [value for value in (_number(state.get("last_gen_throughput")) for state in states) if value is not None]
        said.told_accept_length = sum(lengths) / len(lengths) if lengths else None
        said.told_throughput = sum(speeds) if speeds else None
        return


@dataclass
class Speculation:
    """How drafting goes; None for what is not told."""

    enabled: bool | None
    accept_length: float | None = None
    accept_rate: float | None = None
    by_position: tuple[float, ...] = ()
    drafts: float | None = None
    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    scope: str | None = None
    source: str | None = None


def speculation(said: Said) -> Speculation:
    """Return how drafting goes, over as long a time as the server tells."""
    if said.kind == "vllm":
        return _vllm_speculation(said.metrics, None)
    if said.kind == "sglang":
        return _sglang_speculation(said)
    return Speculation(None)


def _sglang_speculation(said: Said) -> Speculation:
    enabled = None if said.algorithm is None else said.algorithm != "none"
    metrics = said.metrics
    length = metrics.mean("sglang:spec_accept_length") if metrics else None
    rate = metrics.mean("sglang:spec_accept_rate") if metrics else None
    scope, source = "the last batches that were counted", "sglang:spec_accept_length"
    # The gauge exists without speculation too, and is 0 before the first draft.
    if not length:
        length, scope, source = said.told_accept_length, "since the server started or its cache was flushed", "avg_spec_accept_length"
        rate = None
    if enabled is None and length:
        enabled = True
    if not enabled or not length:
        return Speculation(enabled)
    return Speculation(enabled, accept_length=length, accept_rate=rate or None, scope=scope, source=source)


def _vllm_speculation(metrics: Metrics | None, before: Metrics | None) -> Speculation:
    if metrics is None:
        return Speculation(None)
    if not metrics.has("vllm:spec_decode"):
        # The counters exist exactly where speculation is configured.
        return Speculation(enabled=False)

    def counted(name: str) -> float | None:
        names = (name + "_total", name)
        value = metrics.total(*names)
        earlier = before.total(*names) if before is not None else None
        # A counter that went down belongs to a server that was started again.
        return None if value is None or value < (earlier or 0.0) else value - (earlier or 0.0)

    drafts = counted("vllm:spec_decode_num_drafts")
    proposed = counted("vllm:spec_decode_num_draft_tokens")
    accepted = counted("vllm:spec_decode_num_accepted_tokens")
    found = Speculation(True, drafts=drafts, draft_tokens=proposed, accepted_tokens=accepted)  # noqa: FBT003
    found.scope = "since the server started" if before is None else "the measured load"
    if accepted is not None and drafts is not None and drafts >= 1:
        found.accept_length, found.source = 1 + accepted / drafts, "vllm:spec_decode_num_accepted_tokens_total"
        found.by_position = _by_position(metrics, before, drafts)
    if accepted is not None and proposed is not None and proposed >= 1:
        found.accept_rate = accepted / proposed
    elif before is None:
        found.accept_rate = metrics.mean("vllm:spec_decode_draft_acceptance_rate")
        found.source = found.source or ("vllm:spec_decode_draft_acceptance_rate" if found.accept_rate is not None else None)
    return found


def _by_position(metrics: Metrics, before: Metrics | None, drafts: float) -> tuple[float, ...]:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    counts: dict[int, float] = {}
    for source, sign in ((metrics, 1.0), (before, -1.0)):
        for sample in source.samples(name + "_total", name) if source is not None else ():
            position = sample.labels.get("position", "")
            if position.isdecimal() and len(position) < 4:
                counts[int(position)] = counts.get(int(position), 0.0) + sign * sample.value
    return tuple(counts[position] / drafts for position in sorted(counts))


def during(kind: str, before: Metrics | None, after: Metrics | None) -> Speculation:
    """Return how drafting went between two readings of a server's metrics; vLLM only, SGLang has no such counters."""
    return _vllm_speculation(after, before) if kind == "vllm" and before is not None else Speculation(None)


@dataclass
class Load:
    """What a server does now; None for what it does not tell."""

    running: float | None
    waiting: float | None
    kv_usage: float | None
    cache_hit_rate: float | None
    generated_total: float | None
    prompt_total: float | None
    told_throughput: float | None


def load(said: Said) -> Load:
    """Return what a server does now."""
    metrics = said.metrics
    if metrics is None:
        return Load(None, None, None, None, None, None, said.told_throughput)
    if said.kind == "vllm":
        queries = metrics.total("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
        hits = metrics.total("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
        return Load(
            metrics.total("vllm:num_requests_running"),
            metrics.total("vllm:num_requests_waiting"),
            metrics.largest("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            hits / queries if hits is not None and queries is not None and queries >= 1 else None,
            metrics.total("vllm:generation_tokens_total", "vllm:generation_tokens"),
            metrics.total("vllm:prompt_tokens_total", "vllm:prompt_tokens"),
            metrics.total("vllm:avg_generation_throughput_toks_per_s"),
        )
    told = metrics.total("sglang:gen_throughput")
    return Load(
        metrics.total("sglang:num_running_reqs"),
        metrics.total("sglang:num_queue_reqs"),
        metrics.largest("sglang:token_usage"),
        metrics.mean("sglang:cache_hit_rate"),
        metrics.total("sglang:generation_tokens_total"),
        metrics.total("sglang:prompt_tokens_total"),
        told if told is not None else said.told_throughput,
    )


def _get(client: Client, path: str, said: Said) -> bytes | None:
    try:
        data = client.get(path)
    except NoAnswer as error:
        said.reached = said.reached or error.reached
        said.tried.append((path, str(error).partition(": ")[2] or str(error)))
        return None
    said.reached = True
    said.tried.append((path, "ok"))
    return data


def _json(client: Client, path: str, said: Said) -> Any:
    data = _get(client, path, said)
    if data is None:
        return None
    try:
        return parse(data)
    except NoAnswer as error:
        said.tried[-1] = (path, str(error))
        return None


def _first(value: Any) -> dict[str, Any]:
    return value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else {}


def _text(value: Any) -> str | None:
    return legible(value[:_TEXT]) if isinstance(value, str) and value else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 20 else None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in {int, float} and isfinite(value) and 0 <= value < 1e15 else None

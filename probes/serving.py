"""Say how a running SGLang or vLLM server does: acceptance of drafts, throughput, KV cache; measure it if asked to.

Reads its metrics and information over HTTP from the host, twice with a pause. Only with ``measure`` it sends requests of
its own: a fixed number with fixed prompts, shown in the answer. The server's GPUs work for them, and other users of the
server wait meanwhile, so a server that has requests, or does not tell, is left alone unless ``while_busy`` is set.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn

    from probes.lib.serving.http import Client
    from probes.lib.serving.measure import Measured
    from probes.lib.serving.servers import Load, Said, Speculation
    from remote_diag.findings import Level
    from remote_diag.probe import Context

EFFECTS = ("network", "reads-files")
MAX_REQUESTS = 512
MAX_TOKENS = 4096
MAX_CONCURRENCY = 128
KV_FULL = 0.9
ACCEPT_LIMIT = 1.3
RESERVE_S = 15.0
"""Seconds before the deadline at which no request is sent any more."""


@dataclass(frozen=True)
class Params:
    """Which server, and whether to load it."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    url: str = "http://127.0.0.1:30000"
    """The server, as the host reaches it."""
    baseline_url: str | None = None
    """The same model without speculation, to compare with."""
    api_key_file: str | None = None
    """File on the host that holds the server's key; the key itself is never sent to or from rdiag."""
    interval_s: float = 2.0
    """Seconds between the two readings, 0 to 60; 0 reads once."""
    request_s: float = 10.0
    """Seconds that one question of ours may take, above 0 to 60."""
    measure: bool = False
    """Whether to send requests of our own."""
    requests: int = 16
    """How many, to each server, 1 to 512."""
    max_tokens: int = 256
    """Tokens of each answer, 1 to 4096."""
    concurrency: int = 1
    """How many at a time, 1 to 128."""
    while_busy: bool = False
    """Whether to measure although the server has other requests, or does not tell whether it has."""
    accept_limit: float = ACCEPT_LIMIT
    """Acceptance length (tokens a verify step, 1 without any accepted draft) below which the finding is degraded."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name, low, high in (
            ("interval_s", 0, 60), ("request_s", 0.1, 60), ("requests", 1, MAX_REQUESTS), ("max_tokens", 1, MAX_TOKENS),
            ("concurrency", 1, MAX_CONCURRENCY), ("accept_limit", 1, 100),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise ValueError("%s must be %g to %g" % (name, low, high))
        for text in (self.url, self.baseline_url):
            # Anywhere: a password with / or ? in it ends the host early, and would be shown as a port that is none.
            if text is not None and ("@" in text or not text.strip()):
                raise ValueError("an address must not be empty, nor hold a name or password; see api_key_file")


@dataclass(frozen=True)
class Endpoint:
    """One path that was asked."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    path: str
    """Such as /metrics."""
    outcome: str
    """ok, or what went wrong."""


@dataclass(frozen=True)
class Drafting:
    """How speculation goes; None for what the server does not tell."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    enabled: bool | None
    """Whether the server speculates."""
    algorithm: str | None
    """As the server names it: EAGLE3...; SGLang only."""
    steps: int | None
    """Draft steps that are configured; SGLang only."""
    draft_tokens: int | None
    """Tokens that are verified at once; SGLang only."""
    accept_length: float | None
    """Tokens a verify step gives, the target's own one included; 1 if no draft is ever accepted."""
    accept_rate: float | None
    """Accepted / proposed draft tokens, 0 to 1."""
    accept_rate_by_position: tuple[float, ...]
    """Share of drafts whose k-th token was accepted, from the first on; vLLM only."""
    drafts: float | None
    """Verify steps that were counted."""
    scope: str | None
    """The time that the numbers are about."""
    source: str | None
    """The metric or field that they come from."""


@dataclass(frozen=True)
class Measurement:
    """What our own requests showed."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    requests: int
    """Requests that were to be sent."""
    done: int
    """Answered in full."""
    failed: int
    """Not answered, or not with status 200."""
    uncounted: int
    """Answered without saying how many tokens."""
    max_tokens: int
    """Tokens asked for in each."""
    concurrency: int
    """Requests at a time."""
    completion_tokens: int
    """Tokens in all answers."""
    wall_s: float
    """From the first request to the last answer, s."""
    tokens_per_s: float | None
    """completion_tokens / wall_s; None without any."""
    request_tokens_per_s: float | None
    """Median over requests of tokens / latency."""
    latency_p50_s: float | None
    """Median latency of a request, s."""
    latency_p99_s: float | None
    """99th percentile (nearest rank), s."""
    accept_length: float | None
    """Tokens a verify step gave in these requests; None where the server does not tell."""
    accept_source: str | None
    """How that is known."""
    errors: tuple[str, ...]
    """The first ten different ones."""


@dataclass(frozen=True)
class Server:
    """One server."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    role: str
    """server, or baseline."""
    url: str
    """Its address."""
    reached: bool
    """Whether anything answered there."""
    kind: str
    """sglang, vllm, unknown."""
    version: str | None
    """As it says."""
    model: str | None
    """As it says."""
    drafting: Drafting
    """How speculation goes."""
    generation_tokens_per_s: float | None
    """Tokens generated between our two readings / time; None where they are not counted."""
    told_tokens_per_s: float | None
    """The throughput that the server itself tells, over its last batches."""
    prompt_tokens_per_s: float | None
    """Prompt tokens between our two readings / time."""
    running: float | None
    """Requests that run."""
    waiting: float | None
    """Requests that wait."""
    kv_usage: float | None
    """Used share of the KV cache, 0 to 1; the fullest engine."""
    cache_hit_rate: float | None
    """Share of prompt tokens found in the prefix cache, 0 to 1."""
    generation_tokens_total: float | None
    """Tokens generated since the start."""
    endpoints: tuple[Endpoint, ...]
    """What was asked."""
    measurement: Measurement | None
    """What our own requests showed; None where none were sent."""


@dataclass(frozen=True)
class Comparison:
    """The server beside the one without speculation."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    tokens_per_s: float
    """Of the server."""
    baseline_tokens_per_s: float
    """Of the baseline."""
    speedup: float
    """tokens_per_s / baseline_tokens_per_s."""


@dataclass(frozen=True)
class Result:
    """What the servers say."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    servers: tuple[Server, ...]
    """The server, then the baseline if one was given."""
    comparison: Comparison | None
    """With and without speculation; None unless both were measured."""


def run(params: Params, context: Context) -> Result:
    """Ask, perhaps measure, judge."""
    key = _key(params.api_key_file, context)
    servers = []
    for role, address in (("server", params.url), ("baseline", params.baseline_url)):
        if address is not None:
            servers.append(_one(role, address, key, params, context))
    comparison = _compare(servers)
    for server in servers:
        _judge(server, params, context)
    _judge_comparison(servers, comparison, params, context)
    return Result(tuple(servers), comparison)


def _key(path: str | None, context: Context) -> str | None:
    from probes.lib.files import File, Meter, Unreadable

    if path is None:
        return None
    try:
        with File(path, Meter()) as file:
            text = file.read(0, min(file.size, 4096)).decode("ascii", "replace").strip()
    except Unreadable as error:
        context.unfit("cannot read the key: %s" % error, hint="name a file on the host that holds nothing but the key")
    if not text or not text.isprintable() or " " in text or not text.isascii():
        context.unfit("%s holds no key" % path, hint="it must hold nothing but the key, on one line")
    return text


def _one(role: str, address: str, key: str | None, params: Params, context: Context) -> Server:
    from probes.lib.serving import servers as lib
    from probes.lib.serving.http import Client, Url

    try:
        url = Url(address)
    except ValueError as error:
        _bad_url(str(error), context)
    client = Client(url, key, params.request_s)
    context.progress(0, 2, unit="steps", label="asking %s" % url)
    said = lib.ask(client)
    first, first_at = lib.load(said), said.taken_at
    generated = prompted = None
    if said.metrics is not None and params.interval_s > 0:
        time.sleep(min(params.interval_s, max(0.0, context.remaining() - RESERVE_S)))
        lib.scrape(client, said)
    now = lib.load(said)
    elapsed = said.taken_at - first_at
    if elapsed > 0:
        generated = _rate(first.generated_total, now.generated_total, elapsed)
        prompted = _rate(first.prompt_total, now.prompt_total, elapsed)
    drafting = lib.speculation(said)
    measurement = None
    if params.measure and said.reached and said.kind != "unknown":
        measurement = _measured(role, client, said, now, params, context)
    context.progress(2, 2, unit="steps", label="asked %s" % url)
    return Server(
        role=role,
        url=str(url),
        reached=said.reached,
        kind=said.kind,
        version=said.version,
        model=said.model,
        drafting=_drafting(said, drafting),
        generation_tokens_per_s=generated,
        told_tokens_per_s=now.told_throughput,
        prompt_tokens_per_s=prompted,
        running=now.running,
        waiting=now.waiting,
        kv_usage=now.kv_usage,
        cache_hit_rate=now.cache_hit_rate,
        generation_tokens_total=now.generated_total,
        endpoints=tuple(Endpoint(path, outcome[:300]) for path, outcome in dict(said.tried).items()),
        measurement=measurement,
    )


def _bad_url(why: str, context: Context) -> NoReturn:
    context.unfit("that is no address of a server: %s" % why, hint="write http://127.0.0.1:30000, as the host reaches it")


def _rate(before: float | None, after: float | None, seconds: float) -> float | None:
    # A counter that went down belongs to a server that was started again.
    return (after - before) / seconds if before is not None and after is not None and after >= before else None


def _drafting(said: Said, found: Speculation) -> Drafting:
    return Drafting(
        enabled=found.enabled,
        algorithm=None if said.algorithm == "none" else said.algorithm,
        steps=said.steps,
        draft_tokens=said.draft_tokens,
        accept_length=found.accept_length,
        accept_rate=found.accept_rate,
        accept_rate_by_position=found.by_position,
        drafts=found.drafts,
        scope=found.scope,
        source=found.source,
    )


def _measured(  # noqa: PLR0917
    role: str, client: Client, said: Said, now: Load, params: Params, context: Context
) -> Measurement | None:
    from probes.lib.serving import servers as lib
    from probes.lib.serving.measure import measure

    others = (now.running or 0.0) + (now.waiting or 0.0)
    if (others or now.running is None) and not params.while_busy:
        told = "it has %.0f requests of others, so none was sent" % others
        if not others:
            told = "it does not tell whether others use it, so no request was sent"
        context.finding(
            "unknown", "server-busy", told, subject=str(client.url), value=others if others else None,
            unit="requests", threshold=0, threshold_source="others would wait, and the numbers would be theirs as well",
            action="%s, or measure all the same with --while-busy" % ("wait" if others else "turn its metrics on"),
        )  # fmt: skip
        return None
    seconds = context.remaining() - RESERVE_S
    if seconds <= 0:
        context.finding("unknown", "no-time-to-measure", "the deadline leaves no time to measure", subject=str(client.url), action="raise --timeout")
        return None
    before = said.metrics
    found = measure(
        client, said.kind, said.model, params.requests, params.max_tokens, params.concurrency, seconds,
        lambda done: context.progress(done, params.requests, unit="requests", label="measuring the %s" % role),
    )  # fmt: skip
    length, source = None, None
    if found.verify_steps:
        length, source = max(1.0, found.verified_tokens / found.verify_steps), "completion_tokens / spec_verify_ct of the answers"
    elif before is not None:
        lib.scrape(client, said)
        spoken = lib.during(said.kind, before, said.metrics)
        length, source = spoken.accept_length, spoken.source
    return _measurement(found, length, source, params)


def _measurement(found: Measured, length: float | None, source: str | None, params: Params) -> Measurement:
    from probes.lib.serving.measure import percentile

    counted = found.completion_tokens
    return Measurement(
        requests=params.requests,
        done=found.done,
        failed=found.failed,
        uncounted=found.uncounted,
        max_tokens=params.max_tokens,
        concurrency=params.concurrency,
        completion_tokens=counted,
        wall_s=found.wall_s,
        tokens_per_s=counted / found.wall_s if counted and found.wall_s > 0 else None,
        request_tokens_per_s=percentile(found.speeds, 0.5),
        latency_p50_s=percentile(found.latencies_s, 0.5),
        latency_p99_s=percentile(found.latencies_s, 0.99),
        accept_length=length,
        accept_source=source,
        errors=tuple(dict.fromkeys(found.errors))[:10],
    )


def _compare(servers: list[Server]) -> Comparison | None:
    # Half a load is another load: what was not answered may be what is slow.
    speeds = [server.measurement.tokens_per_s if server.measurement and _whole(server.measurement) else None for server in servers]
    if len(speeds) != 2 or speeds[0] is None or speeds[1] is None:
        return None
    return Comparison(speeds[0], speeds[1], speeds[0] / speeds[1])


def _whole(measured: Measurement) -> bool:
    return measured.done == measured.requests and not measured.failed and not measured.uncounted


def _judge(server: Server, params: Params, context: Context) -> None:
    from probes.lib.serving.advice import for_unknown_server, for_unread_metrics

    trouble = tuple("%s: %s" % (each.path, each.outcome) for each in server.endpoints if each.outcome != "ok")
    if not server.reached:
        context.finding(
            "unknown", "server-unreachable", "nothing answers there", subject=server.url, evidence=trouble[:3],
            action="look at its address as the host sees it: a container may have another one",
        )  # fmt: skip
        return
    if server.kind == "unknown":
        action = for_unknown_server([each.outcome for each in server.endpoints], keyed=params.api_key_file is not None)
        context.finding(
            "unknown", "server-unknown", "it is no SGLang and no vLLM that can be recognised", subject=server.url, evidence=trouble[:6],
            action=action,
        )  # fmt: skip
        return
    name = "%s%s" % ({"sglang": "SGLang", "vllm": "vLLM"}[server.kind], " " + server.version if server.version else "")
    context.finding("ok", "server", "%s serves %s" % (name, server.model or "a model that it does not name"), subject=server.url)
    for each in server.endpoints:
        if each.path == "/metrics" and each.outcome != "ok":
            advice = for_unread_metrics(server.kind, each.outcome)
            context.finding("unknown", "metrics-off", "its metrics cannot be read", subject=server.url, evidence=trouble[:6], action=advice)
    _judge_drafting(server, params, context)
    if server.kv_usage is not None and server.kv_usage >= KV_FULL and server.waiting:
        context.finding(
            "degraded", "kv-cache-full", "the KV cache is full and requests wait", subject=server.url, value=round(server.kv_usage, 4),
            threshold=KV_FULL, threshold_source="own judgement", evidence=("%.0f running, %.0f waiting" % (server.running or 0, server.waiting),),
            action="fewer requests at a time, a shorter context, or more memory for the cache",
        )  # fmt: skip
    measured = server.measurement
    if measured is not None and not _whole(measured):
        context.finding(
            "unknown", "requests-failed", "%d of %d requests were answered, %d without a count" % (measured.done, measured.requests, measured.uncounted),
            subject=server.url, value=measured.done, threshold=measured.requests, unit="requests", evidence=measured.errors[:5],
        )  # fmt: skip


def _judge_drafting(server: Server, params: Params, context: Context) -> None:
    drafting, measured = server.drafting, server.measurement
    if drafting.enabled is False:
        if server.role == "server":
            context.finding("ok", "no-speculation", "it does not speculate", subject=server.url)
        return
    length, source, scope = drafting.accept_length, drafting.source, drafting.scope
    if measured is not None and measured.accept_length is not None:
        length, source, scope = measured.accept_length, measured.accept_source, "our own requests"
    if length is None:
        told = "it speculates, and tells no acceptance yet" if drafting.enabled else "whether it speculates is not told"
        context.finding("unknown", "acceptance-unknown", told, subject=server.url, action="send it requests (--measure), and turn its metrics on")
        return
    evidence = ["from %s, over %s" % (source, scope)]
    # Rates over another span would contradict the length that our own requests had.
    if drafting.accept_rate is not None and scope == drafting.scope:
        evidence.append("%.1f %% of the draft tokens are accepted" % (100 * drafting.accept_rate))
    if drafting.accept_rate_by_position and scope == drafting.scope:
        evidence.append("by position: " + ", ".join("%.2f" % share for share in drafting.accept_rate_by_position[:16]))
    low = length < params.accept_limit
    level: Level = "degraded" if low else "ok"
    context.finding(
        level, "acceptance-length", "a verify step gives %.2f tokens" % length, subject=server.url, value=round(length, 4), unit="tokens",
        threshold=params.accept_limit,
        threshold_source="yours (accept_limit)" if params.accept_limit != ACCEPT_LIMIT else "accept_limit: own judgement, drafting costs about that much",
        evidence=tuple(evidence),
        action="find out why the drafter is rejected: rdiag vocab-compare, drafter-check, replay" if low else None,
    )  # fmt: skip


def _judge_comparison(servers: list[Server], comparison: Comparison | None, params: Params, context: Context) -> None:
    if not params.measure:
        return
    if len(servers) == 1:
        context.finding(
            "ok", "no-baseline", "there is one server only: what speculation gains is not known", subject=servers[0].url,
            action="neither SGLang nor vLLM can leave it out for one request: start a second server without, and give it as --baseline-url",
        )  # fmt: skip
        return
    with_it, without = servers
    if without.drafting.enabled or with_it.drafting.enabled is False:
        context.finding(
            "unknown", "not-comparable", "these are not one server with and one without speculation",
            evidence=tuple("%s %s: speculation %s" % (each.role, each.url, _told(each.drafting.enabled)) for each in servers),
        )  # fmt: skip
        return
    if with_it.model != without.model:
        context.finding("unknown", "models-differ", "the two servers name different models", evidence=(str(with_it.model), str(without.model)))
    if comparison is None:
        context.finding("unknown", "no-comparison", "with and without speculation could not both be measured")
        return
    low = comparison.speedup < 1
    level: Level = "degraded" if low else "ok"
    context.finding(
        level, "speedup", "speculation makes it %.2f times as fast: %.1f against %.1f tokens/s"
        % (comparison.speedup, comparison.tokens_per_s, comparison.baseline_tokens_per_s),
        value=round(comparison.speedup, 4), threshold=1.0, threshold_source="below it speculation costs more than it saves",
        evidence=(
            "%d requests of %d tokens, %d at a time, to each" % (params.requests, params.max_tokens, params.concurrency),
            *(() if without.drafting.enabled is False else ("whether the baseline speculates is not told",)),
        ),
        action="try fewer draft tokens, or leave speculation out at this concurrency" if low else None,
    )  # fmt: skip


def _told(value: bool | None) -> str:
    return {True: "on", False: "off", None: "not told"}[value]

"""A small load on a server, the same on each: a fixed number of requests with fixed prompts and lengths."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from time import monotonic

from probes.lib.serving.http import Client, NoAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

PROMPTS = (
    "Write a Python function that merges two sorted lists, and explain each line of it.",
    "Explain to a gardener how rain forms, from the sea to the drop on a leaf.",
    "Solve step by step: a train leaves at 9:40 and needs 2 h 35 min; when does it arrive, and why?",
    "Write a SQL query that finds customers without an order in the last year, with comments.",
    "Tell the story of a lighthouse keeper who finds a letter in a bottle.",
    "List the steps for changing the tyre of a bicycle, with a reason for each.",
    "Compare two ways of storing time series in a database, in a table and in words.",
    "Translate into German and French, sentence by sentence: The committee postponed its decision until spring.",
)
"""Different kinds of text, as drafters do well on some and badly on others. Each request is numbered: none is answered
from another one's cache."""


OVERSHOOT = 64
"""Tokens of the last accepted draft beyond what was asked for, which some releases let through; a count above is none."""


@dataclass
class Measured:
    """What came of the load."""

    done: int = 0
    failed: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    """Answers that do not say how many tokens they have."""
    wall_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    """Tokens/s of each request, from sending it to its answer."""
    verify_steps: int = 0
    verified_tokens: int = 0
    """Tokens of answers that say how many verify steps they took (SGLang)."""
    errors: list[str] = field(default_factory=list)
    cut: bool = False
    """Whether time ran out before all requests were sent."""


def measure(  # noqa: PLR0917
    client: Client, kind: str, model: str | None, requests: int, max_tokens: int, concurrency: int, seconds: float,
    progress: Callable[[int], None],
) -> Measured:  # fmt: skip
    """Send ``requests`` requests, at most ``concurrency`` at a time, and count.

    Args:
        client: of the server.
        kind: sglang is asked through its own /generate, which tells the verify steps; others through /v1/completions.
        model: its name for /v1/completions.
        requests: how many.
        max_tokens: tokens of each answer; the end of text is ignored, so that all are as long.
        concurrency: how many at a time.
        seconds: after which none is sent any more, and all are ended.
        progress: told how many are over; called in this thread only.
    """
    found = Measured()
    lock = threading.Lock()
    until = monotonic() + seconds
    numbers = iter(range(requests))

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            left = until - monotonic()
            if number is None:
                return
            if left <= 0:
                with lock:
                    found.cut = True
                return
            begun = monotonic()
            try:
                answer = _ask(client, kind, model, number, max_tokens, left)
            except NoAnswer as error:
                with lock:
                    found.failed += 1
                    found.errors.append(str(error))
                continue
            with lock:
                _count(found, answer, kind, max_tokens, monotonic() - begun)

    begun = monotonic()
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(concurrency, requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)
            progress(found.done + found.failed)
    found.wall_s = monotonic() - begun
    return found


def _ask(client: Client, kind: str, model: str | None, number: int, max_tokens: int, left: float) -> Any:  # noqa: PLR0917
    prompt = "Request %d. %s\n" % (number + 1, PROMPTS[number % len(PROMPTS)])
    if kind == "sglang":
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return client.post("/generate", {"text": prompt, "sampling_params": sampling}, left)
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return client.post("/v1/completions", body, left)


def _count(found: Measured, answer: Any, kind: str, max_tokens: int, seconds: float) -> None:
    found.done += 1
    found.latencies_s.append(seconds)
    told = answer.get("meta_info" if kind == "sglang" else "usage") if isinstance(answer, dict) else None
    told = told if isinstance(told, dict) else {}
    tokens = told.get("completion_tokens")
    if type(tokens) is not int or not 0 <= tokens <= max_tokens + OVERSHOOT:
        found.uncounted += 1
        return
    found.completion_tokens += tokens
    found.speeds.append(tokens / seconds if seconds > 0 else 0.0)
    steps = told.get("spec_verify_ct")
    if type(steps) is int and 0 < steps < 1 << 24:
        found.verify_steps += steps
        found.verified_tokens += tokens


def percentile(values: list[float], share: float) -> float | None:
    """Return the nearest-rank percentile; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]

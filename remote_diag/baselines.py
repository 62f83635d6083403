"""What a host said when it was well, kept on this machine, and how it differs from that now.

``--save-baseline`` writes ``<user data folder>/baselines/<host>/<probe>.json``; every later run of that probe on that
host is held against it. What is compared, and how far it may move, a command says with :class:`Watch`::

    WATCHED = (Watch("gpus[uuid]", level="fail"), Watch("gpus[uuid].power_limit_w", tolerance=0.01, worse="lower"))
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from . import paths
from .errors import ConfigError, LocalIOError
from .files import read_file
from .findings import Finding, Level, status
from .outcome import Outcome
from .strict_json import loads

SCHEMA_VERSION = 1
MAX_BYTES = 64 * 1024 * 1024
Plain: TypeAlias = bool | int | float | str | None
_STEP = re.compile(r"(?P<name>[a-z0-9_]+)(?:\[(?P<by>[a-z0-9_,]+)\])?\Z")
_MAX_FINDINGS = 200


@dataclass(frozen=True)
class Watch:
    """One value, or one kind of thing, that is compared."""

    path: str
    """Names joined by dots; ``gpus[uuid]`` goes through a list whose items are recognised by their ``uuid``, and
    ``rows[size_bytes,in_place]`` by two fields. A path that ends with a list watches which items are there."""
    level: Level = "degraded"
    """What a change is worth; ``ok`` for one that is worth knowing and no fault."""
    tolerance: float = 0.0
    """Relative change of a number that means nothing."""
    worse: Literal["any", "lower", "higher"] = "any"
    """Which direction is a change for the worse; the other one is only told, as ``ok``."""
    unit: str | None = None
    action: str | None = None


@dataclass(frozen=True)
class Difference:
    """One value that is not what it was."""

    key: str
    """``gpus[GPU-12ab].power_limit_w``."""
    old: Plain
    """None where there was no value; for a thing that is new or gone, whether it was there."""
    new: Plain
    change: float | None
    """Relative to the old value, for numbers."""
    watch: Watch

    def as_dict(self) -> dict[str, Plain]:
        """Return the object that ``--json`` prints."""
        return {"key": self.key, "old": self.old, "new": self.new, "change": self.change}


@dataclass(frozen=True)
class Baseline:
    """A stored result."""

    host: str
    probe: str
    saved_at: str
    """ISO 8601, UTC."""
    result: Mapping[str, Any]


def path_of(host: str, probe: str) -> Path:
    """Return where the baseline of a probe on a host is kept."""
    return paths.baselines() / _as_name(host) / f"{_as_name(probe)}.json"


def _as_name(text: str) -> str:
    # What stands for a folder (".", "..") or separates them must not come out of a name.
    return quote(text, safe="") if text.strip(".") else text.replace(".", "%2E")


def save(host: str, probe: str, result: Mapping[str, Any]) -> Path:
    """Store ``result`` as what is normal for ``probe`` on ``host``; replaces an older one as a whole.

    Raises:
        LocalIOError: it cannot be written.
    """
    target = path_of(host, probe)
    content = {
        "schema_version": SCHEMA_VERSION,
        "host": host,
        "probe": probe,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "result": result,
    }
    data = json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)  # noqa: PTH105 - the temporary name is a string
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise LocalIOError(f"the baseline cannot be written to {target}: {error.strerror}", host=host) from error
    return target


def load(host: str, probe: str) -> Baseline | None:
    """Return the stored baseline; None when there is none.

    Raises:
        ConfigError: the file is damaged, or of another version.
    """
    path = path_of(host, probe)
    if not path.exists():
        return None
    hint = "save it anew with --save-baseline, or delete it"
    try:
        content = loads(read_file(path, limit=MAX_BYTES))
    except ValueError as error:
        raise ConfigError(f"{path}: is no baseline: {error}", hint=hint) from error
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"{path}: is no baseline of this version of rdiag", hint=hint)
    saved_at, result = content.get("saved_at"), content.get("result")
    if content.get("probe") != probe or not isinstance(saved_at, str) or not isinstance(result, dict):
        raise ConfigError(f"{path}: is no baseline of {probe}", hint=hint)
    return Baseline(host, probe, saved_at, result)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], watched: Sequence[Watch]) -> tuple[Difference, ...]:
    """Return what differs between two results, as far as it is watched.

    Items of lists are matched by what identifies them, never by their place; an item that is new or gone is one
    difference of its list, and its values are not compared. A list whose items cannot be told apart is skipped.
    """
    found: list[Difference] = []
    for watch in watched:
        before, after = dict(_reach(old, watch.path)), dict(_reach(new, watch.path))
        whole_items = watch.path.endswith("]")
        for key in [*before, *(key for key in after if key not in before)]:
            if whole_items:
                if (key in before) != (key in after):
                    found.append(Difference(key, key in before, key in after, None, watch))
            elif key in before and key in after:
                difference = _compare(key, before[key], after[key], watch)
                if difference is not None:
                    found.append(difference)
    return tuple(found)


def _reach(value: Any, path: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of everything that ``path`` leads to."""
    step, _, rest = path.partition(".")
    match = _STEP.match(step)
    if match is None:
        raise ValueError(f"not a path of a watch: {path!r}")
    if not isinstance(value, Mapping) or match["name"] not in value:
        return
    below, name = value[match["name"]], prefix + match["name"]
    if match["by"] is None:
        yield from _reach(below, rest, name + ".") if rest else [(name, below)]
        return
    items: dict[str, Any] = {}
    for item in below if isinstance(below, Sequence) and not isinstance(below, str) else ():
        identity = [item.get(part) if isinstance(item, Mapping) else None for part in match["by"].split(",")]
        key = "/".join(str(part) for part in identity)
        if None in identity or key in items:
            return
        items[key] = item
    for key, item in items.items():
        label = f"{name}[{key}]"
        yield from _reach(item, rest, label + ".") if rest else [(label, item)]


def _compare(key: str, old: Any, new: Any, watch: Watch) -> Difference | None:
    old, new = (value if isinstance(value, (bool, int, float, str, type(None))) else json.dumps(value) for value in (old, new))
    if old == new:
        return None
    change = None
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (old, new)):
        change = (new - old) / abs(old) if old else None
        if change is not None and abs(change) <= watch.tolerance:
            return None
    return Difference(key, old, new, change, watch)


def finding(difference: Difference, baseline: Baseline) -> Finding:
    """Return a difference as a finding."""
    watch, key = difference.watch, difference.key
    level: Level = watch.level
    if watch.path.endswith("]"):
        message = f"{key} is {'gone' if difference.old else 'new'} since the baseline"
        level = level if difference.old or watch.worse == "any" else "ok"
    elif difference.new is None:
        message, level = f"{key} can no longer be told; it was {difference.old}", "unknown"
    elif difference.old is None:
        message, level = f"{key} can be told now: {difference.new}", "ok"
    else:
        percent = "" if difference.change is None else f" ({difference.change:+.1%})"
        message = f"{key} was {difference.old} and is {difference.new}{percent}"
        if watch.worse != "any" and difference.change is not None and (difference.change < 0) != (watch.worse == "lower"):
            level = "ok"
    return Finding(
        level,
        "changed-since-baseline",
        message,
        subject=key,
        value=difference.new,
        unit=watch.unit,
        threshold=difference.old,
        threshold_source=f"baseline of {baseline.host}, saved {baseline.saved_at}",
        action=watch.action or "find out what changed; if it is meant, save a new baseline with --save-baseline",
    )


def _unfit(result: Mapping[str, Any]) -> str | None:
    """Say why a result is not what is normal, where it says so itself; None where nothing speaks against it."""
    if result.get("complete") is False:
        return "the run is not complete"
    if result.get("correctness") == "wrong":
        return "data arrived wrong"
    gpus = result.get("gpus")
    failed = [gpu for gpu in gpus if isinstance(gpu, dict) and gpu.get("status") == "fail"] if isinstance(gpus, list) else []
    return f"{len(failed)} of {len(gpus or [])} GPUs have failed" if failed else None


def _not_saved(why: str) -> Finding:
    message = f"no baseline is saved: {why}; an older one stays"
    return Finding("unknown", "baseline-not-saved", message, action="run it again with --save-baseline when that is mended")


def apply(
    outcome: Outcome[Any], watched: Sequence[Watch], *, save_now: bool = False, like: str | None = None
) -> Outcome[Any]:
    """Hold an outcome against the host's baseline and return it with what that adds to its findings and status.

    Args:
        outcome: of a probe that gave a result; others come back as they are.
        watched: what is compared.
        save_now: store the result as the baseline afterwards; one that says itself that it is not complete, that data
            were wrong, or that a GPU has failed, is no baseline and replaces none.
        like: hold it against the baseline of this other host instead.

    Raises:
        ConfigError: the stored baseline is damaged, or ``like`` has none.
        LocalIOError: the new one cannot be written.
    """
    if outcome.answer is None:
        return outcome
    result = json.loads(json.dumps(dataclasses.asdict(outcome.answer)))
    baseline = None if save_now else load(like or outcome.host, outcome.probe)
    if like is not None and baseline is None:
        raise ConfigError(
            f"there is no baseline of {like} for {outcome.probe}", hint=f"rdiag {outcome.probe} --host {like} --save-baseline"
        )
    about: dict[str, Any] | None = None
    unfit = _unfit(result) if save_now else None
    if unfit is not None:
        findings = (*outcome.findings, _not_saved(unfit))
        outcome = dataclasses.replace(outcome, findings=findings, status=status(findings))
    elif save_now:
        path = save(outcome.host, outcome.probe, result)
        about = {"saved": str(path), "differences": []}
    elif baseline is not None:
        found = differences(baseline.result, result, watched)
        about = {"saved_at": baseline.saved_at, "differences": [difference.as_dict() for difference in found]}
        more = tuple(finding(difference, baseline) for difference in found[:_MAX_FINDINGS])
        findings = outcome.findings + more
        outcome = dataclasses.replace(outcome, findings=findings, status=status(findings))
    return dataclasses.replace(outcome, baseline=about)

"""What a host said when it was well, kept on this machine, and how it differs from that now.

``--save-baseline`` writes ``<user data folder>/baselines/<host>/<probe>.json``; every later run of that probe on that
host is held against it. Where a result holds for conditions only (so many ranks, this type), each set of conditions has
a file of its own beside it, ``<probe>@all_reduce,8-ranks,1a2b3c4d.json``. What is compared, and under which conditions,
a command says with :class:`remote_diag.comparison.Comparison`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import paths
from .comparison import Comparison, Plain, differences, findings
from .errors import ConfigError, LocalIOError
from .files import read_file
from .findings import Finding, status
from .outcome import Outcome
from .strict_json import loads

SCHEMA_VERSION = 1
MAX_BYTES = 64 * 1024 * 1024
_MAX_FILES = 100
"""Files of one probe on one host that are looked through for conditions."""
_MAX_NAME = 80
_MAX_TOLD = 3
_HINT = "save it anew with --save-baseline, or delete it"


@dataclass(frozen=True)
class Baseline:
    """A stored result."""

    host: str
    probe: str
    saved_at: str
    """ISO 8601, UTC."""
    result: Mapping[str, Any]
    conditions: Mapping[str, Plain] | None = None
    """What it holds for; None where the file is older than conditions: then the result tells."""
    by_host: tuple[str, ...] = ()
    """Conditions that nobody had asked for: the host decided."""
    path: Path = Path()


def path_of(host: str, probe: str, conditions: Mapping[str, Plain] | None = None) -> Path:
    """Return where the baseline of a probe on a host is kept that holds for ``conditions``."""
    name = _as_name(probe)
    if conditions:
        text = json.dumps(dict(conditions), sort_keys=True, ensure_ascii=True)
        words = ",".join(value if isinstance(value, str) else f"{value}-{key}" for key, value in conditions.items())
        # "@" is in no name: it is written as %40 there. What tells conditions apart is the digest.
        readable = re.sub(r"[^A-Za-z0-9,_-]+", "-", words)[:_MAX_NAME].strip("-,")
        name += f"@{readable},{hashlib.sha256(text.encode('ascii')).hexdigest()[:8]}"
    return paths.baselines() / _as_name(host) / f"{name}.json"


def _as_name(text: str) -> str:
    # What stands for a folder (".", "..") or separates them must not come out of a name.
    return quote(text, safe="") if text.strip(".") else text.replace(".", "%2E")


def save(
    host: str, probe: str, result: Mapping[str, Any], conditions: Mapping[str, Plain] | None = None, by_host: tuple[str, ...] = ()
) -> Path:
    """Store ``result`` as what is normal for ``probe`` on ``host``; replaces an older one of the same conditions as a whole.

    Raises:
        LocalIOError: it cannot be written.
    """
    target = path_of(host, probe, conditions)
    content = {
        "schema_version": SCHEMA_VERSION,
        "host": host,
        "probe": probe,
        "saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "conditions": dict(conditions or {}),
        "by_host": list(by_host),
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
        raise LocalIOError(f"the baseline cannot be written to {target}: {error.strerror}", host=host, hint="see that the folder can be written") from error
    return target


def check_writable(host: str, probe: str) -> None:
    """See that a baseline could be stored, before anything is measured for it.

    Raises:
        LocalIOError: it could not.
    """
    folder = path_of(host, probe).parent
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")
        os.close(descriptor)
        Path(temporary).unlink(missing_ok=True)
    except OSError as error:
        hint = "see that the folder can be written, or leave --save-baseline away"
        raise LocalIOError(f"no baseline can be written to {folder}: {error.strerror}", host=host, hint=hint) from error


def load(host: str, probe: str, conditions: Mapping[str, Plain] | None = None) -> Baseline | None:
    """Return the stored baseline in the file of these conditions; None when there is none.

    Raises:
        ConfigError: the file is damaged, of another version, or of another host or probe.
    """
    path = path_of(host, probe, conditions)
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}", hint="check the path and its permissions") from None
    return _read(path, host, probe)


def _read(path: Path, host: str, probe: str) -> Baseline:
    try:
        content = loads(read_file(path, limit=MAX_BYTES))
    except ValueError as error:
        raise ConfigError(f"{path}: is no baseline: {error}", hint=_HINT) from error
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(f"{path}: is no baseline of this version of rdiag", hint=_HINT)
    saved_at, result, conditions = content.get("saved_at"), content.get("result"), content.get("conditions")
    if content.get("probe") != probe or not isinstance(saved_at, str) or not isinstance(result, dict):
        raise ConfigError(f"{path}: is no baseline of {probe}", hint=_HINT)
    if content.get("host") != host:
        raise ConfigError(f"{path}: is the baseline of the host {content.get('host')!r}, not of {host}", hint=_HINT)
    if not (conditions is None or isinstance(conditions, dict)) or any(isinstance(value, (dict, list)) for value in (conditions or {}).values()):
        raise ConfigError(f"{path}: is no baseline: the conditions make no sense", hint=_HINT)
    by_host = content.get("by_host")
    return Baseline(host, probe, saved_at, result, conditions, tuple(by_host) if isinstance(by_host, list) else (), path)


def _others(host: str, probe: str) -> Iterator[Baseline]:
    """Yield the stored baselines of a probe on a host, whatever they hold for; those that cannot be read are left out."""
    alone = path_of(host, probe)
    beginning = f"{alone.stem}@"
    try:
        names = sorted(name for name in os.listdir(alone.parent) if name == alone.name or (name.startswith(beginning) and name.endswith(".json")))  # noqa: PTH208 - names suffice
    except OSError:
        return
    for name in names[:_MAX_FILES]:
        try:
            yield _read(alone.parent / name, host, probe)
        except ConfigError:
            continue


@dataclass(frozen=True)
class _Held:
    """What a result is held against."""

    conditions: dict[str, Plain]
    by_host: tuple[str, ...]
    baseline: Baseline | None = None
    others: tuple[tuple[Baseline, dict[str, Plain]], ...] = ()
    """Those that hold for something else."""


def _find(host: str, probe: str, comparison: Comparison, conditions: dict[str, Plain], by_host: tuple[str, ...]) -> _Held:
    baseline = load(host, probe, conditions)
    if baseline is not None and (not comparison.conditions or _conditions_of(baseline, comparison) == conditions):
        return _Held(conditions, by_host, baseline)
    if not comparison.conditions:
        return _Held(conditions, by_host)
    others = tuple((other, _conditions_of(other, comparison)) for other in _others(host, probe))
    fitting = next((other for other, its in others if its == conditions), None)
    return _Held(conditions, by_host, fitting, others)


def _conditions_of(baseline: Baseline, comparison: Comparison) -> dict[str, Plain]:
    """Return what a baseline holds for; where its file does not say, its result does."""
    told = comparison.conditions_of(baseline.result, {})
    if baseline.conditions is None:
        return told
    known = {condition.name for condition in comparison.conditions}
    return {name: value for name, value in baseline.conditions.items() if name in known and value is not None}


def _unfit(outcome: Outcome[Any], result: Mapping[str, Any], comparison: Comparison) -> str | None:
    """Say why a result is not what is normal, where it says so itself; None where nothing speaks against it."""
    if result.get("complete") is False:
        return "the run is not complete"
    if result.get("correctness") == "wrong":
        return "data arrived wrong"
    gpus = result.get("gpus")
    failed = [gpu for gpu in gpus if isinstance(gpu, dict) and gpu.get("status") == "fail"] if isinstance(gpus, list) else []
    if failed:
        return f"{len(failed)} of {len(gpus or [])} GPUs have failed"
    why = comparison.unlisted(result, _codes(outcome))
    if why is not None:
        return why
    first = next((finding for finding in outcome.findings if finding.level == "fail"), None)
    return None if first is None else f"something has failed: {first.subject + ': ' if first.subject else ''}{first.message}"


def _codes(outcome: Outcome[Any]) -> frozenset[str]:
    return frozenset(finding.code for finding in outcome.findings)


def _with(outcome: Outcome[Any], more: list[Finding]) -> Outcome[Any]:
    told = (*outcome.findings, *more)
    return dataclasses.replace(outcome, findings=told, status=status(told))


def _not_saved(why: str) -> Finding:
    message = f"no baseline is saved: {why}; an older one stays"
    return Finding("unknown", "baseline-not-saved", message, action="run it again with --save-baseline when that is mended")


def check_like(like: str, probe: str) -> None:
    """See that there is a baseline of another host to compare with, before anything is contacted.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    if load(like, probe) is None and next(_others(like, probe), None) is None:
        raise ConfigError(f"there is no baseline of {like} for {probe}", hint=f"rdiag {probe} --host {like} --save-baseline")


def apply(
    outcome: Outcome[Any],
    comparison: Comparison,
    *,
    asked: Mapping[str, Any] | None = None,
    save_now: bool = False,
    like: str | None = None,
) -> Outcome[Any]:
    """Hold an outcome against the host's baseline and return it with what that adds to its findings and status.

    A result is only compared with one of the same conditions; where there are others only, a note says so. What was
    measured is never lost to a baseline: one that cannot be read or written is a finding.

    Args:
        outcome: of a probe that gave a result; others come back as they are.
        comparison: what is compared, and when.
        asked: the parameters of the run.
        save_now: store the result as the baseline afterwards; one that says itself that it is not complete, that data
            were wrong, that something has failed, or that nobody listed everything, is no baseline and replaces none.
        like: hold it against the baseline of this other host instead.

    Raises:
        ConfigError: the baseline of ``like`` is damaged, or there is none.
    """
    if outcome.answer is None:
        return outcome
    result = json.loads(json.dumps(dataclasses.asdict(outcome.answer)))
    asked = asked or {}
    conditions = comparison.conditions_of(result, asked)
    by_host = tuple(each.name for each in comparison.conditions if each.option is not None and asked.get(each.option) is None)
    if save_now:
        return _save(outcome, result, comparison, conditions, by_host)
    if like is not None:
        check_like(like, outcome.probe)
    try:
        held = _find(like or outcome.host, outcome.probe, comparison, conditions, by_host)
    except ConfigError as error:
        if like is not None:
            raise
        told = Finding("unknown", "baseline-unreadable", f"nothing is compared with the baseline: {error.message}", action=error.hint)
        return _with(outcome, [told])
    if held.baseline is None:
        return _none_fits(outcome, comparison, held, like or outcome.host)
    found = differences(held.baseline.result, result, comparison, _codes(outcome))
    about = {
        "saved_at": held.baseline.saved_at, "conditions": conditions, "differences": [difference.as_dict() for difference in found],
    }  # fmt: skip
    told_of = findings(found, f"baseline of {held.baseline.host}, saved {held.baseline.saved_at}")
    return dataclasses.replace(_with(outcome, told_of) if told_of else outcome, baseline=about)


def _save(
    outcome: Outcome[Any], result: Mapping[str, Any], comparison: Comparison, conditions: dict[str, Plain], by_host: tuple[str, ...]
) -> Outcome[Any]:
    unfit = _unfit(outcome, result, comparison)
    if unfit is not None:
        return _with(outcome, [_not_saved(unfit)])
    try:
        path = save(outcome.host, outcome.probe, result, conditions, by_host)
    except LocalIOError as error:
        # What was measured is worth more than the place where it was to be kept.
        return _with(outcome, [_not_saved(error.message)])
    _drop_older(outcome, comparison, conditions, path)
    about = {"saved": str(path), "conditions": conditions, "holds": _holds(result, comparison, conditions), "differences": []}
    return dataclasses.replace(outcome, baseline=about)


def _drop_older(outcome: Outcome[Any], comparison: Comparison, conditions: dict[str, Plain], path: Path) -> None:
    """Take away the file of the time before conditions, where the new one stands in its place."""
    try:
        older = load(outcome.host, outcome.probe)
        if older is not None and older.path != path and older.conditions is None and _conditions_of(older, comparison) == conditions:
            older.path.unlink()
    except (ConfigError, OSError):
        return


def _holds(result: Mapping[str, Any], comparison: Comparison, conditions: Mapping[str, Plain]) -> str:
    """Return what is in a baseline, in words: its conditions, and how many things of which kind."""
    lists = dict.fromkeys(watch.path.partition("[")[0] for watch in comparison.watches if "[" in watch.path)
    counts = [f"{len(result[name])} {name}" for name in lists if isinstance(result.get(name), list) and result[name]]
    return ", ".join([*filter(None, [comparison.tell(conditions, conditions)]), *counts])


def _none_fits(outcome: Outcome[Any], comparison: Comparison, held: _Held, host: str) -> Outcome[Any]:
    """Say that only others are stored; where it is the host that decided otherwise than then, that is not known to be well."""
    if not held.others:
        return outcome
    differing = [comparison.differing(held.conditions, its) for _, its in held.others]
    wanted = comparison.tell(held.conditions, set().union(*differing))
    told = list(dict.fromkeys(comparison.tell(its, names) for (_, its), names in zip(held.others, differing, strict=True)))
    there = "; one for ".join(told[:_MAX_TOLD]) + (f"; and {len(told) - _MAX_TOLD} more" if len(told) > _MAX_TOLD else "")
    line = f"there is no baseline of {host} for {wanted}; there is one for {there}"
    if any(names <= set(held.by_host) & set(other.by_host) for (other, _), names in zip(held.others, differing, strict=True)):
        return _with(outcome, [Finding("unknown", "baseline-does-not-fit", line, action="nobody asked for that: see what the host lacks")])
    return dataclasses.replace(outcome, notes=(*outcome.notes, line))

"""The dialects in which trainers and servers print their numbers: one reading function each.

A dialect is told by what only it prints; where several fit, the more particular one is asked first.
"""

from __future__ import annotations

import re
from typing import Callable, NamedTuple

from .training_values import (
    COORDINATES,
    NUMBER,
    PRIMARY,
    Metric,
    Number,
    canonical,
    number,
    percent,
    read_mapping,
    scan_pairs,
)

_MAX_MAPPINGS = 4
"""Dicts read per line."""


class Value(NamedTuple):
    """One number of a line."""

    raw: str
    """The name as printed."""
    metric: Metric
    number: Number


class Reading(NamedTuple):
    """What one line says."""

    dialect: str
    values: list[Value]
    step: int | None = None
    epoch: float | None = None
    split: str | None = None
    rank: int | None = None


class Place(NamedTuple):
    """Where the numbers of one line belong, as far as it says."""

    step: int | None = None
    epoch: float | None = None
    rank: int | None = None


class Dialect(NamedTuple):
    """One way of printing."""

    name: str
    family: str
    """Whose rules hold for the numbers: ``speculators``, ``specforge``, ...; ``generic`` where anybody may print so."""
    distinctive: bool = True
    """Whether nobody else prints this."""


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect("specforge-accuracy", "specforge"),
        Dialect("specforge-acceptance", "specforge"),
        Dialect("specforge-ploss", "specforge"),
        Dialect("specforge-progress", "specforge"),
        Dialect("specforge-step", "specforge"),
        Dialect("specforge-mapping", "specforge"),
        Dialect("specforge-warm-start", "specforge"),
        Dialect("speculators", "speculators"),
        Dialect("speculators-kl", "speculators"),
        Dialect("speculators-phases", "speculators"),
        Dialect("speculators-mapping", "speculators"),
        Dialect("safeai", "safeai"),
        Dialect("modelopt", "modelopt"),
        Dialect("nemo", "nemo"),
        Dialect("angelslim", "angelslim"),
        Dialect("torchspec", "torchspec"),
        Dialect("sglang", "serving"),
        Dialect("vllm", "serving"),
        Dialect("hf-trainer", "generic", distinctive=False),
        Dialect("json-lines", "generic", distinctive=False),
        Dialect("tqdm", "generic", distinctive=False),
        Dialect("key-value", "generic", distinctive=False),
    )
}
"""Every dialect by name."""

_N = f"({NUMBER})"
_POSITION_LINE = re.compile(
    r"(?:(?:Eval|Train) - Step (\d{1,18})|(Train|Test) Epoch) \[(\d{1,18})/\d{1,18}\], position (\d{1,2}),\s{1,4}"
    r"(Acc|Acceptance Rate|pLoss):\s{0,4}" + _N
)
_POSITION_NAMES = {
    "Acc": ("acc", "specforge-accuracy"),
    "Acceptance Rate": ("acceptance_rate", "specforge-acceptance"),
    "pLoss": ("loss", "specforge-ploss"),
}


def _position_lines(text: str) -> Reading | None:
    """SpecForge before its rewrite, and SafeAI: one line a position, metric and log interval."""
    if ", position " not in text:
        return None
    match = _POSITION_LINE.search(text)
    if match is None:
        return None
    step, epoch_kind, bracket, position, word, value = match.groups()
    name, dialect = _POSITION_NAMES[word]
    values = [Value(word, Metric(name, int(position), None), number(value))]
    if step is not None:
        # It says "Eval" in training too, and the bracket mixes steps with epochs: neither is used.
        return Reading(dialect, values, step=int(step))
    return Reading("safeai", values, epoch=float(bracket), split="train" if epoch_kind == "Train" else "val")


_STEP_DICT = re.compile(r"(?<![\w.])step (\d{1,18}): (?=\{)")


def _specforge_step(text: str) -> Reading | None:
    match = _STEP_DICT.search(text[:4096])
    if match is None:
        return None
    values, place = _split_pairs(read_mapping(text, match.end()).pairs)
    return _reading("specforge-step", values, place._replace(step=int(match.group(1)))) if values else None


_MODELOPT_ACC = re.compile(r"Step (\d{1,18}) Training Acc: \[?\[([^\[\]]{0,4000})\]")
_MODELOPT_AR = re.compile(r"Step (\d{1,18}) Estimated Training AR: " + _N)
_ITEM = re.compile(r"(?<![\w.])(?:[\w.]{1,40}\()?" + _N)


def _modelopt(text: str) -> Reading | None:
    if " Training A" not in text:
        return None
    match = _MODELOPT_AR.search(text)
    if match is not None:
        value = Value("Estimated Training AR", Metric("accept_length", None, "train"), number(match.group(2)))
        return Reading("modelopt", [value], step=int(match.group(1)), split="train")
    match = _MODELOPT_ACC.search(text)
    if match is None:
        return None
    items = [number(item.group(1)) for item in _ITEM.finditer(match.group(2))][:64]
    values = [Value("Training Acc", Metric("acc", index, "train"), item) for index, item in enumerate(items)]
    return Reading("modelopt", values, step=int(match.group(1)), split="train") if values else None


_SGLANG = re.compile(r"accept (len|rate): " + _N)
_VLLM_LENGTH = re.compile(r"[Mm]ean acceptance length: " + _N)
_VLLM_RATES = re.compile(r"[Pp]er-position acceptance rate: ([0-9., \-+e]{1,400})")
_VLLM_RATE = re.compile(r"(?:Avg )?[Dd]raft acceptance rate: " + _N + r"(\s?%)?")
_PROMETHEUS = re.compile(
    r"vllm:spec_decode_num_(accepted_tokens|draft_tokens|drafts|accepted_tokens_per_pos)(?:_total)?(\{[^}]{0,400}\})? " + _N
)
_PROMETHEUS_POSITION = re.compile(r'position="(\d{1,2})"')


def _serving(text: str) -> Reading | None:
    if "accept len: " in text:
        names = {"len": "accept_length", "rate": "acceptance_rate"}
        found = [
            Value(f"accept {match.group(1)}", Metric(names[match.group(1)], None, None), number(match.group(2)))
            for match in _SGLANG.finditer(text)
        ]
        return Reading("sglang", found) if found else None
    if "cceptance" in text:
        values = _vllm_line(text)
        return Reading("vllm", values) if values else None
    if text.startswith("vllm:spec_decode_"):
        match = _PROMETHEUS.match(text)
        if match is not None:
            position = _PROMETHEUS_POSITION.search(match.group(2) or "")
            metric = Metric(f"{match.group(1)}_total", int(position.group(1)) if position else None, None)
            return Reading("vllm", [Value(text.partition("{")[0][:64], metric, number(match.group(3)))])
    return None


def _vllm_line(text: str) -> list[Value]:
    length = _VLLM_LENGTH.search(text)
    if length is None:
        return []
    values = [Value("Mean acceptance length", Metric("accept_length", None, None), number(length.group(1)))]
    rates = _VLLM_RATES.search(text)
    for position, item in enumerate(_ITEM.finditer(rates.group(1) if rates else "")):
        values.append(Value("Per-position acceptance rate", Metric("acceptance_rate", position, None), number(item.group(1))))
    rate = _VLLM_RATE.search(text)
    if rate is not None:
        values.append(
            Value("Draft acceptance rate", Metric("acceptance_rate", None, None), percent(number(rate.group(1)), rate.group(2)))
        )
    return values


_BAR = re.compile(
    r"(?:(\d{1,3})%\|[^|]{0,400}\|\s{0,12})?(?<![\w.])(\d{1,18})(?:/(\d{1,18})|it) \[([^\]]{0,2000})\]?"
)
_BAR_EPOCH = re.compile(r"\b[Ee]poch:?\s{0,3}\[?(\d{1,9})")


def _bars(text: str) -> Reading | None:
    """Progress bars of tqdm with numbers behind the rate; the last state of several on one line is the newest."""
    if "it/s" not in text and "s/it" not in text and "?it" not in text:
        return None
    for match in reversed(list(_BAR.finditer(text))):
        inside = match.group(4)
        if "<" not in inside and "it" not in inside:
            continue
        # Behind the times and the rate: 09:06<2:14:55,  3.48s/it, loss=0.00
        postfix = inside.partition(",")[2].partition(",")[2]
        values, place = _split_pairs(scan_pairs(postfix))
        if not any(value.metric.name in PRIMARY for value in values):
            return None
        ours = "Training Epoch" in text or "Evaluating Epoch" in text
        name = "specforge-progress" if ours else "torchspec" if "acc_len" in postfix else "tqdm"
        epoch = _BAR_EPOCH.search(text[: match.start(2)][-200:])
        if place.epoch is None and epoch is not None:
            place = place._replace(epoch=float(epoch.group(1)))
        if place.step is None:
            place = place._replace(step=int(match.group(2)))
        return _reading(name, values, place, split="val" if "Evaluating Epoch" in text else "train" if ours else None)
    return None


def _dicts(text: str) -> Reading | None:
    """Dicts of the Hugging Face Trainer (also AngelSlim's and ModelOpt's), and JSON lines."""
    position = text.find("{")
    if position < 0:
        return None
    pairs: list[tuple[str, Number]] = []
    first = position
    for _ in range(_MAX_MAPPINGS):
        mapping = read_mapping(text, position)
        pairs += mapping.pairs
        position = text.find("{", max(mapping.end, position + 1))
        if position < 0:
            break
    values, place = _split_pairs(pairs)
    if not any(value.metric.name in PRIMARY for value in values):
        return None
    if any(name == "train_runtime" for name, _ in pairs):
        # The mean over the whole run, printed last: no point of the curve.
        return _reading("hf-trainer", values, place, split="summary")
    if any(value.raw.startswith(("train/acc_", "train/ploss_", "eval/acc_", "eval/ploss_")) for value in values):
        return _reading("angelslim", values, place)
    json_line = text[first : first + 8].replace(" ", "").startswith('{"')
    return _reading("json-lines" if json_line else "hf-trainer", values, place)


_SPECULATORS = re.compile(r"(?<![\w/])(?:train|val)/[a-z_0-9]{1,40}=")


def _pairs(text: str) -> Reading | None:
    """Lines of ``name=number``: speculators, NeMo, TorchSpec, anybody's."""
    values, place = _split_pairs(scan_pairs(text))
    if not any(value.metric.name in PRIMARY for value in values):
        return None
    names = {value.raw for value in values}
    if _SPECULATORS.search(text):
        newer = "kl_div_" in text or "profile/" in text or "global_step=" in text
        return _reading("speculators-kl" if newer else "speculators", values, place)
    if "train_tau_sim" in names or {"train_loss", "train_acc"} <= names:
        return _reading("nemo", values, place)
    if "sim_acc_len" in names or "simulated_acc_len" in names:
        return _reading("torchspec", values, place)
    return _reading("key-value", values, place)


def _split_pairs(pairs: list[tuple[str, Number]]) -> tuple[list[Value], Place]:
    """Return the metrics among ``pairs``, and where they belong."""
    values: list[Value] = []
    place: dict[str, float] = {}
    for raw, value in pairs:
        metric = canonical(raw)
        if metric is None:
            continue
        if metric.name not in COORDINATES:
            values.append(Value(raw, metric, value))
        elif 0 <= value.value < 10**18:
            place.setdefault(metric.name, value.value)
    step, rank = place.get("step"), place.get("rank")
    return values, Place(None if step is None else int(step), place.get("epoch"), None if rank is None else int(rank))


def _reading(dialect: str, values: list[Value], place: Place, split: str | None = None) -> Reading:
    return Reading(dialect, values, place.step, place.epoch, split, place.rank)


READERS: tuple[Callable[[str], Reading | None], ...] = (
    _position_lines,
    _specforge_step,
    _modelopt,
    _serving,
    _bars,
    _dicts,
    _pairs,
)
"""Asked in this order; the first that finds something has the line."""


def read(text: str) -> Reading | None:
    """Return what a line of text says in whichever dialect it is written, None when it is in none."""
    for reader in READERS:
        reading = reader(text)
        if reading is not None:
            return reading
    return None


_LOOKS_LIKE = re.compile(
    r"(?<![\w/.\-])(?:(?:train|val|eval|test)[/_])?(?:p?loss|acc|accuracy|full_acc|cond_acc|acceptance_rate|kl_div)(?:_\d{1,3})?"
    r"['\"]?\s{0,3}[=:]\s{0,12}\S",
    re.IGNORECASE,
)


def looks_like_metrics(text: str) -> bool:
    """Whether a line that no dialect fits still names a metric and gives it something."""
    return _LOOKS_LIKE.search(text) is not None

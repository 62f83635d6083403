"""Numbers and names in the lines of training logs: tolerant, bounded, nothing is ever evaluated.

All work on one line is linear in its length: a log is not trusted.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

NUMBER = (
    r"[+-]?(?:(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,4})?"
    r"|(?:nan|NaN|NAN|inf|Inf|INF|[Ii]nfinity))(?!\.?\w)"
)
"""A number as Python, JSON or printf writes it; not the beginning of a word or of ``3.46s``."""

MAX_POSITION = 63
"""Largest step index k of ``loss_k``; training unrolls a handful of steps."""
_MAX_PAIRS = 512
_MAX_DEPTH = 16


class Number(NamedTuple):
    """A printed number."""

    value: float
    """May be NaN or infinite."""
    resolution: float
    """Half a unit of the last printed digit: ``0.00`` stands for anything below 0.005."""


class Metric(NamedTuple):
    """What a printed name stands for."""

    name: str
    """Canonical: loss, acc, full_acc, cond_acc, acceptance_rate, kl_div, lr, grad_norm, accept_length, ..."""
    position: int | None
    """Step k of ``loss_k``; None for a value over all steps."""
    split: str | None
    """``train``, ``val``; None where the name does not say."""


_NAMES = {
    "loss": "loss", "ploss": "loss", "lm_loss": "loss", "total_loss": "loss",
    "kl_div": "kl_div", "kl": "kl_div", "kl_loss": "kl_div",
    "acc": "acc", "accuracy": "acc", "top1": "acc", "top1_acc": "acc", "token_accuracy": "acc", "mean_token_accuracy": "acc",
    "full_acc": "full_acc", "cond_acc": "cond_acc",
    "acceptance_rate": "acceptance_rate", "accept_rate": "acceptance_rate",
    "accept_len": "accept_length", "accept_length": "accept_length", "acceptance_length": "accept_length",
    "acc_len": "accept_length", "acc_length": "accept_length", "sim_acc_len": "accept_length",
    "simulated_acc_len": "accept_length", "tau_sim": "tau_sim",
    "lr": "lr", "learning_rate": "lr", "grad_norm": "grad_norm", "gradnorm": "grad_norm",
    "perplexity": "perplexity", "ppl": "perplexity",
    "step": "step", "global_step": "step", "steps": "step", "iter": "step", "iteration": "step",
    "epoch": "epoch", "rank": "rank",
}  # fmt: skip
PRIMARY = frozenset({"loss", "kl_div", "acc", "full_acc", "cond_acc", "acceptance_rate", "accept_length", "tau_sim", "perplexity"})
"""Metrics that make a line one about training; a learning rate alone may stand in any dump of options."""
COORDINATES = frozenset({"step", "epoch", "rank"})
"""Names that say where a value belongs rather than being one."""

_SPLITS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "eval": "val", "test": "val"}
_POSITION = re.compile(r"(.+?)[_/@]?([0-9]{1,3})\Z")


@lru_cache(maxsize=4096)
def canonical(raw: str) -> Metric | None:
    """Return what the printed name ``raw`` stands for; None when it is no metric known here."""
    if len(raw) > 64:
        return None
    name = raw.strip().lower().replace(" ", "_").replace("-", "_").replace(".", "/")
    split = None
    for separator in ("/", "_"):
        head, found, rest = name.partition(separator)
        if found and head in _SPLITS:
            split, name = _SPLITS[head], rest
            break
    if name.startswith("lr/"):
        return Metric("lr", None, split)
    if name.endswith("_epoch"):
        name = name[: -len("_epoch")]
    known = _NAMES.get(name)
    if known is not None:
        return Metric(known, None, split)
    match = _POSITION.match(name)
    if match is None or int(match.group(2)) > MAX_POSITION:
        return None
    known = _NAMES.get(match.group(1))
    if known is None or known in COORDINATES:
        return None
    return Metric(known, int(match.group(2)), split)


def number(text: str) -> Number:
    """Return the number that ``text``, matched by :data:`NUMBER`, stands for."""
    mantissa, _, exponent = text.lower().partition("e")
    digits = mantissa.partition(".")[2]
    power = (int(exponent) if exponent.lstrip("+-").isdigit() else 0) - (len(digits) if digits.isdigit() else 0)
    return Number(float(text), 0.5 * 10.0**power if -300 < power < 300 else 0.0)


def percent(found: Number, sign: str | None) -> Number:
    """Return ``found`` as a fraction when a percent sign follows it."""
    return Number(found.value / 100, found.resolution / 100) if sign else found


_PAIR = re.compile(
    r"(?<![\w/.\-])([A-Za-z][\w/.\-]{0,63}|learning rate|grad norm|lm loss)['\"]?\s{0,3}[=:]\s{0,12}['\"]?"
    r"(?:[A-Za-z_][\w.]{0,40}\(){0,2}(" + NUMBER + r")(\s?%)?"
)
_SPACED = re.compile(
    r"(?<![\w/.\-])((?:train_|val_|eval_)?(?:loss|acc|accuracy|lr|step|iter|iteration|epoch))\s{1,12}\[?(" + NUMBER + r")(\s?%)?",
    re.IGNORECASE,
)


def scan_pairs(text: str) -> list[tuple[str, Number]]:
    """Return every ``name=number`` and ``name: number`` of a line, in order; ``name number`` for the few usual names."""
    found = []
    for pattern in (_PAIR, _SPACED):
        for match in pattern.finditer(text):
            found.append((match.start(), match.group(1), percent(number(match.group(2)), match.group(3))))
            if len(found) >= _MAX_PAIRS:
                break
    found.sort(key=lambda item: item[0])
    return [(name, value) for _, name, value in found]


class Mapping(NamedTuple):
    """What was read of a printed dict."""

    pairs: list[tuple[str, Number]]
    """Numbers by name; nested names joined by ``/``, items of lists by ``_``: ``acc_0``."""
    odd: list[str]
    """Names whose values are no numbers."""
    whole: bool
    """Whether the closing bracket was reached without anything unexpected."""
    end: int
    """Where reading stopped."""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>" + NUMBER + r")|(?P<string>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>[A-Za-z_][\w.]{0,80})|(?P<mark>[{}\[\](),:=])|(?P<other>\S))"
)
_CLOSERS = {"{": "}", "[": "]", "(": ")", "call": ")"}


class _Level:
    """One open bracket: what values inside of it are called."""

    def __init__(self, kind: str, path: str) -> None:
        self.kind = kind
        self.path = path
        self.key: str | None = None
        self.valued = False
        self.index = 0

    def name(self) -> str | None:
        """Return the name of the value that comes next; None where there is none to be had."""
        if self.kind == "{":
            return None if self.key is None else f"{self.path}/{self.key}" if self.path else self.key
        if self.kind == "call":
            # tensor(2.1, device='cuda:0'): the value is the first argument.
            return self.path if self.index == 0 else None
        return f"{self.path}_{self.index}"


def read_mapping(text: str, start: int) -> Mapping:
    """Read the dict printed at ``text[start]``, as ``repr`` or JSON writes it: nan and inf, tensors, nesting included.

    Whatever does not belong there ends the reading; what was read until then is returned. Never evaluates anything.
    """
    reader = _MappingReader()
    position = start
    while not reader.closed and not reader.broken:
        match = _TOKEN.match(text, position)
        if match is None:
            break
        position = match.end()
        reader.take(match.lastgroup or "other", match.group(match.lastgroup or 0).strip())
    return Mapping(reader.pairs, reader.odd, reader.closed and not reader.broken, position)


class _MappingReader:
    def __init__(self) -> None:
        self.pairs: list[tuple[str, Number]] = []
        self.odd: list[str] = []
        self.closed = False
        self.broken = False
        self._stack: list[_Level] = []
        self._last_was_name = False

    def take(self, kind: str, word: str) -> None:
        """Take the next token."""
        after_name, self._last_was_name = self._last_was_name, kind == "name"
        if kind == "mark":
            self._mark(word, after_name=after_name)
        elif kind == "other" or not self._stack:
            self.broken = True
        elif self._stack[-1].kind == "{" and self._stack[-1].key is None:
            self._stack[-1].key = word[1:-1] if kind == "string" else word
        elif kind == "number":
            self._value(number(word))
        elif kind == "string":
            inside = word[1:-1].strip()
            self._value(number(inside) if _WHOLE_NUMBER.match(inside) else None)
        elif word in {"None", "null", "True", "False", "true", "false"}:
            self._value(None)

    def _value(self, value: Number | None) -> None:
        level = self._stack[-1]
        name = level.name()
        if name is None or len(name) > 200:
            return
        if value is None:
            self.odd.append(name)
        else:
            self.pairs.append((name, value))
        level.valued = True
        self.broken = len(self.pairs) + len(self.odd) >= _MAX_PAIRS

    def _mark(self, word: str, *, after_name: bool) -> None:
        if word in "{[(":
            self._open(word, after_name=after_name)
        elif word in "}])":
            if not self._stack or _CLOSERS[self._stack[-1].kind] != word:
                self.broken = True
                return
            self._stack.pop()
            self.closed = not self._stack
        elif word == "," and self._stack:
            level = self._stack[-1]
            level.key, level.valued = None, False
            level.index += 1
        elif word == ":" and not (self._stack and self._stack[-1].kind == "{"):
            self.broken = True

    def _open(self, word: str, *, after_name: bool) -> None:
        if len(self._stack) >= _MAX_DEPTH:
            self.broken = True
            return
        name = self._stack[-1].name() if self._stack else ""
        self._stack.append(_Level("call" if word == "(" and after_name else word, "?" if name is None else name))


_WHOLE_NUMBER = re.compile(NUMBER + r"\Z")

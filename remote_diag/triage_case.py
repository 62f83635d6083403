"""A case for ``rdiag triage``: what is known of a drafter that serves well and trains badly.

Everything is optional; a hypothesis that needs what the case lacks stays undecided and says so. Paths are those of the
host. All of it in one file::

    host: gpu8
    drafter_before: /models/drafter        # as it serves
    drafter_after: /runs/7/checkpoint-0    # as training has it
    mapping: /data/run7                    # d2t and t2d that training uses
    target: /models/Kimi-K2.5
    samples: [/data/run7/hidden_states/hs_0.safetensors]
    counts: /data/run7/token_freq.pt
    serving_accept_length: 3.2
    log: /runs/7/train.log                 # or numbers: loss: [18.9], accuracy: [0.02]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import UsageProblem
from .param_values import Unfit, checked, from_text, items_from_text
from .text import safe

if TYPE_CHECKING:
    from .hypotheses import Declared
    from .strict_yaml import Document

Trainer = Literal[
    "speculators", "speculators-0.3", "specforge", "safeai", "angelslim", "torchspec", "modelopt", "nemo"
]


@dataclass(frozen=True)
class Entry:
    """One entry of a case."""

    kind: Any
    """Its type, as a probe's parameter has it."""
    doc: str


ENTRIES: dict[str, Entry] = {
    "drafter_before": Entry(str | None, "the drafter that serves above chance (A): checkpoint on the host"),
    "drafter_after": Entry(str | None, "the drafter as training has it, its first checkpoint if there are several (B)"),
    "mapping": Entry(str | None, "the mapping that training uses, where that is not drafter_after's: d2t and t2d"),
    "target": Entry(str | None, "the target (verifier) model"),
    "samples": Entry(tuple[str, ...], "files with the hidden states that it is trained on; a few are enough"),
    "dataset": Entry(str | None, "the dataset that the samples were made from: JSON lines with input_ids"),
    "serving_dump": Entry(tuple[str, ...], "the same texts' hidden states as the server has them"),
    "sample_layers": Entry(tuple[int, ...], "layers of the target whose input was captured into the samples, in order"),
    "counts": Entry(str | None, "occurrences by token id in the training text"),
    "trainer": Entry(Trainer | None, "the program that trains; known from the log where that is given"),
    "log": Entry(str | None, "the log of the training"),
    "loss": Entry(tuple[float, ...], "losses that the training printed first, nat; instead of a log"),
    "accuracy": Entry(tuple[float, ...], "accuracies that the training printed first, 0 to 1; instead of a log"),
    "serving_accept_length": Entry(float | None, "mean acceptance length when served, tokens; 1 is the target's own"),
    "serving_accuracy": Entry(float | None, "share of its first drafted tokens that are accepted when served, 0 to 1"),
    "draft_vocab_size": Entry(int | None, "draft tokens; known from the mapping where that is given"),
    "target_vocab_size": Entry(int | None, "target tokens"),
    "mask_density": Entry(float | None, "supervised positions / all positions of a batch, 0 to 1"),
}
"""What every case may say; hypotheses of your own may add more."""
OBSERVED: dict[str, Entry] = {
    "observed_loss": Entry(float | None, "loss that training starts with, nat"),
    "observed_accuracy": Entry(float | None, "accuracy that training starts with, 0 to 1"),
    "uniform_loss": Entry(float | None, "what a uniform guess would print there, nat"),
    "loss_verdict": Entry(str | None, "verdict of loss-check on the numbers"),
}
"""What triage itself finds out first and hands to hypotheses that declare it."""


@dataclass(frozen=True)
class Case:
    """What is known; empty values are left out."""

    values: Mapping[str, Any]
    host: str | None = None
    source: str = "options"
    """Name of the file it came from."""
    extra: Mapping[str, Entry] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Return an entry's value, None where the case does not have it."""
        return self.values.get(name)

    def with_values(self, **values: Any) -> Case:
        """Return the case with what became known; None and empty values add nothing."""
        known = {name: value for name, value in values.items() if value is not None and value != ()}
        return Case({**self.values, **known}, self.host, self.source, self.extra)


def entries(declared: Sequence[Declared]) -> dict[str, Entry]:
    """Return all entries that a case may have: the usual ones, and what hypotheses declare besides."""
    known = dict(ENTRIES)
    for one in declared:
        for parameter in one.probe.params_fields:
            if parameter.name not in OBSERVED:
                known.setdefault(parameter.name, Entry(parameter.annotation, " ".join(parameter.doc.split())))
    return known


def load(
    path: Path | None, given: Mapping[str, Any], sets: Sequence[str], declared: Sequence[Declared] = ()
) -> Case:
    """Return the case in the file at ``path``; options win over it.

    Args:
        path: YAML (JSON is YAML); None when options say everything.
        given: values of named options; None and empty ones are ignored.
        sets: ``key=value`` each, for entries without an option of their own.
        declared: hypotheses, which may add entries.

    Raises:
        ConfigError: the file is invalid; the message begins with ``file:line:column``.
        UsageProblem: an option does not fit, or the case says nothing.
    """
    known = entries(declared)
    host, values = (None, {}) if path is None else _from_file(path, known)
    for name, value in given.items():
        if value is not None and value != ():
            values[name] = _fit(name, known[name], value)
    values.update(_from_sets(sets, known))
    values = {name: value for name, value in values.items() if value is not None and value != ()}
    _check(values)
    return Case(values, host, "options" if path is None else str(path), known)


def _from_file(path: Path, known: Mapping[str, Entry]) -> tuple[str | None, dict[str, Any]]:
    from .strict_yaml import load_file

    document = load_file(path)
    if not isinstance(document.data, dict):
        raise document.error((), "a case is a mapping of names to values", hint=overview(known))
    host, values = None, {}
    for name, value in document.data.items():
        if name == "host":
            if not isinstance(value, str):
                raise document.error((name,), "the host is a name of hosts.yaml", hint="host: local")
            host = value
            continue
        if name not in known:
            raise _unknown(document, name, known)
        try:
            values[name] = checked(_listed(known[name], value), known[name].kind)
        except Unfit as unfit:
            raise _misfit(document, name, known[name], unfit) from None
        try:
            _check({name: values[name]})
        except UsageProblem as problem:
            raise document.error((name,), problem.message, hint=_line(name, known[name])) from None
    return host, values


def _listed(entry: Entry, value: Any) -> Any:
    """Return a single value as the list of one that it stands for."""
    several = getattr(entry.kind, "__origin__", None) is tuple
    return [value] if several and value is not None and not isinstance(value, (list, tuple)) else value


def _unknown(document: Document, name: str, known: Mapping[str, Entry]) -> Exception:
    from difflib import get_close_matches

    near = get_close_matches(name.replace("-", "_"), [*known, "host"], n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    message = f"a case has no entry '{safe(name, limit=60)}'{meant}"
    if name in OBSERVED:
        message = f"'{name}' is found out from loss, accuracy or log; give those"
    return document.error((name,), message, hint=overview(known), key=True)


def _misfit(document: Document, name: str, entry: Entry, unfit: Unfit) -> Exception:
    given = safe(unfit.given if isinstance(unfit.given, str) else repr(unfit.given), limit=60)
    path = (name, *unfit.path)
    written = document.text(path)
    hint = _line(name, entry)
    if written is not None and not isinstance(unfit.given, str) and "text" in unfit.allowed:
        hint = f"quote it: '{safe(written, limit=60)}'\n{hint}"
    return document.error(path, f"{name}: '{given}' is given; {unfit.allowed}", hint=hint)


def _fit(name: str, entry: Entry, value: Any) -> Any:
    try:
        return checked(_listed(entry, value), entry.kind)
    except Unfit as unfit:
        given = safe(unfit.given if isinstance(unfit.given, str) else repr(unfit.given), limit=60)
        raise UsageProblem(f"{name}: '{given}' is given; {unfit.allowed}", hint=_line(name, entry)) from None


def _from_sets(sets: Sequence[str], known: Mapping[str, Entry]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not equals or name not in known:
            what = "is not key=value" if not equals else "names no entry of a case"
            raise UsageProblem(f"--set '{safe(text, limit=60)}' {what}", hint=overview(known))
        kind = known[name].kind
        try:
            if getattr(kind, "__origin__", None) is tuple:
                values[name] = (*values.get(name, ()), *items_from_text(value, kind))
            else:
                values[name] = from_text(value, kind)
        except Unfit as unfit:
            raise UsageProblem(f"--set {name}: '{safe(value, limit=60)}' is given; {unfit.allowed}",
                               hint=_line(name, known[name])) from None  # fmt: skip
    return values


def _check(values: Mapping[str, Any]) -> None:
    """Check what no type says."""
    for name, value in values.items():
        texts = value if isinstance(value, tuple) else (value,)
        if name in ENTRIES and ENTRIES[name].kind in (str | None, tuple[str, ...]) and "" in texts:
            raise UsageProblem(f"{name} is empty", hint=f"{name}: {ENTRIES[name].doc}")
    if any(not 0 <= value <= 1 for value in values.get("accuracy", ())):
        raise UsageProblem("accuracy must be fractions between 0 and 1", hint="0.03 for 3 %")
    for name in ("serving_accuracy", "mask_density"):
        if name in values and not 0 < values[name] <= 1:
            raise UsageProblem(f"{name} must be above 0 and at most 1", hint="0.5 for 50 %")
    for name in ("draft_vocab_size", "target_vocab_size"):
        if name in values and not 2 <= values[name] <= 1 << 31:
            raise UsageProblem(f"{name} must be 2 or more", hint=f"{name}: {ENTRIES[name].doc}")
    if "log" in values and ("loss" in values or "accuracy" in values):
        raise UsageProblem("a log and numbers are given", hint="give the log, or loss and accuracy")


def overview(known: Mapping[str, Entry]) -> str:
    """Return all entries, one a line."""
    lines = [_line(name, entry) for name, entry in known.items()]
    return "\n".join(("a case may have:", "host: name of a host in hosts.yaml", *lines))


def _line(name: str, entry: Entry) -> str:
    return f"{name}: {entry.doc}"

"""Writes training logs the way each trainer and server does, and says what a reader has to find in them."""

from __future__ import annotations

import io
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.logging import RichHandler


@dataclass(frozen=True)
class Expected:
    """One value that has to be found."""

    metric: str
    position: int | None
    value: float
    split: str | None = None
    step: int | None = None
    epoch: float | None = None


@dataclass
class Written:
    """Text of a log, without the last newline, and what is in it."""

    lines: list[str] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)

    @property
    def data(self) -> bytes:
        return ("\n".join(self.lines) + "\n").encode()


Writer = Callable[[random.Random, int], Written]
_STEPS = 3


def _share(source: random.Random) -> float:
    return source.random() ** 3


def specforge_accuracy(source: random.Random, n: int) -> Written:
    out = Written()
    for k in range(_STEPS):
        text = f"{_share(source):.2f}"
        out.lines.append(f"Eval - Step {n * 50} [{n * 50 + 1}/10], position {k},  Acc: {text}")
        out.expected.append(Expected("acc", k, float(text), step=n * 50))
    return out


def specforge_acceptance(source: random.Random, n: int) -> Written:
    text = f"{_share(source):.4f}"
    line = f"Eval - Step {n * 50} [{n * 50 + 1}/10], position 1,  Acceptance Rate: {text}"
    return Written([line], [Expected("acceptance_rate", 1, float(text), step=n * 50)])


def specforge_ploss(source: random.Random, n: int) -> Written:
    value = source.uniform(0, 20)
    line = f"Eval - Step {n * 50} [{n * 50 + 1}/10], position 0, pLoss: {value}"
    return Written([line], [Expected("loss", 0, value, step=n * 50)])


def specforge_progress(source: random.Random, n: int) -> Written:
    loss, acc = f"{source.uniform(0, 20):.2f}", f"{_share(source):.2f}"
    percent = 100 * n // 2484
    line = (
        f"Training Epoch 2: {percent:3d}%|██▌       | {n}/2484 [09:06<2:14:55,  3.48s/it, "
        f"loss={loss}, acc={acc}, time=3.46s, acceptance_rate=0.57, grad_norm=0.31]"
    )
    place = {"split": "train", "step": n, "epoch": 2.0}
    values = [("loss", float(loss)), ("acc", float(acc)), ("acceptance_rate", 0.57), ("grad_norm", 0.31)]
    return Written([line], [Expected(name, None, value, **place) for name, value in values])  # type: ignore[arg-type]


def specforge_step(source: random.Random, n: int) -> Written:
    values = {"acc_0": _share(source), "acceptance_rate_0": _share(source), "ploss_0": source.uniform(0, 20), "lr": 5e-05}
    values["loss"] = float("inf") if n == 1 else values["ploss_0"] * 3
    names = {"acc_0": ("acc", 0), "acceptance_rate_0": ("acceptance_rate", 0), "ploss_0": ("loss", 0), "lr": ("lr", None)}
    expected = [Expected(*names.get(name, (name, None)), value, step=n) for name, value in values.items()]
    return Written([f"step {n}: {values}"], expected)


def _speculators_number(value: float) -> str:
    return f"{value:.2e}" if value < 0.001 or value > 999 else f"{value:.3f}"


def speculators(source: random.Random, n: int, *, newer: bool = False) -> Written:
    out = Written()
    parts = []
    step = n if newer else None

    def add(raw: str, metric: str, position: int | None, value: float) -> None:
        text = _speculators_number(value)
        parts.append(f"{raw}={text}")
        split = "train" if raw.startswith("train/") else None
        out.expected.append(Expected(metric, position, float(text), split, step, 0.0))

    for k in range(_STEPS):
        add(f"train/loss_{k}", "loss", k, source.uniform(0, 20))
        add(f"train/full_acc_{k}", "full_acc", k, _share(source))
        add(f"train/cond_acc_{k}", "cond_acc", k, _share(source))
        if newer:
            add(f"train/kl_div_{k}", "kl_div", k, source.uniform(0, 20))
    add("train/loss", "loss", None, source.uniform(0, 60))
    parts.append("epoch=0")
    if newer:
        parts.append(f"global_step={n}")
        add("lr/AdamW", "lr", None, 1e-4)
        add("lr/Muon", "lr", None, 2e-3)
    else:
        add("lr", "lr", None, 1e-4)
    out.lines.append(", ".join(parts))
    return out


def speculators_kl(source: random.Random, n: int) -> Written:
    return speculators(source, n, newer=True)


def safeai(source: random.Random, n: int) -> Written:
    acc, loss = f"{_share(source):.2f}", f"{source.uniform(0, 20):.2f}"
    lines = [f"Train Epoch [{n}/40], position 0,  Acc: {acc}", f"Test Epoch [{n}/40], position 0, pLoss: {loss}"]
    return Written(
        lines,
        [Expected("acc", 0, float(acc), "train", None, float(n)), Expected("loss", 0, float(loss), "val", None, float(n))],
    )


def modelopt(source: random.Random, n: int) -> Written:
    accs = [round(_share(source), 4) for _ in range(_STEPS)]
    length = f"{1 + source.random():.4f}"
    lines = [f"Step {n} Training Acc: {accs}", f"Step {n} Estimated Training AR: {length}"]
    expected = [Expected("acc", k, acc, "train", n) for k, acc in enumerate(accs)]
    return Written(lines, [*expected, Expected("accept_length", None, float(length), "train", n)])


def hf_trainer(source: random.Random, n: int) -> Written:
    values = {"loss": round(source.uniform(0, 20), 4), "grad_norm": round(source.random(), 3), "learning_rate": 1e-4}
    names = {"learning_rate": "lr"}
    expected = [Expected(names.get(name, name), None, value, None, None, n / 8) for name, value in values.items()]
    return Written([str({**values, "epoch": n / 8})], expected)


def nemo(source: random.Random, n: int) -> Written:
    loss, acc, tau = f"{source.uniform(0, 20):.6f}", f"{_share(source):.6f}", f"{_share(source):.4f}"
    line = f"epoch=0 step={n} train_loss={loss} train_acc={acc} train_tau_sim={tau} lr=8.000e-05"
    expected = [
        Expected(name, None, float(text), "train", n, 0.0) for name, text in (("loss", loss), ("acc", acc), ("tau_sim", tau))
    ]
    return Written([line + " (trailing flush)" * (n % 2)], [*expected, Expected("lr", None, 8e-5, None, n, 0.0)])


def angelslim(source: random.Random, n: int) -> Written:
    acc, loss, total = round(_share(source), 4), round(source.uniform(0, 20), 4), round(source.uniform(0, 60), 4)
    line = str({"train/acc_0": acc, "train/ploss_0": loss, "loss": total, "epoch": float(n)})
    return Written(
        [line],
        [
            Expected("acc", 0, acc, "train", None, n),
            Expected("loss", 0, loss, "train", None, n),
            Expected("loss", None, total, None, None, n),
        ],
    )


def torchspec(source: random.Random, n: int) -> Written:
    acc, length = f"{_share(source):.4f}", f"{1 + source.random():.2f}"
    return Written(
        [f"acc={acc}, sim_acc_len={length}"],
        [Expected("acc", None, float(acc)), Expected("accept_length", None, float(length))],
    )


def sglang(source: random.Random, n: int) -> Written:
    length = f"{1 + source.random():.2f}"
    line = f"[2025-08-20 10:00:{n:02d}] Decode batch. #running-req: 1, token usage: 0.01, accept len: {length}, accept rate: 0.71, cuda graph: True"
    return Written([line], [Expected("accept_length", None, float(length)), Expected("acceptance_rate", None, 0.71)])


def vllm(source: random.Random, n: int) -> Written:
    length, rates = f"{1 + source.random():.2f}", [f"{_share(source):.3f}" for _ in range(_STEPS)]
    line = (
        f"INFO SpecDecoding metrics: Mean acceptance length: {length}, Accepted: 187 tokens, Drafted: 300 tokens, "
        f"Per-position acceptance rate: {', '.join(rates)}, Avg Draft acceptance rate: 62.5%"
    )
    expected = [Expected("accept_length", None, float(length))]
    expected += [Expected("acceptance_rate", k, float(rate)) for k, rate in enumerate(rates)]
    return Written([line], [*expected, Expected("acceptance_rate", None, 0.625)])


def json_lines(source: random.Random, n: int) -> Written:
    loss, acc = source.uniform(0, 20), _share(source)
    line = json.dumps({"step": n, "loss": loss, "eval": {"acc": acc}, "note": "a {brace}, a \"quote\": loss=7"})
    return Written([line], [Expected("loss", None, loss, None, n), Expected("acc", None, acc, "val", n)])


def tqdm(source: random.Random, n: int) -> Written:
    loss = f"{source.uniform(0, 20):.3f}"
    line = f"{n:3d}%|{'#' * (n // 10)}| {n}/100 [00:10<03:10, 2.0s/it, loss={loss}, v_num=1]"
    return Written([line], [Expected("loss", None, float(loss), None, n)])


def key_value(source: random.Random, n: int) -> Written:
    loss, acc = f"{source.uniform(0, 20):.4f}", f"{_share(source):.4f}"
    shapes = (
        f"step={n} loss={loss} acc={acc}",
        f"Step {n} | loss: {loss} | acc: {acc}",
        f"iter {n}: loss {loss}, acc {acc}, 30ms",
    )
    return Written([shapes[n % 3]], [Expected("loss", None, float(loss), None, n), Expected("acc", None, float(acc), None, n)])


WRITERS: dict[str, Writer] = {
    "specforge-accuracy": specforge_accuracy,
    "specforge-acceptance": specforge_acceptance,
    "specforge-ploss": specforge_ploss,
    "specforge-progress": specforge_progress,
    "specforge-step": specforge_step,
    "speculators": speculators,
    "speculators-kl": speculators_kl,
    "safeai": safeai,
    "modelopt": modelopt,
    "hf-trainer": hf_trainer,
    "nemo": nemo,
    "angelslim": angelslim,
    "torchspec": torchspec,
    "sglang": sglang,
    "vllm": vllm,
    "json-lines": json_lines,
    "tqdm": tqdm,
    "key-value": key_value,
}
"""The dialects that hold numbers."""

MILESTONES: dict[str, tuple[str, str | None]] = {
    "top 32000 token frequency ratio: 95.12%": ("token-coverage", "specforge-mapping"),
    "Loading vocab mapping from the cached file at: cache/vocab_mapping/ab12.pt": ("mapping-cached", "specforge-mapping"),
    "Saved vocab mapping to: cache/vocab_mapping/ab12.pt": ("mapping-saved", "specforge-mapping"),
    "Finetuning from base model: /ckpt/old": ("warm-start", "specforge-warm-start"),
    "Last checkpoint detected: out/epoch_0_step_5": ("checkpoint-found", "specforge-warm-start"),
    "Loaded vocab mapping": ("mapping-loaded", "specforge-warm-start"),
    "Training epoch 1/20 started": ("epoch-started", "speculators-phases"),
    "Validation epoch 1/20 completed": ("epoch-finished", "speculators-phases"),
    "Started saving checkpoint to out/0": ("checkpoint-saving", "speculators-phases"),
    "Finished saving checkpoint": ("checkpoint-saved", "speculators-phases"),
    "Updated checkpoint_best -> 3 (loss_epoch=5.123456)": ("best-checkpoint", "speculators-phases"),
    "Found checkpoint at out/3": ("checkpoint-found", "speculators-phases"),
    "No previous checkpoint found. Starting from scratch.": ("from-scratch", "speculators-phases"),
    "Loading vocab mappings from 'data/d2t.npy' and 'data/t2d.npy'": ("mapping-files", "speculators-mapping"),
    "No vocab mappings provided. Regenerating from token frequencies": ("mapping-regenerated", "speculators-mapping"),
    "No vocab mappings found, and can't generate new ones because of X. Using full verifier vocab": (
        "mapping-missing",
        "speculators-mapping",
    ),
    "Now training epoch 0": ("epoch-started", "safeai"),
    "New best checkpoint: iter_0001000 (simulated_acc_len=2.31)": ("best-checkpoint", "torchspec"),
    "[rank3]:[E820 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL": ("nccl-error", None),
    "RuntimeError: CUDA error: an illegal memory access was encountered": ("cuda-error", None),
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": ("cuda-out-of-memory", None),
    "NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.": ("xid", None),
    "Root Cause (first observed failure):": ("root-cause", None),
    "  rank      : 3 (local_rank: 3)": ("failed-rank", None),
    "warning: loss is NaN, skipping": ("not-a-number", None),
}
"""Line -> (kind, dialect)."""


def wrapped(message: str, width: int, *, time: bool = True) -> str:
    """Return ``message`` as rich's own log handler prints it on a page of ``width`` columns."""
    page = io.StringIO()
    console = Console(file=page, width=width, color_system=None, force_terminal=False)
    handler = RichHandler(console=console, show_time=time)
    record = logging.LogRecord("trainer", logging.INFO, "/somewhere/trainer.py", 190, message, (), None)
    handler.emit(record)
    return page.getvalue()

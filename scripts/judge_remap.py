"""The speculators library judges ``vocab-remap``: it makes a drafter, loads what became of it, and runs both.

Run by ``scripts/judge``, in an environment of its own. Under several mappings and ways to fill rows, the remapped drafter
must load without a word about missing or unexpected tensors, and give every shared token the very same logit.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import remote_diag

Ids = NDArray[np.int64]
V, D, H, LENGTH = 1024, 256, 64, 128


def settings(layers: int) -> LlamaConfig:
    """Return what verifier and drafter have in common."""
    return LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=2 * H, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, attn_implementation="eager",
    )  # fmt: skip


def make_drafter(path: Path, verifier_path: Path, ids: Ids, dtype: torch.dtype) -> None:
    """Let the library make and save a drafter with random weights and this mapping."""
    verifier = VerifierConfig(name_or_path=str(verifier_path), architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=settings(1), draft_vocab_size=len(ids), eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
    )  # fmt: skip
    model = Eagle3DraftModel(config)
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    model.load_vocab_mappings(mask(ids), torch.from_numpy(ids - np.arange(len(ids))))
    model.to(dtype).save_pretrained(path)


def mask(ids: Ids) -> torch.Tensor:
    """Return t2d."""
    marked = torch.zeros(V, dtype=torch.bool)
    marked[torch.from_numpy(ids)] = True
    return marked


def exchange_rows(path: Path) -> None:
    """Exchange the first two rows of the head in a file."""
    tensors = load_file(path)
    tensors["lm_head.weight"][[0, 1]] = tensors["lm_head.weight"][[1, 0]]
    save_file(tensors, path, {"format": "pt"})


def load(path: Path, complaints: list[str]) -> Any:
    """Load a drafter with the library, and note what it has to say."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    model = SpeculatorModel.from_pretrained(path)
    logging.getLogger("transformers").removeHandler(handler)
    return model.eval()


def logits(model: Any) -> list[torch.Tensor]:
    """Return the logits of all steps, [length, draft tokens] each, as the library computes them."""
    torch.manual_seed(1)
    kind = model.fc.weight.dtype
    hidden, tokens = torch.randn(1, LENGTH, 3 * H).to(kind), torch.randint(0, V, (1, LENGTH))
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: found.append(output[0].clone()))
    with torch.no_grad():
        model(hidden_states=hidden, input_ids=tokens, document_ids=torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=2)
    hook.remove()
    return found


@dataclass(frozen=True)
class Case:
    """What is to be judged."""

    a: Ids
    b: Ids
    missing: str
    dtype: torch.dtype
    tamper: bool = False
    """Whether two rows of the remapped head are exchanged before it is judged."""


def judge(folder: Path, case: Case) -> str | None:
    """Return what the library finds wrong, None for nothing."""
    a, b = case.a, case.b
    verifier = folder / "verifier"
    LlamaForCausalLM(settings(4)).to(case.dtype).save_pretrained(verifier)
    make_drafter(folder / "drafter", verifier, a, case.dtype)
    np.savez(folder / "b.npz", d2t=b - np.arange(len(b)), t2d=mask(b).numpy())
    values = {
        "source": str(folder / "drafter"), "mapping": str(folder / "b.npz"), "out": str(folder / "out"),
        "missing": case.missing, "verifier": str(verifier),
    }  # fmt: skip
    with remote_diag.connect("local") as session:
        result = session.run("vocab-remap", values).result
    if case.tamper:
        exchange_rows(folder / "out" / "model.safetensors")
    complaints: list[str] = []
    before, after = load(folder / "drafter", []), load(folder / "out", complaints)
    if complaints:
        return "; ".join(complaints)
    if not torch.equal(after.t2d, mask(b)) or not np.array_equal(after.d2t.numpy() + np.arange(len(b)), b):
        return "the mapping is another one"
    own = {"lm_head.weight", "d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight"}
    kept = after.state_dict()
    changed = [name for name, weight in before.state_dict().items() if name not in own and not torch.equal(weight, kept[name])]
    if changed:
        return f"{changed[0]} is not what it was"
    place = {token: row for row, token in enumerate(a.tolist())}
    new = [row for row, token in enumerate(b.tolist()) if token in place]
    old = [place[int(b[row])] for row in new]
    if result.rows_moved != len(new):
        return f"{result.rows_moved} rows were moved, not {len(new)}"
    steps = list(zip(logits(before), logits(after), strict=True))
    if len(steps) != 2 or not all(torch.equal(one[:, old], other[:, new]) for one, other in steps):
        return "a shared token has another logit"
    if not all(torch.isfinite(other).all() for _, other in steps):
        return "a new row gives no number"
    return None


def main() -> int:
    """Judge several remappings, and one that is made wrong on purpose; return 1 when a verdict is not as it must be."""
    logger.remove()
    disable_progress_bar()
    random = np.random.default_rng(7)
    a = np.sort(random.choice(V, D, replace=False)).astype(np.int64)
    spare = np.setdiff1d(np.arange(V), a)
    mappings = {
        "another 32 tokens": np.sort(np.concatenate([np.delete(a, slice(30, 62)), spare[:32]])), "fewer tokens": a[::2].copy(),
        "more tokens": np.sort(np.concatenate([a, spare[:64]])), "another order": random.permutation(a),
    }  # fmt: skip
    cases = {
        f"{what}, {missing}, {str(dtype)[6:]}": Case(a, b, missing, dtype)
        for what, b in mappings.items()
        for missing in ("verifier", "verifier-scaled", "mean", "random")
        for dtype in (torch.float32, torch.bfloat16)
    }
    cases["two rows exchanged on purpose"] = Case(a, a, "mean", torch.bfloat16, tamper=True)
    wrong = 0
    for what, case in cases.items():
        with tempfile.TemporaryDirectory() as name:
            fault = judge(Path(name), case)
        wrong += (fault is not None) != case.tamper
        print(f"{what}: {fault or 'right'}")
    print(f"{len(cases)} judged, {wrong} wrong verdicts")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

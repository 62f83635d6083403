"""Checks of a drafter's config.json against its tensors and its target: sizes, layer ids, norm flags, settings that bite."""

from __future__ import annotations

from .config import AUX_IDS
from .files import shown
from .strict_json import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .config import Config
    from .drafter import Drafter
    from .report import Report

AUX_OUTPUT, AUX_INPUT = "outputs", "inputs"
_RAW = ("deepseek", "kimi")
"""Kinds of targets whose ids SGLang takes for inputs of layers: all of them once, later those that do not begin with 1."""
_SHORT_CONTEXT = 2048
_SIZES = ("vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers")
_COUNTED = {
    AUX_OUTPUT: "the output of layer i, as SpecForge, SGLang, ModelOpt, TorchSpec and NeMo count",
    AUX_INPUT: "the input of layer i, as speculators and vLLM count",
}


def usual_ids(layers: int, convention: str) -> tuple[int, int, int]:
    """Return the layers of a target that trainers take unless told otherwise."""
    return (1, layers // 2 - 1, layers - 4) if convention == AUX_OUTPUT else (2, layers // 2, layers - 3)


def meant_convention(config: Config) -> str:
    """Return how the dialect of a configuration counts layers: ``outputs`` or ``inputs``."""
    return AUX_INPUT if config.dialect == "speculators" else AUX_OUTPUT


def looks_like(ids: tuple[int, ...], layers: int | None) -> str | None:
    """Return which way of counting ``ids`` are the usual ones of; None where they are neither's.

    Trainers that count outputs take 1, L/2 - 1 and L - 4, those that count inputs take 2, L/2 and L - 3 (and L itself).
    """
    if layers is not None:
        for convention in (AUX_OUTPUT, AUX_INPUT):
            low, _, high = usual_ids(layers, convention)
            if ids and ids[0] == low and high in ids:
                return convention
        return None
    return {1: AUX_OUTPUT, 2: AUX_INPUT}.get(ids[0]) if ids else None


def check_config(report: Report, drafter: Drafter) -> None:
    """Check sizes and flags of config.json against the tensors."""
    config = drafter.config
    if config is None:
        report.unknown(
            "config-missing",
            drafter.config_problem or "There is no config.json beside the weights",
            action="put the drafter's config.json beside its weights: servers need it",
        )
        return
    part = report.part()
    _check_types(part, config)
    _check_sizes(part, drafter, config)
    _check_flags(part, drafter, config)
    _check_context(part, config)
    if part.sound:
        report.ok("config-consistent", "config.json (%s) and the tensors say the same" % config.dialect)


def _check_types(report: Report, config: Config) -> None:
    """Check that what config.json says of sizes and layers can be meant: a size is a whole number."""
    odd = [name for name in _SIZES for values in (config.values, config.layer)
           if values.get(name) is not None and not count(values[name])]  # fmt: skip
    if config.aux_ids[0] is None and any(values.get(AUX_IDS) is not None for values in config.aux_places):
        odd.append(AUX_IDS)
    for name in dict.fromkeys(odd):
        report.degraded(
            "config-value",
            "config.json says something for %s that means nothing" % name,
            threshold="a list of whole numbers" if name == AUX_IDS else "a whole number above 0",
            threshold_source="what servers and trainers read there",
            action="write the value that the drafter was trained with",
        )  # fmt: skip


def _check_sizes(report: Report, drafter: Drafter, config: Config) -> None:
    found: list[tuple[str, int | None, int]] = []
    norm = drafter.entry("norm")
    if norm is not None and len(norm.shape) == 1:
        found.append(("hidden_size", config.hidden_size, norm.shape[0]))
    layers = len({role.split(".")[1] for role in drafter.roles if role.startswith("layers.")})
    said = config.layers
    # A copied target's configuration keeps that one's number of layers, which every server ignores.
    if said is not None and layers and said < layers:
        found.append(("num_hidden_layers", said, layers))
    gate = drafter.entry("layers.0.mlp.gate_proj")
    if gate is not None and len(gate.shape) == 2:
        found.append(("intermediate_size", count(config.layer.get("intermediate_size")) or None, gate.shape[0]))
    for name, told, real in found:
        if told not in (None, real):
            report.fail(
                "config-size",
                "config.json says %s %d, the tensors have %d" % (name, told or 0, real),
                value=told, threshold=real, threshold_source="the tensors",
                action="config.json is another model's; take the one that the drafter was trained with",
            )  # fmt: skip


def _check_flags(report: Report, drafter: Drafter, config: Config) -> None:
    per_layer = any(role.startswith("fc_norm.") for role in drafter.roles)
    whole = "input_norm" in drafter.roles
    said = {name: bool(config.flag(name)) for name in ("fc_norm", "norm_before_fc")}
    unsaid = "fc_norm" if per_layer and not any(said.values()) else "norm_before_fc" if whole and not said["norm_before_fc"] else None
    if unsaid is not None:
        report.fail(
            "norm-flag",
            "The checkpoint has norms before fc, and config.json does not say %s: servers leave them out" % unsaid,
            value=False, threshold=True, threshold_source="the tensors",
            action="set %s to true in config.json" % unsaid,
        )  # fmt: skip
    absent = "fc_norm" if said["fc_norm"] and not per_layer else None
    absent = absent or ("norm_before_fc" if said["norm_before_fc"] and not (whole or per_layer) else None)
    if absent is not None:
        report.fail(
            "norm-flag",
            "config.json says %s, and the norm is not in the checkpoint: servers norm with weights that were never loaded" % absent,
            value=True, threshold=False, threshold_source="the tensors",
            action="set %s to false in config.json, or export the missing norm" % absent,
        )  # fmt: skip
    if config.dialect == "flat" and config.flag("norm_before_residual"):
        report.degraded(
            "norm-before-residual",
            "The layer was trained with norm_before_residual, which SGLang does not know: it adds the un-normed state",
            value=True,
            action="serve it with vLLM, or train with norm_before_residual false",
        )
    head, mapping = drafter.entry("lm_head"), drafter.has("d2t")
    if config.tied and head is not None and mapping:
        report.fail(
            "config-tied",
            "config.json says that the head is the embedding, and the checkpoint has a head of draft tokens",
            value=True, threshold=False, threshold_source="lm_head beside d2t",
            action="set tie_word_embeddings to false: SGLang would take the embedding for the head",
        )  # fmt: skip


def _check_context(report: Report, config: Config) -> None:
    positions = count(config.layer.get("max_position_embeddings"))
    if positions is not None and 0 < positions <= _SHORT_CONTEXT:
        report.degraded(
            "context-short",
            "The drafter says that it knows %d positions: vLLM holds it to that, and long texts are drafted badly" % positions,
            value=positions, unit="positions", threshold=_SHORT_CONTEXT,
            threshold_source="what several trainers write without meaning it",
            action="write the target's max_position_embeddings, if the rotary embedding of the drafter reaches that far",
        )  # fmt: skip


def check_aux_layers(
    report: Report, config: Config | None, blocks: int | None, layers: int | None, kind: str = ""
) -> str | None:
    """Check the layers of the target that feed the drafter.

    Args:
        report: told of it.
        config: of the drafter.
        blocks: layers that fc takes; None when unknown.
        layers: of the target; None when unknown.
        kind: ``model_type`` of the target; empty when unknown.

    Returns:
        By whose counting the ids are the usual ones: ``outputs`` or ``inputs``; None when that cannot be told.
    """
    if config is None:
        return None
    ids, where = config.aux_ids
    meant = meant_convention(config)
    if ids is None:
        usual = "2, %d, %d" % (layers // 2, layers - 3) if layers else "2, L/2, L - 3"
        report.ok(
            "aux-ids-missing",
            "config.json names no layers of the target: servers take the inputs of layers %s" % usual,
            action="make sure that these are the layers that it was trained with, and write them down",
        )
        return None
    listed = ", ".join(str(item) for item in ids)
    _check_ids(report, ids, (meant, layers, blocks))
    found = looks_like(ids, layers)
    if where == "the top level" and config.dialect == "flat":
        report.degraded(
            "aux-ids-place",
            "The layers %s stand at the top level of config.json; SGLang reads only those in eagle_config" % listed,
            action="write them into eagle_config as well",
        )
    if found == AUX_INPUT and meant == AUX_OUTPUT and kind.startswith(_RAW):
        report.ok(
            "aux-ids",
            "The layers %s are the usual ones of those who count inputs, as SGLang does for a target of the kind %s" % (listed, kind),
            action="for other servers, make sure that they count in the same way",
        )
    elif found is not None and found != meant:
        direction = "one layer too shallow" if meant == AUX_INPUT else "one layer too deep"
        report.degraded(
            "aux-ids-convention",
            "The layers %s are the usual ones of those who count the other way: they would be taken %s" % (listed, direction),
            value=listed,
            threshold=", ".join(str(item) for item in usual_ids(layers, meant)) if layers else None,
            threshold_source="the usual layers where a number means %s" % _COUNTED[meant],
            evidence=("these look like numbers that mean %s" % _COUNTED[found],),
            action="find out which layers the training data came from; %s them by one if they were copied from the other "
            "kind of config" % ("raise" if meant == AUX_INPUT else "lower"),
        )
    elif found is not None:
        report.ok("aux-ids", "The layers %s are the usual ones of this dialect: %s" % (listed, _COUNTED[found]))
    return found


def _check_ids(report: Report, ids: tuple[int, ...], known: tuple[str, int | None, int | None]) -> None:
    meant, layers, blocks = known
    listed = ", ".join(str(item) for item in ids)
    last = None if layers is None else layers - 1 + (meant == AUX_INPUT)
    if min(ids) < 0 or (last is not None and max(ids) > last):
        report.fail(
            "aux-ids-range",
            "The target has no layer of these numbers: %s" % listed,
            value=max(ids), threshold=last, threshold_source="the target's config.json",
            action="the drafter belongs to another target, or its config.json to another drafter",
        )  # fmt: skip
    if list(ids) != sorted(set(ids)):
        report.fail(
            "aux-ids-order",
            "The layers %s are not in ascending order" % listed,
            value=listed,
            action="fc expects the low, the middle and the high layer in this order: check it against the training data",
        )
    # speculators may list the last layer too, whose state the loss needs and fc does not.
    if blocks is not None and len(ids) not in (blocks, blocks + (meant == AUX_INPUT)):
        report.fail(
            "aux-ids-count",
            "config.json names %d layers of the target, fc takes %d" % (len(ids), blocks),
            value=len(ids), unit="layers", threshold=blocks, threshold_source="the width of fc over the target's hidden size",
            action="write the layers that the drafter was trained with into config.json",
        )  # fmt: skip


def check_against_target(report: Report, drafter: Drafter, target: Config | None) -> None:
    """Check what config.json says of the target against the target's own."""
    config = drafter.config
    if config is None or target is None:
        return
    for name, said, real in (
        ("hidden size", config.target_hidden_size, target.hidden_size),
        ("vocabulary", config.target_vocab_size, target.target_vocab_size),
    ):
        # speculators once wrote the draft vocabulary's size there.
        if said is None or real is None or said == real or (name == "vocabulary" and said == config.draft_vocab_size):
            continue
        report.fail(
            "target-size",
            "The drafter is for a target with another %s" % name,
            value=said, threshold=real, threshold_source=shown(target.path),
            action="give the target that the drafter was trained for",
        )  # fmt: skip
    for name in ("rope_theta",):
        own, theirs = config.layer.get(name), target.layer.get(name)
        if isinstance(own, (int, float)) and isinstance(theirs, (int, float)) and own != theirs:
            report.ok(
                "rope-differs",
                "rope_theta of the drafter is not the target's: right only if it was trained so",
                value=float(own), threshold=float(theirs), threshold_source=shown(target.path),
            )  # fmt: skip

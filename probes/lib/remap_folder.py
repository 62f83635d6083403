"""Write a remapped drafter as a new folder: weights, config.json, and what belongs to them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from . import config as configs
from .checkpoint import Safetensors
from .companions import Companions, look_beside, new_config
from .files import Damaged, File, Meter, shown
from .new_folder import NewFolder, check_space
from .remap import Plan, verify_weights, write_weights
from .safetensors_writer import Writer, make_header

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .mappings import Ids
    from .row_fill import Fill

    Told = Callable[[int, int, str], None]
    """Called with the bytes that were done, those there are in all, and what is being done."""

WEIGHTS = "model.safetensors"
PROVENANCE = "rdiag.vocab-remap"
"""Key in the metadata of the weights; its value is JSON."""


@dataclass(frozen=True)
class Folder:
    """What is to be made."""

    place: str
    """As :func:`new_folder.place_for` returned it."""
    plan: Plan
    fill: Fill | None
    provenance: dict[str, Any]
    """Where the head comes from; more is added to it."""
    tag: str
    """Keeps runs apart; see :class:`NewFolder`."""

    @property
    def source(self) -> str:
        """Folder of the weights that are remapped."""
        return self.plan.drafter.checkpoint.folder


@dataclass(frozen=True)
class Written:
    """What was made."""

    names: tuple[str, ...]
    """Files in the new folder."""
    left: tuple[str, ...]
    """Name and reason of what lies beside the source and was not copied."""
    size: int
    """Bytes of all files."""
    verified: int
    """Bytes of the new weights that were read again."""
    read: int
    """Bytes that were read from all files before that."""


def write_folder(folder: Folder, meter: Meter, told: Told) -> Written:
    """Make the folder, whole or not at all; raise Damaged or Unreadable."""
    plan = folder.plan
    config = _new_config(plan)
    companions = look_beside(folder.source, _own_names(folder.source, meter))
    metadata = _metadata(folder)
    total = len(make_header(plan.specs, metadata)) + sum(spec.size for spec in plan.specs)
    check_space(folder.place, total + companions.size + len(config or b""))
    with NewFolder(folder.place, folder.tag) as new:
        weights = os.path.join(new.path, WEIGHTS)
        size = write_weights(weights, plan, folder.fill, metadata, lambda done: told(done, total, "writing"))
        if config is not None:
            with Writer(os.path.join(new.path, configs.NAME)) as writer:
                writer.write(config)
            size += writer.written
        size += _copy_companions(folder.source, companions, new.path, meter)
        read, again = meter.bytes, Meter()
        verify_weights(weights, plan, again, lambda done: told(done, total, "verifying"))
        new.keep(readable_as=folder.source)
    names = (WEIGHTS, *((configs.NAME,) if config is not None else ()), *companions.copied)
    return Written(tuple(map(shown, names)), companions.left, size, again.bytes, read)


def _own_names(folder: str, meter: Meter) -> set[str]:
    """Return the files of ``folder`` that were read, which are therefore written anew."""
    place = os.path.abspath(folder)
    return {os.path.basename(path) for path in meter.files if os.path.dirname(os.path.abspath(path)) == place}


def _new_config(plan: Plan) -> bytes | None:
    drafter, moves = plan.drafter, plan.moves
    if drafter.config_problem is not None:
        raise Damaged(drafter.checkpoint.folder, "%s; it belongs to the mapping and has to be changed with it" % drafter.config_problem)
    return None if drafter.config is None else new_config(drafter.config, len(moves.a), len(moves.b), moves.vocab)


def _copy_companions(source: str, companions: Companions, target: str, meter: Meter) -> int:
    size = 0
    for name in companions.copied:
        with File(os.path.join(source, name), meter) as file, Writer(os.path.join(target, name)) as writer:
            writer.copy(file, 0, file.size)
        size += writer.written
    return size


def _metadata(folder: Folder) -> dict[str, str]:
    """Return the metadata of the source, with where the new file comes from."""
    checkpoint, moves = folder.plan.drafter.checkpoint, folder.plan.moves
    metadata = checkpoint.metadata() if isinstance(checkpoint, Safetensors) else {}
    told = {
        **folder.provenance,
        "ids_before_sha256": _digest(moves.a),
        "ids_sha256": _digest(moves.b),
        "before": metadata.get(PROVENANCE),
    }
    return {"format": "pt", **metadata, PROVENANCE: json.dumps(told, sort_keys=True)}


def _digest(ids: Ids) -> str:
    """Return the SHA-256 of token ids as little-endian int64, row after row."""
    from hashlib import sha256

    return sha256(ids.astype("<i8").tobytes()).hexdigest()

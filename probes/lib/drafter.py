"""An EAGLE-3 drafter: its configuration, and its tensors by role, read when they are asked for.

Use :func:`open_drafter` in a ``with`` statement. The big matrices are :class:`Matrix` objects, read by rows; everything
else is small enough to be read whole.
"""

from __future__ import annotations

from . import config as configs
from .checkpoint import open_checkpoint
from .files import Absent, Damaged, Unreadable, quoted
from .matrix import Matrix
from .model import Model
from .roles import layer_key, role_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from .checkpoint import Checkpoint, Entry
    from .files import Meter


class Drafter(Model):
    """A drafter's tensors by role.

    Args:
        checkpoint: closed together with the drafter.
        config: None where there is no readable config.json.
        config_problem: why that beside it cannot be read.
    """

    def __init__(self, checkpoint: Checkpoint, config: configs.Config | None, config_problem: str | None) -> None:
        super().__init__(checkpoint, config, config_problem)
        self.roles: dict[str, str] = {}
        """Role -> full name of the tensor; the shortest where several have the same role."""
        self.repeated: dict[str, list[str]] = {}
        """Role -> all names, where several tensors have the same role."""
        self.unknown: list[str] = []
        """Names of tensors whose role is not known; servers skip such tensors without a word."""
        self._assign(checkpoint.names())

    @property
    def layer_keys(self) -> list[str]:
        """How the file calls its decoder layers: ``midlayer``, ``layers.0``, ``model.layers.0``."""
        return sorted({key for key in map(layer_key, self.checkpoint.names()) if key is not None})

    def has(self, role: str) -> bool:
        """Whether there is a tensor of that role."""
        return role in self.roles

    def entry(self, role: str) -> Entry | None:
        """Return type and shape of a role's tensor, None where there is none; raise Damaged or Unreadable."""
        return self.checkpoint.entry(self.roles[role]) if role in self.roles else None

    def read(self, role: str) -> NDArray[Any]:
        """Return a whole tensor (bfloat16 as float32); raise Damaged or Unreadable."""
        return self.checkpoint.read(self._name(role))

    def matrix(self, role: str) -> Matrix:
        """Return a matrix to be read by rows; raise Damaged or Unreadable."""
        return Matrix(self.checkpoint, self._name(role))

    def _name(self, role: str) -> str:
        if role not in self.roles:
            raise Unreadable(self.path, "holds no %s" % role, "give the drafter's whole checkpoint")
        return self.roles[role]

    def _assign(self, names: list[str]) -> None:
        by_role: dict[str, list[str]] = {}
        for name in sorted(names, key=lambda name: (len(name), name)):
            role = role_of(name)
            if role is None:
                self.unknown.append(name)
            else:
                by_role.setdefault(role, []).append(name)
        self.roles = {role: found[0] for role, found in by_role.items()}
        self.repeated = {role: found for role, found in by_role.items() if len(found) > 1}


def open_drafter(path: str, meter: Meter) -> Drafter:
    """Return the drafter at ``path``, a file or a folder.

    Raises:
        Absent: a mapping without weights.
        Unreadable: there is nothing, or nothing that is read.
        Damaged: it contradicts itself.
    """
    checkpoint = open_checkpoint(path, meter)
    try:
        drafter = Drafter(checkpoint, *configs.read(checkpoint.folder, meter))
        _check(drafter)
    except BaseException:
        checkpoint.close()
        raise
    return drafter


def _check(drafter: Drafter) -> None:
    if drafter.roles.keys().isdisjoint({"lm_head", "fc"}) and not drafter.layer_keys:
        raise Absent(drafter.path, "holds no weights of a drafter", "give the checkpoint, not its mapping")
    for names in drafter.repeated.values():
        shapes = {drafter.checkpoint.entry(name).shape for name in names[:4]}
        if len(shapes) > 1:
            raise Damaged(drafter.path, "%s differ in shape" % " and ".join(quoted(name) for name in names[:4]))

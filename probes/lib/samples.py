"""Hidden states of a target as trainers keep them, whatever their files look like.

One file is one conversation: its tokens, a mask of those that count in the loss, and for each token some hidden states
of the target: those of a few layers that feed the drafter (*aux*), and that before the output head (*final*). The same
key means different things in different formats, so a file is recognised by all its keys, dimensions and widths together.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checkpoint import open_checkpoint
from .files import Damaged, Unreadable, quoted
from .matrix import Matrix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from .checkpoint import Checkpoint
    from .files import Meter

MAX_WHOLE = 1 << 28
"""Numbers of a tensor that does not lie row after row and must be read at once."""
MAX_TOKENS = 1 << 22
MAX_PARTS = 256
CONVENTIONS = {
    "specforge": (True, "the trainer applies no norm"),
    "speculators-v0": (True, "0.3 applies no norm; later releases do, and then norm these twice"),
    "speculators-v1": (False, "the trainer applies the final norm since 0.4"),
    "speculators": (False, "the trainer applies the final norm"),
    "modelopt": (None, "transformers dumps normed states, vLLM those before the norm"),
    "angelslim": (True, "the trainer applies no norm"),
}
"""Kind -> (whether the final state is kept normed; None where both are usual, what its trainer does with it)."""


@dataclass(frozen=True)
class Part:
    """The hidden states of one layer, [S, width]."""

    name: str
    """``aux 0``, ``aux 1``... in the order that feeds the drafter; ``final``."""
    source: Source
    first: int
    """Column of ``source`` that it begins at."""
    width: int

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the states of some tokens, float32 [positions, width]; the caller bounds how many."""
        import numpy as np

        states = self.source.take(positions)[:, self.first : self.first + self.width]
        return np.ascontiguousarray(states, np.float32)


class Source:
    """A stored tensor of one row a token, read in pieces where its bytes allow.

    Args:
        checkpoint: it must stay open.
        name: the tensor.
        rows: tokens.

    Raises:
        Damaged, Unreadable: as :class:`Matrix`.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, rows: int) -> None:
        entry = checkpoint.entry(name)
        if rows < 1 or entry.elements % rows or entry.elements < rows:
            raise Damaged(checkpoint.path, "%s has the shape %s for %d tokens" % (quoted(name), list(entry.shape), rows))
        self.name = name
        self.dtype = entry.dtype
        self.rows, self.columns = rows, entry.elements // rows
        self._matrix: Matrix | None = None
        self._whole: NDArray[Any] | None = None
        try:
            self._matrix = Matrix(checkpoint, name, (self.rows, self.columns))
        except Unreadable:
            if entry.elements > MAX_WHOLE or not entry.dtype.startswith(("float", "bfloat")):
                raise
            self._whole = checkpoint.read(name).reshape(self.rows, self.columns)

    def take(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Return some rows as numbers."""
        return self._matrix.take(positions) if self._matrix is not None else self._array()[positions]

    def chunks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (index of the first row, numbers of some rows) for all rows in order."""
        if self._matrix is None:
            yield 0, self._array()
            return
        # Numbers take twice the room of their bits.
        step = max(1, self._matrix.chunk_rows // 4)
        for start in range(0, self.rows, step):
            yield start, self._matrix.numbers(start, min(self.rows, start + step))

    def _array(self) -> NDArray[Any]:
        if self._whole is None:
            raise ValueError("neither a matrix nor an array")
        return self._whole


@dataclass
class Sample:
    """One conversation. Use it in a ``with`` statement."""

    path: str
    """As it was asked for."""
    kind: str
    """``specforge``, ``speculators-v0``, ``speculators-v1``, ``speculators`` (0.5 and later), ``modelopt``, ``angelslim``."""
    reason: str
    """How that was recognised."""
    checkpoint: Checkpoint
    ids: NDArray[np.int64] | None
    """Tokens, [S]."""
    mask: NDArray[np.bool_] | None
    """Which tokens count in the loss, [S]; None where the file does not say."""
    tokens: int
    """Tokens by the hidden states."""
    parts: list[Part]
    """Aux layers in order, then the final state where there is one."""
    problems: list[str]
    """Contradictions within the file."""

    def __enter__(self) -> Sample:
        """Return the sample."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close its file."""
        self.checkpoint.close()

    @property
    def aux(self) -> list[Part]:
        """The layers that feed the drafter."""
        return [part for part in self.parts if part.name != "final"]

    @property
    def final(self) -> Part | None:
        """The state before the output head."""
        return next((part for part in self.parts if part.name == "final"), None)

    @property
    def sources(self) -> list[Source]:
        """The stored tensors, each once."""
        found: list[Source] = []
        for part in self.parts:
            if not any(part.source is one for one in found):
                found.append(part.source)
        return found

    @property
    def width(self) -> int:
        """Width of a layer's states."""
        return self.parts[-1].width


def open_sample(path: str, meter: Meter, hidden: int | None = None, shown_path: str | None = None) -> Sample:
    """Return the conversation in the file ``path``.

    Args:
        path: the file.
        meter: told of every byte.
        hidden: width of the target, where it is known; some files cannot be told apart without.
        shown_path: the path to speak of, where the file is an unpacked copy.

    Raises:
        Unreadable: no file, or no hidden states of a kind that is known.
        Damaged: it contradicts its format.
    """
    checkpoint = open_checkpoint(path, meter)
    checkpoint.path = shown_path or path
    try:
        return _open(checkpoint, hidden)
    except BaseException:
        checkpoint.close()
        raise


def _open(checkpoint: Checkpoint, hidden: int | None) -> Sample:
    names = checkpoint.names()
    ids = _numbers(checkpoint, "input_ids") if "input_ids" in names else None
    ids = _numbers(checkpoint, "token_ids") if ids is None and "token_ids" in names else ids
    kind, reason, aux_names, final_name = _recognise(checkpoint, names, hidden)
    shapes = [checkpoint.entry(name).shape for name in ([final_name] if final_name else []) + aux_names]
    rows = {_rows(checkpoint, shape, stacked=kind == "speculators") for shape in shapes}
    tokens = min(rows)
    problems = [] if len(rows) == 1 else ["its hidden states are of %s tokens" % _either(rows)]
    parts = _parts(checkpoint, kind, aux_names, final_name, hidden)
    mask = _numbers(checkpoint, "loss_mask") if "loss_mask" in names else None
    if ids is None:
        problems.append("it holds no tokens")
    elif len(ids) != tokens:
        problems.append("%d tokens, but hidden states of %d" % (len(ids), tokens))
    if mask is not None and len(mask) != tokens:
        problems.append("a mask of %d tokens, but hidden states of %d" % (len(mask), tokens))
    widths = {part.width for part in parts}
    if len(widths) > 1:
        problems.append("layers of different widths: %s" % _either(widths))
    marked = None if mask is None else mask != 0
    return Sample(checkpoint.path, kind, reason, checkpoint, ids, marked, tokens, parts, problems)


def _recognise(checkpoint: Checkpoint, names: list[str], hidden: int | None) -> tuple[str, str, list[str], str | None]:
    """Return (kind, how it was recognised, tensors of the aux layers, tensor of the final state)."""
    listed = sorted((n for n in names if n.startswith("hidden_states.") and n[14:].isdigit()), key=lambda n: int(n[14:]))
    if listed:
        if len(listed) > MAX_PARTS:
            raise Damaged(checkpoint.path, "a list of %d layers" % len(listed))
        return "speculators-v1", "hidden_states is a list of layers", listed[:-1], listed[-1]
    for kind, final, aux in _PAIRS:
        if final in names and aux in names:
            final_width, aux_width = (checkpoint.entry(name).shape[-1:] or (0,) for name in (final, aux))
            if not final_width[0] or aux_width[0] % final_width[0]:
                raise Damaged(
                    checkpoint.path,
                    "%s is %d wide, no multiple of the %d of %s" % (quoted(aux), aux_width[0], final_width[0], quoted(final)),
                )
            return kind, "keys %s (%d wide) and %s (%d wide)" % (aux, aux_width[0], final, final_width[0]), [aux], final
    lone = next((name for name in ("hidden_states", "hidden_state", "aux_hidden_state", "aux_hidden_states") if name in names), None)
    if lone is None:
        held = ", ".join(quoted(name) for name in names[:6]) or "nothing"
        raise Unreadable(checkpoint.path, "holds no hidden states of a known format, but %s" % held)
    return _recognise_lone(checkpoint, lone, hidden)


_PAIRS = (
    ("specforge", "hidden_state", "aux_hidden_state"),
    ("speculators-v0", "target", "hidden_state"),
    ("angelslim", "target_hiddens", "hidden_states"),
    ("modelopt", "hidden_states", "aux_hidden_states"),
)
"""(kind, key of the final state, key of the aux layers); the key that two of them share means another thing in each."""


def _recognise_lone(checkpoint: Checkpoint, name: str, hidden: int | None) -> tuple[str, str, list[str], str | None]:
    shape = checkpoint.entry(name).shape
    if name == "hidden_states" and len(shape) == 3 and shape[0] > 1 and 1 < shape[1] <= MAX_PARTS:
        return "speculators", "hidden_states is a stack of %d layers a token" % shape[1], [name], None
    if hidden is None or not shape or shape[-1] % hidden:
        raise Unreadable(
            checkpoint.path,
            "holds only %s of the shape %s, which may be aux layers or the final state" % (quoted(name), list(shape)),
            "give --target: its width decides",
        )
    if shape[-1] == hidden:
        return "modelopt", "%s is as wide as the target" % name, [], name
    return "specforge", "%s is %d times as wide as the target" % (name, shape[-1] // hidden), [name], None


def _parts(checkpoint: Checkpoint, kind: str, aux: list[str], final: str | None, hidden: int | None) -> list[Part]:
    stacked = kind == "speculators"
    sources = {
        name: Source(checkpoint, name, _rows(checkpoint, checkpoint.entry(name).shape, stacked=stacked))
        for name in [*aux, *([final] if final else [])]
    }
    if stacked:
        source = sources[aux[0]]
        layers = checkpoint.entry(aux[0]).shape[1]
        width = source.columns // layers
        names = ["aux %d" % index for index in range(layers - 1)] + ["final"]
        return [Part(part, source, index * width, width) for index, part in enumerate(names)]
    if kind == "speculators-v1":
        parts = [Part("aux %d" % index, sources[name], 0, sources[name].columns) for index, name in enumerate(aux)]
    else:
        width = sources[final].columns if final else (hidden or 1)
        parts = []
        for name in aux:
            count = sources[name].columns // width
            if not 0 < count <= MAX_PARTS:
                raise Damaged(checkpoint.path, "%s is %d wide where a layer has %d" % (quoted(name), sources[name].columns, width))
            parts += [Part("aux %d" % index, sources[name], index * width, width) for index in range(count)]
    return parts + ([Part("final", sources[final], 0, sources[final].columns)] if final else [])


def _rows(checkpoint: Checkpoint, shape: tuple[int, ...], *, stacked: bool) -> int:
    """Return how many tokens a tensor of hidden states is of."""
    if stacked or len(shape) == 2:
        rows = shape[0]
    elif len(shape) == 3 and shape[0] == 1:
        rows = shape[1]
    else:
        told = "a batch of %d conversations" % shape[0] if len(shape) == 3 else "the shape %s" % list(shape)
        raise Unreadable(checkpoint.path, "hidden states of %s, not of one conversation" % told)
    if not 0 < rows <= MAX_TOKENS:
        raise Damaged(checkpoint.path, "hidden states of %d tokens" % rows)
    return rows


def _numbers(checkpoint: Checkpoint, name: str) -> NDArray[np.int64]:
    """Return a vector of whole numbers, whatever batch dimension stands before it."""
    import numpy as np

    entry = checkpoint.entry(name)
    if entry.elements > MAX_TOKENS or entry.elements != (entry.shape or (0,))[-1]:
        raise Damaged(checkpoint.path, "%s has the shape %s, not that of one conversation" % (quoted(name), list(entry.shape)))
    values = checkpoint.read(name).reshape(-1)
    if values.dtype.kind == "f" and (not np.isfinite(values).all() or (values != np.rint(values)).any()):
        raise Damaged(checkpoint.path, "%s holds numbers that are not whole" % quoted(name))
    return values.astype(np.int64)


def _either(values: set[int]) -> str:
    return " and ".join(str(value) for value in sorted(values))

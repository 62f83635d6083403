"""A drafter under another mapping: the rows of its head moved by token id, everything else byte for byte as it was.

Rows are read straight into their new places, a block at a time, so memory stays far below the size of the head. What
was written is read again and held against the source before anybody gets to see it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checkpoint import open_checkpoint
from .files import Damaged, Unreadable, quoted
from .mappings import find_rows
from .matrix import Matrix
from .roles import bare_name, role_of
from .safetensors import BITS
from .safetensors_writer import BLOCK, Spec, Writer, arrange, format_word, make_header

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from .checkpoint import Checkpoint
    from .drafter import Drafter
    from .files import Meter
    from .mappings import Ids
    from .row_fill import Fill

    Told = Callable[[int], None]
    """Called with the bytes that were done."""

_HEAD = "lm_head.weight"
_BIAS = "lm_head.bias"


@dataclass(frozen=True)
class Moves:
    """Where each row of the new head comes from."""

    a: Ids
    """Token of each row of the source's head."""
    b: Ids
    """Token of each row of the new one."""
    vocab: int
    """Tokens of the target."""
    source: Ids
    """Row of the old head for each row of the new one, -1 where the old one has none."""

    @property
    def moved(self) -> int:
        """Rows that are copied."""
        return int((self.source >= 0).sum())

    @property
    def initialised(self) -> int:
        """Rows that are made anew."""
        return len(self.source) - self.moved

    def stretches(self, step: int) -> list[list[tuple[int, int, int]]]:
        """Return for each block of ``step`` new rows which of them lie together in the old head.

        Each is (first row in the block, row behind the last, row in the old head); rows without a source are in none.
        """
        import numpy as np

        known = np.flatnonzero(self.source >= 0)
        old = self.source[known]
        apart = (np.diff(known) != 1) | (np.diff(old) != 1) | (np.diff(known // step) != 0)
        begins = np.concatenate([[0], np.flatnonzero(apart) + 1]).astype(np.int64) if len(known) else known
        lengths = np.diff(np.append(begins, len(known)))
        blocks: list[list[tuple[int, int, int]]] = [[] for _ in range(0, len(self.source), step)]
        for new, count, row in zip(known[begins].tolist(), lengths.tolist(), old[begins].tolist()):
            first = new % step
            blocks[new // step].append((first, first + count, row))
        return blocks


def plan_moves(a: Ids, b: Ids, vocab: int) -> Moves:
    """Return where the rows of a head for the tokens ``b`` come from in one for the tokens ``a``."""
    return Moves(a, b, vocab, find_rows(b, a))


@dataclass(frozen=True)
class Plan:
    """What becomes of every tensor."""

    drafter: Drafter
    moves: Moves
    heads: tuple[str, ...]
    """Rows are moved."""
    small: dict[str, NDArray[Any]]
    """New contents: the mapping, and one number a row."""
    copied: tuple[str, ...]
    """As they are."""
    dropped: tuple[str, ...]
    """Left out: what trainers cut anew from the target for the mapping that they use."""
    suspects: tuple[str, ...]
    """Copied although they have as many rows as the old head, and nobody knows what they are."""

    @property
    def specs(self) -> list[Spec]:
        """All tensors of the new file."""
        checkpoint, rows = self.drafter.checkpoint, len(self.moves.b)
        specs = [Spec(name, format_word(array.dtype.name), array.shape) for name, array in self.small.items()]
        for name in self.heads:
            entry = checkpoint.entry(name)
            specs.append(Spec(name, format_word(entry.dtype), (rows, *entry.shape[1:])))
        for name in self.copied:
            entry = checkpoint.entry(name)
            specs.append(Spec(name, format_word(entry.dtype), entry.shape))
        return arrange(specs)


def plan_tensors(drafter: Drafter, moves: Moves) -> Plan:
    """Return what becomes of each tensor of ``drafter``.

    Raises:
        Unreadable: its head cannot be moved by rows, or something is of a type that is not written.
        Damaged: the head has other rows than its mapping.
    """
    checkpoint = drafter.checkpoint
    heads: list[str] = []
    copied: list[str] = []
    dropped: list[str] = []
    suspects: list[str] = []
    small: dict[str, NDArray[Any]] = {}
    mapping = _mapping_tensors(moves)
    for name in checkpoint.names():
        entry, role, bare = checkpoint.entry(name), role_of(name), bare_name(name)
        if format_word(entry.dtype) not in BITS:
            raise Unreadable(checkpoint.path, "tensor %s has the type %s, which is not written" % (quoted(name), quoted(entry.dtype)))
        if role in mapping:
            small[name] = mapping[role]
        elif role == "lm_head":
            _check_head(drafter, Matrix(checkpoint, name), moves)
            heads.append(name)
        elif role == "verifier_lm_head":
            dropped.append(name)
        elif bare == _BIAS:
            small[name] = _moved_vector(checkpoint, name, moves)
        elif bare.startswith("lm_head."):
            raise Unreadable(checkpoint.path, "its head is quantised (%s)" % quoted(name), "give the drafter before quantisation")
        else:
            copied.append(name)
            if role is None and entry.shape[:1] == (len(moves.a),):
                suspects.append(name)
    if not heads:
        raise Unreadable(checkpoint.path, "holds no lm_head whose rows could be moved", "give the drafter's whole checkpoint")
    prefix = heads[0][: len(heads[0]) - len(_HEAD)]
    for role in ("d2t", "t2d"):
        if not any(role_of(name) == role for name in small):
            small[prefix + role] = mapping[role]
    return Plan(drafter, moves, tuple(heads), small, tuple(copied), tuple(dropped), tuple(suspects))


def write_weights(path: str, plan: Plan, fill: Fill | None, metadata: Mapping[str, str], told: Told) -> int:
    """Write the file ``path`` and return its size in bytes; raise Damaged or Unreadable."""
    checkpoint = plan.drafter.checkpoint
    specs = plan.specs
    with Writer(path) as writer:
        writer.write(make_header(specs, metadata))
        for spec in specs:
            if spec.name in plan.small:
                writer.write(plan.small[spec.name].tobytes())
            elif spec.name in plan.heads:
                for block in _moved_blocks(Matrix(checkpoint, spec.name), plan.moves, fill):
                    writer.write(block)
                    told(writer.written)
            else:
                _copy(writer, checkpoint, spec, told)
        return writer.written


def verify_weights(path: str, plan: Plan, meter: Meter, told: Told) -> None:
    """Read ``path`` again and hold it against its source, bit for bit where bits must be the same.

    Raises:
        Damaged: it differs.
        Unreadable: it cannot be read.
    """
    import numpy as np

    source, done = plan.drafter.checkpoint, 0
    with open_checkpoint(path, meter) as written:
        wanted = {spec.name: spec for spec in plan.specs}
        if set(written.names()) != set(wanted):
            raise Damaged(path, "it has other tensors than were written")
        for spec in wanted.values():
            entry = written.entry(spec.name)
            same = (format_word(entry.dtype), entry.shape) == (spec.dtype, spec.shape)
            if spec.name in plan.small:
                same = same and np.array_equal(written.read(spec.name), plan.small[spec.name], equal_nan=_is_float(spec))
            elif spec.name in plan.heads:
                same = same and _same_rows(Matrix(source, spec.name), Matrix(written, spec.name), plan.moves)
            else:
                same = same and _same_bytes(source, written, spec)
            if not same:
                raise Damaged(path, "%s is not what was written: the disk, or the source, changed" % quoted(spec.name))
            done += spec.size
            told(done)


# Mapping and small tensors -------------------------------------------------------------------------------------------


def _mapping_tensors(moves: Moves) -> dict[str | None, NDArray[Any]]:
    import numpy as np

    mask = np.zeros(moves.vocab, bool)
    mask[moves.b] = True
    offsets = moves.b - np.arange(len(moves.b), dtype=np.int64)
    return {"d2t": offsets, "t2d": mask, "ids": moves.b.astype(np.int64)}


def _moved_vector(checkpoint: Checkpoint, name: str, moves: Moves) -> NDArray[Any]:
    """Return a tensor of one number a row, moved; rows without a source get the mean."""
    import numpy as np

    entry = checkpoint.entry(name)
    if entry.shape != (len(moves.a),) or entry.dtype not in ("float16", "float32", "float64"):
        raise Unreadable(checkpoint.path, "%s is %s of shape %s, which is not moved" % (quoted(name), entry.dtype, list(entry.shape)))
    values = checkpoint.read(name)
    mean = values.mean(dtype=np.float64).astype(values.dtype)
    found: NDArray[Any] = np.where(moves.source >= 0, values[np.maximum(moves.source, 0)], mean)
    return found


def _is_float(spec: Spec) -> bool:
    return spec.dtype.startswith("F")


def _check_head(drafter: Drafter, head: Matrix, moves: Moves) -> None:
    if not head.columns:
        raise Damaged(drafter.path, "%s has no columns" % quoted(head.name))
    if head.rows == len(moves.a):
        return
    if head.rows == moves.vocab:
        raise Unreadable(
            drafter.path,
            "%s has a row for each of the target's %d tokens, not for the %d of the mapping: it is the target's head"
            % (quoted(head.name), head.rows, len(moves.a)),
            "nothing has to be moved: only d2t and t2d are to be exchanged",
        )
    raise Damaged(drafter.path, "%s has %d rows, its mapping %d" % (quoted(head.name), head.rows, len(moves.a)))


# Bytes ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Block:
    """Some rows of the new head."""

    start: int
    stop: int
    stretches: list[tuple[int, int, int]]


def _blocks(head: Matrix, moves: Moves) -> Iterator[_Block]:
    rows, step = len(moves.b), _step(head)
    for number, stretches in enumerate(moves.stretches(step)):
        yield _Block(number * step, min(rows, number * step + step), stretches)


def _step(head: Matrix) -> int:
    """Return how many rows make up a block."""
    return max(1, BLOCK // head.row_bytes)


def _gather(head: Matrix, block: _Block, into: memoryview) -> None:
    """Read the rows of ``block`` that have a source into their places; those without one stay as they are."""
    file, begin, size = head.place.file, head.place.offset, head.row_bytes
    for first, stop, row in block.stretches:
        file.read_into(begin + row * size, into[first * size : stop * size])


def _moved_blocks(head: Matrix, moves: Moves, fill: Fill | None) -> Iterator[memoryview]:
    """Yield the new head, some rows at a time; a block is valid until the next is asked for."""
    import numpy as np

    head.place.file.expect(head.place.offset, head.rows * head.row_bytes)
    raw, rows = _buffer(head, moves)
    for block in _blocks(head, moves):
        _gather(head, block, memoryview(raw))
        missing = np.flatnonzero(moves.source[block.start : block.stop] < 0)
        if len(missing):
            if fill is None:
                raise ValueError("%d rows have no source, and nothing to fill them with was given" % len(missing))
            rows[missing] = fill.rows(moves.b[block.start + missing])
        yield memoryview(raw)[: (block.stop - block.start) * head.row_bytes]


def _same_rows(head: Matrix, written: Matrix, moves: Moves) -> bool:
    """Whether the moved rows in ``written`` are their sources in ``head``, bit for bit."""
    import numpy as np

    (raw, rows), (raw_found, rows_found) = _buffer(head, moves), _buffer(head, moves)
    for block in _blocks(head, moves):
        part = memoryview(raw_found)[: (block.stop - block.start) * head.row_bytes]
        written.place.file.read_into(written.place.offset + block.start * head.row_bytes, part)
        missing = np.flatnonzero(moves.source[block.start : block.stop] < 0)
        rows[missing] = rows_found[missing]
        _gather(head, block, memoryview(raw))
        # As bytes: a NaN equals itself, and -0 is not 0. What is behind the last block is the same in both.
        if raw != raw_found:
            return False
    return True


def _buffer(head: Matrix, moves: Moves) -> tuple[bytearray, NDArray[Any]]:
    """Return room for one block, as bytes and as rows."""
    import numpy as np

    from .floats import STORED

    count = min(len(moves.b), _step(head))
    raw = bytearray(count * head.row_bytes)
    return raw, np.frombuffer(raw, STORED[head.dtype]).reshape(count, head.columns)


def _copy(writer: Writer, checkpoint: Checkpoint, spec: Spec, told: Told) -> None:
    raw = _scattered(checkpoint, spec)
    if raw is not None:
        writer.write(raw)
        return
    place = checkpoint.place(spec.name)
    for start in range(0, spec.size, 32 * BLOCK):
        writer.copy(place.file, place.offset + start, min(32 * BLOCK, spec.size - start))
        told(writer.written)


def _same_bytes(source: Checkpoint, written: Checkpoint, spec: Spec) -> bool:
    raw, there = _scattered(source, spec), written.place(spec.name)
    if raw is not None:
        return raw == there.file.read(there.offset, spec.size)
    here = source.place(spec.name)
    a, b = bytearray(BLOCK), bytearray(BLOCK)
    for start in range(0, spec.size, BLOCK):
        count = min(BLOCK, spec.size - start)
        here.file.read_into(here.offset + start, memoryview(a)[:count])
        there.file.read_into(there.offset + start, memoryview(b)[:count])
        if count < BLOCK:
            a, b = a[:count], b[:count]
        if a != b:
            return False
    return True


def _scattered(checkpoint: Checkpoint, spec: Spec) -> bytes | None:
    """Return the bytes of a tensor that does not lie in one piece in its file, None for all others."""
    import numpy as np

    if not spec.size:
        return b""
    try:
        checkpoint.place(spec.name)
        return None
    except Unreadable:
        values = checkpoint.read(spec.name)
    if spec.dtype == "BF16":
        # It was widened, which left its bits in the upper half.
        values = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")
    return np.ascontiguousarray(values).tobytes()

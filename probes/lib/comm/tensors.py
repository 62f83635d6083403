"""The collectives themselves, in torch: buffers of known contents, the call, and the count of what came out wrong.

Sums are exact: values are small integers whose sum over all ranks fits the mantissa of the type. They repeat with a
prime period, so that a block that lands at another power of two is seen, and differ by rank and destination.
"""

from __future__ import annotations

from .plan import ELEMENT, SPLIT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

_EXACT = {"bf16": 256, "fp16": 2048, "uint8": 254}
"""Type -> the largest integer up to which every one is exact, where that is small; 255 marks what was not written."""
_PRIMES = (251, 241, 199, 151, 127, 101, 83, 61, 47, 31, 23, 17, 13, 11, 7, 5, 3)
_CHUNK = 1 << 20
_UNWRITTEN = {"uint8": 255}
_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "int32": "int32",
          "int64": "int64", "uint8": "uint8"}  # fmt: skip


def period(dtype: str, addends: int) -> int:
    """Return the largest prime period whose values, summed over ``addends`` ranks, are exact in ``dtype``."""
    largest = _EXACT.get(dtype, 1 << 24)
    return next((prime for prime in _PRIMES if (prime - 1) * addends <= largest), 2)


class Pattern:
    """Values that are known from rank, destination and place alone."""

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus

    def value(self, place: int, source: int, target: int = 0) -> int:
        """Return what rank ``source`` puts at ``place`` for rank ``target``."""
        return (place + 7 * source + 3 * target + 1) % self.modulus

    def of(self, source: int, target: int = 0) -> list[int]:
        """Return one period of what ``source`` sends."""
        return [self.value(place, source, target) for place in range(self.modulus)]

    def total(self, ranks: int, start: int = 0) -> list[int]:
        """Return one period of the sum over all ranks, from place ``start`` on."""
        return [sum(self.value(place + start, rank) for rank in range(ranks)) for place in range(self.modulus)]


class Collective:
    """One collective of one size on one rank.

    Args:
        torch: the module.
        name: which one.
        dtype: type of the elements, by its short name.
        size: bytes, as :func:`plan.possible` returns them.
        rank: of this process.
        ranks: how many there are.
        device: where tensors live.
        lists: whether the backend wants lists of tensors in place of one (gloo).

    Raises:
        RuntimeError: there is no memory for it.
    """

    def __init__(
        self, torch: Any, name: str, dtype: str, size: int, *, rank: int, ranks: int, device: Any, lists: bool
    ) -> None:
        self._torch, self._dist = torch, torch.distributed
        self._name, self._dtype, self._rank, self._ranks, self._lists = name, dtype, rank, ranks, lists
        self._type = getattr(torch, _NAMES[dtype])
        self.count = size // ELEMENT[dtype]
        part = self.count // ranks if name in SPLIT else self.count
        reduces = name in ("all_reduce", "reduce", "reduce_scatter")
        self._pattern = Pattern(period(dtype, ranks if reduces else 1))
        self._part = part

        def new(count: int) -> Any:
            return torch.empty(count, dtype=self._type, device=device)

        self._in = new(part if name == "all_gather" else self.count)
        self._out = self._in
        if name not in ("all_reduce", "broadcast", "reduce"):
            self._out = new(part if name == "reduce_scatter" else self.count)
        self.call: Callable[[], None] = getattr(self, "_" + name)

    # -- the calls

    def _all_reduce(self) -> None:
        self._dist.all_reduce(self._in)

    def _all_gather(self) -> None:
        if self._lists:
            self._dist.all_gather(list(self._out.chunk(self._ranks)), self._in)
        else:
            self._dist.all_gather_into_tensor(self._out, self._in)

    def _reduce_scatter(self) -> None:
        self._dist.reduce_scatter_tensor(self._out, self._in)

    def _alltoall(self) -> None:
        self._dist.all_to_all_single(self._out, self._in)

    def _broadcast(self) -> None:
        self._dist.broadcast(self._in, src=0)

    def _reduce(self) -> None:
        self._dist.reduce(self._in, dst=0)

    def _sendrecv(self) -> None:
        dist = self._dist
        following, previous = (self._rank + 1) % self._ranks, (self._rank - 1) % self._ranks
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, self._in, following), dist.P2POp(dist.irecv, self._out, previous)]
        ):
            work.wait()

    # -- contents

    def fill(self) -> None:
        """Write what this rank sends, and a mark where it receives."""
        if self._out is not self._in:
            self._out.fill_(_UNWRITTEN.get(self._dtype, -1))
        if self._name == "broadcast" and self._rank:
            self._in.fill_(_UNWRITTEN.get(self._dtype, -1))
        elif self._name == "alltoall":
            for target, part in enumerate(self._in.split(self._part)):
                self._write(part, self._pattern.of(self._rank, target))
        else:
            self._write(self._in, self._pattern.of(self._rank))

    def wrong(self) -> int:
        """Return how many elements are not what they must be after one call."""
        pattern, out, ranks = self._pattern, self._out, self._ranks
        if self._name == "reduce" and self._rank:
            return 0
        if self._name in ("all_reduce", "reduce"):
            return self._differing(out, pattern.total(ranks))
        if self._name == "reduce_scatter":
            return self._differing(out, pattern.total(ranks, self._rank * self._part))
        if self._name == "broadcast":
            return self._differing(out, pattern.of(0))
        if self._name == "sendrecv":
            return self._differing(out, pattern.of((self._rank - 1) % ranks))
        target = self._rank if self._name == "alltoall" else 0
        parts = enumerate(out.split(self._part))
        return sum(self._differing(part, pattern.of(source, target)) for source, part in parts)

    def clear(self) -> None:
        """Write zeros: a sum that is called again and again must not overflow."""
        self._in.zero_()
        self._out.zero_()

    def _tile(self, values: list[int], count: int) -> Any:
        once = self._torch.tensor(values, dtype=self._type, device=self._in.device)
        return once.repeat(max(1, min(_CHUNK, count + len(values) - 1) // len(values)))

    def _write(self, tensor: Any, values: list[int]) -> None:
        tile = self._tile(values, len(tensor))
        for start in range(0, len(tensor), len(tile)):
            piece = tensor[start : start + len(tile)]
            piece.copy_(tile[: len(piece)])

    def _differing(self, tensor: Any, values: list[int]) -> int:
        tile = self._tile(values, len(tensor))
        counts = []
        for start in range(0, len(tensor), len(tile)):
            piece = tensor[start : start + len(tile)]
            counts.append((piece != tile[: len(piece)]).sum())
        return int(sum(int(count.item()) for count in counts))

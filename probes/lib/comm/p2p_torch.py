"""Memory of GPUs and of the host, and copies between them, in torch: the device layer of :mod:`p2p_main`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

HOST = -1
"""Stands for pinned memory of the host in the place of a GPU's index."""
_PERIOD = 251
"""Bytes after which contents repeat; a prime, so that a block that lands elsewhere is seen."""
_TILE = _PERIOD * 4096


class Layer:
    """Everything that a copy is made and judged with. Buffers are whatever the layer makes them."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.version = str(torch.__version__)
        self._used: set[int] = set()

    def devices(self) -> list[dict[str, Any]]:
        """Return name, bus_id and uuid of each GPU, by index."""
        from probes.lib.comm.devices import count, describe

        cuda = self._torch.cuda
        # Where CUDA cannot be used, this says why.
        cuda.init()
        number, _ = count(self._torch)
        return [describe(cuda.get_device_properties(index), index) for index in range(number)]

    def can_access(self, source: int, target: int) -> bool | None:
        """Return what the driver grants; None where there is nothing to grant."""
        if HOST in (source, target) or source == target:
            return None
        return bool(self._torch.cuda.can_device_access_peer(source, target))

    def blank(self, where: int, size: int) -> Any:
        """Return memory that holds nothing that a copy could leave there."""
        return self._new(where, size).fill_(255)

    def filled(self, where: int, size: int, seed: int) -> Any:
        """Return memory with the contents that ``seed`` stands for."""
        buffer = self._new(where, size)
        tile = self._tile(buffer, seed)
        for start in range(0, size, len(tile)):
            piece = buffer[start : start + len(tile)]
            piece.copy_(tile[: len(piece)])
        self.settle()
        return buffer

    def differing(self, buffer: Any, seed: int) -> int:
        """Return how many bytes are not what ``seed`` stands for; looked at where the buffer is."""
        tile = self._tile(buffer, seed)
        wrong = 0
        for start in range(0, len(buffer), len(tile)):
            piece = buffer[start : start + len(tile)]
            wrong += int((piece != tile[: len(piece)]).sum().item())
        return wrong

    def copy(self, target: Any, source: Any) -> None:
        """Begin to copy."""
        target.copy_(source, non_blocking=True)

    def settle(self) -> None:
        """Wait until all copies are done; GPUs that no copy uses are left alone."""
        for index in sorted(self._used):
            self._torch.cuda.synchronize(index)

    def seconds(self, copies: Sequence[tuple[Any, Any]], calls: int) -> float:
        """Return how long one round of all ``copies`` (target, source) takes; several go at the same time."""
        import time

        cuda = self._torch.cuda
        if len(copies) == 1:
            # The stream that a copy between devices runs on is that of its source.
            target, source = copies[0]
            device = source.device if source.is_cuda else target.device
            with cuda.device(device):
                start, end = (cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(calls):
                    target.copy_(source, non_blocking=True)
                end.record()
                self.settle()
                return float(start.elapsed_time(end)) / 1e3 / calls
        streams = []
        for target, source in copies:
            with cuda.device(source.device if source.is_cuda else target.device):
                streams.append(cuda.Stream())
        self.settle()
        begun = time.perf_counter()
        for _ in range(calls):
            for stream, (target, source) in zip(streams, copies):
                with cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        self.settle()
        return (time.perf_counter() - begun) / calls

    def _new(self, where: int, size: int) -> Any:
        torch = self._torch
        if where == HOST:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._used.add(where)
        return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", where))

    def _tile(self, buffer: Any, seed: int) -> Any:
        torch = self._torch
        values = torch.arange(_PERIOD, dtype=torch.int64).add_(seed).remainder_(_PERIOD).to(torch.uint8)
        return values.to(buffer.device).repeat(max(1, min(_TILE, len(buffer) + _PERIOD - 1) // _PERIOD))

"""What is only run on GPUs, with a torch that pretends to have some: units, graphs, contents of copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from probes.lib.comm import worker_main
from probes.lib.comm.devices import describe
from probes.lib.comm.p2p_torch import Layer


class Event:
    """Takes 3 ms for each call, 0.5 ms for each replay of a call, between two events."""

    clock = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.clock

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Graph:
    captured = 0

    def replay(self) -> None:
        Event.clock += 0.5 * Graph.captured


class Capturing:
    def __init__(self, _: Graph, *, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"

    def __enter__(self) -> None:
        self.before = Event.clock

    def __exit__(self, *_: object) -> None:
        Graph.captured = round((Event.clock - self.before) / 3)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = {"rank": 0, "ranks": 1, "backend": "nccl", "graph": False}
    rank: Any = worker_main.Rank(spec, SimpleNamespace(say=lambda **_: None))  # type: ignore[arg-type]
    cuda = SimpleNamespace(Event=Event, synchronize=lambda: None, CUDAGraph=Graph, graph=Capturing)
    rank._torch = SimpleNamespace(cuda=cuda)
    rank._dist = SimpleNamespace(all_reduce=lambda _: setattr(Event, "clock", Event.clock + 100))
    rank._tiny = None
    rank._cuda = True
    rank._collective = SimpleNamespace(call=lambda: setattr(Event, "clock", Event.clock + 3))
    return rank


def test_times_are_microseconds_of_one_call_and_the_meeting_before_is_not_timed(rank: Any) -> None:
    assert rank._latency(5, graph=False) == [pytest.approx(3000)] * 5
    assert rank._burst(7) == pytest.approx(3000)


def test_a_graph_of_several_calls_is_divided(rank: Any) -> None:
    assert rank._latency(2, graph=True) == [pytest.approx(500)] * 2
    assert Graph.captured == worker_main._GRAPH_CALLS


def test_gpus_are_named_as_the_kernel_names_them() -> None:
    new = SimpleNamespace(name="G", uuid="6f00", pci_bus_id=0x1B, pci_device_id=0, pci_domain_id=1)
    assert describe(new) == {"name": "G", "bus_id": "0001:1b:00.0", "uuid": "GPU-6f00"}
    assert describe(SimpleNamespace(name="G")) == {"name": "G", "bus_id": None, "uuid": None}


class OnTheCpu(Layer):
    """The layer with all memory on the host."""

    def _new(self, where: int, size: int) -> Any:  # noqa: ARG002
        return torch.empty(size, dtype=torch.uint8)


@pytest.mark.parametrize("size", [4, 251, 4096, (1 << 20) + 3])
def test_contents_of_copies(size: int) -> None:
    layer = OnTheCpu()
    here, there = layer.filled(0, size, 17), layer.blank(1, size)
    assert layer.differing(there, 17) == size
    layer.copy(there, here)
    assert layer.differing(there, 17) == 0
    assert layer.differing(there, 101) == size
    there[-1] += 1
    assert layer.differing(there, 17) == 1
    if size > 4096:
        assert layer.differing(here.roll(4096), 17) > 0

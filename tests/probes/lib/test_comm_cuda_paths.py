"""What is only run on GPUs, with a torch that pretends to have some: units, graphs, contents of copies."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from probes.lib.comm import worker_main
from probes.lib.comm.devices import count, describe
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


def test_cuda_begins_before_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    rank: Any = worker_main.Rank({"rank": 1, "backend": "nccl"}, SimpleNamespace(say=lambda **what: said.append(what.get("phase"))))  # type: ignore[arg-type]

    def begin(index: int) -> None:
        assert (index, said[-1]) == (1, "devices")
        raise RuntimeError("as far as this goes")

    monkeypatch.setattr(torch.cuda, "set_device", begin)
    with pytest.raises(RuntimeError, match="as far"):
        rank.meet()
    assert said == ["import", "devices"]


def test_gpus_are_named_as_the_kernel_names_them() -> None:
    new = SimpleNamespace(name="G", uuid="6f00", pci_bus_id=0x1B, pci_device_id=0, pci_domain_id=1)
    assert describe(new) == {"name": "G", "bus_id": "0001:1b:00.0", "uuid": "GPU-6f00"}
    assert describe(SimpleNamespace(name="G")) == {"name": "G", "bus_id": None, "uuid": None}


class Driver:
    """libcuda, which writes what it knows where it is told to."""

    def __init__(self, address: bytes, status: int = 0) -> None:
        self._address, self._status = address, status

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = 40 + index
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, length: int, device: Any) -> int:  # noqa: N802
        assert (length, device.value) == (64, 42)
        text.value = self._address
        return self._status


def test_an_address_that_torch_does_not_tell_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(driver: Driver | None) -> str | None:
        def library(name: str) -> Driver:
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError(name)
            return driver

        monkeypatch.setattr("ctypes.CDLL", library)
        address: str | None = describe(SimpleNamespace(name="G"), 2)["bus_id"]
        return address

    assert told(Driver(b"0000:1B:00.0")) == "0000:1b:00.0"
    assert [told(driver) for driver in (Driver(b"0000:1B:00.0", 101), Driver(b"nonsense"), None)] == [None] * 3


def with_gpus(nvml: int, cuda: int | str | None, *, built: bool = True) -> Any:
    """Return a torch; ``cuda`` is what CUDA counts, what it complains of, or None in a torch that cannot ask it."""

    def counted() -> int:
        if isinstance(cuda, str):
            warnings.warn(cuda, stacklevel=1)
            return 0
        return cuda or 0

    inner = SimpleNamespace() if cuda is None else SimpleNamespace(_cuda_getDeviceCount=counted)
    backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: built))
    return SimpleNamespace(_C=inner, cuda=SimpleNamespace(device_count=lambda: nvml), backends=backends)


def test_only_gpus_that_cuda_gives_out_are_counted() -> None:
    assert count(with_gpus(8, 8)) == (8, "")
    # Eight GPUs in MIG mode: NVML knows them, a process gets one instance.
    assert count(with_gpus(8, 1)) == (1, "")
    assert count(with_gpus(2, None)) == (2, "")
    number, why = count(with_gpus(8, "CUDA initialization: Error 802:\nsystem not yet initialized"))
    assert (number, why) == (0, "CUDA initialization: Error 802: system not yet initialized")
    assert count(with_gpus(0, None, built=False)) == (0, "it was built without CUDA")


def test_copies_are_made_between_gpus_that_cuda_gives_out() -> None:
    layer, begun = Layer(), []
    layer._torch = with_gpus(8, 2)
    layer._torch.cuda.init = lambda: begun.append(True)
    layer._torch.cuda.get_device_properties = lambda index: SimpleNamespace(name=f"G{index}", pci_bus_id=index)
    assert [each["name"] for each in layer.devices()] == ["G0", "G1"]
    assert begun == [True]


def test_copies_wait_for_the_gpus_that_they_use_only() -> None:
    waited: list[int] = []
    layer = Layer()
    empty = lambda size, **_: torch.zeros(size, dtype=torch.uint8)  # noqa: E731
    cuda = SimpleNamespace(synchronize=waited.append, device_count=lambda: 8, is_initialized=lambda: True)
    layer._torch = SimpleNamespace(cuda=cuda, empty=empty, uint8=torch.uint8, device=lambda kind, index: (kind, index))
    for where in (5, -1, 2):
        layer._new(where, 4)
    layer.settle()
    assert waited == [2, 5]


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

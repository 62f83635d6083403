"""One rank: ``python worker_main.py SPEC``, started by :mod:`workers`, told what to do line by line on stdin.

What it measures goes out through a pipe of its own, never through the group that is measured: when that hangs, all
that was found out before has already been said. It ends when its starter does, however that went.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BEAT = 0.5
"""Seconds between two signs of life."""
_WARM_UP = 5
_GRAPH_CALLS = 16
_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, even while it is stopped."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


def enter_bundle() -> None:
    """Make ``probes`` importable, and nothing of this folder by a bare name."""
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == here:
        del sys.path[0]
    package = type(sys)("probes")
    package.__path__ = [os.path.dirname(os.path.dirname(here))]
    sys.modules["probes"] = package


class Mouth:
    """Says JSON lines to the starter, from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def say(self, **what: Any) -> None:
        """Send one line."""
        data = (json.dumps(what) + "\n").encode("ascii")
        with self._lock:
            while data:
                data = data[os.write(self._descriptor, data) :]

    def beat(self) -> None:
        """Show signs of life until the process ends, or nobody listens."""
        try:
            while True:
                self.say(beat=True)
                time.sleep(BEAT)
        except OSError:
            os._exit(1)


class Rank:
    """This process in the group."""

    def __init__(self, spec: dict[str, Any], mouth: Mouth) -> None:
        self._spec, self._mouth = spec, mouth
        self._collective: Any = None
        self._size = 0

    def phase(self, name: str) -> None:
        """Say what is about to be done."""
        self._mouth.say(phase=name, size=self._size or None)

    def meet(self) -> None:
        """Import torch and join the group."""
        spec = self._spec
        self.phase("import")
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        self._cuda = spec["backend"] == "nccl"
        more: dict[str, Any] = {}
        if self._cuda:
            self.phase("devices")
            torch.cuda.set_device(spec["rank"])
            self._device = torch.device("cuda", spec["rank"])
            if _accepts(dist.init_process_group, "device_id"):
                more["device_id"] = self._device
        else:
            torch.set_num_threads(1)
            self._device = torch.device("cpu")
        self.phase("meet")
        from datetime import timedelta

        dist.init_process_group(
            spec["backend"],
            init_method="tcp://127.0.0.1:%d" % spec["port"],
            rank=spec["rank"],
            world_size=spec["ranks"],
            timeout=timedelta(seconds=spec["timeout_s"]),
            **more,
        )
        self._tiny = torch.zeros(1, device=self._device)
        dist.all_reduce(self._tiny)
        self._settle()
        self._mouth.say(ready=True, **self._describe())

    def _describe(self) -> dict[str, Any]:
        torch = self._torch
        told = {"name": "cpu", "bus_id": None, "uuid": None, "free": None, "torch": torch.__version__, "library": None}
        if self._cuda:
            from probes.lib.comm.devices import describe

            told.update(describe(torch.cuda.get_device_properties(self._device), self._spec["rank"]))
            told["free"] = int(torch.cuda.mem_get_info(self._device)[0])
            version = torch.cuda.nccl.version()
            told["library"] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
        return told

    def obey(self, order: dict[str, Any]) -> None:
        """Do what a line says, and answer."""
        if order["do"] == "prepare":
            self._mouth.say(done="prepare", **self._prepare(order))
        elif order["do"] == "time":
            self._mouth.say(done="time", **self._time(order))
        else:
            raise ValueError("no such order: %r" % order["do"])

    def _prepare(self, order: dict[str, Any]) -> dict[str, Any]:
        from probes.lib.comm.tensors import Collective

        spec = self._spec
        # The last size's memory goes first.
        self._collective = None
        self._size = order["size"]
        self.phase("prepare")
        collective = Collective(
            self._torch,
            spec["collective"],
            spec["dtype"],
            order["size"],
            rank=spec["rank"],
            ranks=spec["ranks"],
            device=self._device,
            lists=not self._cuda,
        )
        wrong = None
        if order["check"]:
            self.phase("check")
            collective.fill()
            self._settle()
            collective.call()
            self._settle()
            wrong = collective.wrong()
        collective.clear()
        self.phase("warm-up")
        collective.call()
        self._settle()
        begun = time.perf_counter()
        for _ in range(_WARM_UP):
            collective.call()
        self._settle()
        self._collective = collective
        return {"wrong": wrong, "count": collective.count, "estimate_us": (time.perf_counter() - begun) * 1e6 / _WARM_UP}

    def _time(self, order: dict[str, Any]) -> dict[str, Any]:
        single: list[float] = []
        if order["latency"]:
            self.phase("latency")
            single = self._latency(order["latency"], graph=self._spec["graph"])
        self.phase("burst")
        return {"latency_us": single, "burst_us": [self._burst(order["burst"]) for _ in range(order["bursts"])]}

    def _latency(self, calls: int, *, graph: bool) -> list[float]:
        call, each = self._collective.call, 1
        if graph:
            call, each = self._captured(), _GRAPH_CALLS
        if not self._cuda:
            found = []
            for _ in range(calls):
                self._dist.barrier()
                begun = time.perf_counter_ns()
                call()
                found.append((time.perf_counter_ns() - begun) / 1e3)
            return found
        event = self._torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(calls)]
        for start, end in pairs:
            # Ranks begin together: this one is not timed.
            self._dist.all_reduce(self._tiny)
            start.record()
            call()
            end.record()
        self._settle()
        return [start.elapsed_time(end) * 1e3 / each for start, end in pairs]

    def _captured(self) -> Any:
        graph = self._torch.cuda.CUDAGraph()
        self._settle()
        kind = self._torch.cuda.graph
        # Other threads of NCCL may talk to the driver meanwhile; torch before 2.1 does not know the word.
        more = {"capture_error_mode": "thread_local"} if _accepts(kind.__init__, "capture_error_mode") else {}
        with kind(graph, **more):
            for _ in range(_GRAPH_CALLS):
                self._collective.call()
        graph.replay()
        self._settle()
        return graph.replay

    def _burst(self, calls: int) -> float:
        call = self._collective.call
        if not self._cuda:
            self._dist.barrier()
            begun = time.perf_counter_ns()
            for _ in range(calls):
                call()
            return (time.perf_counter_ns() - begun) / 1e3 / calls
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._dist.all_reduce(self._tiny)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        self._settle()
        return float(start.elapsed_time(end)) * 1e3 / calls

    def _settle(self) -> None:
        if self._cuda:
            self._torch.cuda.synchronize()

    def leave(self) -> None:
        """Leave the group in order."""
        self.phase("leave")
        self._collective = None
        self._dist.destroy_process_group()


def _accepts(function: Any, name: str) -> bool:
    import inspect

    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def serve(kind: Any) -> None:
    """Make a ``kind`` of the spec that the command line names, and let it obey until stdin says ``stop`` or ends."""
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    die_with(spec["parent"])
    mouth = Mouth(spec["descriptor"])
    threading.Thread(target=mouth.beat, daemon=True).start()
    try:
        servant = kind(spec, mouth)
        servant.meet()
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "stop":
                servant.leave()
                mouth.say(done="stop")
                break
            servant.obey(order)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the starter has to know
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        words = [line.strip() for line in str(error).splitlines() if line.strip()]
        mouth.say(error=type(error).__name__, text=" ".join(words)[:2000])
    # Tear-down of a group that hangs would hang too; everything has been said.
    os._exit(0)


if __name__ == "__main__":
    enter_bundle()
    serve(Rank)

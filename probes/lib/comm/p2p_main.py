"""One process that copies between GPUs, pair after pair, as it is told: ``python p2p_main.py SPEC``.

A pair that hangs or crashes takes this process with it and no other pair: the starter begins another one.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    _HERE = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0]) == _HERE:
        # Names in this folder must not stand for those of the environment.
        del sys.path[0]
    _PACKAGE = type(sys)("probes")
    _PACKAGE.__path__ = [os.path.dirname(os.path.dirname(_HERE))]
    sys.modules["probes"] = _PACKAGE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from probes.lib.comm.worker_main import Mouth

HOST = -1
_SMALL = 4
_SEEDS = (17, 101)
"""Contents of two rounds: what is left from the first is no proof in the second."""


class Copier:
    """Obeys orders with a device layer."""

    def __init__(self, spec: dict[str, Any], mouth: Mouth) -> None:
        self._mouth = mouth
        self._size = 0
        self._layer: Any = None
        self._path = spec["layer"]

    def meet(self) -> None:
        """Load the layer and say what GPUs there are."""
        from importlib.util import module_from_spec, spec_from_file_location

        self.phase("import")
        found = spec_from_file_location("device_layer", self._path)
        assert found is not None and found.loader is not None  # noqa: S101, PT018 - a .py file has a loader
        module = module_from_spec(found)
        found.loader.exec_module(module)
        self._layer = module.Layer()
        self.phase("devices")
        self._mouth.say(ready=True, devices=self._layer.devices(), version=self._layer.version)

    def phase(self, name: str) -> None:
        """Say what is about to be done."""
        self._mouth.say(phase=name, size=self._size or None)

    def obey(self, order: dict[str, Any]) -> None:
        """Copy from one place to another: contents, then single copies, then many; then both ways at once."""
        source, target, size, layer = order["source"], order["target"], order["size"], self._layer
        self.phase("capability")
        said = layer.can_access(source, target)
        wrong = 0
        self.phase("check")
        for checked in (_SMALL, order["checked"]):
            for seed in _SEEDS:
                here, there = layer.filled(source, checked, seed), layer.blank(target, checked)
                layer.settle()
                layer.copy(there, here)
                layer.settle()
                wrong += layer.differing(there, seed)
        self._mouth.say(found={"can_access": said, "wrong_bytes": wrong})
        self.phase("latency")
        here, there = layer.filled(source, _SMALL, 1), layer.blank(target, _SMALL)
        layer.seconds([(there, here)], 10)
        latency = layer.seconds([(there, here)], 100)
        self.phase("bandwidth")
        here, there = layer.filled(source, size, 1), layer.blank(target, size)
        layer.seconds([(there, here)], 2)
        one_way = size / layer.seconds([(there, here)], order["calls"]) / 1e9
        both = None
        if order["both"]:
            self.phase("both ways")
            back, to = layer.filled(target, size, 2), layer.blank(source, size)
            copies = [(there, here), (to, back)]
            layer.seconds(copies, 2)
            both = 2 * size / layer.seconds(copies, order["calls"]) / 1e9
        self._mouth.say(
            done="pair", can_access=said, wrong_bytes=wrong, latency_us=latency * 1e6, bandwidth_gbs=one_way,
            both_ways_gbs=both,
        )  # fmt: skip

    def leave(self) -> None:
        """Nothing is to be left in order."""


def main() -> None:
    """Copy until stdin says ``stop`` or ends."""
    from probes.lib.comm.worker_main import serve

    serve(Copier)


if __name__ == "__main__":
    main()

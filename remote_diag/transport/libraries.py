"""paramiko and fabric, imported on first use and without what they never need here.

``import fabric`` takes about 100 ms, a quarter of it for two modules of which invoke uses one name each, and never
while rdiag runs: ``unittest.mock`` (with all of asyncio behind it), for invoke's MockContext, and invoke's own copy of
PyYAML, for configuration files. While fabric is being imported two stand-ins take their places; they are removed
right after, and what invoke holds of them loads the real module when it is used. Any trouble leads to the plain
import.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
import types
from typing import Any

_lock = threading.RLock()
_loaded: dict[str, Any] = {}


def paramiko() -> Any:
    """Return the module."""
    return _loaded.get("paramiko") or _load("paramiko")


def fabric() -> Any:
    """Return the module."""
    return _loaded.get("fabric") or _load("fabric")


class _StandIn(types.ModuleType):
    """Looks like a module and becomes the real one when something other than ``postponed`` is wanted.

    Args:
        name: the module it stands for.
        client: the one module for which names are postponed; everybody else gets the real thing at once.
        postponed: names that ``client`` imports and does not need yet.
    """

    def __init__(self, name: str, client: str, postponed: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self._client = client
        self._postponed = postponed

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        importer = sys._getframe(1).f_globals.get("__name__")
        if attribute in self._postponed and importer == self._client:
            return _postponed(self.__name__, attribute)
        return getattr(_real(self.__name__), attribute)


def _postponed(module: str, name: str) -> type:
    """Return a class whose instances are those of ``module.name``, which is imported at the first of them."""

    def make(_: type, *args: Any, **kwargs: Any) -> Any:
        return getattr(_real(module), name)(*args, **kwargs)

    return type(name, (), {"__new__": make, "__module__": module})


def _real(name: str) -> types.ModuleType:
    # No lock: the thread that imports fabric may hold it and wait for a module that the calling thread is importing.
    if isinstance(sys.modules.get(name), _StandIn):
        sys.modules.pop(name, None)
    return importlib.import_module(name)


def _load(name: str) -> Any:
    with _lock:
        if "fabric" not in _loaded:
            _import_fabric()
            _loaded["fabric"] = importlib.import_module("fabric")
            _loaded["paramiko"] = importlib.import_module("paramiko")
        return _loaded[name]


def _import_fabric() -> None:
    """Import fabric; thousands of new objects are no reason to look for garbage, so that waits."""
    collecting = gc.isenabled()
    gc.disable()
    stand_ins = [
        _StandIn("unittest.mock", "invoke.context", ("Mock",)),
        _StandIn("invoke.vendor.yaml", "invoke.util"),
    ]
    placed = [one for one in stand_ins if sys.modules.setdefault(one.__name__, one) is one]
    try:
        importlib.import_module("fabric")
    except Exception:  # noqa: BLE001 - a version that uses these modules differently: import it as it wants to be
        _remove(placed)
        importlib.import_module("fabric")
    finally:
        _remove(placed)
        if collecting:
            gc.enable()


def _remove(stand_ins: list[_StandIn]) -> None:
    for one in stand_ins:
        if sys.modules.get(one.__name__) is one:
            del sys.modules[one.__name__]

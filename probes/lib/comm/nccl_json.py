"""Reads the JSON of nccl-tests (`-J FILE`), versions 1 to 3, also where the program ended before the file did.

What is odd about it and handled here: booleans are strings; NaN is the string "nan" and infinity stands bare; versions
2.17.3 to 2.17.8 spell `average_bus_bandwidith`; `nwrong` is null when nothing was checked while `okay` stays "true"; a
build without MPI lists only its first device; and `env` holds the whole environment, of which only NCCL_ and CUDA_
variables are kept.
"""

from __future__ import annotations

import json
import re

from .nccl_log import REDUCTIONS, TYPE_BYTES, Damage, Device, Line, Log, Printed, Side, Spread, Table
from .nccl_text import bus_id, version_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

MAX_RESULTS = 100_000
_JSON_STEP = 5e-7
"""Half of the last digit that the writer prints."""
_BARE = re.compile(r"([:\[,]\s*)(-?(?:inf(?:inity)?|nan))\b", re.IGNORECASE)
_ALLOWED = re.compile(r"(?:NCCL_[A-Z0-9_]+|CUDA_[A-Z0-9_]+)", re.ASCII)
_NAMES = {"AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AllToAll", "Broadcast", "Reduce", "SendRecv", "Gather", "Scatter", "HyperCube"}  # fmt: skip
_CONFIG = {
    "threads": "nthreads", "gpus": "ngpus", "min_bytes": "minimum_bytes", "max_bytes": "maximum_bytes",
    "step_factor": "step_factor", "step_bytes": "step_bytes", "warmup": "warmup_iters", "iterations": "iterations",
    "validation": "validation", "graph": "graph",
}  # fmt: skip


def looks_like(text: str) -> bool:
    """Whether a text is meant as this JSON, whole or not."""
    return text.lstrip("\ufeff \t\r\n").startswith("{")


def read(text: str) -> Log:
    """Gather what the JSON holds.

    Raises:
        ValueError: It is not JSON of nccl-tests.
    """
    text = text.lstrip("\ufeff \t\r\n")
    whole: dict[str, Any] | None
    try:
        whole = _whole(text)
    except ValueError:
        whole = None
    found = whole if whole is not None else _parts(text)
    if not ("results" in found and ("nccl_version" in found or "config" in found)):
        raise ValueError("it is JSON, and not that of nccl-tests: no results with nccl_version or config")
    log = Log("json", settings=_settings(found.get("env")))
    log.json_version = _whole_number(found.get("version"))
    if log.json_version is None or log.json_version > 3:
        log.notes.append("versions 1 to 3 of the JSON are known, and this one says %.40r" % (found.get("version"),))
    log.tables.append(_table(found, whole=whole is not None))
    errors = found.get("errors")
    log.failures += [str(error)[:200] for error in errors if error][:20] if isinstance(errors, list) else []
    return log


def _whole(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=str, object_pairs_hook=_once)
    except ValueError:
        found = json.loads(_BARE.sub(r'\1"\2"', text), parse_constant=str, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return found if isinstance(found, dict) else {}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it says something twice")
    return found


def _parts(text: str) -> dict[str, Any]:
    """Return what can be read of an object that ends too early: its fields, and results until the first broken one."""
    decoder = json.JSONDecoder(parse_constant=str, object_pairs_hook=_once)
    text = _BARE.sub(r'\1"\2"', text)
    found: dict[str, Any] = {}
    for name in ("version", "env", "nccl_version", "config", "args", "errors"):
        place = re.search(r'"%s"\s*:\s*' % name, text)
        if place is not None:
            try:
                found[name] = decoder.raw_decode(text, place.end())[0]
            except (ValueError, RecursionError):
                continue
    start = re.search(r'"results"\s*:\s*\[', text)
    if start is not None:
        found["results"] = list(_objects(text, start.end(), decoder))
    return found


def _objects(text: str, place: int, decoder: json.JSONDecoder) -> Iterator[Any]:
    for _ in range(MAX_RESULTS):
        while text[place : place + 1] in {",", " ", "\n", "\r", "\t"}:
            place += 1
        if text[place : place + 1] in {"]", ""}:
            return
        try:
            found, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            yield None
            return
        yield found


def _settings(env: Any) -> dict[str, str]:
    kept = {}
    for entry in env if isinstance(env, list) else ():
        name, equals, value = str(entry).partition("=")
        if equals and _ALLOWED.fullmatch(name):
            kept[name] = value[:200]
    return kept


def _table(found: dict[str, Any], *, whole: bool) -> Table:
    table = Table(1, json=True, nccl_version=version_text(str(found.get("nccl_version"))))
    config = found.get("config")
    _configure(table, config if isinstance(config, dict) else {})
    results = found["results"]
    names = set()
    for number, result in enumerate(results[:MAX_RESULTS] if isinstance(results, list) else [None], 1):
        read = _line(number, result) if isinstance(result, dict) else "it is no whole object"
        if isinstance(read, Line):
            table.lines.append(read)
            names.add(str(result.get("experiment_name")))
        else:
            table.damaged.append(Damage(number, str(result)[:200] if result is not None else "", read))
    if len(names & _NAMES) == 1:
        table.program = (names & _NAMES).pop()
    elif isinstance(found.get("args"), list) and found["args"]:
        table.program = str(found["args"][0])
    bounds = found.get("out_of_bounds")
    if isinstance(bounds, dict):
        table.out_of_bounds = _whole_number(bounds.get("count"))
        table.out_of_bounds_ok = _flag(bounds.get("okay"))
    average = found.get("average_bus_bandwidth", found.get("average_bus_bandwidith"))
    table.average_ok = _flag(average.get("okay")) if isinstance(average, dict) else None
    table.ended = whole and isinstance(bounds, dict) and "end_time" in found
    return table


def _configure(table: Table, config: dict[str, Any]) -> None:
    for name, key in _CONFIG.items():
        setattr(table.config, name, _whole_number(config.get(key)))
    if "validation" in config and table.config.validation is None:
        table.config.validation_unreadable = True
    devices = config.get("devices")
    for device in devices if isinstance(devices, list) else ():
        rank = _whole_number(device.get("rank")) if isinstance(device, dict) else None
        if rank is not None:
            host, bus, name = (str(device.get(key, "")) for key in ("hostname", "device_hex", "device_info"))
            table.devices.append(Device(rank, _whole_number(device.get("group")) or 0, host, bus_id(bus), name[:100]))


def _line(number: int, result: dict[str, Any]) -> Line | str:
    size, count = _whole_number(result.get("size")), _whole_number(result.get("count"))
    if size is None or count is None:
        return "size or count is no number"
    dtype, redop, root = result.get("type"), result.get("redop"), str(result.get("root", "-1")).strip()
    if not isinstance(dtype, str) or not isinstance(redop, str) or dtype not in TYPE_BYTES or redop not in REDUCTIONS:
        return "its type or reduction is not known"
    if re.fullmatch(r"-1|\d{1,6}", root) is None:
        return "its root is no rank"
    sides = [
        _side(result[name], result.get(name + "_per_iter"), in_place=name == "in_place")
        for name in ("out_of_place", "in_place")
        if result.get(name) is not None
    ]
    bad = [side for side in sides if isinstance(side, str)]
    if bad or not sides:
        return bad[0] if bad else "it has neither placement"
    return Line(
        number, size, count, dtype, None if redop == "none" else redop, None if root == "-1" else int(root),
        tuple(side for side in sides if isinstance(side, Side)), _whole_number(result.get("actual_iterations")),
    )  # fmt: skip


def _side(found: Any, single: Any, *, in_place: bool) -> Side | str:
    if not isinstance(found, dict):
        return "a placement is no object"
    numbers = [_number(found.get("time", found.get("cpu_time"))), _number(found.get("alg_bw")), _number(found.get("bus_bw"))]
    plain = [number for number in numbers if number is not None]
    if len(plain) != 3 or plain[0].value <= 0:
        return "its time or bandwidth is no number above 0"
    wrong = found.get("nwrong", "absent")
    counted = None if wrong is None else _number(wrong)
    if wrong is not None and (counted is None or counted.value % 1):
        return "its count of wrong elements is neither a number nor null"
    spread = None if single is None else _spread(single)
    if isinstance(spread, str):
        return spread
    return Side(in_place, plain[0], plain[1], plain[2], None if counted is None else int(counted.value), None, spread)


def _spread(single: Any) -> Spread | str:
    found = single if isinstance(single, dict) else {}
    numbers = [_number(found.get(name)) for name in ("min_us", "p50_us", "p99_us", "max_us", "cv_pct")]
    values = [number.value for number in numbers if number is not None]
    if len(values) != len(numbers) or not values[0] <= values[1] <= values[2] <= values[3]:
        return "the times of its single calls are no numbers, or contradict each other"
    times = found.get("times_us")
    return Spread(values[0], values[1], values[2], values[3], values[4], len(times) if isinstance(times, list) else None)


def _number(value: Any) -> Printed | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    number = float(value) if abs(value) < 1e30 else -1.0
    return Printed(number, _JSON_STEP) if number >= 0 else None


def _whole_number(value: Any) -> int | None:
    """Return a whole number of 0 or more; None for all else, booleans too."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None


def _flag(value: Any) -> bool | None:
    """Return a boolean of this JSON: a string."""
    return {"true": True, "false": False}.get(value) if isinstance(value, str) else None

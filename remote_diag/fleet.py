"""Many sessions at once; what came of each host is kept, whatever happens to the others."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from .errors import InternalError, RdiagError
from .exitcodes import ExitCode, fold
from .host import Host
from .outcome import Outcome

MAX_AT_ONCE = 64
_DESCRIPTORS_EACH = 12
"""Descriptors that one session has open at its worst: sockets, and the pipes of `ssh -G` and of processes."""
_DESCRIPTORS_ELSEWHERE = 24

Answer = Outcome[Any] | RdiagError
T = TypeVar("T")


def run_on_all(hosts: Sequence[Host], run: Callable[[Host], T]) -> Iterator[tuple[Host, T | RdiagError]]:
    """Call ``run`` for every host, :func:`at_once` of them at a time, and yield answers as they arrive."""
    pool = ThreadPoolExecutor(max_workers=at_once(len(hosts)), thread_name_prefix="host")
    try:
        futures = {pool.submit(_answer, host, run): host for host in hosts}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def at_once(hosts: int) -> int:
    """Return how many of ``hosts`` sessions may be open together: what this process may open sets a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    affordable = MAX_AT_ONCE
    if limit != resource.RLIM_INFINITY:
        affordable = (limit - _DESCRIPTORS_ELSEWHERE) // _DESCRIPTORS_EACH
    return max(1, min(hosts, MAX_AT_ONCE, affordable))


def exit_code(answers: Sequence[Answer]) -> ExitCode:
    """Return the one exit code that stands for all ``answers``."""
    return fold(answer.exit_code for answer in answers)


def as_dict(host: Host, answer: Answer) -> dict[str, Any]:
    """Return one entry of the ``hosts`` list of ``--json``."""
    if isinstance(answer, RdiagError):
        return {"host": host.name, "status": "error", "error": answer.as_dict()}
    return answer.as_dict()


def _answer(host: Host, run: Callable[[Host], T]) -> T | RdiagError:
    try:
        return run(host)
    except RdiagError as error:
        return error
    except Exception as error:  # noqa: BLE001 - one host's bug must not cost the others their results
        return InternalError(f"{type(error).__name__}: {error}", host=host.name)

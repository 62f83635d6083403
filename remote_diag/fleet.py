"""Many sessions at once; what came of each host is kept, whatever happens to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

from .errors import InternalError, RdiagError
from .exitcodes import ExitCode, fold
from .host import Host
from .outcome import Outcome

MAX_AT_ONCE = 64

Answer = Outcome[Any] | RdiagError
T = TypeVar("T")


def run_on_all(hosts: Sequence[Host], run: Callable[[Host], T]) -> Iterator[tuple[Host, T | RdiagError]]:
    """Call ``run`` for every host, at most :data:`MAX_AT_ONCE` at a time, and yield answers as they arrive."""
    pool = ThreadPoolExecutor(max_workers=max(1, min(len(hosts), MAX_AT_ONCE)), thread_name_prefix="host")
    try:
        futures = {pool.submit(_answer, host, run): host for host in hosts}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


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

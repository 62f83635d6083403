"""Runs one probe in its own process: load, build the parameters, call, check, answer."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import sys
from time import monotonic

from .answer import BadResult, encode
from .channel import AgentChannel, HandChannel, wait_for_agent
from .context import Context, Leave, forbid_other_processes, last_line
from .protocol import BAD_RESULT, NO_RESULT, PROBE_ERROR

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .channel import Channel

MODULE = "probe"
"""Name of the probe's module: that of its file, so that a spawned worker process finds it as well."""


class Failure(Exception):
    """The probe ends without a result, and this is why.

    Args:
        outcome: one of ``protocol.CHILD_OUTCOMES``.
        message: the cause.
        hint: what to do about it.
        details: further lines.
    """

    def __init__(self, outcome: str, message: str, hint: str | None = None, details: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.hint = hint
        self.details = details


def main(arguments: list[str]) -> None:
    """Run the probe in the run directory named first; does not return.

    Args:
        arguments: the run directory; from the agent also the nonce of the messages, the time (monotonic
            clock, seconds) at which the run will be ended, and the numbers of the message pipe, of the pipe whose end
            is the end of this process, and of the one through which the agent says that it is ready.
    """
    directory = os.path.abspath(arguments[0]) if arguments else ""
    if len(arguments) not in (1, 6):
        sys.exit("usage: python <bundle>/agent/probe_main.py <run directory>")
    with open(os.path.join(directory, "request.json"), "rb") as stream:
        request = json.loads(stream.read())
    channel: Channel
    if len(arguments) == 6:
        channel = AgentChannel(int(arguments[3]), arguments[1])
        until = float(arguments[2])
        os.set_inheritable(int(arguments[4]), False)  # noqa: FBT003 - the only way this call takes it
    else:
        enter_by_hand(request, directory)
        channel = HandChannel(directory)
        until = monotonic() + float(request["deadline_s"])
    _prepare_streams()
    if len(arguments) == 6:
        # What the probe starts and leaves behind must find somebody who adopts it.
        wait_for_agent(int(arguments[5]))
    # Registered first, so it runs last: after the probe's threads and its own clean-up. What the interpreter
    # would do from there on, taking every module apart, helps nobody.
    status = [1]
    atexit.register(_leave, status)
    status[0] = _answer(directory, request, until, channel)


def enter_by_hand(request: dict[str, Any], directory: str) -> None:
    """Become what the agent would have started: same environment variables, same working directory."""
    from .layout import MARKER, smi_lock
    from .request import Request, is_sha256
    from .spawn import child_environment, encoded, inherited_environment

    if os.environ.get(MARKER) == request["run_id"]:
        return
    checked = Request(json.dumps(request).encode("ascii"))
    bundle = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    # Beside an installed release is the cache; anywhere else is no place for a lock.
    lock = smi_lock(os.path.dirname(bundle)) if is_sha256(os.path.basename(bundle)) else None
    env = child_environment(checked, inherited_environment(), sys.executable, lock)
    if checked.workdir is not None:
        os.chdir(encoded(checked.workdir))
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe_main.py")
    variables = {encoded(name): encoded(value) for name, value in env.items()}
    os.execve(sys.executable, [sys.executable, program, directory], variables)  # noqa: S606 - no shell is meant


def _prepare_streams() -> None:
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        # Line by line, so that the client sees them as they come; no character can make print() fail.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]


def _leave(status: list[int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - contextlib would be one more import
            stream.flush()
        except (OSError, ValueError):
            pass
    os._exit(status[0])


def _answer(directory: str, request: dict[str, Any], until: float, channel: Channel) -> int:
    """Run the probe and send how it went; return the exit status of the process."""
    try:
        payload = _run(directory, request, until, channel)
    except Failure as failure:
        error = {
            "outcome": failure.outcome,
            "message": _printable(failure.message),
            "hint": None if failure.hint is None else _printable(failure.hint),
            "details": [_printable(line) for line in failure.details],
        }
        channel.send("error", json.dumps(error).encode("ascii"))
        return 1
    channel.send("result", payload)
    return 0


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _run(directory: str, request: dict[str, Any], until: float, channel: Channel) -> bytes:
    """Return the result as JSON; raise Failure for every other way it can go."""
    path = os.path.join(directory, "probe.py")
    scratch = os.path.join(directory, "scratch")
    context = Context(request["run_id"], scratch, until, forbid_other_processes(channel.send))
    try:
        module = load(path)
        params = _params(module, request["params"])
        result = module.run(params, context)
        return _checked(module, result, int(request["result_bytes"]))
    except Leave as leave:
        raise Failure(leave.outcome, leave.message, leave.hint) from leave
    except BadResult as bad:
        raise Failure(BAD_RESULT, str(bad), bad.hint) from bad
    except SystemExit as ended:
        message = "the probe called sys.exit(%s) instead of returning a result" % _status(ended)
        raise Failure(NO_RESULT, message, "return a Result; context.skip() and context.unfit() end early") from ended
    except MemoryError as error:
        _free(error)
        message = "the probe ran out of memory (%s)" % last_line(error)
        raise Failure(PROBE_ERROR, message, None, _frames(error, path)) from error
    except KeyboardInterrupt as error:
        raise Failure(PROBE_ERROR, "the probe was interrupted (SIGINT)", None, _frames(error, path)) from error
    except BaseException as error:
        raise Failure(PROBE_ERROR, "the probe raised " + _brief(error), None, _frames(error, path)) from error


def _free(error: BaseException) -> None:
    """Let go of what the frames of ``error`` hold: there is no memory to tell of it otherwise."""
    link = error.__traceback__
    while link is not None:
        try:  # noqa: SIM105 - contextlib would be one more import
            link.tb_frame.clear()
        except RuntimeError:
            # It still runs: one of ours.
            pass
        link = link.tb_next


def load(path: str) -> ModuleType:
    """Return the module made of the file ``path``, registered as dataclasses and pickle need it."""
    with open(path, "rb") as stream:
        source = stream.read()
    module = type(sys)(MODULE)
    module.__file__ = path
    sys.modules[MODULE] = module
    sys.path.append(os.path.dirname(path))
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - what this program is for
    return module


def _params(module: ModuleType, values: dict[str, Any]) -> Any:
    try:
        return module.Params(**{name: _tuples(value) for name, value in values.items()})
    except (TypeError, ValueError) as error:
        message = "the probe does not accept its parameters: %s" % _brief(error)
        raise Failure(PROBE_ERROR, message) from error


def _tuples(value: Any) -> Any:
    """Return ``value`` with every list made a tuple: parameters are immutable."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value


def _checked(module: ModuleType, result: Any, limit: int) -> bytes:
    if not isinstance(result, module.Result):
        kind = type(result).__name__
        raise BadResult("run() returned %s instead of the probe's Result" % ("None" if result is None else "a " + kind))
    return encode(result, limit)


def _status(ended: SystemExit) -> str:
    return "" if ended.code is None else repr(ended.code)[:200]


def _brief(error: BaseException) -> str:
    text = str(error).strip()
    name = type(error).__name__
    return ("%s: %s" % (name, text) if text else name)[:2000]


def _frames(error: BaseException, path: str) -> tuple[str, ...]:
    try:
        from .traces import describe

        return describe(error, path)
    except (OSError, ImportError, MemoryError, RuntimeError):
        # What the probe used up (descriptors, memory, threads, stack) is missing here too; the cause is known all the same.
        return ()

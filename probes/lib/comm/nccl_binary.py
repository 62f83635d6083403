"""Runs a program of nccl-tests that is on the host, within bounds, and keeps what it printed until then."""

from __future__ import annotations

import os
import re
import stat
import tempfile

from ..gpu import run_smi
from . import bandwidth, nccl_report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

    from remote_diag.probe import Context

    from .nccl_report import Given

NAME = re.compile(r"[a-z_]+_perf(?:_mpi)?")
RESERVE_S = 5.0
"""Seconds before the deadline at which the program is ended, so that its rows still get told."""
MAX_OUTPUT = 32 << 20
HELP_S = 10.0
"""Seconds in which a program has to tell its options: it prints them before it touches a GPU."""
MAX_HELP = 1 << 20
TYPES = {
    "bf16": "bfloat16", "fp16": "half", "fp32": "float", "fp64": "double", "int32": "int32", "int64": "int64", "uint8": "uint8",
}  # fmt: skip
"""Types as rdiag names them -> as nccl-tests does."""
_DEVICES = "/dev"
_LAST = 5


def arguments(
    *, sizes: str, dtype: str, ranks: int | None, graph: bool, check: bool, iterations: int | None
) -> list[str]:
    """Return the arguments that ask a program for what rdiag's own ranks would measure.

    Raises:
        ValueError: Sizes are a list: a program takes a range only.
    """
    low, _, rest = sizes.partition(":")
    if "," in sizes:
        raise ValueError("a program of nccl-tests takes a range of sizes, FROM:TO or FROM:TO:FACTOR, and no list")
    high, _, factor = rest.partition(":")
    gpus = ranks or _visible()
    found = ["-b", low, "-e", high or low, "-f", factor or "4", "-g", str(gpus or 1), "-d", TYPES[dtype], "-c", str(int(check))]
    return found + (["-G", "1"] if graph else []) + (["-n", str(iterations)] if iterations is not None else [])


def measure(context: Context, program: str, words: Sequence[str], given: Given) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the program and read what it prints.

    Args:
        context: Of the run.
        program: Its path, or its name on the PATH.
        words: Its arguments.
        given: What is known apart from its output.

    Returns:
        The fields of the result, and findings as arguments of `context.finding`.
    """
    path = _found(context, program)
    context.progress(0, label=f"running {os.path.basename(path)}")
    report = _json_path(context, path, words)
    seconds = max(1.0, context.remaining() - RESERVE_S)
    said = run_smi.ask([path, *words, *(() if report is None else ("-J", report))], seconds, limit=MAX_OUTPUT)
    text = said.out + ("\n" if said.out and not said.out.endswith("\n") else "") + said.err
    fields, findings = _read(text, path, given, None if report is None else _taken(report))
    ended = _ended(said)
    if ended is not None:
        kind, level, code, words_ = ended
        evidence = tuple(line.strip()[:200] for line in text.splitlines() if line.strip())[-_LAST:]
        explained = fields["correctness"] == "wrong" or any(each["code"] in {"minimum-missed", "program-failed"} for each in findings)
        if not (explained and code == "program-failed"):
            findings = [each for each in findings if each["code"] not in {"incomplete", "no-table"}]
            findings.append(
                {"level": level, "code": code, "message": f"{os.path.basename(path)} {words_}; {_kept(fields)}",
                 "evidence": evidence, "action": _ACTIONS.get(code)}
            )  # fmt: skip
        if not fields["complete"]:
            fields["failure"] = {**(fields["failure"] or {"rank": None, "phase": "start", "size_bytes": None}), "kind": kind,
                                 "text": words_}  # fmt: skip
    fields["notes"] = (f"ran {said.command}", *fields["notes"])
    return fields, findings


_ACTIONS = {
    "deadline": "raise --timeout, or measure fewer sizes; if a call never returns, repeat with NCCL_P2P_DISABLE=1 and see rdiag p2p",
    "program-killed": "look for its reason in the kernel log (out of memory, Xid): rdiag gpu",
    "program-unkillable": "the driver hangs; save nvidia-bug-report.log.gz if that still works, and reboot",
    "program-failed": "run it by hand with NCCL_DEBUG=WARN",
}


def _found(context: Context, program: str) -> str:
    if NAME.fullmatch(os.path.basename(program)) is None or bandwidth.canonical(program) is None:
        context.unfit(f"{program!r} is not named like a program of nccl-tests", "such as /opt/nccl-tests/build/all_reduce_perf")
    found = os.path.expanduser(program) if "/" in program else run_smi.find(program)
    if found is None or not os.path.isfile(found):
        context.unfit(f"there is no program {program!r} on this host", "build nccl-tests there, or leave --binary away")
    if not os.access(found, os.X_OK):
        context.unfit(f"{found} may not be executed")
    return os.path.abspath(found)


def _json_path(context: Context, path: str, words: Sequence[str]) -> str | None:
    """Return where the program can write JSON beside its table; None where it cannot, or was asked to by the user."""
    if any(word.startswith(("-J", "--output_file")) for word in words):
        return None
    said = run_smi.ask([path, "-h"], min(HELP_S, max(1.0, context.remaining() - RESERVE_S)), limit=MAX_HELP)
    if re.search(r"(?<!\w)-J\b", said.out + said.err) is None:
        return None
    # It never overwrites a file, and goes by this ending.
    return os.path.join(tempfile.mkdtemp(prefix="nccl-tests-", dir=context.run_dir), "report.json")


def _taken(report: str) -> bytes | None:
    """Return what the program wrote, and remove it: the environment stands in it, secrets included."""
    try:
        descriptor = os.open(report, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            plain = stat.S_ISREG(os.fstat(descriptor).st_mode)
            data = stream.read(MAX_OUTPUT + 1) if plain else b""
        os.unlink(report)
        os.rmdir(os.path.dirname(report))
    except OSError:
        return None
    return data if 0 < len(data) <= MAX_OUTPUT else None


def _read(text: str, path: str, given: Given, written: bytes | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    given.name = os.path.basename(path)
    try:
        return nccl_report.parse(text.encode("utf-8"), given, written)
    except ValueError:
        # It printed nothing that is known; that is a result, too.
        return nccl_report.nothing(given)


def _ended(said: run_smi.Said) -> tuple[str, str, str, str] | None:
    """Return (kind of failure, level, code, words) for a program that did not end well."""
    if said.how == "not-started":
        return "not-started", "unknown", "program-not-started", said.err
    if said.pid is not None:
        place = f" in {said.waits_in}" if said.waits_in else ""
        return "hang", "fail", "program-unkillable", f"could not be killed after {said.seconds:.0f} s: it is stuck{place}"
    if said.how == "timeout":
        return "deadline", "unknown", "deadline", f"was ended after {said.seconds:.0f} s"
    if said.how == "too-long":
        return "error", "unknown", "output-too-long", f"printed more than {MAX_OUTPUT} bytes and was ended"
    if said.status is not None and said.status < 0:
        return "killed", "fail", "program-killed", f"was killed by signal {-said.status}"
    if said.status:
        return "exited", "fail", "program-failed", f"ended with status {said.status}"
    return None


def _kept(fields: dict[str, Any]) -> str:
    rows = len(fields["rows"])
    return f"{rows} rows until then are kept" if rows else "it had printed no row"


def _visible() -> int:
    """Return how many GPUs a program will see."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip()])
    try:
        return sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir(_DEVICES))
    except OSError:
        return 0

"""Stand-ins for programs of nccl-tests: they print what `nccl_output` writes, and end in each way that real ones do."""

from __future__ import annotations

import sys
from pathlib import Path

from . import nccl_output
from .nccl_output import Run

HELP = "USAGE: {name} \n\t[-t,--nthreads <num threads>] \n\t[-S,--report_timestamps <0/1>] \n\t"
OPTION = "[-J,--output_file <file> write output to filepath, if accessible. Infer type from suffix (only json supported presently.)] \n\t"
KINDS = ("ok", "wrong", "slow", "noisy", "hang", "dead", "early", "deaf", "fails", "silent", "crash")


def write(folder: Path, kind: str, name: str = "all_reduce_perf", run: Run | None = None, *, written: str | None = None) -> Path:
    """Write a program that behaves like ``kind``; it also puts its arguments into NAME.arguments.

    ok, wrong, slow: a whole table. noisy: among messages of NCCL. hang: two rows, and then nothing. deaf: the same, and
    it ignores SIGTERM. dead: killed after two rows. early: killed before the first. fails: an error of CUDA.
    silent: nothing, status 3. crash: a signal, nothing printed. ``written``: what it puts into the file of ``-J``; without
    it does not know that option.
    """
    run = run or Run()
    run = run.but(wrong=7) if kind == "wrong" else run.but(gbs=9.0) if kind == "slow" else run
    head, rows, foot = (part(run, "2.17") for part in (nccl_output.head, nccl_output.rows, nccl_output.foot))
    lines = {"ok": [*head, *rows, *foot], "wrong": [*head, *rows, *foot], "slow": [*head, *rows, *foot]}.get(kind, [*head, *rows[:2]])
    if kind == "noisy":
        lines = [each for line in [*head, *rows, *foot] for each in (line, "gpu8:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct")]
    if kind == "early":
        lines = head
    if kind == "fails":
        lines = [*head, "gpu8: Test CUDA failure common.cu:291 'out of memory'", " .. gpu8 pid 7: Test failure common.cu:401"]
    if kind in {"silent", "crash"}:
        lines = []
    ending = {
        "wrong": "sys.exit(1)", "hang": "time.sleep(600)", "deaf": "time.sleep(600)", "fails": "sys.exit(2)", "silent": "sys.exit(3)",
        "dead": "os.kill(os.getpid(), 9)", "early": "os.kill(os.getpid(), 9)", "crash": "os.kill(os.getpid(), 11)",
    }.get(kind, "")  # fmt: skip
    path = folder / name
    printed = "\n".join([*lines, ""])
    path.write_text(
        f"#!{sys.executable} -S\nimport os, pathlib, signal, sys, time\n"
        + ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if kind == "deaf" else "")
        + f"if '-h' in sys.argv: sys.exit(print({HELP.format(name=name) + (OPTION if written is not None else '')!r}))\n"
        + f"if '-J' in sys.argv: pathlib.Path(sys.argv[sys.argv.index('-J') + 1]).write_text({written!r} or '')\n"
        + f"pathlib.Path({str(path)!r} + '.arguments').write_text(repr(sys.argv[1:]))\n"
        f"sys.stdout.write({printed!r})\nsys.stdout.flush()\n{ending}\n"
    )
    path.chmod(0o755)
    return path

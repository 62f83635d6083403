"""Where ``rdiag`` starts: the group of commands, and the one place where errors become lines and exit codes."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .. import __version__
from ..exitcodes import ExitCode, for_signal
from .settings import Settings

if TYPE_CHECKING:
    from ..errors import RdiagError

COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("check", "Look at a host: connection, login shell, Python, disk, limits."),
    "clean": ("clean", "Remove what old jobs and old releases of rdiag left on a host."),
    "comm-share": ("comm_share", "Say which share of a step communication takes, from a profiler's trace."),
    "drafter-check": ("drafter_check", "Check the checkpoint of a drafter, alone or against its target."),
    "env": ("env", "Describe the environment of GPU programs: versions, settings and who sets them."),
    "gpu": ("gpu", "Say which GPUs a host has, how they are, and who is on them."),
    "hidden-states": ("hidden_states", "Find out what is wrong with stored hidden states."),
    "hosts": ("hosts", "Show the inventory, and which file it came from."),
    "jobs": ("jobs", "List the jobs of the hosts, and their states."),
    "launch": ("launch", "Start a job that outlives the connection, and follow it."),
    "logs": ("logs", "Mirror and follow the logs of a job."),
    "loss-check": ("loss_check", "Say what the loss and accuracy of a training mean."),
    "metrics": ("metrics", "Show loss, accuracy and learning rate of a job, and alerts."),
    "nccl": ("nccl", "Measure collectives over all GPUs: contents, latency, bandwidth, verdict."),
    "new-probe": ("new_probe", "Write a small working probe, and its test."),
    "p2p": ("p2p", "Copy between all pairs of GPUs, and see whether the bytes arrive."),
    "probes": ("probes", "List the probes, or describe one."),
    "replay": ("replay", "Run a drafter over hidden states: which conventions does it follow?"),
    "run": ("run", "Run any probe on a host."),
    "serving": ("serving", "Say how a running SGLang or vLLM server does, and measure it if asked."),
    "stop": ("stop", "Stop a job, and say whether that worked."),
    "topo": ("topo", "Show how the GPUs of a host are joined, and what NCCL will make of it."),
    "triage": ("triage", "Find out why a drafter that serves well trains badly."),
    "trust": ("trust", "Show a host's key and record it after a yes."),
    "verifier-head": ("verifier_head", "Say which mapping the head of a drafter follows."),
    "vocab-compare": ("vocab_compare", "Compare the draft vocabularies of two EAGLE-3 checkpoints."),
    "vocab-keep": ("vocab_keep", "Write a drafter's own mapping, so that its trainer keeps it."),
    "vocab-remap": ("vocab_remap", "Write a drafter under another mapping: rows moved by token id."),
}
"""Command name -> (module in this package, one line of help); modules are imported when their command is called."""
SECTIONS: dict[str, tuple[str, ...]] = {
    "Drafters": (
        "vocab-compare", "vocab-keep", "vocab-remap", "verifier-head", "drafter-check", "hidden-states", "replay",
        "loss-check", "triage",
    ),
    "GPUs": ("gpu", "topo", "env", "nccl", "p2p", "comm-share", "serving"),
    "Jobs": ("launch", "jobs", "stop", "clean", "logs", "metrics"),
    "Hosts and probes": ("check", "run", "probes", "new-probe", "hosts", "trust"),
}  # fmt: skip
"""Every command once, in the order in which ``rdiag --help`` and the README show them."""


_NOT_WRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EBADF}


class SignalReceived(BaseException):
    """SIGTERM or SIGHUP arrived; raised in the main thread so that everything is ended in order."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Commands(click.Group):
    """A group that imports a command's module only when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the commands by what they are about, without importing them."""
        widest = max(map(len, COMMANDS))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), COMMANDS[name][1]) for name in names])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        from importlib import import_module

        module = import_module(f".{COMMANDS[cmd_name][0]}", __package__)
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            if near:
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from error
            raise


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit status: 0 ok, 1 findings, 2 usage, 3 config, 4 unreachable, 5 auth, 6 host key, 7 environment, "
    "8 probe error, 9 refused, 10 unknown, 11 job failed, 12 not stopped, 124 deadline, 128+n signals.",
)
@click.version_option(__version__, prog_name="rdiag")
def cli() -> None:
    """Safe diagnostics for GPU hosts: probes travel as files and answer with typed results."""


def main() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    # A short-lived process: fewer collections while modules are being imported are worth 5 to 10 ms.
    gc.set_threshold(100_000, 50, 50)
    # The thread that talks to the host works in many small steps; with the usual 5 ms each of them would wait that
    # long for a thread that imports.
    sys.setswitchinterval(0.0005)
    _prepare_streams()
    settings = Settings(json="--json" in sys.argv[1:])
    code = _guarded(settings)
    code = _flush(code)
    # Skips the interpreter's tear-down, which takes longer than many a probe; everything is flushed and closed.
    os._exit(code)


def _prepare_streams() -> None:
    """Let no locale make printing fail, and no connection get the number of a stream that the caller closed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            # Nobody misses our stderr. Output that goes nowhere is an error: this stdout cannot be written to.
            descriptor = os.open(os.devnull, os.O_WRONLY if name == "stderr" else os.O_RDONLY)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            stream = open(number, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: PTH123, SIM115
            setattr(sys, name, stream)
        if name != "stdin":
            stream.reconfigure(errors="backslashreplace")


def _guarded(settings: Settings) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    try:
        return _call(settings)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(ExitCode.OK)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            _to_stderr(error.format_message())
            return int(ExitCode.USAGE)
        return _report_usage(error, settings)
    except (KeyboardInterrupt, click.Abort):
        _to_stderr("rdiag: interrupted")
        return int(ExitCode.INTERRUPTED)
    except SignalReceived as received:
        _to_stderr(f"rdiag: ended by {signal.Signals(received.number).name}")
        return int(for_signal(received.number))
    except BrokenPipeError:
        return int(ExitCode.BROKEN_PIPE)
    except Exception as error:  # noqa: BLE001 - the last place where it can be explained
        return _report(error, settings)


def _call(settings: Settings) -> int:
    if "_RDIAG_COMPLETE" in os.environ:
        cli.main(prog_name="rdiag", obj=settings)
    # click's own main() turns a closed pipe into exit status 1; here it is told apart.
    with cli.make_context("rdiag", sys.argv[1:], obj=settings) as context:
        result = cli.invoke(context)
    return int(result) if isinstance(result, int) else int(ExitCode.OK)


def _on_signal(number: int, frame: object) -> None:  # noqa: ARG001
    raise SignalReceived(number)


def _flush(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return int(ExitCode.BROKEN_PIPE)
    except (OSError, ValueError) as error:
        if code != ExitCode.LOCAL_IO:
            _to_stderr(f"rdiag: error: output: cannot write to standard output: {error}")
        return int(ExitCode.LOCAL_IO)
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        return code
    return code


def _to_stderr(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)  # noqa: T201
    except (OSError, ValueError):
        return


def _print_json(error: dict[str, Any]) -> None:
    from ..outcome import SCHEMA_VERSION

    print(json.dumps({"schema_version": SCHEMA_VERSION, "error": error}, indent=2))  # noqa: T201


def _report_usage(error: click.ClickException, settings: Settings) -> int:
    from ..errors import UsageProblem
    from ..text import safe

    hint = None
    if isinstance(error, click.UsageError) and error.ctx is not None:
        hint = f"see: {error.ctx.command_path} --help"
    return _report(UsageProblem(safe(error.format_message()), hint=hint), settings)


def _report(error: Exception, settings: Settings) -> int:
    from ..errors import RdiagError

    known = error if isinstance(error, RdiagError) else _unexpected(error, settings)
    if settings.json:
        # Should that fail, the lines below tell what happened; the exit code is the one of a failed output then.
        with contextlib.suppress(OSError):
            _print_json(known.as_dict())
    for line in error_lines(known, verbose=settings.verbose):
        _to_stderr(line)
    return int(known.exit_code)


def error_lines(error: RdiagError, *, verbose: int = 0) -> list[str]:
    """Return what a person gets to read: the cause, the last lines that explain it, and what to do next."""
    lines = [f"rdiag: error: {error.one_line()}"]
    shown = error.details if verbose else error.details[-6:]
    lines += [f"  {line}" for line in shown]
    if error.hint:
        first, *rest = error.hint.split("\n")
        lines += [f"hint: {first}", *(f"      {line}" for line in rest)]
    return lines


def _unexpected(error: Exception, settings: Settings) -> RdiagError:
    import traceback

    from ..errors import InternalError, LocalIOError

    if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
        return LocalIOError(f"cannot write on this machine: {error}")
    text = "".join(traceback.format_exception(error))
    if settings.debug:
        _to_stderr(text)
    return InternalError(
        f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
        phase="run",
        hint=f"this is a bug in rdiag; the traceback is in {_save_crash(text)}",
    )


def _save_crash(text: str) -> str:
    import time

    from ..paths import crash_reports

    try:
        folder = crash_reports()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
    except OSError as error:
        return f"no file ({error}); run again with --debug"
    return str(path)


if __name__ == "__main__":
    main()

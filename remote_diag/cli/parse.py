"""``--parse FILE``: a probe's judgement of output that somebody saved, on this machine, without a host.

The probe file has a function ``parse(data: bytes, params: Params, context: Context) -> Result`` beside ``run``: the
same readers and the same checks. What is printed is the object that a run prints, with ``-`` as the host (there is
none), an empty run id and no time spent; a file that cannot be read is a ConfigError that names it.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .settings import Settings

if TYPE_CHECKING:
    from ..outcome import Outcome
    from ..probe import Probe
    from .run import ParamsBuilder, Then, View

NO_HOST = "-"
"""Stands for the host in what is printed."""
MAX_BYTES = 64 * 1024 * 1024
_NAME = 80
_STDIN = "stdin"


def execute_parsed(
    settings: Settings, probe: str, file: Path, build: ParamsBuilder, *, view: View | None = None, then: Then | None = None
) -> int:
    """Let ``probe`` judge the contents of ``file``, print what came of it, and return the exit code.

    Args:
        settings: the common options; ``json`` and the probe folders count here.
        probe: name or path of a probe whose file has a ``parse``.
        file: what was saved; ``-`` is stdin.
        build: gets the loaded probe and returns its ``Params``.
        view: renders the Outcome for people; the generic table by default.
        then: is called with the Outcome before it is printed, when it has an answer.

    Raises:
        UsageError: the common options ask for what only a host can give.
        ConfigError: the file cannot be read, or is not what the probe parses.
    """
    from ..discovery import locate
    from ..probe import load
    from ..text import safe
    from .output import print_json, print_outcome

    if settings.save_baseline or settings.hosts or settings.dry_run:
        raise click.UsageError("--parse judges a file: it takes no --host, saves no baseline and has nothing to try without a host")
    data = read(file)
    provide_probe_code()
    loaded = load(locate(probe, settings.probe_paths).path)
    outcome = judge(loaded, data, build(loaded), name=_STDIN if str(file) == "-" else str(file))
    if then is not None and outcome.answer is not None:
        then(outcome, alone=True)
    if settings.json:
        print_json(outcome.as_dict())
    else:
        # People see what was judged where a run names its host.
        print_outcome(replace(outcome, host=_STDIN if str(file) == "-" else safe(file.name, limit=_NAME)), view)
    return int(outcome.exit_code)


def read(file: Path) -> bytes:
    """Return the contents of ``file``, of stdin for ``-``; raise ConfigError where that cannot be read or is too long."""
    from ..errors import ConfigError
    from ..files import read_file

    if str(file) != "-":
        return read_file(file, limit=MAX_BYTES)
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"stdin: more than {MAX_BYTES} bytes")
    return data


def judge(probe: Probe[Any, Any], data: bytes, params: Any, *, name: str) -> Outcome[Any]:
    """Return what ``probe`` makes of ``data``; the result passes the same check as one that comes from a host.

    Raises:
        ConfigError: the probe cannot make anything of it; the message begins with ``name``.
    """
    from ..errors import ConfigError
    from ..findings import status
    from ..outcome import Outcome, Timing
    from ..testing import Leave, RecordingContext

    with tempfile.TemporaryDirectory(prefix="rdiag-") as folder:
        context = RecordingContext(folder)
        answer, message = None, ""
        try:
            answer = probe.module.parse(data, params, context)
        except Leave as leave:
            if leave.outcome != "skipped":
                raise ConfigError(f"{name}: {leave.message}", hint=leave.hint) from leave
            message = leave.message
        except ValueError as error:
            hint = getattr(error, "hint", None) or f"this is not what {probe.name} --parse reads"
            raise ConfigError(f"{name}: {error}", hint=hint) from error
    if answer is not None:
        answer = probe.result_adapter.validate_json(probe.result_adapter.dump_json(answer), strict=True)
    findings = tuple(context.findings)
    return Outcome(
        host=NO_HOST,
        probe=probe.name,
        run_id="",
        status=status(findings, skipped=answer is None),
        answer=answer,
        findings=findings,
        timing=Timing(connect_s=0.0, upload_s=0.0, run_s=0.0, total_s=0.0),
        message=message,
    )


def provide_probe_code() -> None:
    """Make ``from probes.lib import ...`` find the shipped code in this process, as it does on a host.

    A folder ``./probes`` of the user's own must not be taken for it.
    """
    from .. import paths

    folder = paths.shipped_probes()
    known = sys.modules.get("probes")
    if known is not None and str(folder) in list(getattr(known, "__path__", ())):
        return
    spec: ModuleSpec | None = spec_from_file_location(
        "probes", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018 - a file with this ending has a loader
    module = module_from_spec(spec)
    sys.modules["probes"] = module
    spec.loader.exec_module(module)

"""``rdiag probes``: the list of probes, or everything about one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..exitcodes import ExitCode
from .options import common, pass_settings, probe_path_option
from .run import complete_probes
from .settings import Settings

if TYPE_CHECKING:
    from ..discovery import Found, Listed
    from ..probe import Probe


@click.command()
@click.argument("name", required=False, shell_complete=complete_probes)
@click.option("--schema", is_flag=True, help="Print the JSON Schemas of NAME: parameters and result.")
@probe_path_option
@common
@pass_settings
def command(settings: Settings, name: str | None, *, schema: bool) -> int:
    """List the probes, or describe NAME: parameters, fields of the result, effects.

    Probes are found in rdiag itself, in ./probes and in every --probe-path; of one name, the last one wins.

    \b
    rdiag probes
    rdiag probes vocab-compare
    rdiag probes vocab-compare --schema
    """
    if name is None:
        if schema:
            raise click.UsageError("--schema needs the name of a probe")
        return _list(settings)
    from ..discovery import locate
    from ..probe import load
    from ..views.probes import details
    from .output import print_json, show

    found = locate(name, settings.probe_paths)
    probe = load(found.path)
    if schema:
        print_json(probe.schema())
    elif settings.json:
        print_json(_one_as_dict(probe, found))
    else:
        show(details(probe, found))
    return int(ExitCode.OK)


def _list(settings: Settings) -> int:
    from ..discovery import listing
    from ..outcome import SCHEMA_VERSION
    from ..views.probes import table
    from .output import print_json, show

    listed = listing(settings.probe_paths)
    if settings.json:
        print_json({"schema_version": SCHEMA_VERSION, "probes": [_listed_as_dict(item) for item in listed]})
    else:
        show(table(listed), rows=True)
    return int(ExitCode.CONFIG if any(item.error is not None for item in listed) else ExitCode.OK)


def _listed_as_dict(item: Listed) -> dict[str, Any]:
    if item.probe is not None:
        return {**_facts(item.probe, item.found), "error": None}
    return {
        **_place(item.found),
        "summary": None,
        "effects": None,
        "sha256": None,
        "error": None if item.error is None else item.error.as_dict(),
    }


def _place(found: Found) -> dict[str, Any]:
    return {
        "name": found.name,
        "path": str(found.path),
        "from": found.origin,
        "instead_of": None if found.shadows is None else str(found.shadows),
    }


def _facts(probe: Probe[Any, Any], found: Found) -> dict[str, Any]:
    return {**_place(found), "summary": probe.summary, "effects": list(probe.effects), "sha256": probe.sha256}


def _one_as_dict(probe: Probe[Any, Any], found: Found) -> dict[str, Any]:
    from ..outcome import SCHEMA_VERSION
    from ..param_values import plain
    from ..views.probes import one_line, result_rows

    return {
        "schema_version": SCHEMA_VERSION,
        **_facts(probe, found),
        "description": probe.description,
        "params": [
            {
                "name": field.name,
                "type": field.type_text,
                "required": field.required,
                "default": plain(field.default),
                "doc": one_line(field.doc),
            }
            for field in probe.params_fields
        ],
        "result": [row._asdict() for row in result_rows(probe)],
    }

"""``rdiag trust``: show the key of a host, and record it after a yes."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import click

from ..exitcodes import ExitCode
from .options import common, complete_hosts, pass_settings
from .settings import Settings

if TYPE_CHECKING:
    from ..host import Host
    from ..trust import ScannedKey

_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}=?\Z")


def _check_fingerprints(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> frozenset[str]:  # noqa: ARG001
    for value in values:
        if not _FINGERPRINT.match(value):
            raise click.BadParameter("write SHA256: and 43 characters, as `ssh-keygen -lf` prints it")
    return frozenset(value.rstrip("=") for value in values)


@click.command()
@click.argument("host", shell_complete=complete_hosts)
@click.option(
    "--fingerprint",
    "fingerprints",
    multiple=True,
    metavar="SHA256:...",
    callback=_check_fingerprints,
    help="Record the key only if it is this one, without a question; may be repeated where jump hosts have keys too.",
)
@click.option("--yes", is_flag=True, help="Record whatever key is shown: for hosts that cannot be attacked on the way.")
@click.option("--replace", is_flag=True, help="Remove the host's other keys from rdiag's own file.")
@common
@pass_settings
def command(settings: Settings, host: str, fingerprints: frozenset[str], yes: bool, replace: bool) -> int:
    """Show the key of HOST, and record it after a yes.

    The key goes into rdiag's own file; ssh's files are read and never written. Compare the fingerprint with what
    the host itself says before you answer:

    \b
    ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub
    """
    from ..errors import UsageProblem
    from ..inventory import load

    target = load(settings.inventory).host(host)
    interactive = not settings.json and sys.stdin.isatty() and sys.stderr.isatty()
    if target.transport == "ssh" and not (interactive or yes or fingerprints):
        raise UsageProblem(
            "nobody can be asked whether the key is the right one: this is no terminal"
            if not settings.json
            else "with --json nobody is asked whether the key is the right one",
            host=target.name,
            hint=f"rdiag trust {target.name} --fingerprint SHA256:... records the key with this fingerprint; "
            "--yes records any",
        )
    keys = _walk(target, fingerprints, ask=interactive and not yes, replace=replace, show=not settings.json)
    if settings.json:
        from ..outcome import SCHEMA_VERSION
        from .output import print_json

        print_json({"schema_version": SCHEMA_VERSION, "host": target.name, "keys": keys})
    return int(ExitCode.HOST_KEY if keys[-1]["status"] == "declined" else ExitCode.OK)


def _walk(
    target: Host, fingerprints: frozenset[str], *, ask: bool, replace: bool, show: bool
) -> list[dict[str, Any]]:
    """Go from jump host to jump host until the host's own key is settled; return what came of each key."""
    from ..route import MAX_HOPS
    from ..trust import scan

    keys: list[dict[str, Any]] = []
    for _ in range(MAX_HOPS + 1):
        key = scan(target)
        if show:
            _show(key)
        keys.append(_settle(key, fingerprints, ask=ask, replace=replace))
        if show:
            _show_outcome(keys[-1])
        if not key.jump_host or keys[-1]["status"] == "declined":
            return keys
    raise AssertionError("a jump host asked for trust again after it was recorded")


def _settle(key: ScannedKey, fingerprints: frozenset[str], *, ask: bool, replace: bool) -> dict[str, Any]:
    from ..errors import HostKeyError
    from ..known_hosts import ChangedHostKey, UnknownHostKey, on_the_host
    from ..trust import record

    if fingerprints and key.fingerprint not in fingerprints:
        raise HostKeyError(
            f"{key.address} shows {key.key_type} {key.fingerprint}, which is not the expected key",
            host=key.host.name,
            hint=f"nothing was recorded; compare with `{on_the_host(key.key_type)}`, run on the host: "
            "it has a key, and a fingerprint, of each type",
        )
    if key.refusal is None:
        return _outcome(key, "known", key.source)
    changed = isinstance(key.refusal, ChangedHostKey)
    if not (isinstance(key.refusal, UnknownHostKey) or (changed and replace and _replaceable(key.refusal))):
        raise key.refusal
    if ask and not fingerprints and not _agreed(changed=changed):
        return _outcome(key, "declined", None)
    where = record(key, replace=replace)
    return _outcome(key, "replaced" if changed else "recorded", where)


def _replaceable(refusal: Exception) -> bool:
    from ..known_hosts import ChangedHostKey
    from ..paths import own_known_hosts

    own = own_known_hosts()
    return isinstance(refusal, ChangedHostKey) and all(entry.path == own for entry in refusal.known)


def _agreed(*, changed: bool) -> bool:
    question = "Is this the key of the host? Record it" + (", and forget the one known so far" if changed else "")
    return click.confirm(question, default=False, err=True)


def _outcome(key: ScannedKey, status: str, source: str | None) -> dict[str, Any]:
    return {
        "address": key.settings.hostname,
        "port": key.settings.port,
        "name": key.name,
        "jump_host": key.jump_host,
        "key_type": key.key_type,
        "fingerprint": key.fingerprint,
        "status": status,
        "source": source,
        "notes": list(key.notes),
    }


def _show(key: ScannedKey) -> None:
    from ..known_hosts import on_the_host
    from ..text import safe

    for note in key.notes:
        click.echo(f"rdiag: {key.host.name}: {safe(note)}", err=True)
    rows = [
        ("host", f"jump host of {key.host.name}" if key.jump_host else key.host.name),
        ("address", key.address),
        ("key", key.key_type),
        ("fingerprint", key.fingerprint),
        ("known", _described(key)),
        ("compare", f"{on_the_host(key.key_type)}   (on the host, reached another way)"),
    ]
    for label, value in rows:
        click.echo(f"{label:<12} {safe(value)}")


def _described(key: ScannedKey) -> str:
    from ..known_hosts import ChangedHostKey, UnknownHostKey

    if key.source is not None:
        return f"yes, the same key: {key.source}"
    if isinstance(key.refusal, ChangedHostKey):
        return "ANOTHER KEY: " + ", ".join(entry.described for entry in key.refusal.known)
    if isinstance(key.refusal, UnknownHostKey):
        elsewhere = [f"the same key is known as {entry.name} ({entry.where})" for entry in key.refusal.elsewhere]
        return "; ".join(["no", *elsewhere])
    return "refused" if key.refusal is None else f"refused: {key.refusal.message}"


def _show_outcome(outcome: dict[str, Any]) -> None:
    from ..text import safe

    sentences = {
        "known": "Nothing to record.",
        "recorded": f"Recorded in {outcome['source']}.",
        "replaced": f"Recorded in {outcome['source']}, in place of the other.",
        "declined": "Nothing was recorded.",
    }
    click.echo(safe(sentences[outcome["status"]]))

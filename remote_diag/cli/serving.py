"""``rdiag serving``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import pass_settings, running
from .run import execute
from .settings import Settings

if TYPE_CHECKING:
    from ..probe import Probe


@click.command()
@click.argument("url", required=False)
@click.option("--baseline-url", metavar="URL", help="The same model without speculation, to compare with.")
@click.option("--api-key-file", metavar="PATH", help="File on the host that holds the server's key.")
@click.option("--interval", "interval_s", type=float, metavar="S", help="Seconds between two readings.  [default: 2]")
@click.option("--request-timeout", "request_s", type=float, metavar="S", help="Seconds for one question of ours.  [default: 10]")
@click.option("--measure", is_flag=True, help="Send requests of our own; the server's GPUs work for them.")
@click.option("--requests", type=int, metavar="N", help="How many, to each server.  [default: 16]")
@click.option("--max-tokens", type=int, metavar="N", help="Tokens of each answer.  [default: 256]")
@click.option("--concurrency", type=int, metavar="N", help="Requests at a time.  [default: 1]")
@click.option("--while-busy", is_flag=True, help="Measure although the server has requests of others, or does not tell.")
@click.option("--accept-limit", type=float, metavar="L", help="Acceptance length that is too little.  [default: 1.3]")
@running
@pass_settings
def command(settings: Settings, /, url: str | None, **options: Any) -> int:
    """Say how a running SGLang or vLLM server does: URL is its address as the host sees it.

    Acceptance length and rates of speculation, throughput, KV cache, from its metrics and information. The default
    is http://127.0.0.1:30000. With --measure a fixed load is sent (REQUESTS x MAX_TOKENS, CONCURRENCY at a time), and
    tokens/s are told; with --baseline-url the same load goes to a second server, and both stand side by side.

    \b
    rdiag serving --host gpu8
    rdiag serving http://127.0.0.1:30000 --measure --baseline-url http://127.0.0.1:30001 --host gpu8
    """
    from ..views.serving import render

    values = {name: value for name, value in options.items() if value is not None}
    load = [name for name in ("requests", "max_tokens", "concurrency") if name in values]
    if not values["measure"] and (load or values["while_busy"]):
        raise click.UsageError("a load is only sent with --measure")
    if url is not None:
        values["url"] = url

    def build(probe: Probe[Any, Any]) -> Any:
        from ..parameters import build as build_params

        return build_params(probe, base=values)

    return execute(settings, "serving", build, view=render)

"""What to do about a server that does not answer as SGLang or vLLM do, by what came of each question."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence

_LATE = "no whole answer within"
_CUT_OFF = ("Connection reset", "Remote end closed connection")


def for_unknown_server(outcomes: Sequence[str], *, keyed: bool) -> str:
    """Return what to do about a server that is not recognised.

    Args:
        outcomes: What came of each path.
        keyed: Whether a key was sent.
    """
    told = [outcome for outcome in outcomes if outcome != "ok"]
    if any("CERTIFICATE_VERIFY_FAILED" in outcome for outcome in told):
        return "the host does not trust its certificate: name its CA with SSL_CERT_FILE in env of hosts.yaml, or ask it over http on the host"
    if any("SSL" in outcome for outcome in told):
        return "it does not speak TLS at this port: write http://"
    if any(outcome in {"HTTP status 401", "HTTP status 403"} for outcome in told):
        return "the key is not the server's: see the file of --api-key-file" if keyed else "give the server's key with --api-key-file"
    if told and all(_LATE in outcome for outcome in told):
        return "it takes connections and does not answer: see in its log whether it hangs or still loads, or raise --request-timeout"
    if told and all(outcome.startswith(_CUT_OFF) for outcome in told):
        return "it ends every connection: write https:// if it speaks TLS, and see whether SGLang or vLLM listens at this port"
    return "see whether SGLang or vLLM listens at this port, and at no path below it; or start it with metrics (SGLang: --enable-metrics)"


def for_unread_metrics(kind: str, outcome: str) -> str:
    """Return what to do about metrics that could not be read."""
    if _LATE in outcome:
        return "raise --request-timeout, or look at what keeps the server from answering"
    if kind == "sglang" and outcome in {"HTTP status 404", "no metrics in the answer"}:
        return "start it with --enable-metrics"
    return "look at its port and key"

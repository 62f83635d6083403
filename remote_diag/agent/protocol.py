"""The words of protocol 1, shared by the client, the agent and the probe's process. Constants only."""

from __future__ import annotations

PROTOCOL = 1
"""Raised whenever a frame changes its meaning. Client and agent come from one release, so they always agree."""

CHECK_AGENT = "agent"
CHECK_WHOLE = "whole"
"""The client's second line: what must be undamaged before the agent says hello. Its own files always are checked;
the library, which is several times as large, only for what may import it."""

PASSIVE_EFFECTS = ("reads-files", "runs-commands", "network", "writes-files")
ACTIVE_EFFECTS = ("cuda", "collectives")
"""Effects that could disturb a running job: such a probe needs the host's GPUs for itself."""
EFFECTS = PASSIVE_EFFECTS + ACTIVE_EFFECTS

LEVELS = ("ok", "degraded", "fail", "unknown", "skipped")
"""Levels of a finding, as a probe may give them."""

ENVIRONMENT_KINDS = ("default", "python", "venv", "conda", "docker")

OK = "ok"
PROBE_ERROR = "probe-error"
NO_RESULT = "no-result"
CRASHED = "crashed"
OUTPUT_LIMIT = "output-limit"
BAD_RESULT = "bad-result"
ENVIRONMENT = "environment"
REFUSED = "refused"
DEADLINE = "deadline"
CANCELLED = "cancelled"
LEASE = "lease"
SKIPPED = "skipped"
OUTCOMES = (
    OK, PROBE_ERROR, NO_RESULT, CRASHED, OUTPUT_LIMIT, BAD_RESULT,
    ENVIRONMENT, REFUSED, DEADLINE, CANCELLED, LEASE, SKIPPED,
)  # fmt: skip
"""How a run can end, the ``outcome`` of the ``end`` frame."""

CHILD_OUTCOMES = (PROBE_ERROR, NO_RESULT, BAD_RESULT, ENVIRONMENT, SKIPPED)
"""The outcomes that the probe's process may announce by itself."""

MAX_FINDINGS = 1000
"""Findings that one run may report."""
MAX_FINDING_BYTES = 64 * 1024
"""Largest encoded finding."""
MAX_LOG = 64 * 1024 - 1
"""Bytes of output carried by one ``log`` frame."""

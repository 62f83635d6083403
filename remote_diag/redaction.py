"""Which values are not shown: terminals, and the logs of CI, are read by many."""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "(hidden)"
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|(?:^|_)(?:KEY|PWD)(?:_|$)|API_?KEY", re.IGNORECASE)


def shown_environment(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return environment variables as they may be shown: a value whose name sounds like a secret is hidden."""
    return {name: HIDDEN if _SECRET.search(name) else value for name, value in variables}

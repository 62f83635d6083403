"""Every path name on the host, in one place.

::

    <cache>/                      0700; ``.cache/rdiag`` below the home directory unless hosts.yaml says otherwise
        <bundle hash>/            64 hex digits; what was installed, never changed afterwards
            enter                 the entry script; the only thing a remote shell is asked to run
            python, venv, conda, container   data read by ``enter``, one value a line
            agent/                this package
            probes/lib/           what shipped probes share
        blobs/<sha256>            probe files that came over a session, by the hash of their bytes
        runs/<run id>/            0700, one run: see :class:`RunPaths`
        active.lock               held by the one active probe of the host
"""

from __future__ import annotations

import os

DEFAULT_CACHE = ".cache/rdiag"
ENTER = "enter"
PYTHON_CANDIDATES = "python"
VENV = "venv"
CONDA = "conda"
CONTAINER = "container"
AGENT = "agent"
PROBES = "probes"
BLOBS = "blobs"
RUNS = "runs"
ACTIVE_LOCK = "active.lock"

MARKER = "RDIAG_RUN_ID"
"""Environment variable that every process of a run carries; by it they are found again."""


class RunPaths:
    """The files of one run's private directory.

    ``request.json``, ``probe.py`` and the two output files are enough to run the probe again by hand.
    """

    def __init__(self, cache: str, run_id: str) -> None:
        self.directory = os.path.join(cache, RUNS, run_id)
        self.request = os.path.join(self.directory, "request.json")
        self.probe = os.path.join(self.directory, "probe.py")
        self.stdout = os.path.join(self.directory, "stdout")
        self.stderr = os.path.join(self.directory, "stderr")
        self.result = os.path.join(self.directory, "result.json")
        self.scratch = os.path.join(self.directory, "scratch")

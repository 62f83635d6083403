"""Every path name on the host, in one place.

::

    <cache>/                      0700; ``.cache/rdiag`` below the home directory unless hosts.yaml says otherwise
        <bundle hash>/            64 hex digits; what was installed, never changed afterwards
            enter                 the entry script; the only thing a remote shell is asked to run
            python, venv, conda, container   data read by ``enter``, one value a line
            agent/                this package
            probes/lib/           what shipped probes share
            library               the digest of ``probes``, 64 hex digits
        blobs/<sha256>            probe files that came over a session, by the hash of their bytes
        runs/<run id>/            0700, one run: see :class:`RunPaths`
        active.lock               held by the one active probe of the host
        nvidia-smi.<boot id>.lock  held by whatever asks the GPU driver, see probes/lib/gpu/one_at_a_time.py; a home
                                  folder may be that of many hosts, and the driver of one must not hold up another
        nvidia-smi.<boot id>.lock.next  held by who is next to ask it
        jobs/<name>.v<N>/         0700, one attempt of a job: see :class:`JobPaths`
        jobs/.numbers/<name>      the last number given to an attempt
        launches/<launch id>      the job that this launch became; made once, so nothing is launched twice
        launch.lock               held while a job is given its number and its GPUs
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
LIBRARY = "library"
BLOBS = "blobs"
RUNS = "runs"
ACTIVE_LOCK = "active.lock"
SMI_LOCK = "nvidia-smi.%s.lock"
"""The boot id stands for the machine as well as for the boot: no process of an earlier one is left."""
JOBS = "jobs"
JOB_NUMBERS = ".numbers"
LAUNCHES = "launches"
LAUNCH_LOCK = "launch.lock"

MARKER = "RDIAG_RUN_ID"
"""Environment variable that every process of a run carries; by it they are found again."""
JOB_MARKER = "RDIAG_JOB"
"""The same for jobs: ``<job id>:<token>``."""
SMI_LOCK_VARIABLE = "RDIAG_SMI_LOCK"
"""Environment variable that tells a probe, and what it starts, the path of the lock of the GPU driver."""


def boot_id() -> str:
    """Return the identifier that the kernel made when it started; empty where it does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as stream:
            return stream.read(64).strip()
    except OSError:
        return ""


def smi_lock(cache: str) -> str | None:
    """Return the path of the lock of this machine's GPU driver; None where nobody can tell which machine this is."""
    boot = boot_id()
    return os.path.join(cache, SMI_LOCK % boot) if boot.replace("-", "").isalnum() else None


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


class JobPaths:
    """The files of one attempt of a job.

    Args:
        directory: the job's folder; its name is the job's id.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.job = os.path.basename(directory)
        self.record = os.path.join(directory, "job.json")
        """What was launched, by whom and how; written once, before the start."""
        self.environment = os.path.join(directory, "environment.json")
        """The environment variables that the job got, and the packages that were there."""
        self.diff = os.path.join(directory, "dirty.diff")
        """How the launching folder differed from its commit."""
        self.files = os.path.join(directory, "files")
        """What was sent along; the working directory unless another one was asked for."""
        self.stdout = os.path.join(directory, "stdout.log")
        self.stderr = os.path.join(directory, "stderr.log")
        self.ranks = os.path.join(directory, "ranks")
        """For logs of single ranks (``torchrun --log-dir``)."""
        self.state = os.path.join(directory, "state.json")
        """How it goes; written by the supervisor alone, always as a whole."""
        self.state_spare = os.path.join(directory, ".state.spare")
        """Room for the last state, taken while there is some."""
        self.started = os.path.join(directory, "started")
        """Made by whoever starts the job; it can be made only once."""
        self.stop = os.path.join(directory, "stop")
        """That somebody wants it stopped; made before anything is signalled."""
        self.lock = os.path.join(directory, "lock")
        """Locked by the launcher, then by the supervisor, for as long as they live."""
        self.supervisor_log = os.path.join(directory, "supervisor.log")

"""What every contender runs: one probe, one parameter file; and the same as a plain script."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from . import bench_probe

PROBE = Path(bench_probe.__file__)
SAMPLES = 24

_FOOTER = """

class _Nobody:
    def progress(self, *args, **kwargs):
        pass


if __name__ == "__main__":
    import dataclasses
    import json
    import sys

    _text = %s
    _values = {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(_text).items()}
    print(json.dumps(dataclasses.asdict(run(Params(**_values), _Nobody()))))
"""


@dataclass(frozen=True)
class Workload:
    """The files, on this machine."""

    probe: Path
    """The probe, for rdiag."""
    params: Path
    """Its parameters, JSON."""
    script: Path
    """The probe as a script that reads the file named by its first argument."""
    single: Path
    """The probe as a script with the parameters in it: goes through stdin whole."""
    digest: str
    """Stands in every right answer."""


def write(directory: Path) -> Workload:
    """Write the files into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    chance = random.Random(7)  # noqa: S311 - sample data
    names = tuple(f"rank{index:02}/step_time" for index in range(SAMPLES))
    samples = tuple(round(chance.uniform(0.1, 0.9), 6) for _ in range(SAMPLES))
    params = json.dumps({"names": names, "samples": samples, "bins": 8, "threshold": 0.5}, indent=1)
    source = PROBE.read_text(encoding="utf-8")
    files = {
        "bench_probe.py": source,
        "params.json": params,
        "script.py": source + _FOOTER % "open(sys.argv[1]).read()",
        "single.py": source + _FOOTER % repr(params),
    }
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    return Workload(
        probe=directory / "bench_probe.py",
        params=directory / "params.json",
        script=directory / "script.py",
        single=directory / "single.py",
        digest=bench_probe.digest(names, samples),
    )

"""Memory that is left: of the host, and within control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.lib.comm import memory

GIB = 1 << 30


def left(folder: Path, cgroup: str, **files: str) -> int:
    (folder / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 16777216 kB\n")
    (folder / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = folder / "fs" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory.available(str(folder / "meminfo"), str(folder / "cgroup"), str(folder / "fs"))


def test_without_limits_it_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert left(tmp_path, "") == 16 * GIB
    assert left(tmp_path, "0::/a/b\n", a__b__memory_dot_max="max\n", a__b__memory_dot_current="5\n") == 16 * GIB
    assert left(tmp_path, "4:memory:/\n", memory__memory_dot_limit_in_bytes="9223372036854771712\n", memory__memory_dot_usage_in_bytes="5\n") == 16 * GIB


@pytest.mark.parametrize("inside", ["/a/b", "/docker/somewhere/else/a/b", "/"])
def test_the_least_that_any_group_leaves(tmp_path: Path, inside: str) -> None:
    # In a container the path may be that of the outside, and the mount itself is the group.
    files = {"memory_dot_max": str(4 * GIB), "memory_dot_current": str(3 * GIB), "memory_dot_stat": f"anon 1\ninactive_file {GIB}\n"}
    assert left(tmp_path, f"0::{inside}\n", **files) == 2 * GIB
    if inside == "/a/b":
        assert left(tmp_path, "0::/a/b\n", a__memory_dot_max=str(GIB), a__memory_dot_current=str(GIB // 2)) == GIB // 2
        assert left(tmp_path, "0::/a/b\n", a__b__memory_dot_max="1", a__b__memory_dot_current="2") == 0


def test_the_first_version_of_groups(tmp_path: Path) -> None:
    files = {
        "memory__job__memory_dot_limit_in_bytes": str(2 * GIB), "memory__job__memory_dot_usage_in_bytes": str(GIB),
        "memory__job__memory_dot_stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
    }  # fmt: skip
    assert left(tmp_path, "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n", **files) == 3 * GIB // 2


@pytest.mark.parametrize("text", ["", "nonsense", "0::", ":::", "0::/../../etc\n", "4:memory:\n"])
def test_what_makes_no_sense_limits_nothing(tmp_path: Path, text: str) -> None:
    assert left(tmp_path, text, memory_dot_max="x", memory_dot_current="1") == 16 * GIB
    (tmp_path / "meminfo").write_text("MemAvailable: many\n")
    assert memory.available(str(tmp_path / "meminfo"), str(tmp_path / "absent")) == memory.UNTOLD

"""Real output of nccl-tests and of NCCL, where it is beside the checkout: each read to values, or refused by name."""

from __future__ import annotations

import pytest

from probes.lib.comm import nccl_debug

from ...support import captures
from ...support.nccl_parsing import parse

pytestmark = captures.needs_captures

# name -> collective, ranks, complete, correctness, rows, (size, busbw) of one row
READ = {
    "nccl_tests__64xH200-8node-graph1.txt": ("all_reduce", 64, True, "ok", 2, (1_731_821_448, 240.18)),
    "nccl_tests__8xB200-40MB-single-size.txt": ("all_reduce", 8, True, "ok", 2, (40_160_460, 389.23)),
    "nccl_tests__8xB200-alltoall-uint32.txt": ("alltoall", 8, True, "ok", 6, (8192, 0.58)),
    "nccl_tests__aws-batch-p5-mpirun-prefix.txt": ("all_reduce", 8, True, "not_checked", 64, (17_179_869_184, 483.05)),
    "nccl_tests__aws-p5-2n-mpirun-prefix.txt": ("all_reduce", 16, True, "not_checked", 14, (2_147_483_648, 437.79)),
    "nccl_tests__dcgm-mock-fail-bw.txt": ("all_reduce", 1, True, "ok", 2, (33_554_432, 0.0)),
    "nccl_tests__dcgm-mock-fail-oob.txt": ("all_reduce", 1, True, "wrong", 2, (33_554_432, 0.0)),
    "nccl_tests__dcgm-mock-pass.txt": ("all_reduce", 1, True, "ok", 2, (33_554_432, 0.0)),
    "nccl_tests__gcm-pairwise-success.txt": ("all_reduce", 16, True, "ok", 12, (1_073_741_824, 182.8)),
    "nccl_tests__gcp-a3high-allgather-hashless.txt": ("all_gather", 16, True, "not_checked", 22, (8_589_934_592, 50.17)),
    "nccl_tests__gcp-a3mega-allgather-na.txt": ("all_gather", 16, True, "not_checked", 22, (8_589_934_592, 188.54)),
    "nccl_tests__lambda-2.17.6-b200-2n.txt": ("all_reduce", 16, True, "ok", 58, (2_147_483_648, 696.06)),
    "nccl_tests__nebius-h100-2n-wide-time.txt": ("all_reduce", 16, True, "ok", 62, (8_589_934_592, 467.54)),
    "nccl_tests__superbench-allreduce.txt": ("all_reduce", 8, True, "not_checked", 68, (8_589_934_592, 235.26)),
    "nccl_tests__superbench-alltoall.txt": ("alltoall", 8, True, "not_checked", 68, (8_589_934_592, 224.31)),
    "nccl_tests__superbench-broadcast.txt": ("broadcast", 8, True, "not_checked", 68, (8_589_934_592, 232.81)),
    "nccl_tests__superbench-reduce.txt": ("reduce", 8, True, "not_checked", 68, (8_589_934_592, 228.38)),
    "nccl_tests__superbench-reducescatter.txt": ("reduce_scatter", 8, True, "not_checked", 68, (8_589_934_592, 231.52)),
    "synthetic/nccl_tests__2.19-per-iter-21-columns.txt": ("all_reduce", 8, True, "ok", 26, (134_217_728, 39.84)),
    "synthetic/nccl_tests_json__v1-truncated.json": ("all_reduce", 8, False, "not_checked", 26, (134_217_728, 39.837)),
    "synthetic/nccl_tests_json__v1-typo-keys-one-device.json": ("all_reduce", 8, True, "ok", 26, (134_217_728, 39.837)),
    "synthetic/nccl_tests_json__v2-per-iter.json": ("all_reduce", 8, True, "ok", 26, (134_217_728, 39.837)),
    "synthetic/nccl_tests_json__v3-check-off-nwrong-null.json": ("all_reduce", 8, True, "not_checked", 26, (134_217_728, 39.837)),
    "synthetic/nccl_tests_json__v3-wrong.json": ("all_reduce", 8, True, "wrong", 26, (134_217_728, 39.837)),
    "synthetic/nccl_tests_json__v3.json": ("all_reduce", 8, True, "ok", 26, (134_217_728, 39.837)),
}  # fmt: skip
NO_TABLE = {"nccl_tests__gcm-failure.txt"}
FROM_NCCL = "nccl_debug__"


def test_every_one_has_its_place() -> None:
    there = {name for name in captures.names() if "nccl_tests" in name}
    assert there == {*READ, *NO_TABLE}


@pytest.mark.parametrize("name", READ)
def test_values(name: str) -> None:
    collective, ranks, complete, correctness, rows, (size, busbw) = READ[name]
    result = parse(captures.read(name), file_name=name).result
    assert (result.collective, result.ranks, result.complete, result.correctness) == (collective, ranks, complete, correctness)
    assert (len(result.rows), result.damaged_rows) == (rows, 0)
    (row,) = [row for row in result.rows if row.size_bytes == size and not row.in_place]
    assert row.busbw_gbs == pytest.approx(busbw, rel=0.01)
    for row in result.rows:
        assert row.reported_busbw_gbs is not None
        assert row.time_us is not None
        # A time of few digits tells its bandwidth as roughly.
        assert row.busbw_gbs == pytest.approx(row.reported_busbw_gbs, rel=0.01 + 0.005 / row.time_us, abs=0.0051)


def test_no_whole_environment() -> None:
    for name in READ:
        assert "EXAMPLE_TOKEN" not in repr(parse(captures.read(name)))


def test_a_launcher_that_never_started_it() -> None:
    parsed = parse(captures.read("nccl_tests__gcm-failure.txt"))
    assert (parsed.result.collective, parsed.result.complete, parsed.codes["no-table"]) == ("all_reduce", False, "unknown")
    assert "slots" in parsed.finding("no-table").evidence[0]


def test_verdicts() -> None:
    a100 = parse(captures.read("nccl_tests__superbench-allreduce.txt"))
    assert (a100.codes["busbw"], a100.result.expectation and round(a100.result.expectation.ratio, 2)) == ("ok", 1.0)
    failed = parse(captures.read("nccl_tests__dcgm-mock-fail-bw.txt"))
    assert {"minimum-missed", "one-rank"} <= set(failed.codes)
    assert "busbw" not in failed.codes
    named = parse(captures.read("nccl_tests__aws-batch-p5-mpirun-prefix.txt"), gpu="NVIDIA H100 80GB HBM3")
    assert named.codes["busbw"] == "ok"
    assert "dots" in " ".join(parse(captures.read("nccl_tests__aws-p5-2n-mpirun-prefix.txt")).result.notes)


def test_single_calls() -> None:
    (text, document) = ("synthetic/nccl_tests__2.19-per-iter-21-columns.txt", "synthetic/nccl_tests_json__v2-per-iter.json")
    for name in (text, document):
        parsed = parse(captures.read(name))
        assert all(row.latency is not None for row in parsed.result.rows)
        assert parsed.finding("times-vary").value == pytest.approx(18.6, rel=1e-3)


# What NCCL says ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", captures.names(FROM_NCCL + "*"))
def test_what_nccl_says_is_recognised(name: str) -> None:
    parsed = parse(captures.read(name))
    assert (parsed.result.rows, parsed.result.complete, parsed.result.correctness) == ((), False, "not_checked")
    assert parsed.codes == {"no-table": "unknown"}


def test_what_it_says() -> None:
    init = nccl_debug.read(captures.read("nccl_debug__info-8xH200-init.txt").splitlines())
    assert (init.ranks, init.network, init.settings["NCCL_NVLS_ENABLE"], init.warnings) == (8, "Socket", "0", 0)
    every = nccl_debug.read(captures.read("nccl_debug__subsystems-2.30__nccl-docs.txt").splitlines())
    assert (every.version, every.transports, every.nvls) == ("2.30.3+cuda13.0", {"SHM": 2, "NET": 2, "P2P": 2}, True)
    assert every.first_warning is not None
    assert every.first_warning.endswith("Failed to initialize any NET plugin")
    closing = nccl_debug.read(captures.read("nccl_debug__warn-proxy-close-benign.txt").splitlines())
    assert (closing.warnings, closing.first_warning, closing.harmless) == (0, None, 12)
    rccl = nccl_debug.read(captures.read("nccl_debug__rccl-mi300x-warn.txt").splitlines())
    assert rccl.warnings == 6


@pytest.mark.parametrize("name", [name for name in captures.names("*.json") if "nccl_tests" not in name])
def test_other_json_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not that of nccl-tests"):
        parse(captures.read(name))

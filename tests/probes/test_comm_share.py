from __future__ import annotations

import dataclasses
import gzip
import json
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from probes import comm_share
from probes.lib.comm import trace
from probes.lib.files import File, Meter
from remote_diag.findings import Finding, status
from remote_diag.paths import shipped_probes
from remote_diag.probe import load
from remote_diag.testing import Leave, RecordingContext
from tests.support.profiler_traces import (
    ALL_REDUCE,
    GEMM,
    LAYOUTS,
    all_reduce,
    annotation,
    copy,
    kernel,
    operator,
    process_name,
    write_trace,
)

GROUP = {"backend": "nccl", "rank": 3, "world_size": 8, "nccl_version": "2.27.5"}


def read(tmp_path: Path, **params: Any) -> tuple[comm_share.Result, list[Finding]]:
    context = RecordingContext(tmp_path)
    result = comm_share.run(comm_share.Params(**params), context)
    adapter = load(shipped_probes() / "comm_share.py").result_adapter
    adapter.validate_json(json.dumps(dataclasses.asdict(result), allow_nan=False), strict=True)
    return result, context.findings


def verify_steps(count: int = 10) -> list[dict[str, Any]]:
    """Steps of 1000 us: 970 of all-reduce in calls of 97, 40 of it behind computation, 20 of computation alone, 10 idle."""
    events: list[dict[str, Any]] = [process_name()]
    for step in range(count):
        begin = 5_000_000.0 + 1000 * step
        events += [operator(begin, 3), annotation(f"verify#{step}", begin, 1000, device=0), annotation("draft", begin - 1, 1)]
        events += [all_reduce(begin + 97 * call, 97, elements=16384) for call in range(10)]
        events += [kernel(GEMM, begin + 100, 40), kernel(GEMM, begin + 970, 20)]
    return events


def test_a_limit_of_ones_own_is_named(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", verify_steps())
    _, findings = read(tmp_path, path=str(path), step="verify", exposed_limit=0.95)
    (finding,) = [found for found in findings if found.code == "communication-share"]
    assert (finding.level, finding.threshold, finding.threshold_source) == ("ok", 0.95, "yours (exposed_limit)")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_97_percent_of_the_verify_step_is_all_reduce(tmp_path: Path, layout: str) -> None:
    path = write_trace(tmp_path / "t.json", verify_steps(), layout, GROUP)
    result, findings = read(tmp_path, path=str(path), step="verify")
    (device,) = result.devices
    assert (device.window, device.clock, device.steps, device.step_us) == ("annotation", "gpu", 10, 10_000.0)
    assert (device.communication_us, device.overlapped_us, device.exposed_us) == (9700.0, 400.0, 9300.0)
    assert (device.compute_us, device.copies_us, device.idle_us) == (600.0, 0.0, 100.0)
    assert device.communication_share == device.nccl_share == 0.97
    assert device.exposed_share == 0.93
    (row,) = device.collectives
    assert (row.name, row.family, row.calls, row.p50_us) == ("all_reduce", "nccl", 100, 97.0)
    assert (row.latency_bound_us, row.bandwidth_bound_us, row.unsized_us) == (9700.0, 0.0, 0.0)
    (message,) = device.messages
    assert (message.size_bytes, message.dtype, message.ranks, message.calls) == (32768, "BFloat16", 8, 100)
    assert message.algbw_gbs == pytest.approx(32768 / 97e-6 / 1e9)
    assert [(each.name, each.kind, each.calls) for each in device.top_kernels] == [(ALL_REDUCE, "nccl", 100), (GEMM, "compute", 20)]
    (finding,) = [found for found in findings if found.code == "communication-share"]
    assert finding.message.startswith("97.0 % of the verify step is all_reduce; 93.0 % is communication")
    assert finding.level == "degraded"
    assert "latency" in (finding.action or "")
    assert str(finding.threshold_source).startswith("exposed_limit: own judgement")
    assert result.complete
    assert result.rank == (None if layout == "array" else 3)
    assert result.events == 1 + 10 * 15
    assert result.annotations == ("draft", "verify")


def test_overlap_is_that_of_unions(tmp_path: Path) -> None:
    events = [
        # Two streams of communication over each other: 100..160, 50 of it twice.
        all_reduce(100, 50), kernel("ncclDevKernel_AllGather_RING_LL(x)", 100, 60, stream=21),
        # Computation on two streams: 140..170, and a copy, which hides nothing.
        kernel(GEMM, 140, 20), kernel(GEMM, 150, 20, stream=8), copy(100, 40),
        kernel(GEMM, 0, 10), kernel(GEMM, 190, 10),
    ]  # fmt: skip
    device = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)))[0].devices[0]
    assert (device.window, device.step_us) == ("span", 200.0)
    assert (device.communication_us, device.overlapped_us, device.exposed_us) == (60.0, 20.0, 40.0)
    assert (device.compute_us, device.copies_us, device.idle_us) == (50.0, 40.0, 110.0)
    assert {row.name: (row.total_us, row.exposed_us) for row in device.collectives} == {
        "all_reduce": (50.0, 40.0),
        "all_gather": (60.0, 40.0),
    }


def test_steps_cut_what_reaches_over_their_borders(tmp_path: Path) -> None:
    events = [annotation("ProfilerStep#1", 100, 100), annotation("ProfilerStep#2", 300, 100)]
    events += [all_reduce(50, 300), kernel(GEMM, 180, 140), all_reduce(500, 50)]
    device = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)))[0].devices[0]
    assert (device.window, device.clock, device.steps, device.step_us) == ("profiler-step", "cpu", 2, 200.0)
    assert (device.communication_us, device.overlapped_us, device.compute_us) == (150.0, 40.0, 40.0)
    assert device.collectives[0].calls == 0
    assert device.collectives[0].p50_us is None


def test_a_profiler_step_of_the_gpu_lasts_until_the_next(tmp_path: Path) -> None:
    events = [annotation(f"ProfilerStep#{n}", 1000 * n, 600, device=0) for n in (1, 2, 3, 7)]
    events += [all_reduce(1000 * n, 300) for n in (1, 2, 3, 7)]
    result, findings = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)))
    assert result.devices[0].step_us == 1000 + 1000 + 600 + 600
    assert result.devices[0].communication_us == 1200
    assert result.step_name == "ProfilerStep"
    assert "37.5 % of the step is all_reduce" in findings[-1].message


def test_spans_of_one_call_on_two_streams_are_one_step(tmp_path: Path) -> None:
    spans = [(annotation("verify", 1000 * n + shift, 90, device=0), 7 + shift) for n in range(3) for shift in (0, 10)]
    events = [{**event, "tid": stream} for event, stream in spans]
    events += [all_reduce(1000 * n, 50) for n in range(3)]
    device = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)), step="verify")[0].devices[0]
    assert (device.steps, device.step_us, device.communication_us) == (3, 300, 150)


def test_each_gpu_by_itself(tmp_path: Path) -> None:
    events = [all_reduce(0, 90, device=1), kernel(GEMM, 90, 10, device=1), kernel(GEMM, 0, 50, device=0), copy(50, 50, device=0)]
    result, findings = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)))
    assert [(device.device, device.communication_share) for device in result.devices] == [(0, 0.0), (1, 0.9)]
    assert [(found.level, found.code) for found in findings] == [("ok", "no-communication"), ("degraded", "communication-share")]
    assert "trace without CUDA graphs" in (findings[1].action or "")


def test_kernels_of_other_libraries_count_apart(tmp_path: Path) -> None:
    events = [kernel("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(...)", 0, 60), all_reduce(60, 20), kernel(GEMM, 80, 20)]
    device = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)))[0].devices[0]
    assert (device.communication_us, device.nccl_us) == (80.0, 20.0)
    assert {(row.family, row.name) for row in device.collectives} == {("custom", "all_reduce"), ("nccl", "all_reduce")}


@pytest.mark.parametrize(
    "name",
    [
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16(x)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)",
        "_ZN4vllm26cross_device_reduce_2stageI13__nv_bfloat16Li8EEEvPNS_8RankDataE",
        "void sglang::allreduce_LL_1node<__half>(mscclpp::MemoryChannelDeviceHandle*)", "void custom_all_reduce<half>(half*)",
        "std::enable_if<(N > 2), void>::type foo::one_shot_all_reduce_kernel<float, 4>(float*)",
        "void tensorrt_llm::kernels::oneShotAllReduceKernel<half, 8, false>(AllReduceParams)", "multimem_one_shot_all_reduce_kernel",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(Pattern)1, __nv_bfloat16>(Params)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["kineto", "compact"])
def test_97_percent_is_all_reduce_whoever_reduces(tmp_path: Path, name: str, layout: str) -> None:
    # Half by NCCL, half by another library: it is all one all-reduce to whoever asks for its share.
    events = [annotation("verify", 0, 1000, device=0), all_reduce(0, 300), kernel(name, 300, 670), kernel(GEMM, 970, 30)]
    result, findings = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events, layout)), step="verify")
    assert result.devices[0].communication_share == 0.97
    assert findings[-1].message.startswith("97.0 % of the verify step is all_reduce; 97.0 %")


@pytest.mark.parametrize(
    "name",
    [
        "triton_red_fused_all_reduce_0", "triton_poi_fused_add_all_reduce_wait_tensor_0", "void oneflow::SoftmaxBlockAllReduceKernel<x>(y)",
        "void cutlass::Kernel2<mscclpp::X, (ncclY)2>(P)", "pack_kernel(mscclpp::Handle*)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(x)", "void norm<allreduce::Tag<int>, 3>(x)",
    ],
)  # fmt: skip
def test_what_computes_is_no_communication(tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / "t.json", [kernel(name, 0, 100), all_reduce(100, 100)])
    assert read(tmp_path, path=str(path))[0].devices[0].communication_us == 100


def test_steps_without_any_work_of_a_gpu_are_unknown_and_not_free_of_communication(tmp_path: Path) -> None:
    steps = [annotation("ProfilerStep#1", 5000, 100)]
    for work in ([all_reduce(0, 90)], [all_reduce(0, 90), all_reduce(0, 90, device=1)]):
        result, findings = read(tmp_path, path=str(write_trace(tmp_path / "t.json", [*steps, *work])))
        assert [(found.level, found.code) for found in findings] == [("unknown", "empty-step")]
        assert result.devices == ()


@pytest.mark.parametrize("device", [0, None], ids=["gpu", "cpu"])
def test_calls_that_follow_each_other_directly_are_steps_each(tmp_path: Path, device: int | None) -> None:
    # 0.1 + 0.2 is more than 0.3: spans that touch may overlap by a hair.
    events = [annotation("verify_tree", 0.1 + 100 * n, 100.2, device=device) for n in range(4)]
    events += [all_reduce(0.1 + 100 * n + 20, 10 * (n + 1)) for n in range(4)]
    events += [kernel(GEMM, 0.1 + 320, 20)]
    device_found = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)), step="verify*")[0].devices[0]
    each = device_found.per_step
    assert each is not None
    assert (device_found.steps, each.steps) == (4, 4)
    assert (each.length_min_us, each.length_p50_us, each.length_max_us) == pytest.approx((100.2, 100.2, 100.2))
    assert (each.communication_min, each.communication_p50, each.communication_max) == pytest.approx((10 / 100.2, 20 / 100.2, 40 / 100.2))
    assert (each.exposed_min, each.exposed_p50, each.exposed_max) == pytest.approx((10 / 100.2, 20 / 100.2, 30 / 100.2))


def test_on_several_streams_each_call_is_one_step_however_the_streams_lag(tmp_path: Path) -> None:
    spans = [(20, 0), (21, 2), (20, 10), (21, 12), (22, 13), (20, 20), (21, 22)]
    events = [{**annotation("verify", start, 10, device=0), "tid": stream} for stream, start in spans]
    events += [{**annotation("verify_draft", 4, 2, device=0), "tid": 20}, all_reduce(0, 5)]
    device = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)), step="verify*")[0].devices[0]
    assert (device.steps, device.step_us) == (3, 32)
    each = device.per_step
    assert each is not None
    assert (each.length_min_us, each.length_max_us) == (12, 13)
    assert (each.communication_min, each.communication_max) == (0, 5 / 12)


def test_calls_on_streams_of_their_own_that_touch_stay_apart(tmp_path: Path) -> None:
    # 0.1 + 0.2 is a little more than 0.3, where the next one starts.
    events = [{**annotation("verify", start, length, device=0), "tid": tid} for start, length, tid in ((0.1, 0.2, 7), (0.3, 0.2, 8))]
    device = read(tmp_path, path=str(write_trace(tmp_path / "t.json", [*events, all_reduce(0, 1)])), step="verify")[0].devices[0]
    assert device.steps == 2


def test_what_is_called_within_a_step_is_part_of_it(tmp_path: Path) -> None:
    events = [annotation("verify", 0, 100), annotation("verify_draft", 0, 40), annotation("verify_tree", 40, 60)]
    events += [annotation("verify", 100, 100), {**annotation("verify", 50, 100), "tid": 99}, all_reduce(0, 50)]
    device = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)), step="verify*")[0].devices[0]
    assert (device.clock, device.steps, device.step_us) == ("cpu", 3, 200)


def test_steps_that_differ_are_told(tmp_path: Path) -> None:
    events = [annotation(f"ProfilerStep#{n}", 100 * n, 100) for n in range(3)] + [all_reduce(110, 80)]
    result, findings = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)))
    assert "communication 0.0 / 0.0 / 80.0 %; exposed 0.0 / 0.0 / 80.0 %" in " ".join(findings[-1].evidence)
    assert read(tmp_path, path=str(write_trace(tmp_path / "u.json", [all_reduce(110, 80)])))[0].devices[0].per_step is None
    assert result.devices[0].steps == 3


def test_a_number_that_comes_again_is_another_call(tmp_path: Path) -> None:
    # layer#0 of each of three forward passes; between them something else takes ten times as long.
    events = [annotation("layer#0", 1000 * n, 100, device=0) for n in range(3)]
    events += [all_reduce(1000 * n, 60) for n in range(3)] + [kernel(GEMM, 1000 * n + 100, 900) for n in range(3)]
    device = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)), step="layer")[0].devices[0]
    assert (device.steps, device.step_us, device.communication_share) == (3, 300.0, 0.6)


def test_steps_of_different_names_with_one_number_stay_apart(tmp_path: Path) -> None:
    events = [annotation("verify#1", 0, 100, device=0), annotation("vote#1", 900, 100, device=0)]
    events += [all_reduce(0, 100), kernel(GEMM, 100, 900)]
    device = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)), step="v*")[0].devices[0]
    assert (device.steps, device.step_us, device.communication_share) == (2, 200.0, 0.5)


@pytest.mark.parametrize("layout", ["kineto", "compact"])
@pytest.mark.parametrize("process", ["[TP01] 0", 77])
def test_ranks_merged_into_one_file_are_not_taken_for_one_gpu(tmp_path: Path, layout: str, process: object) -> None:
    events = [all_reduce(0, 90), {**kernel(GEMM, 0, 90), "pid": process}]
    found = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events, layout)))[1]
    assert status(tuple(found)) == "unknown"
    assert "ranks-merged" in {each.code for each in found}
    # One rank whose processes were renumbered is fine.
    events = [{**event, "pid": process} for event in events]
    found = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events, layout)), exposed_limit=1)[1]
    assert status(tuple(found)) == "ok"


@pytest.mark.parametrize("layout", ["kineto", "compact"])
def test_halves_of_characters_cost_no_answer(tmp_path: Path, layout: str) -> None:
    half = "\ud800"
    events = [annotation("verify" + half, 0, 100, device=0), kernel(ALL_REDUCE + half, 0, 90), kernel(half, 90, 10), copy(0, 1)]
    group = {"backend": "nccl" + half, "rank": 0, "world_size": 2, "nccl_version": half}
    result, findings = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events, layout, group)))
    repr((result, findings)).encode("utf-8")
    assert (result.backend, result.annotations) == ("nccl\\ud800", ("verify\\ud800",))
    assert result.devices[0].communication_share == 0.9


def test_steps_of_the_program_are_said_to_be_that(tmp_path: Path) -> None:
    events = [annotation("ProfilerStep#1", 0, 100), all_reduce(0, 50)]
    findings = read(tmp_path, path=str(write_trace(tmp_path / "t.json", events)))[1]
    assert "may run on the GPU later" in findings[-1].evidence[-1]


def test_giant_names_and_properties_take_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with path.open("w") as file:
        file.write("{")
        for number in range(20):
            file.write(f'"p{number}": "{"x" * (4 << 20)}",')
        file.write('"traceEvents": [')
        for number in range(100):
            file.write(json.dumps(kernel(f"{number}" + "k" * (1 << 20), 2 * number, 1)) + ",")
        file.write(json.dumps(all_reduce(200, 100)) + "]}")
    tracemalloc.start()
    try:
        result, _ = read(tmp_path, path=str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.devices[0].communication_us == 100
    assert result.devices[0].compute_us == 100
    assert peak < 70 << 20


def test_what_the_profiler_recorded_wins_over_the_name(tmp_path: Path) -> None:
    recorded: dict[str, Any] = {
        "Collective name": "_reduce_scatter_base", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 17, "dtype": "Float",
    }  # fmt: skip
    generic = kernel("ncclDevKernel_Generic(x)", 0, 10, **recorded)
    unknown = kernel("ncclDevKernel_Generic(x)", 10, 10)
    device = read(tmp_path, path=str(write_trace(tmp_path / "t.json", [generic, unknown])))[0].devices[0]
    assert {row.name: (row.bandwidth_bound_us, row.unsized_us) for row in device.collectives} == {
        "reduce_scatter": (10.0, 0.0),
        "unnamed": (0.0, 10.0),
    }
    assert device.messages[0].size_bytes == 4 << 20


def test_an_absent_step_and_a_trace_without_gpus_are_unknown(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", verify_steps(1))
    result, findings = read(tmp_path, path=str(path), step="prefill")
    assert (status(tuple(findings)), findings[0].code, result.devices) == ("unknown", "no-such-step", ())
    assert "draft, verify" in findings[0].evidence[0]
    path = write_trace(tmp_path / "cpu.json", [operator(0, 5)])
    assert [found.code for found in read(tmp_path, path=str(path))[1]] == ["no-gpu-work"]
    assert read(tmp_path, path=str(write_trace(tmp_path / "none.json", [])))[0].events == 0


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "ends before its first event"),
        (b"\x1f\x8bgarbage", "gzip data are damaged"),
        (b"\x80\x02}q\x00.", "no JSON object"),
        (b"{}", "no traceEvents"),
        (b'{"a": 1, "b": [2]}', "no traceEvents: the keys are a, b"),
        (b'{"traceEvents": [], "traceEvents": []}', "traceEvents twice"),
        (b'{"traceEvents": 3}', "where '[' should stand"),
        (b'{"traceEvents": []} []', "something follows"),
        (b'{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "where ',' or ']' should stand"),
        (b'{"traceEvents": [{"ph": X}]}', "not JSON"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"traceEvents": [' + b'{"a":' * 100_000, "nested too deeply"),
        (b'{"traceEvents": [{"ts": ' + b"9" * 5000 + b"}]}", "more than 4300 digits"),
        (b'{"traceEvents": [{"a": "' + b"x" * (17 << 20) + b'"}]}', "one value of more than 8 MiB"),
        (b'{"traceEvents": [{"ph"', "ends before its first event"),
        (b'\xef\xbb\xbf{"traceEvents": []}', "byte order mark"),
        (json.dumps({str(n): 0 for n in range(1100)}).encode(), "too many keys"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(Leave) as raised:
        read(tmp_path, path=str(path))
    assert raised.value.outcome == "environment"
    assert reason in raised.value.message


def test_a_fifo_and_a_folder_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", ".", "absent"):
        with pytest.raises(Leave):
            read(tmp_path, path=str(tmp_path / name))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_fast_way_is_taken_where_it_can_be(tmp_path: Path, layout: str) -> None:
    path = write_trace(tmp_path / "t.json", verify_steps(50), layout, GROUP)
    parsed: list[Any] = []
    plain: list[Any] = []
    with File(str(path), Meter()) as file:
        reader = trace.Reader(file, parsed.append, lambda *event: plain.append(event), lambda _: True)
        reader.read()
    fast = layout in {"kineto", "kineto-lines", "gzip"}
    assert reader.layout == ("kineto" if fast else "general")
    assert reader.events == 1 + 50 * 15
    # All kernels but the last, which the end of the list follows.
    assert len(plain) == (50 * 12 - 1 if fast else 0)
    assert len(parsed) + len(plain) == 50 * 14


def test_a_trace_that_torch_itself_writes(tmp_path: Path) -> None:
    code = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

path = sys.argv[1]
plan = schedule(wait=0, warmup=1, active=2)
with profile(
    activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True, on_trace_ready=lambda p: p.export_chrome_trace(path)
) as profiler:
    for step in range(3):
        with record_function(f"verify#{step}"):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        profiler.step()
"""
    path = tmp_path / "t.json"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True)
    result, findings = read(tmp_path, path=str(path), step="verify")
    assert result.complete
    assert result.events == len(json.loads(path.read_text())["traceEvents"])
    assert result.annotations == ("ProfilerStep", "verify")
    assert [found.code for found in findings] == ["no-gpu-work"]
    with File(str(path), Meter()) as file:
        reader = trace.Reader(file, lambda _: None, lambda *_: None, lambda _: True)
        reader.read()
    assert reader.layout == "kineto"


@pytest.mark.parametrize("layout", ["kineto", "kineto-lines", "compact", "gzip"])
def test_a_trace_cut_anywhere_is_never_ok(tmp_path: Path, layout: str) -> None:
    whole = write_trace(tmp_path / "whole", verify_steps(30), layout).read_bytes()
    path = tmp_path / "t.json"
    chooser = random.Random(7)  # noqa: S311
    for end in [len(whole) - 3, *(chooser.randrange(1, len(whole) - 3) for _ in range(60))]:
        path.write_bytes(whole[:end])
        try:
            result, findings = read(tmp_path, path=str(path), exposed_limit=1.0)
        except Leave as left:
            assert left.outcome == "environment"  # noqa: PT017
        else:
            assert not result.complete
            assert status(tuple(findings)) == "unknown"


def test_damaged_events_are_counted_and_cost_no_other(tmp_path: Path) -> None:
    bad: list[Any] = [
        {**all_reduce(0, 1), "ts": None}, {**all_reduce(0, 1), "dur": -5}, {**all_reduce(0, 1), "name": 7}, [], "x", None,
        {**all_reduce(0, 1), "args": {"device": -3}, "pid": "x"}, {**all_reduce(0, 1), "ts": float("nan")},
        {**all_reduce(0, 1), "dur": 1e400}, {**all_reduce(0, 1), "args": {"device": 10**30}},
    ]  # fmt: skip
    path = write_trace(tmp_path / "t.json", [*bad, all_reduce(10, 30), kernel(GEMM, 40, 70)], "compact")
    result, findings = read(tmp_path, path=str(path))
    assert (result.unusable_events, result.gpu_events) == (10, 2)
    assert result.devices[0].communication_share == 0.3
    assert [found.code for found in findings if found.level == "unknown"] == ["events-unusable"]


def test_the_layouts_of_several_writers_in_one_file(tmp_path: Path) -> None:
    text = write_trace(tmp_path / "a", verify_steps(3)).read_text()
    odd = json.dumps({**all_reduce(5_000_000, 1), "name": 'ncclDevKernel_AllReduce "ph": "X" \\ \u00e9'})
    middle = text.index("\n  },\n  {\n", len(text) // 2) + 5
    (tmp_path / "b").write_text(text[:middle] + "\n" + odd + "," + text[middle:])
    plain, mixed = (read(tmp_path, path=str(tmp_path / name))[0] for name in "ab")
    assert (mixed.events, mixed.gpu_events) == (plain.events + 1, plain.gpu_events + 1)
    assert mixed.devices[0].communication_us == plain.devices[0].communication_us


def test_events_are_found_across_the_borders_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{**event, "name": event["name"] + " é\u2028"} for event in verify_steps(4)]
    expected = None
    for layout in LAYOUTS:
        path = write_trace(tmp_path / layout, events, layout)
        for chunk in (1 << 20, 997, 64, 13):
            monkeypatch.setattr(trace, "CHUNK", chunk)
            result, _ = read(tmp_path, path=str(path))
            assert result.complete
            expected = expected or (result.events, result.devices)
            assert (result.events, result.devices) == expected


def test_members_of_gzip_one_after_another(tmp_path: Path) -> None:
    raw = write_trace(tmp_path / "plain", verify_steps(5)).read_bytes()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(raw[:3000]) + gzip.compress(raw[3000:]) + b"\0" * 512)
    assert read(tmp_path, path=str(path))[0].devices == read(tmp_path, path=str(tmp_path / "plain"))[0].devices


def test_the_deadline_ends_the_reading_and_says_so(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.json", verify_steps(2))
    context = RecordingContext(tmp_path, seconds=5)
    result = comm_share.run(comm_share.Params(path=str(path)), context)
    assert not result.complete
    assert {found.code for found in context.findings} == {"trace-unread", "no-gpu-work"}


def test_the_newest_finished_trace_of_a_process(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    write_trace(folder / "old.trace.json", verify_steps(1))
    new = write_trace(folder / "new.pt.trace.json.gz", verify_steps(2), "gzip")
    write_trace(folder / "unrelated.json", verify_steps(3))
    os.utime(folder / "old.trace.json", (1, 1))
    code = "import sys; f = open(sys.argv[1], 'w'); print('up', flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "growing.trace.json")],
        env={**os.environ, "SGLANG_TORCH_PROFILER_DIR": str(folder)}, cwd="/",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        result, findings = read(tmp_path, pid=child.pid)
        assert result.path == str(new)
        assert findings[0].code == "trace-of-process"
        assert any("growing.trace.json" in line for line in findings[0].evidence)
        new.unlink()
        (folder / "old.trace.json").unlink()
        with pytest.raises(Leave, match="has written no trace") as raised:
            read(tmp_path, pid=child.pid)
        assert "starts no profiler" in (raised.value.hint or "")
    finally:
        child.communicate()
    with pytest.raises(Leave, match="no process"):
        read(tmp_path, pid=child.pid)


def test_params() -> None:
    wrongs: list[dict[str, Any]] = [
        {}, {"path": "a", "pid": 1}, {"pid": 0}, {"path": "a", "step": " "}, {"path": "a", "exposed_limit": 1.5},
        {"path": "a", "top": 0}, {"path": "a", "small_bytes": -1},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"."):
            comm_share.Params(**wrong)


def test_the_wire_form(tmp_path: Path) -> None:
    loaded = load(shipped_probes() / "comm_share.py")
    assert loaded.effects == ("reads-files",)


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_piece_may_end_in_any_space(cut: int) -> None:
    text = b"[\n \n\t{}]"
    characters = trace._Text(iter([text[:cut], text[cut:]]))
    characters.expect("[")
    assert characters.peek() == "{"

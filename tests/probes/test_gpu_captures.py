"""Real output of nvidia-smi, where it is at hand: judged to the end, and every GPU of it accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from remote_diag.discovery import find
from remote_diag.findings import status
from remote_diag.testing import RecordingContext
from tests.support.cli import CHECKOUT

CAPTURES = CHECKOUT.parent / "shared" / "captures"
KINDS = ("smi_xml__*", "smi_q__*", "query_gpu_csv__*")
FILES = sorted(path for kind in KINDS for path in CAPTURES.glob(kind))
HEALTHY = ("query_gpu_csv__h200__", "query_gpu_csv__h100-80gb", "smi_q__h200__", "smi_q__h100-80gb")


@pytest.mark.skipif(not FILES, reason="the captures of real tools are not beside this checkout")
def test_every_capture_is_judged(tmp_path: Path) -> None:
    probe = find("gpu")
    for file in FILES:
        context = RecordingContext(tmp_path)
        result = probe.module.parse(file.read_bytes(), probe.Params(), context)
        probe.result_adapter.validate_json(probe.result_adapter.dump_json(result), strict=True)
        assert result.gpus, file.name
        for gpu in result.gpus:
            assert gpu.uuid is not None, file.name
            assert gpu.bus_id is not None, file.name
            assert gpu.status in {"ok", "degraded", "unknown"}, file.name
        if file.name.startswith(HEALTHY):
            assert status(context.findings) == "ok", (file.name, context.findings)


@pytest.mark.skipif(not FILES, reason="the captures of real tools are not beside this checkout")
def test_captures_of_something_else_are_refused_by_name(tmp_path: Path) -> None:
    probe = find("gpu")
    others = [path for path in sorted(CAPTURES.iterdir()) if path.suffix in {".txt", ".json", ".csv"} and not path.name.startswith("smi_q")]
    for file in others:
        if file not in FILES:
            with pytest.raises(ValueError, match=r"\w+"):
                probe.module.parse(file.read_bytes(), probe.Params(), RecordingContext(tmp_path))


@pytest.mark.skipif(not FILES, reason="the captures of real tools are not beside this checkout")
@pytest.mark.parametrize(("name", "pending"), [("bad", 1), ("good", 0)])
def test_a_part_of_the_long_answer_says_its_part_and_no_more(name: str, pending: int, tmp_path: Path) -> None:
    probe = find("gpu")
    for file in CAPTURES.glob(f"smi_q_page_retirement__{name}__*"):
        context = RecordingContext(tmp_path)
        result = probe.module.parse(file.read_bytes(), probe.Params(), context)
        assert len(result.gpus) == 8
        assert (sum(gpu.retired_pending is True for gpu in result.gpus) > 0) is bool(pending)
        assert {gpu.status for gpu in result.gpus} <= {"unknown", "degraded"}

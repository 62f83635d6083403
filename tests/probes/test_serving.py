from __future__ import annotations

import dataclasses
import itertools
import json
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from probes import serving
from probes.lib.serving import servers
from probes.lib.serving.advice import for_unknown_server, for_unread_metrics
from probes.lib.serving.http import MAX_BODY, Url
from probes.lib.serving.metrics import Metrics
from remote_diag.findings import Finding, status
from remote_diag.paths import shipped_probes
from remote_diag.probe import load
from remote_diag.testing import Leave, RecordingContext
from tests.support import model_servers as stand_in


def ask(tmp_path: Path, url: str, seconds: float = 600.0, **params: Any) -> tuple[serving.Result, dict[str, Finding]]:
    context = RecordingContext(tmp_path, seconds=seconds)
    result = serving.run(serving.Params(**{"url": url, "interval_s": 0, "request_s": 5, **params}), context)
    load(shipped_probes() / "serving.py").result_adapter.validate_json(json.dumps(dataclasses.asdict(result), allow_nan=False), strict=True)
    return result, {finding.code: finding for finding in context.findings}


@pytest.mark.parametrize(("new", "metrics"), [(True, True), (False, True), (True, False), (False, False)])
def test_sglang_of_each_kind(tmp_path: Path, new: bool, metrics: bool) -> None:
    with stand_in.serving(stand_in.sglang(new=new, metrics=metrics)) as up:
        result, found = ask(tmp_path, up.url)
    (server,) = result.servers
    assert (server.kind, server.version, server.model, server.reached) == ("sglang", "0.5.5", "org/model", True)
    drafting = server.drafting
    assert (drafting.enabled, drafting.algorithm, drafting.steps, drafting.draft_tokens) == (True, "EAGLE3", 3, 4)
    assert drafting.accept_length == (2.8 if metrics else 2.9)
    assert drafting.accept_rate == (0.6 if new and metrics else None)
    # Two tensor ranks tell of the same work.
    assert (server.told_tokens_per_s, server.kv_usage) == ((86.5, 0.28) if metrics else (85.0, None))
    assert found["acceptance-length"].level == "ok"
    assert ("metrics-off" in found) is not metrics
    if not metrics:
        assert "--enable-metrics" in (found["metrics-off"].action or "")
    assert "hunter2" not in repr((result, found))


def test_a_limit_of_ones_own_is_named(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.sglang()) as up:
        _, usual = ask(tmp_path, up.url)
        _, found = ask(tmp_path, up.url, accept_limit=3.5)
    assert str(usual["acceptance-length"].threshold_source).startswith("accept_limit: own judgement")
    own = found["acceptance-length"]
    assert (own.level, own.threshold, own.threshold_source) == ("degraded", 3.5, "yours (accept_limit)")


def test_sglang_without_speculation_has_gauges_of_zero(tmp_path: Path) -> None:
    answers = {**stand_in.sglang(algorithm=None), "/metrics": stand_in.sglang_metrics(length=0, rate=0)}
    answers["/server_info"] = stand_in.sglang_info(None, None)
    with stand_in.serving(answers) as up:
        result, found = ask(tmp_path, up.url)
    assert result.servers[0].drafting.enabled is False
    assert result.servers[0].drafting.accept_length is None
    assert found["no-speculation"].level == "ok"


def test_sglang_that_has_not_drafted_yet_is_unknown(tmp_path: Path) -> None:
    answers = {**stand_in.sglang(), "/metrics": stand_in.sglang_metrics(length=0, rate=0), "/server_info": stand_in.sglang_info(length=None)}
    with stand_in.serving(answers) as up:
        found = ask(tmp_path, up.url)[1]
    assert found["acceptance-unknown"].level == "unknown"


def test_vllm_counts_since_its_start(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.vllm(engines=2)) as up:
        result, found = ask(tmp_path, up.url)
    (server,) = result.servers
    assert (server.kind, server.version, server.model) == ("vllm", "0.11.0", "org/model")
    drafting = server.drafting
    assert (drafting.accept_length, drafting.accept_rate, drafting.drafts) == (2.8, 0.6, 100)
    assert drafting.accept_rate_by_position == (0.6, 0.6, 0.6)
    assert (server.kv_usage, server.cache_hit_rate, server.generation_tokens_total) == (0.5, 0.25, 500)
    assert found["acceptance-length"].value == 2.8
    assert not {path for _, path, _, _ in up.asked} & {"/server_info", "/get_server_info"}


@pytest.mark.parametrize(
    ("answers", "enabled", "length", "rate", "usage"),
    [
        (stand_in.vllm(speculation=False), False, None, None, 0.5),
        (stand_in.vllm(kv="gpu_cache"), True, 2.8, 0.6, 0.5),
        (stand_in.vllm(drafts=0, accepted=0), True, None, None, 0.5),
        # Engine V0.
        ({"/v1/models": stand_in.models("vllm"), "/version": b'{"version":"0.6.3"}',
          "/metrics": b'vllm:gpu_cache_usage_perc{model_name="m"} 0.1\nvllm:spec_decode_draft_acceptance_rate{model_name="m"} 0.7\n'},
         True, None, 0.7, 0.1),
        # Through a proxy that allows no colon.
        ({"/metrics": stand_in.vllm_metrics().replace(b"vllm:", b"vllm_")}, True, 2.8, 0.6, 0.5),
    ],
)  # fmt: skip
def test_vllm_of_each_kind(  # noqa: PLR0917
    tmp_path: Path, answers: Any, enabled: bool, length: float | None, rate: float | None, usage: float
) -> None:
    with stand_in.serving(answers) as up:
        (server,) = ask(tmp_path, up.url)[0].servers
    assert (server.kind, server.drafting.enabled, server.drafting.accept_length) == ("vllm", enabled, length)
    assert (server.drafting.accept_rate, server.kv_usage) == (rate, usage)


def test_throughput_between_two_readings(tmp_path: Path) -> None:
    begun = time.monotonic()

    def metrics(handler: BaseHTTPRequestHandler) -> None:
        stand_in.reply(handler, 200, stand_in.vllm_metrics(tokens=1000 + 500 * (time.monotonic() - begun)))

    with stand_in.serving({**stand_in.vllm(), "/metrics": metrics}) as up:
        (server,) = ask(tmp_path, up.url, interval_s=0.5)[0].servers
    assert server.generation_tokens_per_s == pytest.approx(500, rel=0.1)


def test_a_counter_that_fell_is_no_throughput(tmp_path: Path) -> None:
    values = iter((1000.0, 10.0))

    def metrics(handler: BaseHTTPRequestHandler) -> None:
        stand_in.reply(handler, 200, stand_in.vllm_metrics(tokens=next(values)))

    with stand_in.serving({**stand_in.vllm(), "/metrics": metrics}) as up:
        (server,) = ask(tmp_path, up.url, interval_s=0.05)[0].servers
    assert server.generation_tokens_per_s is None


def test_a_drafter_that_is_rejected_and_a_full_cache(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.vllm(accepted=5, usage=0.97, waiting=12)) as up:
        found = ask(tmp_path, up.url)[1]
    assert (found["acceptance-length"].level, found["acceptance-length"].value) == ("degraded", 1.05)
    assert found["kv-cache-full"].level == "degraded"


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_with_and_without_speculation_side_by_side(tmp_path: Path, kind: str) -> None:
    plain = stand_in.vllm(speculation=False) if kind == "vllm" else {**stand_in.sglang(), "/server_info": stand_in.sglang_info(None, None)}
    with stand_in.serving(getattr(stand_in, kind)()) as fast, stand_in.serving(plain) as slow:
        stand_in.generating(fast, 0.1, 2.5)
        stand_in.generating(slow, 0.25, None)
        result, found = ask(
            tmp_path, fast.url, baseline_url=slow.url, measure=True, requests=6, max_tokens=50, concurrency=2
        )
    measured, baseline = (server.measurement for server in result.servers)
    assert measured is not None
    assert baseline is not None
    assert (measured.done, measured.failed, measured.completion_tokens) == (6, 0, 300)
    assert measured.accept_length == pytest.approx(2.5)
    assert baseline.accept_length is None
    assert measured.tokens_per_s == pytest.approx(300 / measured.wall_s)
    assert result.comparison is not None
    assert result.comparison.speedup == pytest.approx(baseline.wall_s / measured.wall_s)
    assert found["speedup"].level == "ok"
    posted = [body for method, _, _, body in fast.asked if method == "POST"]
    assert len(posted) == 6
    assert fast.most_at_once == 2
    assert posted == sorted((body for method, _, _, body in fast.asked if method == "POST"), key=posted.index)
    assert {json.dumps(body) for body in posted} == {json.dumps(body) for method, _, _, body in slow.asked if method == "POST"}
    assert all((body.get("ignore_eos") or body["sampling_params"]["ignore_eos"]) for body in posted)


def test_one_server_alone_says_that_nothing_is_compared(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.sglang()) as up:
        stand_in.generating(up, 0.01, 2.0)
        result, found = ask(tmp_path, up.url, measure=True, requests=2, max_tokens=10)
    assert result.comparison is None
    assert "--baseline-url" in (found["no-baseline"].action or "")
    assert found["acceptance-length"].evidence[0].endswith("over our own requests")


def test_two_servers_with_speculation_are_no_comparison(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.sglang()) as up:
        stand_in.generating(up, 0.01, 2.0)
        found = ask(tmp_path, up.url, baseline_url=up.url, measure=True, requests=1, max_tokens=10)[1]
    assert found["not-comparable"].level == "unknown"
    assert "speedup" not in found


def test_speculation_that_slows_down_is_degraded(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.vllm()) as fast, stand_in.serving(stand_in.vllm(speculation=False)) as slow:
        stand_in.generating(fast, 0.2, 2.5)
        stand_in.generating(slow, 0.05, None)
        found = ask(tmp_path, fast.url, baseline_url=slow.url, measure=True, requests=2, max_tokens=10)[1]
    assert found["speedup"].level == "degraded"
    # Rates since the start are no evidence for the length that these requests had.
    assert found["acceptance-length"].evidence == ("from vllm:spec_decode_num_accepted_tokens_total, over our own requests",)


def test_a_busy_server_is_left_alone(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.vllm(running=3)) as up:
        result, found = ask(tmp_path, up.url, measure=True)
        assert found["server-busy"].level == "unknown"
        assert result.servers[0].measurement is None
        assert not [path for method, path, _, _ in up.asked if method == "POST"]
        up.answers["/v1/completions"] = b'{"usage": {"completion_tokens": 7}}'
        result, _ = ask(tmp_path, up.url, measure=True, while_busy=True, requests=2)
    assert result.servers[0].measurement is not None
    assert result.servers[0].measurement.completion_tokens == 14


@pytest.mark.parametrize("answers", [stand_in.sglang(metrics=False), stand_in.vllm(waiting=2), {**stand_in.vllm(), "/metrics": (500, b"")}])
def test_a_server_that_may_be_busy_is_left_alone(tmp_path: Path, answers: Any) -> None:
    with stand_in.serving(answers) as up:
        result, found = ask(tmp_path, up.url, measure=True)
        assert found["server-busy"].level == "unknown"
        assert result.servers[0].measurement is None
        assert {method for method, _, _, _ in up.asked} == {"GET"}


@pytest.mark.parametrize("tokens", [10**7, 1000, -1])
def test_more_tokens_than_asked_for_are_no_throughput(tmp_path: Path, tokens: int) -> None:
    answer = json.dumps({"usage": {"completion_tokens": tokens}}).encode()
    with stand_in.serving({**stand_in.vllm(), "/v1/completions": answer}) as up:
        result, found = ask(tmp_path, up.url, measure=True, requests=2, max_tokens=10)
    assert result.servers[0].measurement is not None
    assert (result.servers[0].measurement.tokens_per_s, result.servers[0].measurement.uncounted) == (None, 2)
    assert found["requests-failed"].level == "unknown"


def test_a_load_that_was_answered_in_part_is_compared_with_none(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.vllm()) as fast, stand_in.serving(stand_in.vllm(speculation=False)) as slow:
        for up in (fast, slow):
            stand_in.generating(up, 0.01, 2.5 if up is fast else None)
        whole = slow.answers["/v1/completions"]
        turn = itertools.count()

        def sometimes(handler: Any) -> None:
            if next(turn) % 2:
                stand_in.reply(handler, 500, b"out of memory")
            else:
                whole(handler)  # type: ignore[operator]

        slow.answers["/v1/completions"] = sometimes
        result, found = ask(tmp_path, fast.url, baseline_url=slow.url, measure=True, requests=4, max_tokens=10)
    assert result.comparison is None
    assert "speedup" not in found
    assert found["no-comparison"].level == "unknown"


def test_a_server_that_started_again_while_measured_tells_no_acceptance() -> None:
    before = Metrics(stand_in.vllm_metrics(drafts=100, accepted=180).decode())
    after = Metrics(stand_in.vllm_metrics(drafts=120, accepted=30).decode())
    assert servers.during("vllm", before, after).accept_length is None


def test_every_engine_counts_whatever_its_first_rank_is_called() -> None:
    # With attention in parallel over data each engine has ranks of its own; ranks of one engine say the same.
    text = "".join(
        f'sglang:generation_tokens_total{{dp_rank="{rank // 2}",model_name="a, \\"b\\"",tp_rank="{rank}"}} {100 + rank // 2}\n' for rank in range(12)
    )
    assert Metrics(text).total("sglang:generation_tokens_total") == sum(100 + engine for engine in range(6))
    twice = 'vllm:num_requests_running{engine="0"} 3\n' * 2
    assert Metrics(twice).total("vllm:num_requests_running") == 3


@pytest.mark.parametrize(
    "url",
    ["http://bob:SEK/RET@h:1", "bob:SEKRET@h:1", "http://bob:SEK?RET@h", "http://bob:SEK#RET@h", "http://h:SEKRET", "http://h:99999999", "h:SEKRET/"],
)
def test_what_is_wrong_with_an_address_is_said_without_what_may_be_a_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"address|port") as raised:
        Url(url)
    assert "SEK" not in str(raised.value)
    if "@" in url:
        with pytest.raises(ValueError, match="name or password") as raised:
            serving.Params(url=url)
        assert "SEK" not in str(raised.value)


def test_a_server_that_repeats_the_key_does_not_get_it_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("SEKRET")
    echoes = {
        "/v1/models": stand_in.models("vllm", "SEKRET"), "/version": b'{"version": "SEKRET"}', "/metrics": b"SEKRET!",
        "/server_info": lambda handler: stand_in.reply(handler, 302, b"", Location="http://h/?key=SEKRET"),
    }  # fmt: skip
    with stand_in.serving(echoes) as up:  # type: ignore[arg-type]
        result, found = ask(tmp_path, up.url, api_key_file=str(tmp_path / "key"))
        assert up.asked[0][2]["Authorization"] == "Bearer SEKRET"
    assert "SEKRET" not in repr((result, found))


def test_halves_of_characters_cost_no_answer(tmp_path: Path) -> None:
    answers = {**stand_in.vllm(), "/v1/models": b'{"data":[{"id":"m\\ud800","owned_by":"vllm"}]}', "/version": b'{"version":"\\udfff"}'}
    with stand_in.serving(answers) as up:
        result, _ = ask(tmp_path, up.url)
    assert (result.servers[0].model, result.servers[0].version) == ("m\\ud800", "\\udfff")


def test_nothing_is_posted_unless_asked_for(tmp_path: Path) -> None:
    with stand_in.serving(stand_in.sglang()) as up:
        ask(tmp_path, up.url)
    assert {method for method, _, _, _ in up.asked} == {"GET"}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, b"out of memory"), "HTTP status 500"),
        (b"no json", "no JSON"),
        (b'{"meta_info": {"completion_tokens": "many"}}', None),
        (b"[]", None),
    ],
)
def test_requests_that_fail_are_counted(tmp_path: Path, answer: Any, error: str | None) -> None:
    with stand_in.serving({**stand_in.sglang(), "/generate": answer}) as up:
        result, found = ask(tmp_path, up.url, measure=True, requests=3, concurrency=2)
    measured = result.servers[0].measurement
    assert measured is not None
    assert (measured.failed, measured.uncounted, measured.tokens_per_s) == ((3, 0, None) if error else (0, 3, None))
    assert found["requests-failed"].level == "unknown"
    assert not error or error in measured.errors[0]


def silent(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(30)


def test_a_server_that_hangs_while_measured_is_left_at_the_deadline(tmp_path: Path) -> None:
    with stand_in.serving({**stand_in.sglang(), "/generate": silent}) as up:
        begun = time.monotonic()
        result, found = ask(tmp_path, up.url, seconds=serving.RESERVE_S + 1.5, measure=True, requests=4, concurrency=2)
        assert time.monotonic() - begun < 20
    assert result.servers[0].measurement is not None
    assert result.servers[0].measurement.done == 0
    assert found["requests-failed"].level == "unknown"


def drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    for _ in range(600):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.05)


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    piece = b"%x\r\n%s\r\n" % (1 << 20, b"a 1\n" * (1 << 18))
    for _ in range(MAX_BODY // (1 << 20) + 50):
        handler.wfile.write(piece)


def short(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"vllm:num_requests_running 1\n")
    handler.close_connection = True


def elsewhere(handler: BaseHTTPRequestHandler) -> None:
    stand_in.reply(handler, 302, b"", Location="http://169.254.169.254/latest/meta-data")


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (drip, "no whole answer within 1 s"),
        (endless, "more than 8 MiB"),
        (short, "ends 72 bytes too early"),
        (elsewhere, "HTTP status 302 to 'http://169.254.169.254/latest/meta-data', which is not followed"),
        ((503, b""), "HTTP status 503"),
        (b"", "no metrics in the answer"),
        (b"<html>\x00\xff</html>" * 1000, "no metrics in the answer"),
        (b"[" * 100_000, "no metrics in the answer"),
        (silent, "no whole answer within 1 s"),
    ],
)
def test_hostile_answers_are_bounded_and_named(tmp_path: Path, answer: Any, outcome: str) -> None:
    with stand_in.serving({**stand_in.sglang(), "/metrics": answer}) as up:
        begun = time.monotonic()
        result, found = ask(tmp_path, up.url, request_s=1)
        assert time.monotonic() - begun < 15
    (server,) = result.servers
    assert {each.path: each.outcome for each in server.endpoints}["/metrics"] == outcome if "HTTP" in outcome else True
    assert outcome in next(each.outcome for each in server.endpoints if each.path == "/metrics")
    # What the other paths told is not lost.
    assert (server.kind, server.drafting.accept_length) == ("sglang", 2.9)
    assert found["metrics-off"].level == "unknown"


@pytest.mark.parametrize("content", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 500, b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000])
def test_what_is_no_http_is_no_server(tmp_path: Path, content: bytes) -> None:
    with raw(content) as url:
        result, found = ask(tmp_path, url, request_s=1)
    assert result.servers[0].kind == "unknown"
    assert status(tuple(found.values())) == "unknown"


@contextmanager
def raw(content: bytes) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(5)
                try:
                    connection.recv(1 << 16)
                    connection.sendall(content)
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    result, found = ask(tmp_path, f"http://127.0.0.1:{port}", measure=True)
    assert result.servers[0].reached is False
    assert found["server-unreachable"].level == "unknown"
    assert len(result.servers[0].endpoints) == 1


def test_a_certificate_that_is_not_trusted_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = certified(tmp_path)
    with stand_in.serving(stand_in.sglang()) as up:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        up.wrap(context)
        secure = up.url.replace("http:", "https:")
        result, found = ask(tmp_path, secure, request_s=3)
        assert (result.servers[0].reached, result.servers[0].kind) == (True, "unknown")
        assert "SSL_CERT_FILE" in str(found["server-unknown"].action)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        result, found = ask(tmp_path, secure, request_s=3)
        assert (result.servers[0].kind, "server-unknown" in found) == ("sglang", False)


def certified(folder: Path) -> tuple[Path, Path]:
    """Return the files of a certificate for 127.0.0.1 that nobody else has signed, and of its key."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "certificate.pem").write_bytes(made.public_bytes(pem))
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return folder / "certificate.pem", folder / "key.pem"


@pytest.mark.parametrize(
    ("outcomes", "keyed", "words"),
    [
        (["[SSL: WRONG_VERSION_NUMBER] wrong version number"], False, "write http://"),
        (["HTTP status 401"] * 2, False, "give the server's key"),
        (["HTTP status 404", "HTTP status 403"], True, "not the server's"),
        (["no whole answer within 10 s"] * 5, False, "--request-timeout"),
        (["Connection reset by peer", "Remote end closed connection without response"], False, "https://"),
        (["ok", "HTTP status 404"], False, "listens at this port"),
        (["no whole answer within 10 s", "HTTP status 404"], False, "listens at this port"),
    ],
)
def test_advice_follows_what_came_of_the_questions(outcomes: list[str], *, keyed: bool, words: str) -> None:
    assert words in for_unknown_server(outcomes, keyed=keyed)


@pytest.mark.parametrize(
    ("kind", "outcome", "words"),
    [("sglang", "HTTP status 404", "--enable-metrics"), ("vllm", "HTTP status 404", "port"), ("sglang", "HTTP status 401", "key"),
     ("sglang", "no whole answer within 3 s", "--request-timeout"), ("vllm", "no whole answer within 3 s", "--request-timeout")],
)  # fmt: skip
def test_advice_on_metrics_that_cannot_be_read(kind: str, outcome: str, words: str) -> None:
    assert words in for_unread_metrics(kind, outcome)


def test_another_program_is_not_taken_for_a_server(tmp_path: Path) -> None:
    with stand_in.serving({"/metrics": b"node_cpu_seconds_total 7\n", "/version": b'{"version": "9"}'}) as up:
        result, found = ask(tmp_path, up.url, measure=True)
    assert (result.servers[0].kind, result.servers[0].version) == ("unknown", None)
    assert found["server-unknown"].level == "unknown"
    assert "key" not in (found["server-unknown"].action or "")
    assert {method for method, _, _, _ in up.asked} == {"GET"}


def test_a_key_comes_from_a_file_on_the_host_and_stays_there(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hunter2\n")
    with stand_in.serving(stand_in.vllm()) as up:
        up.key = "hunter2"
        result, found = ask(tmp_path, up.url)
        assert found["server-unknown"].level == "unknown"
        assert "HTTP status 401" in str(found["server-unknown"].evidence)
        assert "--api-key-file" in (found["server-unknown"].action or "")
        result, found = ask(tmp_path, up.url, api_key_file=str(tmp_path / "key"))
    assert result.servers[0].kind == "vllm"
    assert "hunter2" not in repr((result, found))
    for content in ("", "two words", "a\nb"):
        (tmp_path / "key").write_text(content)
        with pytest.raises(Leave, match="holds no key"):
            ask(tmp_path, up.url, api_key_file=str(tmp_path / "key"))
    with pytest.raises(Leave, match="cannot read the key"):
        ask(tmp_path, up.url, api_key_file=str(tmp_path / "absent"))


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h/?a=b", "http://h:99999", "http://h/#x", "http://h /x", "http://h\r\nX: y"])
def test_what_is_no_address_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises((Leave, ValueError)):
        ask(tmp_path, url)


def test_addresses() -> None:
    assert str(Url("127.0.0.1:30000")) == "http://127.0.0.1:30000"
    assert str(Url("https://h/base/")) == "https://h:443/base"
    assert str(Url("http://[::1]:8000")) == "http://[::1]:8000"


def test_params() -> None:
    wrongs: list[dict[str, Any]] = [
        {"url": "http://ada:hunter2@h"}, {"url": ""}, {"requests": 513}, {"requests": 0}, {"max_tokens": 5000}, {"concurrency": 129},
        {"interval_s": -1}, {"request_s": 0}, {"baseline_url": "http://a@h"}, {"accept_limit": 0.5},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"."):
            serving.Params(**wrong)
    assert serving.Params().url == "http://127.0.0.1:30000"


def test_metrics_that_are_damaged_anywhere_never_raise() -> None:
    chooser = random.Random(5)  # noqa: S311
    whole = stand_in.sglang_metrics() + b"\n" + stand_in.vllm_metrics(engines=2)
    assert Metrics(whole.decode()).unread == 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chooser.randrange(1, 8)):
            data[chooser.randrange(len(data))] = chooser.randrange(256)
        metrics = Metrics(bytes(data[: chooser.randrange(len(data))]).decode("utf-8", "replace"))
        for name in ("sglang:spec_accept_length", "vllm:spec_decode_num_drafts_total"):
            metrics.total(name)
            metrics.mean(name)


def test_values_that_are_not_finite_are_none() -> None:
    metrics = Metrics("sglang:spec_accept_length NaN\nvllm:x{a=\"b\"} +Inf\nvllm:y 1e400\nvllm:z 3 1700000000\n")
    assert metrics.mean("sglang:spec_accept_length") is None
    assert metrics.total("vllm:x") is metrics.total("vllm:y") is None
    assert metrics.total("vllm:z") == 3


def test_numbers_that_no_server_counts_cannot_damage_the_answer(tmp_path: Path) -> None:
    for odd in (b"1e308", b"-1e308", b"1e-308", b"-5"):
        text = stand_in.vllm_metrics(engines=2)
        for value in (b"100.0", b"50.0", b"150.0", b"90.0", b"250.0", b" 200", b" 50", b" 0.5"):
            text = text.replace(value, b" " + odd)
        with stand_in.serving({**stand_in.vllm(), "/metrics": text}) as up:
            ask(tmp_path, up.url)

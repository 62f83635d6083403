"""Stand-ins for servers of language models: the endpoints that rdiag asks, answered as SGLang and vLLM answer them."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = bytes | tuple[int, bytes] | Callable[[BaseHTTPRequestHandler], None]


class ModelServer:
    """A server in this process; ``answers`` maps a path to its body, to (status, body), or to what handles it."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        """Method, path, headers, JSON body of each request."""
        self.at_once = 0
        self.most_at_once = 0
        self.generated = 0
        self.drafts = 0
        self.lock = threading.Lock()
        self.key: str | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.handle(self, None)

            def do_POST(self) -> None:
                server.handle(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, format: str, *arguments: object) -> None: ...  # noqa: A002

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None: ...

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def handle(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        self.asked.append((handler.command, handler.path, dict(handler.headers), body))
        if self.key is not None and handler.headers.get("Authorization") != f"Bearer {self.key}":
            return reply(handler, 401, b'{"error":"Unauthorized"}')
        answer = self.answers.get(handler.path, (404, b'{"detail":"Not Found"}'))
        if callable(answer):
            return answer(handler)
        return reply(handler, *(answer if isinstance(answer, tuple) else (200, answer)))

    def wrap(self, context: ssl.SSLContext) -> None:
        """Speak TLS from now on."""
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@contextmanager
def serving(answers: dict[str, Answer]) -> Iterator[ModelServer]:
    """Yield a server with ``answers``."""
    server = ModelServer(answers)
    try:
        yield server
    finally:
        server.close()


def models(owner: str, name: str = "org/model") -> bytes:
    return json.dumps({"object": "list", "data": [{"id": name, "object": "model", "owned_by": owner}]}).encode()


def sglang_metrics(length: float = 2.8, rate: float | None = 0.6, tokens: float = 1000, running: float = 0, ranks: int = 2) -> bytes:
    """Return what /metrics of SGLang says, each tensor rank a series; ``rate`` is None for releases that lack it."""
    lines = []
    gauges = {
        "spec_accept_length": length, "spec_accept_rate": rate, "token_usage": 0.28, "gen_throughput": 86.5, "num_running_reqs": running,
        "num_queue_reqs": 0, "cache_hit_rate": 0.25, "num_used_tokens": 123859,
    }  # fmt: skip
    for name, value in gauges.items():
        if value is not None:
            lines.append(f"# HELP sglang:{name} What it is.\n# TYPE sglang:{name} gauge")
            lines += [f'sglang:{name}{{engine_type="unified",model_name="org/model",tp_rank="{rank}"}} {value}' for rank in range(ranks)]
    lines.append(f'sglang:generation_tokens_total{{model_name="org/model"}} {tokens:e}')
    lines.append('sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="org/\\"model\\", {x}"} 11.0')
    return "\n".join(lines).encode()


def sglang_info(algorithm: str | None = "EAGLE3", length: float | None = 2.9) -> bytes:
    """Return what /server_info says: arguments, secrets among them, and the state of each engine."""
    state: dict[str, Any] = {"last_gen_throughput": 85.0, "memory_usage": {"kvcache": 12.5}}
    if length is not None:
        state["avg_spec_accept_length"] = length
    info = {
        "model_path": "org/model", "api_key": "hunter2", "admin_api_key": "hunter2", "speculative_algorithm": algorithm,
        "speculative_num_steps": 3, "speculative_num_draft_tokens": 4, "version": "0.5.5", "internal_states": [state],
    }  # fmt: skip
    return json.dumps(info).encode()


def sglang(new: bool = True, metrics: bool = True, **more: Any) -> dict[str, Answer]:
    """Return the answers of an SGLang server; the path of its information has another name in older releases."""
    answers: dict[str, Answer] = {
        "/v1/models": models("sglang"),
        "/server_info" if new else "/get_server_info": sglang_info(**{key: more[key] for key in ("algorithm",) if key in more}),
    }
    if metrics:
        answers["/metrics"] = sglang_metrics(rate=0.6 if new else None)
    return answers


def vllm_metrics(  # noqa: PLR0917
    drafts: float = 100, accepted: float = 180, k: int = 3, speculation: bool = True, tokens: float = 500, engines: int = 1, kv: str = "kv_cache",
    running: float = 0, waiting: float = 0, usage: float = 0.5,
) -> bytes:  # fmt: skip
    """Return what /metrics of vLLM's engine V1 says, ``engines`` of them with equal shares."""
    lines = []
    for engine in range(engines):
        labels = f'engine="{engine}",model_name="org/model"'
        lines += [
            f"vllm:num_requests_running{{{labels}}} {running / engines}", f"vllm:num_requests_waiting{{{labels}}} {waiting / engines}",
            f"vllm:{kv}_usage_perc{{{labels}}} {usage}", f"vllm:generation_tokens_total{{{labels}}} {tokens / engines}",
            f"vllm:prefix_cache_queries_total{{{labels}}} 200", f"vllm:prefix_cache_hits_total{{{labels}}} 50",
        ]  # fmt: skip
        if speculation:
            lines += [
                f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts / engines}",
                f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.75e+09",
                f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {drafts * k / engines}",
                f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {accepted / engines}",
            ]
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {accepted / engines / k}' for place in range(k)
            ]
    return "\n".join(lines).encode()


def vllm(**metrics: Any) -> dict[str, Answer]:
    """Return the answers of a vLLM server."""
    return {"/v1/models": models("vllm"), "/version": b'{"version":"0.11.0"}', "/metrics": vllm_metrics(**metrics)}


def generating(server: ModelServer, seconds: float, accept_length: float | None) -> None:
    """Let a server answer requests for text, each after ``seconds``; and count the drafts of vLLM."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = server.asked[-1][3]
        with server.lock:
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        time.sleep(seconds)
        wanted = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        with server.lock:
            server.at_once -= 1
            server.generated += wanted
        if handler.path == "/generate":
            meta: dict[str, Any] = {"completion_tokens": wanted, "e2e_latency": seconds}
            if accept_length is not None:
                meta["spec_verify_ct"] = int(wanted / accept_length)
            reply(handler, 200, json.dumps({"text": "x", "meta_info": meta}).encode())
        else:
            reply(handler, 200, json.dumps({"choices": [], "usage": {"completion_tokens": wanted}}).encode())

    def metrics(handler: BaseHTTPRequestHandler) -> None:
        drafts = 100 + server.generated / (accept_length or 1)
        text = vllm_metrics(drafts, 180 + (drafts - 100) * ((accept_length or 1) - 1), speculation=accept_length is not None, tokens=server.generated)
        reply(handler, 200, text)

    server.answers["/generate"] = server.answers["/v1/completions"] = answer
    if "/version" in server.answers:
        server.answers["/metrics"] = metrics

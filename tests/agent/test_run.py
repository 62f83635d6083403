"""One run after another against a real agent: every way a probe can end, and what the client gets to know."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.agent.conftest import RunBody
from tests.support.agent_driver import AgentDriver, Answer, probe_source

NASTY = [
    "",
    " ",
    "-rf",
    "two words",
    "$(touch /tmp/x) `id` ${HOME} %s",
    "'\"\\;&|<>()[]{}*?!#~^",
    "line\nbreak\r\ttab",
    "\x01\x1b[31m\x7f",
    "é 漢字 🦙 \u202e\u2028",
    "\udcff\udc80 bytes that are no text",
    "x" * 100_000,
]


def names_left(bundle: Path) -> list[str]:
    runs = bundle.parent / "runs"
    return sorted(os.listdir(runs)) if runs.exists() else []


def test_a_run_from_hello_to_end(bundle: Path) -> None:
    probe = probe_source("""
        print("to stdout")
        print("to stderr", file=sys.stderr)
        context.progress(1, 2, unit="files", label="reading")
        context.finding("degraded", "slow-link", "Slow.", value=1.5, unit="GB/s", evidence=("seen",))
        return Result(value=[params.value, type(params.value).__name__])
    """)
    with AgentDriver(bundle) as driver:
        driver.begin(probe, params={"value": [1, [2]]})
        driver.wait_for("need")
        driver.send_file(probe)
        driver.wait_for("end")
        assert not driver.run_dir.exists(), "whoever reads the end may rely on it"
    answer = Answer(driver.frames, json.loads(driver.frames[-1].payload))
    hello = answer.json("hello")[0]
    assert hello["protocol"] == 1
    assert (hello["bundle"], hello["cache"]) == (bundle.name, str(bundle.parent))
    assert hello["executable"] == sys.executable
    assert hello["pid"] == driver.process.pid
    assert answer.outcome == "ok"
    assert answer.result == {"value": [[1, [2]], "tuple"]}
    assert answer.log(b"o") == b"to stdout\n"
    assert answer.log(b"e") == b"to stderr\n"
    assert answer.json("progress") == [{"done": 1, "total": 2, "unit": "files", "label": "reading"}]
    assert answer.json("finding")[0]["code"] == "slow-link"
    assert answer.json("started")[0]["run_dir"] == str(driver.run_dir)
    payload = answer.of("result")[0]
    assert answer.end == {
        "outcome": "ok",
        "message": "",
        "hint": None,
        "details": [],
        "exit_status": 0,
        "signal": None,
        "result_sha256": hashlib.sha256(payload).hexdigest(),
        "result_bytes": len(payload),
        "survivors": [],
        "run_dir": None,
        "elapsed_s": pytest.approx(0, abs=30),
    }
    assert [frame.kind for frame in answer.frames][-2:] == ["result", "end"]
    assert driver.process.returncode == 0


def test_a_file_is_asked_for_once_and_kept_private(bundle: Path) -> None:
    probe = probe_source(f"return Result(value={os.getpid()!r})  # {time.time()}")
    for needs in (1, 0):
        with AgentDriver(bundle) as driver:
            answer = driver.run(probe)
        assert answer.outcome == "ok"
        assert len(answer.of("need")) == needs
    blob = bundle.parent / "blobs" / hashlib.sha256(probe).hexdigest()
    assert blob.read_bytes() == probe
    assert stat.S_IMODE(blob.stat().st_mode) == 0o600
    assert stat.S_IMODE(blob.parent.stat().st_mode) == 0o700
    assert not [name for name in os.listdir(blob.parent) if name.startswith(".")]


def test_a_damaged_blob_is_fetched_again(bundle: Path) -> None:
    probe = probe_source("return Result(value='the right one')")
    blobs = bundle.parent / "blobs"
    blobs.mkdir(mode=0o700, exist_ok=True)
    blob = blobs / hashlib.sha256(probe).hexdigest()
    blob.write_bytes(probe_source("return Result(value='another one')"))
    with AgentDriver(bundle) as driver:
        answer = driver.run(probe)
    assert len(answer.of("need")) == 1
    assert answer.result == {"value": "the right one"}
    assert blob.read_bytes() == probe


def test_a_file_that_arrives_damaged_is_not_run(bundle: Path) -> None:
    wanted, other = probe_source("return Result(value=1) # wanted"), probe_source("return Result(value=2)")
    with AgentDriver(bundle) as driver:
        driver.begin(wanted)
        driver.wait_for("need")
        driver.send("file", hashlib.sha256(wanted).hexdigest().encode() + b"\n" + other)
        answer = driver.finish()
    assert (answer.outcome, answer.of("started")) == ("environment", [])
    assert "damaged" in answer.end["message"]


def test_what_a_probe_gets_is_what_the_client_gave(run_body: RunBody, tmp_path: Path) -> None:
    workdir = tmp_path / "a 'dir' $(x)\n🦙"
    workdir.mkdir()
    answer = run_body(
        """
        values = [os.environ.get("V%d" % i) for i in range(100) if "V%d" % i in os.environ]
        ascii_values = [ascii(v) for v in values]
        return Result(value=[params.value == tuple(values), ascii_values, os.getcwd()])
        """,
        params={"value": NASTY},
        env={f"V{index}": value for index, value in enumerate(NASTY)},
        workdir=str(workdir),
    )
    assert answer.result["value"] == [True, [ascii(value) for value in NASTY], str(workdir)]


def test_values_survive_another_locale(bundle: Path) -> None:
    env = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    probe = probe_source("return Result(value=[os.environ['V'], params.value])")
    with AgentDriver(bundle, env=env) as driver:
        answer = driver.run(probe, params={"value": "é🦙"}, env={"V": "é🦙"})
    assert answer.result["value"] == ["é🦙", "é🦙"]


def test_the_process_is_set_apart(run_body: RunBody) -> None:
    body = """
        import resource
        code = "import os; print([n for n in range(3, 256) if os.path.exists('/proc/self/fd/%d' % n)])"
        inherited = subprocess.run([sys.executable, "-c", code], close_fds=False, stdout=-1).stdout.decode().strip()
        return Result(value={
            "leads": os.getpid() == os.getsid(0) == os.getpgid(0),
            "nice": os.nice(0),
            "oom": open("/proc/self/oom_score_adj").read().strip(),
            "core": resource.getrlimit(resource.RLIMIT_CORE),
            "stdin": os.path.realpath("/proc/self/fd/0"),
            "inherited": inherited,
            "marker": os.environ["RDIAG_RUN_ID"],
            "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "run_dir": [context.run_dir, oct(os.stat(context.run_dir).st_mode & 0o777)],
            "remaining": 0 < context.remaining() <= 30,
            "umask": oct(os.umask(0)),
        })
    """
    before = os.umask(0o027)
    try:
        answer = run_body(body, env={"CUDA_VISIBLE_DEVICES": "0,1"}, run_id="apart-1")
    finally:
        os.umask(before)
    value = answer.result["value"]
    scratch, mode = value.pop("run_dir")
    assert scratch.endswith("/runs/apart-1/scratch")
    assert mode == "0o700"
    assert value == {
        "leads": True,
        "nice": min(19, os.nice(0) + 10),
        "oom": "1000",
        "core": [0, 0],
        "stdin": "/dev/null",
        "inherited": "[]",
        "marker": "apart-1",
        "cuda": "",
        "remaining": True,
        "umask": "0o27",
    }


def test_our_module_names_do_not_stand_for_others(bundle: Path, tmp_path: Path) -> None:
    """What the environment calls ``agent``, ``context`` or ``probes`` is its own business."""
    for name in ("agent", "context", "main", "frames"):
        (tmp_path / f"{name}.py").write_text(f"ORIGIN = 'the environment, {name}'\n")
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "json.py").write_text("raise RuntimeError('shadowed')\n")
    body = """
        import agent, context as theirs, main, frames, json
        import probes.lib
        return Result(value=[agent.ORIGIN, theirs.ORIGIN, main.ORIGIN, frames.ORIGIN, list(probes.lib.__path__)])
    """
    with AgentDriver(bundle) as driver:
        answer = driver.run(probe_source(body), env={"PYTHONPATH": str(tmp_path)}, workdir=str(tmp_path / "cwd"))
    assert answer.outcome == "ok", answer.end
    assert answer.result["value"] == [
        *(f"the environment, {name}" for name in ("agent", "context", "main", "frames")),
        [str(bundle / "probes" / "lib")],
    ]


def test_a_spawned_worker_finds_the_probe(run_body: RunBody) -> None:
    """torch.multiprocessing.spawn pickles functions by module name."""
    answer = run_body("""
        import multiprocessing
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return Result(value=pool.apply(Result, (7,)).value)
    """)
    assert answer.outcome == "ok", answer.end
    assert answer.result == {"value": 7}


def expect(answer: Answer, outcome: str, *words: str) -> None:
    assert answer.outcome == outcome, answer.end
    for word in words:
        assert word in answer.end["message"], answer.end["message"]
    assert answer.end["survivors"] == []
    if outcome != "ok":
        assert answer.of("result") == []
        assert answer.end["result_sha256"] is None


@pytest.mark.parametrize(
    ("body", "outcome", "words"),
    [
        ("sys.exit(0)", "no-result", ["sys.exit(0)"]),
        ("sys.exit('bye')", "no-result", ["sys.exit('bye')"]),
        ("os._exit(0)", "no-result", ["exited with status 0 without a result"]),
        ("os._exit(3)", "no-result", ["status 3"]),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed", ["SIGSEGV"]),
        ("os.kill(os.getpid(), signal.SIGKILL)", "crashed", ["SIGKILL"]),
        ("raise ValueError('bad\\nthing')", "probe-error", ["ValueError", "bad"]),
        ("raise ValueError(chr(0xdcff))", "probe-error", ["\\udcff"]),
        ("raise MemoryError", "probe-error", ["out of memory"]),
        ("raise KeyboardInterrupt", "probe-error", ["SIGINT"]),
        ("def f(): f()\nf()", "probe-error", ["RecursionError"]),
        ("raise BaseException('odd')", "probe-error", ["odd"]),
        ("return None", "bad-result", ["None instead of the probe's Result"]),
        ("return {'value': 1}", "bad-result", ["a dict instead"]),
        ("return Params()", "bad-result", ["a Params instead"]),
        ("return Result(value=float('nan'))", "bad-result", ["Result.value is nan"]),
        ("return Result(value={'a': [float('inf')]})", "bad-result", ["Result.value['a'][0] is inf"]),
        ("return Result(value=object())", "bad-result", ["Result.value is a object"]),
        ("return Result(value='x' * 2_000_000)", "bad-result", ["1048576 are allowed"]),
        ("context.require('no_such_module')", "environment", ["'no_such_module'", "not installed", sys.executable]),
        ("context.require('no_such.inner')", "environment", ["'no_such'", "not installed"]),
        ("context.unfit('wrong kernel', 'boot another')", "environment", ["wrong kernel"]),
        ("context.skip('no GPU here')", "skipped", ["no GPU here"]),
        ("try:\n    context.skip('early')\nexcept Exception:\n    pass", "skipped", ["early"]),
        ("context.finding('bad', 'x', 'y')", "probe-error", ["level must be one of"]),
    ],
)
def test_every_end_has_its_outcome_and_its_words(
    run_body: RunBody, body: str, outcome: str, words: list[str]
) -> None:
    expect(run_body(body), outcome, *words)


def test_where_pip_refuses_the_hint_names_a_venv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sysconfig

    from remote_diag.agent.context import _how_to_install

    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))  # noqa: ARG005
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert "-m pip install numpy" in _how_to_install("numpy.linalg")
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    assert "DIR/bin/pip install numpy" in _how_to_install("numpy.linalg")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert f"{sys.executable} -m pip install numpy" in _how_to_install("numpy")


def test_hints_and_frames_come_along(run_body: RunBody) -> None:
    hint = run_body("context.require('no_such_module')").end["hint"]
    assert f"{sys.executable} -m pip install no_such_module" in hint
    assert "environment:" in hint
    assert run_body("context.require('no_such_module', 'ask Bob')").end["hint"] == "ask Bob"
    assert run_body("context.unfit('wrong', 'boot another')").end["hint"] == "boot another"
    details = run_body("""
        import json
        def inner():
            json.loads("{")
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("outer") from error
    """).end["details"]
    assert "RuntimeError: outer" in details
    assert any(line.startswith("probe.py:") and "in inner: json.loads" in line for line in details)
    assert not any("runner.py" in line for line in details)
    assert details.index("RuntimeError: outer") < details.index("caused by:")


@pytest.mark.parametrize(
    ("source", "last"),
    [
        ("raise OSError('libcudart.so.12: cannot open shared object file')", "libcudart.so.12"),
        ("import not_there_either", "not_there_either"),
        ("raise RuntimeError('first line\\nlast line')", "last line"),
        ("x = = 1", "invalid syntax"),
    ],
)
def test_a_module_that_breaks_on_import_is_the_environment(
    run_body: RunBody, tmp_path: Path, source: str, last: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    answer = run_body("context.require('broken')", env={"PYTHONPATH": str(tmp_path)})
    expect(answer, "environment", "'broken' cannot be imported", last)
    assert "first line" not in answer.end["message"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"def run(:\n", ["SyntaxError"]),
        (b"import no_such_module\n", ["no_such_module"]),
        (b"x = 1\n", ["Params"]),
        (b"\xff\xfe", ["SyntaxError"]),
    ],
)
def test_a_probe_file_that_does_not_load(bundle: Path, source: bytes, words: list[str]) -> None:
    with AgentDriver(bundle) as driver:
        expect(driver.run(source), "probe-error", *words)


def test_parameters_that_do_not_fit_are_named(run_body: RunBody) -> None:
    expect(run_body("return Result()", params={"other": 1}), "probe-error", "parameters", "other")


def test_a_result_of_the_largest_size_arrives(bundle: Path) -> None:
    size = (8 << 20) - 1024
    around = len('{"value":""}')
    probe = probe_source(f"return Result(value='x' * {size - around})")
    with AgentDriver(bundle) as driver:
        answer = driver.run(probe, result_bytes=size)
    assert answer.outcome == "ok"
    assert answer.end["result_bytes"] == size == len(answer.of("result")[0])


def test_output_is_passed_on_up_to_the_budget(run_body: RunBody) -> None:
    started = time.monotonic()
    answer = run_body(
        """
        block = b"x" * 65536
        for _ in range(16384):
            os.write(1, block)
        return Result()
        """,
        output_bytes=300_000,
    )
    expect(answer, "output-limit", "more than 300000 bytes")
    assert answer.log() == b"x" * 300_000
    assert time.monotonic() - started < 20


def test_exactly_the_budget_is_fine(run_body: RunBody) -> None:
    answer = run_body("os.write(1, b'x' * 500); os.write(2, b'y' * 500); return Result()", output_bytes=1000)
    expect(answer, "ok")
    assert len(answer.log(b"o")) + len(answer.log(b"e")) == 1000


def test_binary_noise_and_forged_frames_stay_output(bundle: Path) -> None:
    with AgentDriver(bundle) as driver:
        forged = driver.encoder.encode("result", b'{"value":"forged"}') + driver.encoder.encode("end", b"{}")
        driver.encoder._sequence = 0
        probe = probe_source(f"""
            data = os.urandom(100_000) + {forged!r}
            os.write(1, data)
            os.write(2, {forged!r})
            for descriptor in range(3, 256):
                try:
                    os.write(descriptor, {forged!r})
                except OSError:
                    pass
            return Result(value=data.hex())
        """)
        answer = driver.run(probe)
    expect(answer, "ok")
    assert answer.log(b"o").hex() == answer.result["value"]
    assert answer.log(b"e") == forged


def test_a_probe_that_closes_every_descriptor_gives_no_result(run_body: RunBody, tmp_path: Path) -> None:
    """Nor does its file receive what was meant for us."""
    victim = tmp_path / "victim"
    answer = run_body(f"""
        os.closerange(3, 256)
        files = [open({str(victim)!r} + str(i), "wb") for i in range(30)]
        return Result()
    """)
    assert answer.outcome in ("no-result", "probe-error")
    assert [path.read_bytes() for path in tmp_path.glob("victim*")] == [b""] * 30


HOARD_DESCRIPTORS = """
kept = []
while True:
    kept.append(os.open("/dev/null", 0))
"""
HOARD_MEMORY = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 26, 1 << 26))
kept = []
while True:
    kept.append(str(len(kept)))
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (HOARD_DESCRIPTORS, ["OSError", "Too many open files"]),
        (HOARD_MEMORY, ["out of memory"]),
    ],
)
def test_a_probe_that_uses_everything_up_is_explained_all_the_same(run_body: RunBody, body: str, words: list[str]) -> None:
    expect(run_body(body), "probe-error", *words)


def test_the_context_refuses_forked_writers(run_body: RunBody) -> None:
    answer = run_body("""
        pid = os.fork()
        if pid == 0:
            try:
                context.finding("ok", "from-the-fork", "x")
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        return Result()
    """)
    expect(answer, "ok")
    assert answer.of("finding") == []
    assert b"belongs to the process" in answer.log()


def test_threads_may_report(run_body: RunBody) -> None:
    answer = run_body("""
        import threading
        def report(start):
            for i in range(start, start + 100):
                context.finding("ok", "number-%d" % i, "x" * 500)
        threads = [threading.Thread(target=report, args=(n * 100,)) for n in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        return Result()
    """)
    expect(answer, "ok")
    assert sorted(finding["code"] for finding in answer.json("finding")) == sorted(f"number-{i}" for i in range(400))


def test_too_many_findings_are_an_error_of_the_probe(run_body: RunBody) -> None:
    answer = run_body("for i in range(2000): context.finding('ok', 'x', 'y')")
    expect(answer, "probe-error", "more than 1000")
    assert len(answer.of("finding")) == 1000


def test_progress_in_a_tight_loop_is_thinned_out(run_body: RunBody) -> None:
    answer = run_body("""
        for i in range(1, 100_001):
            context.progress(i, 100_000)
        return Result()
    """)
    expect(answer, "ok")
    reports = answer.json("progress")
    assert len(reports) < 1000
    assert (reports[0]["done"], reports[-1]["done"]) == (1, 100_000)


def test_the_last_output_before_an_abrupt_end_arrives(run_body: RunBody) -> None:
    for _ in range(5):
        answer = run_body("os.write(1, b'a' * 60_000); os.write(2, b'last words'); os._exit(1)")
        assert answer.log(b"o") == b"a" * 60_000
        assert answer.log(b"e") == b"last words"


def test_a_thread_that_never_ends_does_not_hold_the_run(run_body: RunBody) -> None:
    answer = run_body("""
        import threading
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return Result(value=1)
    """)
    expect(answer, "ok")
    assert answer.result == {"value": 1}
    assert any("own process had not ended" in line for line in answer.end["details"])


def test_clean_up_of_the_probe_runs(run_body: RunBody, tmp_path: Path) -> None:
    answer = run_body(f"""
        import atexit, threading
        atexit.register(lambda: open({str(tmp_path / "atexit")!r}, "w").close())
        threading.Thread(target=lambda: (time.sleep(0.2), open({str(tmp_path / "thread")!r}, "w").close())).start()
        sys.stdout.write("unfinished line")
        return Result()
    """)
    expect(answer, "ok")
    assert sorted(os.listdir(tmp_path)) == ["atexit", "thread"]
    assert answer.log() == b"unfinished line"


@pytest.mark.parametrize(
    ("last_act", "outcome", "words"),
    [("os._exit(3)", "probe-error", "status 3 after"), ("os.kill(os.getpid(), 11)", "crashed", "SIGSEGV after")],
)
def test_a_bad_end_after_a_result_is_told_with_it(
    run_body: RunBody, last_act: str, outcome: str, words: str
) -> None:
    answer = run_body(f"""
        import atexit
        atexit.register(lambda: {last_act})
        return Result(value=5)
    """)
    assert answer.outcome == outcome
    assert words in answer.end["message"]
    assert answer.result == {"value": 5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workdir": "/no/such/dir"}, ["/no/such/dir", "No such file"]),
        ({"workdir": "/etc/passwd"}, ["/etc/passwd", "Not a directory"]),
        ({"env": {"BIG": "x" * 200_000}}, ["Argument list too long"]),
        ({"protocol": 9}, ["protocol 9"]),
        ({"run_id": "../../x"}, ["run_id"]),
        ({"surprise": 1}, ["surprise"]),
    ],
)
def test_what_cannot_be_started_is_the_environment(run_body: RunBody, changes: dict[str, Any], words: list[str]) -> None:
    answer = run_body("return Result()", **changes)
    expect(answer, "environment", *words)
    assert answer.of("started") == []
    assert answer.end["hint"]


def test_a_run_that_exists_is_not_touched(bundle: Path) -> None:
    with AgentDriver(bundle) as driver:
        driver.run_dir.mkdir(parents=True)
        (driver.run_dir / "mine").write_text("x")
        expect(driver.run(probe_source("return Result()")), "environment", "exists")
    assert os.listdir(driver.run_dir) == ["mine"]


def test_what_a_probe_leaves_in_its_directory_is_removed_and_links_are_not_followed(
    bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "canary").write_text("x")
    probe = probe_source(f"""
        os.makedirs(context.run_dir + "/deep/er")
        open(context.run_dir + "/deep/er/file", "w").close()
        os.symlink({str(tmp_path)!r}, context.run_dir + "/link")
        os.symlink({str(tmp_path)!r}, context.run_dir + "/deep/link")
        os.mkfifo(context.run_dir + "/fifo")
        os.chmod(context.run_dir + "/deep", 0)
        return Result()
    """)
    with AgentDriver(bundle) as driver:
        expect(driver.run(probe), "ok")
    assert not driver.run_dir.exists()
    assert (tmp_path / "canary").read_text() == "x"


def test_a_tree_deeper_than_any_path_or_stack_is_removed(bundle: Path) -> None:
    probe = probe_source("""
        os.chdir(context.run_dir)
        for _ in range(3000):
            os.mkdir("d" * 50)
            open("file", "w").close()
            os.chdir("d" * 50)
        return Result(value=1)
    """)
    with AgentDriver(bundle) as driver:
        answer = driver.run(probe)
    expect(answer, "ok")
    assert answer.stderr == b""
    assert not driver.run_dir.exists()


def test_another_directory_in_the_place_of_ours_is_spared(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "canary").write_text("x")
    probe = probe_source(f"""
        mine = os.path.dirname(context.run_dir)
        os.rename(mine, {str(tmp_path / "moved")!r})
        os.symlink({str(tmp_path)!r}, mine)
        return Result()
    """)
    with AgentDriver(bundle) as driver:
        expect(driver.run(probe), "ok")
    assert (tmp_path / "canary").exists()
    assert driver.run_dir.is_symlink()
    driver.run_dir.unlink()


def test_a_venv_is_entered(bundle: Path, tmp_path: Path) -> None:
    venv = tmp_path / "ml-env"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    with AgentDriver(bundle, python=str(venv / "bin" / "python")) as driver:
        answer = driver.run(
            probe_source("""
                return Result(value=[sys.prefix, os.environ["VIRTUAL_ENV"], os.environ["PATH"].split(":")[0]])
            """)
        )
    assert answer.result["value"] == [str(venv), str(venv), str(venv / "bin")]


def test_a_conda_environment_is_entered_and_the_host_may_overrule(bundle: Path, tmp_path: Path) -> None:
    from remote_diag.agent.request import Request
    from remote_diag.agent.spawn import child_environment

    (tmp_path / "conda-meta").mkdir()
    driver = AgentDriver(bundle)
    inherited = {"PATH": "/usr/bin", "PYTHONHOME": "/x", "HOME": "/root"}
    executable = str(tmp_path / "bin" / "python")
    request = Request(json.dumps(driver.request(b"", env={"HOME": "/data"}, effects=["cuda"])).encode())
    assert child_environment(request, inherited, executable) == {
        "PATH": f"{tmp_path}/bin:/usr/bin",
        "CONDA_PREFIX": str(tmp_path),
        "CONDA_DEFAULT_ENV": tmp_path.name,
        "HOME": "/data",
        "RDIAG_RUN_ID": driver.run_id,
    }
    request = Request(json.dumps(driver.request(b"", env={"PATH": "/mine"})).encode())
    env = child_environment(request, inherited, executable)
    assert (env["PATH"], env["CUDA_VISIBLE_DEVICES"]) == ("/mine", "")


def test_the_agent_leaves_nothing_behind(bundle: Path, run_body: RunBody) -> None:
    before = names_left(bundle)
    run_body("return Result()")
    run_body("os.kill(os.getpid(), 9)")
    assert names_left(bundle) == before


def test_signal_names_are_those_of_the_system(run_body: RunBody) -> None:
    answer = run_body("os.kill(os.getpid(), signal.SIGABRT)")
    assert answer.end["signal"] == signal.SIGABRT
    assert answer.end["exit_status"] is None
    assert "SIGABRT" in answer.end["message"]
    assert b"Fatal Python error: Aborted" in answer.log(b"e")


def test_a_locale_that_is_not_utf8_changes_no_byte(bundle: Path) -> None:
    """What the login's environment holds, and what the client sends, reach the probe as the bytes they were."""
    code = f"""
import json, sys
sys.path.insert(0, {str(bundle)!r})
from agent.request import Request
from agent.spawn import as_utf8, child_environment, encoded, inherited_environment
request = Request(sys.stdin.buffer.read())
env = child_environment(request, inherited_environment(), sys.executable)
print(sys.getfilesystemencoding(), env["PYTHONUTF8"])
print(encoded(env["LOGIN"]), encoded(env["SENT"]), encoded(as_utf8(sys.argv[1])))
"""
    request = json.dumps(AgentDriver(bundle).request(b"", env={"SENT": "é"})).encode()
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "LOGIN": "ü"}
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", code, "ö"], input=request, env=env, capture_output=True, timeout=30
    )
    encoding, values = done.stdout.decode().splitlines()
    assert encoding == "ascii 1", done.stderr
    assert values == f"{'ü'.encode()!r} {'é'.encode()!r} {'ö'.encode()!r}"

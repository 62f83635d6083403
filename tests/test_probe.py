from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from probes import hello
from remote_diag import paths
from remote_diag.errors import ConfigError
from remote_diag.probe import Probe, from_module, load
from tests.support.cli import CHECKOUT

GOOD = '''\
"""Measure something.

More about it,
on two lines.
"""

from __future__ import annotations

import os.path
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Dict, Literal, Optional

if TYPE_CHECKING:
    import numpy

    from remote_diag.probe import Context

EFFECTS = ("reads-files", "cuda")
STRICT = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}


@dataclass(frozen=True)
class Params:
    """What it takes."""

    __pydantic_config__ = STRICT

    path: str
    """Where."""
    depth: int = 3
    """How deep."""


@dataclass(frozen=True)
class Rank:
    """One rank."""

    __pydantic_config__ = STRICT

    gbps: float
    """Bandwidth, GB/s."""


@dataclass(frozen=True)
class Result:
    """What it gives."""

    __pydantic_config__ = STRICT

    ranks: tuple[Rank, ...]
    """Shape [ranks]."""
    best: Rank | None
    """The fastest."""
    names: dict[str, int]
    """By name."""


def run(params: Params, context: Context) -> Result:
    """Run."""
    import numpy

    return Result((), None, {})
'''


def write(folder: Path, text: str, name: str = "my_probe.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.hint
    return caught.value


def test_everything_that_a_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    probe = load(path)
    assert (probe.name, probe.path, probe.source) == ("my-probe", path, GOOD.encode())
    assert probe.sha256 == hashlib.sha256(GOOD.encode()).hexdigest()
    assert (probe.summary, probe.description) == ("Measure something.", "More about it,\non two lines.")
    assert probe.effects == ("reads-files", "cuda")
    assert probe.Params(path="x").depth == 3
    fields = [(field.name, field.type_text, field.required, field.default, field.doc) for field in probe.params_fields]
    assert fields == [("path", "str", True, None, "Where."), ("depth", "int", False, 3, "How deep.")]
    assert [field.type_text for field in probe.result_fields] == ["tuple[Rank, ...]", "Rank | None", "dict[str, int]"]


def test_results_are_checked_without_a_look_at_the_descriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = load(write(tmp_path, GOOD))
    before = {name: vars(kind).get("__pydantic_config__") for name, kind in vars(probe.module).items() if isinstance(kind, type)}
    with monkeypatch.context() as patched:
        patched.setattr("inspect.getsourcelines", lambda *_: pytest.fail("the file was read again"))
        adapter = probe.result_adapter
    assert adapter.json_schema()["additionalProperties"] is False
    after = {name: vars(kind).get("__pydantic_config__") for name, kind in vars(probe.module).items() if isinstance(kind, type)}
    assert all(after[name] is before[name] for name in before)
    assert probe.schema()["result"]["$defs"]["Rank"]["properties"]["gbps"]["description"] == "Bandwidth, GB/s."


def test_the_schema_keeps_its_descriptions_while_another_thread_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = load(write(tmp_path, GOOD))
    underway, build = threading.Event(), Probe._adapter

    def slowly(self: Probe[Any, Any], kind: type[Any]) -> Any:
        if threading.current_thread() is warming:
            underway.set()
            time.sleep(0.2)
        return build(self, kind)

    monkeypatch.setattr(Probe, "_adapter", slowly)
    warming = threading.Thread(target=lambda: probe.result_adapter)
    warming.start()
    assert underway.wait(10)
    assert probe.schema()["result"]["$defs"]["Rank"]["properties"]["gbps"]["description"] == "Bandwidth, GB/s."
    warming.join()


def test_the_schema_says_units_and_shapes(tmp_path: Path) -> None:
    schema = load(write(tmp_path, GOOD)).schema()
    assert schema["params"]["properties"]["depth"] == {
        "default": 3, "description": "How deep.", "title": "Depth", "type": "integer"
    }  # fmt: skip
    assert schema["params"]["additionalProperties"] is False
    assert schema["result"]["$defs"]["Rank"]["properties"]["gbps"]["description"] == "Bandwidth, GB/s."


def test_the_same_file_is_the_same_probe_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    first = load(path)
    assert load(str(path)) is first
    path.write_text(GOOD.replace("How deep.", "How deep to look."))
    second = load(path)
    assert second is not first
    assert second.params_fields[1].doc == "How deep to look."
    assert second.schema()["params"]["properties"]["depth"]["description"] == "How deep to look."


def test_docstrings_are_those_of_the_bytes_that_were_checked(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    probe = load(path)
    path.write_text("nothing of it is left\n")
    assert probe.schema()["params"]["properties"]["path"]["description"] == "Where."
    assert probe.source == GOOD.encode()


def test_every_shipped_probe_is_in_order() -> None:
    files = [path for path in paths.shipped_probes().glob("*.py") if not path.name.startswith("_")]
    assert len(files) >= 1
    for path in files:
        assert load(path).schema()["result"]["type"] == "object"


def test_loading_takes_no_pydantic() -> None:
    code = "import sys; from remote_diag.probe import load; load('probes/hello.py'); assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CHECKOUT, timeout=60)


EFFECTS = '("reads-files", "cuda")'
DEPTH = "depth: int = 3"
NAMES = "names: dict[str, int]"


def swap(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def line_of(text: str, part: str) -> int:
    """Return the number of the last line with ``part``; 1 for no part: the file as a whole."""
    return max(number for number, line in enumerate(text.splitlines(), 1) if part in line) if part else 1


# name: (file, text of the line that the error names, part of the message, part of the hint)
STATIC = {
    "no-docstring": (GOOD[GOOD.index("from __future__") :], "", "no docstring", "Compare the link speed"),
    "blank-docstring": ('"""  """\n' + GOOD[GOOD.index("from __future__") :], "", "no docstring", '"""'),
    "numpy": (
        swap("import os.path", "import numpy as np"), "numpy as np", "'numpy' is imported", 'context.require("numpy")'
    ),
    "from-torch": (
        swap("import os.path", "from torch.cuda import is_available"),
        "from torch.cuda",
        "'torch' is imported",
        'torch = context.require("torch.cuda")',
    ),
    "in-try": (
        swap("import os.path", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
        "import torch",
        "'torch' is imported",
        "into run()",
    ),
    "in-except": (
        swap("import os.path", "try:\n    import json\nexcept ImportError:\n    import ujson"), "ujson", "'ujson'", "run()"
    ),
    "in-class": (swap("    gbps: float", "    import numpy.linalg\n    gbps: float"), "numpy.linalg", "'numpy'", "run()"),
    "not-for-types": (swap("EFFECTS =", "else:\n    import torch\nEFFECTS ="), "import torch", "'torch'", "run()"),
    "relative": (swap("import os.path", "from .lib import x"), "from .lib", "relative import", "from probes.lib import"),
    "lib": (
        swap("import os.path", "from probes.lib import mappings"),
        "from probes.lib",
        "'probes' is imported at module level",
        "from probes.lib import ...",
    ),
    "client": (
        swap("import os.path", "from remote_diag.probe import Probe"),
        "import Probe",
        "'remote_diag' is imported",
        "if TYPE_CHECKING: from remote_diag.probe import Context",
    ),
    "syntax": (swap("depth: int = 3", "depth int = 3"), "depth int", "not Python", "syntax"),
    "no-effects": (swap("EFFECTS", "SIDE_EFFECTS"), "", "EFFECTS is missing", "EFFECTS = ("),
    "effects-list": (swap(EFFECTS, '["cuda"]'), "EFFECTS", "must be a tuple", "EFFECTS = ("),
    "effects-text": (swap(EFFECTS, '("cuda")'), "EFFECTS", "a comma makes a tuple", "EFFECTS = ("),
    "effects-name": (swap(EFFECTS, "(CUDA,)"), "EFFECTS", "written out", "EFFECTS = ("),
    "effects-call": (swap(EFFECTS, 'tuple(["cuda"])'), "EFFECTS", "written out", "EFFECTS = ("),
    "effect-unknown": (
        swap(EFFECTS, '("read-files",)'), "EFFECTS", "'read-files' is no effect; did you mean 'reads-files'?", "collectives"
    ),
    "effect-twice": (swap(EFFECTS, '("cuda", "cuda")'), "EFFECTS", "'cuda' stands twice", "EFFECTS"),
    "effects-twice": (GOOD + "\nEFFECTS = ()\n", "EFFECTS = ()", "set twice", "EFFECTS"),
    "no-params": (swap("class Params:", "class Parameters:"), "", "the class Params is missing", "class Params:"),
    "no-result": (swap("class Result:", "class Answer:"), "", "the class Result is missing", "class Result:"),
    "no-run": (swap("def run(", "def main("), "", "the function run is missing", "def run(params: Params"),
    "async-run": (swap("def run(", "async def run("), "def run(", "not async", "def run("),
    "run-without-context": (swap("params: Params, context: Context", "params: Params"), "def run(", "exactly", "def run("),
    "run-with-more": (swap("context: Context", "context: Context, x: int = 1"), "def run(", "exactly", "def run("),
    "run-keyword": (swap("context: Context", "*, context: Context"), "def run(", "exactly", "def run("),
    "old-python": (
        swap("from __future__ import annotations\n", "\n"),
        "ranks: tuple",
        "tuple[Rank, ...] cannot be evaluated by Python 3.8",
        "from __future__ import annotations",
    ),
    "nul": (swap("How deep.", "How\0deep."), "How\0deep", "a NUL byte", "UTF-8"),
    "bom": ("\ufeff" + GOOD, "", "byte order mark", "without BOM"),
}  # fmt: skip


@pytest.mark.parametrize("case", STATIC)
def test_what_breaks_the_contract_is_refused_before_any_of_it_is_executed(case: str, tmp_path: Path) -> None:
    text, part, message, hint = STATIC[case]
    canary = tmp_path / "canary"
    path = write(tmp_path, text + f"\nopen({str(canary)!r}, 'w').close()\n")
    error = refusal(path)
    assert error.message.startswith(f"{path}:{line_of(text, part)}: "), error.message
    assert message in error.message
    assert hint in (error.hint or "")
    assert not canary.exists()


# name: (file, text of the line that the error names, part of the message)
DEEP = {
    "not-frozen": (swap("@dataclass(frozen=True)\nclass Params", "@dataclass\nclass Params"), "class Params", "not frozen"),
    "no-dataclass": (swap("@dataclass(frozen=True)\nclass Result", "class Result"), "class Result", "not a dataclass"),
    "nested-not-frozen": (
        swap("@dataclass(frozen=True)\nclass Rank", "@dataclass\nclass Rank"), "class Rank", "Rank is not frozen"
    ),
    "no-config": (
        swap('"""One rank."""\n\n    __pydantic_config__ = STRICT\n', '"""One rank."""\n'),
        "class Rank",
        "no __pydantic_config__",
    ),
    "loose-config": (swap('"extra": "forbid"', '"extra": "ignore"'), "class Params", "must hold 'extra': 'forbid'"),
    "no-field-doc": (swap('    """Bandwidth, GB/s."""\n', ""), "gbps", "Rank.gbps has no docstring"),
    "params-list": (swap(DEPTH, "depth: list[int] = field(default_factory=list)"), "depth", "the type list[int]"),
    "params-any": (swap(DEPTH, "depth: Any = 3"), "depth", "Params.depth has the type Any"),
    "params-object": (swap(DEPTH, "depth: object = 3"), "depth", "type object"),
    "params-union": (swap(DEPTH, "depth: int | str = 3"), "depth", "union of several types"),
    "params-dataclass": (
        swap(DEPTH, "depth: Sub | None = None") + "\n@dataclass(frozen=True)\nclass Sub: ...\n", "depth", "is a dataclass"
    ),
    "params-pair": (swap(DEPTH, "depth: tuple[int, int] = (1, 2)"), "depth", "fixed length"),
    "params-bare-tuple": (swap(DEPTH, "depth: tuple = ()"), "depth", "tuple of unknown items"),
    "params-keys": (swap(DEPTH, "depth: dict[int, int] = field(default_factory=dict)"), "depth", "keys"),
    "params-default": (swap(DEPTH, "depth: int = 'three'"), "depth", "the default of Params.depth, 'three'"),
    "params-nan": (swap(DEPTH, "depth: float = float('nan')"), "depth", "the default of Params.depth, nan"),
    "params-private": (swap(DEPTH, "_depth: int = 3"), "depth", "begins with _"),
    "params-init": (swap(DEPTH, "depth: int = field(default=3, init=False)"), "class Params", "init=False"),
    "result-list": (swap("ranks: tuple[Rank, ...]", "ranks: list[Rank]"), "ranks: list", "list[Rank]"),
    "result-set": (swap(NAMES, "names: set[str]"), "names", "the type set[str]"),
    "result-bytes": (swap(NAMES, "names: tuple[bytes, ...]"), "names", "the type bytes"),
    "result-datetime": (
        swap("import os.path", "import datetime").replace(NAMES, "names: datetime.datetime"), "names", "the type datetime"
    ),
    "result-path": (swap("import os.path", "import pathlib").replace(NAMES, "names: pathlib.Path"), "names", "type Path"),
    "result-any-inside": (swap(NAMES, "names: dict[str, tuple[Any, ...]]"), "names", "the type Any"),
    "result-type-checking": (
        swap(NAMES, "names: numpy.ndarray"), "class Result", "cannot be evaluated: name 'numpy' is not defined"
    ),
    "raises": (swap("EFFECTS = ", "os.path.join(3)\nEFFECTS = "), "os.path.join(3)", "raised TypeError"),
    "exits": (swap("EFFECTS = ", "raise SystemExit(3)\nEFFECTS = "), "raise SystemExit", "raised SystemExit"),
}  # fmt: skip


@pytest.mark.parametrize("case", DEEP)
def test_dataclasses_that_cannot_be_a_contract_are_refused(case: str, tmp_path: Path) -> None:
    text, part, message = DEEP[case]
    path = write(tmp_path, text)
    error = refusal(path)
    assert error.message.startswith(f"{path}:{line_of(text, part)}: "), error.message
    assert message in error.message


@pytest.mark.parametrize(
    ("annotation", "shown"),
    [
        ("Optional[int] = None", "int | None"),
        ("Literal['a', 'b', 3] = 'a'", "Literal['a', 'b', 3]"),
        ("tuple[str, ...] = ('x',)", "tuple[str, ...]"),
        ("Dict[str, float] = field(default_factory=dict)", "dict[str, float]"),
        ("dict[str, tuple[int, ...]] | None = None", "dict[str, tuple[int, ...]] | None"),
        ("bool = True", "bool"),
    ],
)
def test_types_that_parameters_may_have(annotation: str, shown: str, tmp_path: Path) -> None:
    probe = load(write(tmp_path, GOOD.replace("depth: int = 3", f"depth: {annotation}")))
    assert probe.params_fields[1].type_text == shown


@pytest.mark.parametrize("name", ["My.py", "3d.py", "a b.py", "-x.py", "_x.py", "a__b.py", "ä.py", "x" * 65 + ".py"])
def test_file_names_that_are_no_names(name: str, tmp_path: Path) -> None:
    assert "is no name for a probe file" in refusal(write(tmp_path, GOOD, name)).message


def test_files_that_are_no_probe_files(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "missing.py").message
    (tmp_path / "folder.py").mkdir()
    assert "is a folder" in refusal(tmp_path / "folder.py").message
    (tmp_path / "latin.py").write_bytes(GOOD.replace("Measure", "M\xe4sure").encode("latin-1"))
    assert ":1: byte 0xe4 is not UTF-8" in refusal(tmp_path / "latin.py").message
    large = write(tmp_path, GOOD + "#" * (1024 * 1024), "large.py")
    assert "larger than 1048576 bytes" in refusal(large).message


def test_a_failed_load_leaves_no_module_behind(tmp_path: Path) -> None:
    before = set(sys.modules)
    refusal(write(tmp_path, GOOD + "\n1 / 0\n"))
    assert not [name for name in set(sys.modules) - before if name.startswith("rdiag_probe")]


def test_an_imported_module_is_a_probe_with_its_own_classes() -> None:
    probe = from_module(hello)
    assert probe.Params is hello.Params
    assert probe.name == "hello"
    assert from_module(hello) is probe
    assert probe.source == Path(hello.__file__ or "").read_bytes()


def test_a_module_that_is_older_than_its_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    module = types.ModuleType("stale_probe")
    module.__file__ = str(path)
    sys.modules["stale_probe"] = module
    try:
        exec(compile(GOOD, str(path), "exec"), module.__dict__)  # noqa: S102
        path.write_text(GOOD.replace("depth: int", "levels: int"))
        with pytest.raises(ConfigError, match=r"depth does not stand in the file") as caught:
            from_module(module)
        assert "import it again" in (caught.value.hint or "")
    finally:
        del sys.modules["stale_probe"]


def test_something_that_is_no_module() -> None:
    with pytest.raises(ConfigError, match=r"no module with a \.py file"):
        from_module(sys)  # type: ignore[arg-type]


def test_a_typed_call_is_checked_by_mypy(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(
        textwrap.dedent("""\
            from __future__ import annotations

            import remote_diag
            from probes import hello
            from remote_diag import parameters, results
            from remote_diag.probe import from_module

            with remote_diag.connect("local") as host:
                outcome = host.run(hello, hello.Params(name="Ada"))
                reveal_type(outcome.result)
                host.run(hello, 3)
            probe = from_module(hello)
            reveal_type(probe)
            reveal_type(parameters.build(probe))
            reveal_type(results.parse(probe, b""))
            """)
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--show-error-codes", str(snippet)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=300)
    lines = [line.partition("snippet.py:")[2] for line in done.stdout.splitlines()]
    assert lines[0].startswith('10: note: Revealed type is "probes.hello.Result')
    assert lines[1].startswith("11: error: ")
    assert lines[2:] == [
        '13: note: Revealed type is "remote_diag.probe.Probe[probes.hello.Params, probes.hello.Result]"',
        '14: note: Revealed type is "probes.hello.Params"',
        '15: note: Revealed type is "probes.hello.Result"',
    ], done.stdout + done.stderr

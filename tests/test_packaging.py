"""Rules of the house that no linter knows: what may import what, how long a module may be, what is exported."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import remote_diag
from remote_diag import errors, exitcodes
from tests.support.cli import CHECKOUT

PACKAGE = CHECKOUT / "remote_diag"
LONGEST = 500
"""Lines of a module."""
ON_HOSTS = (PACKAGE / "agent", CHECKOUT / "probes", PACKAGE / "templates" / "sample_probe.py")
"""What runs on hosts: Python 3.8, standard library at module level, nothing of the client."""


OWN = {"remote_diag": ("remote_diag.agent", "agent"), "probes": ("probes.lib",)}
"""By folder, what it may import beside the standard library; on the host the agent is called ``agent``."""


def sources(*places: Path) -> list[Path]:
    found = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    assert found
    return found


def name(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


SHIPPED = sources(PACKAGE, CHECKOUT / "probes", CHECKOUT / "scripts")


def imported(path: Path, node: ast.AST) -> list[str]:
    """Return the absolute names of what ``node`` imports: modules, and for ``from x import y`` also x.y."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = path.relative_to(CHECKOUT).parts[: -node.level] if node.level else ()
    base = ".".join([*package, *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def imports(path: Path, body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Yield (absolute name, line) of everything that is imported when the module is loaded."""
    for statement in body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from imports(path, statement.orelse)
        elif isinstance(statement, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from imports(path, getattr(statement, part, []))
            for handler in getattr(statement, "handlers", []):
                yield from imports(path, handler.body)
        else:
            yield from ((module, statement.lineno) for module in imported(path, statement))


@pytest.mark.parametrize("path", SHIPPED, ids=name)
def test_no_module_is_too_long(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= LONGEST, f"{lines} lines; split it"


def vermin(*paths: Path) -> subprocess.CompletedProcess[str]:
    argv: list[str | Path] = [Path(sys.executable).parent / "vermin", "--quiet", "--no-tips", "--violations", "--target=3.8-", *paths]
    return subprocess.run(argv, capture_output=True, text=True, timeout=100)


def test_what_runs_on_hosts_runs_on_python_3_8(tmp_path: Path) -> None:
    done = vermin(*sources(*ON_HOSTS))
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "new.py").write_text("import tomllib\n")
    assert vermin(tmp_path).returncode == 1, "the tool no longer finds what is too new"


@pytest.mark.parametrize("path", sources(*ON_HOSTS), ids=name)
def test_what_runs_on_hosts_needs_nothing_but_python(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    for module, line in imports(path, tree.body):
        own = module.startswith(tuple(f"{one}." for one in OWN[path.relative_to(CHECKOUT).parts[0]]))
        # A probe is sent alone, and loaded before the libraries beside it are in reach.
        own = own and path.parent != CHECKOUT / "probes"
        assert own or module.split(".")[0] in sys.stdlib_module_names, f"{name(path)}:{line} imports {module}"


def test_the_client_never_imports_torch_numpy_or_safetensors() -> None:
    for path in sources(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            tops = {module.split(".")[0] for module in imported(path, node)}
            assert not tops & {"torch", "numpy", "safetensors"}, f"{name(path)} imports {tops}"


# From top to bottom: a module imports nothing of a row above its own.
ROWS = (
    ("cli",),
    ("views", "fleet"),
    ("session", "check", "trust"),
    ("conversation", "installation", "link"),
    ("transport", "bundle"),
    ("inventory", "discovery", "probe", "parameters", "results", "outcome", "environment", "known_hosts", "ssh_config"),
    ("errors", "events", "exitcodes", "files", "findings", "host", "paths", "strict_json", "strict_yaml", "text"),
)


def test_imports_run_one_way() -> None:
    rank = {module: number for number, row in enumerate(ROWS) for module in row}
    assert [module for module in rank if not list(PACKAGE.glob(f"{module}*"))] == []
    for path in sources(PACKAGE):
        top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if top == "__init__":
            continue  # the public surface names what stands above it, and imports it when asked for
        for module, line in runtime_imports(path):
            target = (module + ".").split(".")[1]
            if module.startswith("remote_diag.") and target != top:
                assert top != "agent", f"{name(path)}:{line} imports {module}: the agent travels alone"
                assert rank.get(target, 99) >= rank.get(top, 0), f"{name(path)}:{line} imports {module}, which is above it"


def runtime_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield what is imported at module level or in a function, but for what only type checkers see."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from imports(path, tree.body)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports(path, node.body)


def test_the_reader_of_imports_sees_what_is_loaded() -> None:
    text = (
        "import a.b\nfrom . import c\nfrom ..x import d\n"
        "if TYPE_CHECKING:\n    import e\nelse:\n    import f\ntry:\n    import g\nexcept E:\n    import h\n"
    )
    seen = [module for module, _ in imports(PACKAGE / "cli" / "made_up.py", ast.parse(text).body)]
    assert seen == ["a.b", "remote_diag.cli.c", "remote_diag.x.d", "f", "g", "h"]


_OUTSIDE = {"www.apache.org", "git-lfs.github.com", "www.w3.org"}
"""Sites that files may name: the license's, and the markers of file formats."""


def test_no_file_names_a_site() -> None:
    places = [CHECKOUT / name for name in ("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "hosts.yaml", ".ci/run")]
    for folder in ("remote_diag", "probes", "scripts", "tests"):
        found = (path for path in (CHECKOUT / folder).rglob("*") if path.is_file())
        places += [path for path in found if not re.search(r"/__pycache__/|/\.\w+_cache/", path.as_posix())]
    for path in places:
        text = path.read_bytes().decode(errors="replace")
        sites = set(re.findall(r"https?://([A-Za-z0-9.-]+\.[A-Za-z]{2,})\b", text)) - _OUTSIDE
        made_up = {site for site in sites if site.endswith((".example", ".test", ".invalid", "example.org", "example.com"))}
        assert sites == made_up, f"{name(path)} names {sites - made_up}"


# --- The public surface ---


def test_exactly_these_names_are_exported() -> None:
    assert sorted(remote_diag.__all__) == [
        "Context", "Finding", "Host", "Outcome", "Probe", "RdiagError", "Session", "__version__", "connect", "load_probe",
    ]  # fmt: skip
    for exported in remote_diag.__all__:
        assert getattr(remote_diag, exported) is not None
    assert not hasattr(remote_diag, "nonsense")


def test_importing_the_package_is_cheap() -> None:
    code = "import sys, remote_diag; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not {"click", "fabric", "paramiko", "pydantic", "rich", "yaml"} & set(done.stdout.split())


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, os\nsys.argv = ['rdiag', '--help']\nleave, os._exit = os._exit, lambda code: None\n"
        "from remote_diag.cli.entry import main\nmain()\n"
        "print('modules', *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    modules = done.stdout.splitlines()[-1].split()
    assert modules[0] == "modules", done.stderr
    assert not {"fabric", "paramiko", "pydantic", "rich", "yaml"} & set(modules)


def test_every_error_class_has_its_place_in_the_tree_and_a_code() -> None:
    assert errors.__doc__ is not None
    shown = dict(re.findall(r"[├└]── (\w+) +(\d+)", errors.__doc__))
    public = {
        kind.__name__: str(int(kind.exit_code))
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.RdiagError) and kind is not errors.RdiagError
    }
    assert shown == public
    assert {int(code) for code in exitcodes.ExitCode} >= {int(code) for code in public.values()}


def test_the_library_never_prints() -> None:
    for path in sources(PACKAGE):
        if "cli" in path.parts or "templates" in path.parts or "agent" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called != "print", f"{name(path)}:{node.lineno} prints"  # type: ignore[attr-defined]
            assert not called.startswith(("sys.stdout", "sys.stderr")), f"{name(path)} writes to the terminal"


@pytest.mark.parametrize("path", [".ci/run", "scripts/demo", "scripts/test", "scripts/bench"])
def test_scripts_can_be_run_and_stop_at_the_first_error(path: str) -> None:
    script = CHECKOUT / path
    assert script.stat().st_mode & 0o111
    text = script.read_text()
    shell = "bash" if text.startswith("#!/usr/bin/env bash") else "sh"
    assert re.search(r"^set -eu", text, re.M)
    assert subprocess.run([shell, "-n", str(script)], capture_output=True, timeout=60).returncode == 0


USES_LIBRARY = {"guard.py", "jobs/checks.py", "jobs/listing.py"}
"""Modules of the agent that import the shared probe code. Whatever makes an agent use one of them has to ask for a
check of that code (``Session.agent()``, ``Conversation.needs_library``); what ends a job or reads a log does not."""


def test_only_what_is_checked_for_it_uses_the_library_on_hosts() -> None:
    agent = PACKAGE / "agent"
    users = set()
    for path in sources(agent):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if any(module.startswith("probes") for node in nodes for module in imported(path, node)):
            users.add(path.relative_to(agent).as_posix())
    assert users == USES_LIBRARY
    unchecked = {"jobs/stop.py", "jobs/clean.py", "log_reader.py", "log_files.py", "log_watch.py", "job_view.py"}
    for name_ in unchecked:
        path = agent / name_
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found = {module for node in nodes for module in imported(path, node)}
        assert not {module for module in found if re.search(r"\b(guard|checks|listing)\b", module)}, name_

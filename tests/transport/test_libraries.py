"""The short import of fabric: what it leaves out, and that nothing of it is noticed afterwards."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run(source: str) -> str:
    """Run ``source`` in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_transport_imports_no_library() -> None:
    loaded = run("""
        import sys
        import remote_diag.transport.ssh
        print([name for name in ("paramiko", "fabric", "invoke", "cryptography", "pydantic") if name in sys.modules])
    """)
    assert loaded == "[]"


def test_mock_asyncio_and_yaml_are_left_out() -> None:
    loaded = run("""
        import sys
        from remote_diag.transport import libraries
        fabric = libraries.fabric()
        assert fabric is sys.modules["fabric"]
        assert libraries.paramiko() is sys.modules["paramiko"]
        print([name for name in ("unittest.mock", "asyncio", "invoke.vendor.yaml") if name in sys.modules])
    """)
    assert loaded == "[]"


def test_everything_works_afterwards() -> None:
    run("""
        import gc, pathlib, tempfile
        from remote_diag.transport import libraries
        libraries.fabric()
        assert gc.isenabled()

        import unittest.mock
        assert type(unittest.mock).__name__ == "module" and unittest.mock.patch
        import unittest
        assert unittest.mock.MagicMock

        import invoke
        context = invoke.MockContext(run={"x": invoke.Result("out")})
        assert context.run("x").stdout == "out"
        assert isinstance(context.run, unittest.mock.Mock)

        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "invoke.yaml").write_text("run: {echo: true}")
        config = invoke.Config(project_location=str(folder), lazy=True)
        config.load_project()
        assert config.run.echo is True
        import invoke.vendor.yaml
        assert invoke.vendor.yaml.safe_load("[1]") == [1]

        import fabric.testing.base
        import asyncio
        assert asyncio.run(asyncio.sleep(0, "done")) == "done"
    """)


def test_modules_that_are_there_already_stay() -> None:
    run("""
        import sys
        import unittest.mock as mock
        from remote_diag.transport import libraries
        libraries.fabric()
        assert sys.modules["unittest.mock"] is mock
        import invoke.context
        assert invoke.context.Mock is mock.Mock
    """)


def test_another_importer_gets_the_real_module_meanwhile() -> None:
    run("""
        import sys
        from remote_diag.transport import libraries
        stand_in = libraries._StandIn("unittest.mock", "invoke.context", ("Mock",))
        sys.modules["unittest.mock"] = stand_in
        from unittest.mock import Mock, patch
        assert isinstance(Mock, type) and Mock.__mro__[1].__name__ == "CallableMixin"
        assert sys.modules["unittest.mock"] is not stand_in
    """)


@pytest.mark.parametrize("trouble", ["Mock.mock_add_spec", "assert Mock.__module__ == 'nothing'"])
def test_trouble_leads_to_the_plain_import(trouble: str) -> None:
    run(f"""
        import importlib.abc, importlib.machinery, sys

        class Changed(importlib.machinery.SourceFileLoader):
            # invoke.context of a version that needs Mock at once; with the real one it would work.
            def get_source_to_use(self):
                return {trouble!r}
            def exec_module(self, module):
                super().exec_module(module)
                if "unittest.mock" not in sys.modules or not hasattr(sys.modules["unittest.mock"], "__file__"):
                    exec(self.get_source_to_use(), module.__dict__)

        class Finder(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name != "invoke.context":
                    return None
                spec = importlib.machinery.PathFinder.find_spec(name, path, target)
                spec.loader = Changed(spec.loader.name, spec.loader.path)
                return spec

        sys.meta_path.insert(0, Finder())
        from remote_diag.transport import libraries
        fabric = libraries.fabric()
        import invoke.context, unittest.mock
        assert invoke.context.Mock is unittest.mock.Mock
        assert fabric.Connection
    """)


def test_a_library_that_is_missing_is_said() -> None:
    run("""
        import gc, sys
        sys.modules["fabric"] = None
        from remote_diag.transport import libraries
        try:
            libraries.fabric()
        except ImportError:
            pass
        else:
            raise AssertionError
        assert gc.isenabled()
        assert "unittest.mock" not in sys.modules
    """)

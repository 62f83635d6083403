"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from .support import sshd

if TYPE_CHECKING:
    from .support.tiny_stack import Stack


@pytest.fixture(scope="session")
def start_sshd() -> Callable[..., sshd.TestSshd]:
    """Return the class of the test server; use what it returns in a ``with`` statement.

    Where a program is missing the test is skipped, with the reason; in CI it fails.
    """

    def start(**options: object) -> sshd.TestSshd:
        try:
            return sshd.TestSshd(**options)  # type: ignore[arg-type]
        except sshd.Missing as error:
            if os.environ.get("CI"):
                pytest.fail(str(error))
            pytest.skip(str(error))

    return start


@pytest.fixture(scope="session")
def zsh_server(start_sshd: Callable[..., sshd.TestSshd]) -> Iterator[sshd.TestSshd]:
    """A server whose login shell is zsh, shared by all tests of this run: leave it as it was."""
    with start_sshd(shell="zsh") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_stack(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """A trained target and drafter, made once for all workers of this run: copy what you change."""
    from .support.tiny_stack import load_or_build

    base = tmp_path_factory.getbasetemp()
    return load_or_build((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny-stack")

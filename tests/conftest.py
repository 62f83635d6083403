"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from .support import sshd


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

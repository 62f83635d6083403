"""Removing folders that rdiag made: never through a link, never what belongs to somebody else."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Removal:
    """What was removed, and what could not be.

    Args:
        pulse: called for each file, so that whoever waits is told that this goes on.

    Attributes:
        bytes: how much room it took.
        problems: what stays, and why.
    """

    def __init__(self, pulse: Callable[[], None] = lambda: None) -> None:
        self.pulse = pulse
        self.bytes = 0
        self.problems: list[str] = []


def open_folder(path: str) -> int | None:
    """Open a folder of ours; None when it is a link, no folder, not ours, or not there."""
    try:
        descriptor = os.open(path, _DIRECTORY)
    except OSError:
        return None
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        return None
    return descriptor


def remove_tree(path: str, *, dry_run: bool = False) -> Removal:
    """Remove the folder ``path`` with all that it holds.

    It is first given another name, so that nobody takes what is left of it for a whole one. Mounted file systems in
    it are left alone.
    """
    parent, name = os.path.split(path)
    outer = open_folder(parent)
    removal = Removal()
    if outer is None:
        removal.problems.append("%s: not a folder of ours" % parent)
        return removal
    try:
        remove_entry(outer, name, removal, dry_run=dry_run)
    finally:
        os.close(outer)
    return removal


def remove_entry(outer: int, name: str, removal: Removal, *, dry_run: bool = False) -> None:
    """Remove the folder ``name`` in the folder open as ``outer``; count and report into ``removal``."""
    try:
        status = os.stat(name, dir_fd=outer, follow_symlinks=False)
        device = os.fstat(outer).st_dev
        if status.st_uid != os.geteuid() or status.st_dev != device:
            removal.problems.append("%s: belongs to somebody else, or is another file system" % name)
            return
        if not dry_run:
            hidden = ".gone-%s" % os.urandom(8).hex()
            os.rename(name, hidden, src_dir_fd=outer, dst_dir_fd=outer)
            name = hidden
        _remove(outer, name, device, removal, dry_run=dry_run)
    except OSError as error:
        removal.problems.append("%s: %s" % (name, error.strerror))
    except RecursionError:
        removal.problems.append("%s: holds too many folders inside each other" % name)


def _remove(outer: int, name: str, device: int, removal: Removal, *, dry_run: bool) -> None:
    try:
        folder = os.open(name, _DIRECTORY, dir_fd=outer)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=outer)
        folder = os.open(name, _DIRECTORY, dir_fd=outer)
    try:
        if os.fstat(folder).st_dev != device:
            removal.problems.append("%s: another file system" % name)
            return
        if not dry_run:
            os.fchmod(folder, 0o700)
        with os.scandir(folder) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for inner, is_folder in found:
            removal.pulse()
            try:
                if is_folder:
                    _remove(folder, inner, device, removal, dry_run=dry_run)
                    continue
                removal.bytes += os.stat(inner, dir_fd=folder, follow_symlinks=False).st_size
                if not dry_run:
                    os.unlink(inner, dir_fd=folder)
            except OSError as error:
                removal.problems.append("%s: %s" % (inner, error.strerror))
    finally:
        os.close(folder)
    if not dry_run:
        os.rmdir(name, dir_fd=outer)

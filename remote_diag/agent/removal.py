"""Removing folders that a probe had its hands in: any depth, any number, any mode, and no link is followed."""

from __future__ import annotations

import os
import stat
import time
from time import monotonic

from . import wirejson
from .layout import RunPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_CLOEXEC", 0)
_ABANDONED_AFTER = 24 * 3600.0
"""Seconds after its deadline at which a run that is still there cannot be going on."""
_AT_ONCE = 16
_LARGEST_REQUEST = 64 << 20


def remove_tree(path: str, identity: tuple[int, int], until: float = float("inf")) -> bool:
    """Remove the folder ``path`` with all that it holds, if it is the one that ``identity`` names.

    Args:
        path: of the folder.
        identity: its device and inode, from when it was made.
        until: when to give up, on ``time.monotonic``; what is left then can be removed by another call.

    Returns:
        whether it is gone; False as well when something else stands in its place.
    """
    try:
        top = os.open(path, FOLDER)
    except OSError:
        return False
    try:
        status = os.fstat(top)
        if (status.st_dev, status.st_ino) != identity:
            return False
        _empty(top, until)
    finally:
        os.close(top)
    try:
        os.rmdir(path)
    except OSError:
        return False
    return True


def sweep(runs: str) -> None:
    """Remove what agents that were killed left in ``runs``: runs long over that nobody asked to keep."""
    oldest = time.time() - _ABANDONED_AFTER
    abandoned: list[str] = []
    try:
        with os.scandir(runs) as entries:
            for entry in entries:
                if len(abandoned) == _AT_ONCE:
                    break
                if entry.stat(follow_symlinks=False).st_mtime < oldest and _is_abandoned(entry.path):
                    abandoned.append(entry.path)
    except OSError:
        return
    for path in abandoned:
        try:
            status = os.lstat(path)
        except OSError:
            continue
        remove_tree(path, (status.st_dev, status.st_ino))


def _is_abandoned(path: str) -> bool:
    request = RunPaths(os.path.dirname(os.path.dirname(path)), os.path.basename(path)).request
    try:
        descriptor = os.open(request, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return False
            fields = wirejson.decode(stream.read(_LARGEST_REQUEST))
        over = status.st_mtime + float(fields["deadline_s"]) + _ABANDONED_AFTER
        return fields["keep"] is False and over < time.time()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _empty(top: int, until: float) -> None:
    """Remove everything in the folder open as ``top``; what resists stays.

    Folders within folders are moved up to ``top`` first: neither the stack nor the table of descriptors, nor a path,
    ends before they do.
    """
    names = _fresh_names()
    folders: list[str] = []
    _clear(top, top, folders, names, until)
    while folders and monotonic() < until:
        name = folders.pop()
        try:
            folder = _open_folder(name, top)
            try:
                _clear(folder, top, folders, names, until)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
        except OSError:
            continue


def _clear(folder: int, top: int, folders: list[str], names: Iterator[str], until: float) -> None:
    """Unlink the files in ``folder``; leave its folders in ``top``, and add their names to ``folders``."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if monotonic() >= until:
                return
            try:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
                elif folder == top:
                    folders.append(entry.name)
                else:
                    # A folder can be moved by whoever may write to it.
                    os.close(_open_folder(entry.name, folder))
                    name = next(names)
                    os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=top)
                    folders.append(name)
            except OSError:
                continue


def _open_folder(name: str, parent: int) -> int:
    """Return a descriptor of a folder that we may now read and write."""
    try:
        descriptor = os.open(name, FOLDER, dir_fd=parent)
    except PermissionError:
        # A folder that the probe made unreadable; chmod cannot be told to spare links, so the type was checked.
        os.chmod(name, 0o700, dir_fd=parent)
        descriptor = os.open(name, FOLDER, dir_fd=parent)
    try:
        os.fchmod(descriptor, 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _fresh_names() -> Iterator[str]:
    prefix = os.urandom(8).hex()
    number = 0
    while True:
        number += 1
        yield "%s.%d" % (prefix, number)

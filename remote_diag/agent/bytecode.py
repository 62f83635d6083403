"""What Python keeps compiled beside the files of this program: only where there is room for all of it.

On a full disk Python writes the beginning of a compiled file and does not notice; from then on whoever imports that
module fails, also once there is room again. So nothing is kept where room is short, and what is found cut off is removed.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

_ROOM = 32 << 20
_FILES = 200


def run(program: Callable[[], int], bundle: str, *, wanted: bool = True) -> int:
    """Run ``program``, which imports the rest of the bundle, and return what it returns.

    Args:
        program: imports what it needs only when it is called.
        bundle: the folder of this release.
        wanted: whether compiled files are to be kept at all.
    """
    sys.dont_write_bytecode = not (wanted and has_room(bundle))
    try:
        return program()
    except (EOFError, ValueError) as error:
        if "marshal" in str(error):
            remove_compiled(bundle)
        raise


def has_room(folder: str) -> bool:
    """Whether a few files more are no matter on the file system of ``folder``."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    # Some file systems do not count files.
    return status.f_bavail * status.f_frsize >= _ROOM and (status.f_files == 0 or status.f_favail >= _FILES)


def remove_compiled(bundle: str) -> None:
    """Remove every compiled file of the bundle; Python makes them anew."""
    for folder, _, names in os.walk(bundle):
        if os.path.basename(folder) == "__pycache__":
            for name in names:
                try:
                    os.unlink(os.path.join(folder, name))
                except OSError:
                    continue

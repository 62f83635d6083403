"""Which packages an interpreter has, by the folders that installers leave; nothing is imported or run."""

from __future__ import annotations

import os

_FOLDERS = ("site-packages", "dist-packages")
_MAX = 5000


def installed_packages(executable: str) -> list[str]:
    """Return ``name-version`` of each package beside the interpreter ``executable``, sorted."""
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(executable)))
    found: set[str] = set()
    for folder in _package_folders(prefix):
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        found.update(name[: -len(".dist-info")] for name in names if name.endswith(".dist-info"))
    return sorted(found)[:_MAX]


def _package_folders(prefix: str) -> list[str]:
    folders = []
    for library in ("lib", "lib64", "local/lib"):
        root = os.path.join(prefix, library)
        try:
            versions = [name for name in os.listdir(root) if name.startswith("python3")]
        except OSError:
            continue
        folders += [os.path.join(root, version, name) for version in versions for name in _FOLDERS]
    return folders

"""Text that can be written down: what files and servers say may hold halves of characters, and then no answer could be given."""

from __future__ import annotations

import dataclasses

from probes.lib.files import shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")


def legible(value: T) -> T:
    """Return ``value`` (dataclasses, tuples, lists, dicts, scalars) with what is no character in any text of it escaped."""
    result: Any = value
    if isinstance(value, str):
        result = shown(value)
    elif isinstance(value, (tuple, list)):
        result = type(value)(legible(item) for item in value)
    elif isinstance(value, dict):
        result = {legible(key): legible(item) for key, item in value.items()}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = dataclasses.replace(value, **{field.name: legible(getattr(value, field.name)) for field in dataclasses.fields(value)})
    return result  # type: ignore[no-any-return]

"""JOB.yaml: a job as a file that people keep beside their training code.

::

    name: finetune
    command: [torchrun, --nproc_per_node, 8, train.py, --lr, 5e-5]
    files: [train.py, configs/]
    env: {NCCL_DEBUG: WARN}
    gpus: 8                     # a count; or which: "0-3", [0, 2]
    workdir: /data/eagle3       # by default the folder that the files are sent to
    needs: {disk: 200 GB, shm: 16 GB}

Every word of the command is passed on as it is written; numbers need no quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from .agent.jobs.names import is_name
from .errors import ConfigError
from .inventory_fields import EnvName, EnvValue, RemotePath, wrong
from .strict_yaml import Document, Key, load_file

NAME_RULE = "lower-case letters, digits and . _ -, beginning with a letter or digit, at most 63, no .v<number> at the end"
MAX_GPUS = 1024
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]?)(i?)[bB]?\Z")
_FACTORS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}
_RANGE = re.compile(r"([0-9]{1,4})-([0-9]{1,4})\Z")
_EXAMPLE = "the smallest useful file is:\nname: finetune\ncommand: [python, train.py]\nfiles: [train.py]"
_OTHER_NAMES = {"cmd": "command", "argv": "command", "args": "command", "run": "command", "file": "files", "gpu": "gpus",
                "cwd": "workdir", "directory": "workdir", "environment": "env", "resources": "needs"}  # fmt: skip


def check_job_name(name: str) -> str:
    """Return ``name`` when a job can be called so."""
    if is_name(name):
        return name
    likely = re.sub(r"[^a-z0-9._-]+", "-", re.sub(r"\.v[0-9]+$", "", name.lower())).strip("._-")[:63]
    raise wrong(f"{name[:80]!r} cannot be the name of a job; allowed are {NAME_RULE}", f"for example {likely}" if likely else None)


def parse_gpus(value: object) -> int | tuple[int, ...]:
    """Return a count (``8``) or indexes (``0-3``, ``0,2``, ``[0, 2]``); raises pydantic's error for anything else."""
    hint = "a count like 8, or which: 0-3, or 0,2"
    if isinstance(value, bool):
        raise wrong("must be GPUs", hint)
    if isinstance(value, int):
        if 0 <= value <= MAX_GPUS:
            return value
        raise wrong(f"{value} is no number of GPUs", hint)
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 5:
        return parse_gpus(int(value))
    if isinstance(value, list) and value and all(type(one) is int and 0 <= one < MAX_GPUS for one in value):
        indexes = list(value)
    elif isinstance(value, str):
        indexes = list(_indexes(value, hint))
    else:
        raise wrong("must be GPUs", hint)
    if len(set(indexes)) != len(indexes):
        raise wrong("names a GPU twice", hint)
    return tuple(sorted(indexes))


def _indexes(text: str, hint: str) -> Iterable[int]:
    for part in text.split(","):
        one = part.strip()
        match = _RANGE.match(one)
        if match and int(match[1]) <= int(match[2]) < MAX_GPUS:
            yield from range(int(match[1]), int(match[2]) + 1)
        elif one.isascii() and one.isdigit() and len(one) < 5 and int(one) < MAX_GPUS:
            yield int(one)
        else:
            raise wrong(f"{text[:60]!r} names no GPUs", hint)


def parse_size(value: object) -> int:
    """Return bytes: a number, or a text such as ``200 GB`` or ``16 GiB``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.match(value.strip()) if isinstance(value, str) and len(value) < 40 else None
    if match is None:
        raise wrong("must be a size", "write bytes, or like 200 GB or 16 GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** _FACTORS[match[2].replace("K", "k")])


def check_word(text: str) -> str:
    """Return ``text`` when a program can be given it as an argument."""
    if "\0" in text:
        raise wrong("holds a NUL character, which no argument can", "remove it")
    return text


Word = Annotated[str, AfterValidator(check_word)]
Size = Annotated[int, BeforeValidator(parse_size)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class NeedsModel(_Model):
    """Room that the job needs; checked before it starts."""

    disk: Size | None = None
    shm: Size | None = None


class JobModel(_Model):
    """The fields of JOB.yaml."""

    name: Annotated[str, AfterValidator(check_job_name)]
    command: Annotated[list[Word], Field(min_length=1)]
    files: list[Word] = Field(default_factory=list)
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    gpus: Annotated[Any, AfterValidator(parse_gpus)] = None
    workdir: RemotePath | None = None
    needs: NeedsModel = NeedsModel()


@dataclass(frozen=True)
class JobFileSpec:
    """What a JOB.yaml says, files not yet looked for."""

    name: str
    command: tuple[str, ...]
    files: tuple[str, ...]
    base: Path
    """Folder that ``files`` are relative to."""
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int | tuple[int, ...] | None = None
    workdir: str | None = None
    disk_bytes: int | None = None
    shm_bytes: int | None = None


def load(path: Path) -> JobFileSpec:
    """Read a JOB.yaml; raises ConfigError that begins with ``file:line:column``."""
    document = load_file(path)
    if not isinstance(document.data, dict):
        raise document.error((), "a job file must begin with name:", hint=_EXAMPLE)
    for name, value in document.data.items():
        if value is None:
            raise document.error((name,), f"{name}: is empty", hint="give a value or remove the line")
    try:
        model = JobModel.model_validate(_as_written(document))
    except ValidationError as error:
        raise _explain(document, error) from None
    gpus = model.gpus
    return JobFileSpec(
        name=model.name,
        command=tuple(model.command),
        files=tuple(model.files),
        base=path.absolute().parent,
        env=dict(model.env),
        gpus=gpus,
        workdir=model.workdir,
        disk_bytes=model.needs.disk,
        shm_bytes=model.needs.shm,
    )


def _as_written(document: Document) -> dict[str, Any]:
    """Return the data with the words of the command and the values of ``env`` as the file has them."""
    assert isinstance(document.data, dict)  # noqa: S101 - checked by the caller
    data: dict[str, Any] = dict(document.data)
    for name in ("command", "files"):
        if isinstance(data.get(name), list):
            data[name] = [_written(document, (name, index), value) for index, value in enumerate(data[name])]
    if isinstance(data.get("env"), dict):
        data["env"] = {key: _written(document, ("env", key), value) for key, value in data["env"].items()}
    return data


def _written(document: Document, path: tuple[Key, ...], value: Any) -> Any:
    # An unquoted 5e-5 or 8 is one of the command's words; what a reader of YAML takes it for does not matter.
    if isinstance(value, int | float) and not isinstance(value, bool):
        return document.text(path)
    return value


def _explain(document: Document, error: ValidationError) -> ConfigError:
    # A misspelt field explains one that is missing.
    problems = sorted(
        error.errors(), key=lambda one: (one["type"] == "missing", document.position(_place(one["loc"])))
    )
    first = problems[0]
    path = _place(first["loc"])
    kind, context = first["type"], first.get("ctx", {})
    name = ".".join(str(part) for part in path)
    if kind == "rdiag":
        return document.error(path, f"{name}: {context['text']}", hint=context["hint"])
    if kind == "missing":
        return document.error(path[:-1], f"{path[-1]}: is missing", hint=_EXAMPLE)
    if kind == "extra_forbidden":
        fields = list(NeedsModel.model_fields if path[0] == "needs" else JobModel.model_fields)
        bare = str(path[-1]).lower()
        near = get_close_matches(_OTHER_NAMES.get(bare, bare), fields, n=1)
        hint = f"did you mean {near[0]}?" if near else f"allowed are: {', '.join(fields)}"
        return document.error(path, f"unknown field {str(path[-1])[:60]!r}", hint=hint, key=True)
    hints = {
        "list_type": "write it in brackets, word by word: [python, train.py]",
        "string_type": f"quote it: '{document.text(path)}'",
        "too_short": "a command has at least one word",
        "dict_type": "write `name: value` lines below it, indented",
        "model_type": "write {disk: 200 GB, shm: 16 GB}",
    }
    return document.error(path, f"{name}: {str(first['msg'])[:200]}", hint=hints.get(kind))


def _place(location: tuple[int | str, ...]) -> tuple[Key, ...]:
    return tuple(part for part in location if part != "[key]")

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from probes import hello
from remote_diag import conversation, paths
from remote_diag.errors import ConfigError, RdiagError, UsageProblem
from remote_diag.parameters import build, coerce, to_json
from remote_diag.probe import Probe, load
from tests.support.probe_files import write_probe

KINDS = {
    "text": "str = ''",
    "perhaps": "str | None = None",
    "count": "int = 1",
    "limit": "int | None = None",
    "share": "float = 0.5",
    "fast": "bool = False",
    "mode": "Literal['a', 'b', 3, True] = 'a'",
    "paths": "tuple[str, ...] = ('default',)",
    "sizes": "tuple[int, ...] | None = None",
    "labels": "dict[str, str] = field(default_factory=dict)",
    "weights": "dict[str, float] | None = None",
    "groups": "dict[str, tuple[int, ...]] = field(default_factory=dict)",
}


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe[Any, Any]:
    path = write_probe(tmp_path_factory.mktemp("probe"), "all_kinds", "return Result('')", params=KINDS)
    text = path.read_text().replace("import dataclass\n", "import dataclass, field\n")
    path.write_text(text.replace("import TYPE_CHECKING", "import TYPE_CHECKING, Literal"))
    return load(path)


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Probe[Any, Any]:
    """A probe with needs of its own."""
    fields = {"a": "str", "b": "str", "low": "int = 0", "high": "int = 9"}
    path = write_probe(tmp_path_factory.mktemp("probe"), "strict", "return Result('')", params=fields)
    check = "    def __post_init__(self) -> None:\n        if self.low > self.high:\n"
    check += "            raise ValueError('low is above high')\n        if self.low == 13:\n            raise KeyError('bug')\n"
    path.write_text(path.read_text().replace("\n\n@dataclass(frozen=True)\nclass Result", f"\n{check}\n\n@dataclass(frozen=True)\nclass Result"))
    return load(path)


def on_host(params: Any) -> Any:
    """Return what the probe gets: through the request's bytes, and lists made tuples, as the agent does it."""

    def tuples(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(tuples(item) for item in value)
        return {key: tuples(item) for key, item in value.items()} if isinstance(value, dict) else value

    sent = json.loads(conversation.request_bytes({"params": to_json(params)}))["params"]
    return type(params)(**{name: tuples(value) for name, value in sent.items()})


def refused(probe: Probe[Any, Any], *sets: str, kind: type[RdiagError] = UsageProblem, **more: Any) -> RdiagError:
    with pytest.raises(kind) as caught:
        build(probe, sets, **more)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1200
    return caught.value


ACCEPTED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "text": (("text=a b",), {"text": "a b"}),
    "empty": (("text=",), {"text": ""}),
    "equals": (("text=a=b=c",), {"text": "a=b=c"}),
    "dash": (("text=--help",), {"text": "--help"}),
    "json-looking": (('text={"a": [1]}',), {"text": '{"a": [1]}'}),
    "null-text": (("perhaps=null",), {"perhaps": "null"}),
    "file-text": (("text=@/etc/passwd",), {"text": "@/etc/passwd"}),
    "kebab-key": (("weights.x=1",), {"weights": {"x": 1.0}}),
    "int": (("count=-12",), {"count": -12}),
    "int-null": (("limit=null",), {"limit": None}),
    "int-perhaps": (("limit=3",), {"limit": 3}),
    "float": (("share=1e-3",), {"share": 0.001}),
    "float-from-int": (("share=2",), {"share": 2.0}),
    "bool": (("fast=true",), {"fast": True}),
    "literal": (("mode=b",), {"mode": "b"}),
    "literal-number": (("mode=3",), {"mode": 3}),
    "literal-bool": (("mode=true",), {"mode": True}),
    "tuple-one": (("paths=x",), {"paths": ("x",)}),
    "tuple-grows": (("paths=x", "text=t", "paths=x", "paths=[y"), {"paths": ("x", "x", "[y"), "text": "t"}),
    "tuple-json": (('paths=["a", "b,c"]',), {"paths": ("a", "b,c")}),
    "tuple-json-and-more": (('paths=["a"]', "paths=b"), {"paths": ("a", "b")}),
    "tuple-empty": (("paths=[]",), {"paths": ()}),
    "tuple-bracket-file": (("paths=[a].txt",), {"paths": ("[a].txt",)}),
    "tuple-int": (("sizes=1", "sizes=[2, 3]"), {"sizes": (1, 2, 3)}),
    "dict": (("labels.a=1", "labels.b.c=x=y"), {"labels": {"a": "1", "b.c": "x=y"}}),
    "dict-json": (('labels={"a": "b"}', "labels.c=d"), {"labels": {"a": "b", "c": "d"}}),
    "dict-of-tuples": (("groups.a=[1, 2]",), {"groups": {"a": (1, 2)}}),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_values_given_with_set(case: str, probe: Probe[Any, Any]) -> None:
    sets, expected = ACCEPTED[case]
    params = build(probe, sets)
    assert params == probe.Params(**expected)
    for name, value in expected.items():
        assert type(getattr(params, name)) is type(value)
    assert on_host(params) == params


REFUSED: dict[str, tuple[str, str]] = {
    "no-value": ("text", "--set 'text' is not key=value"),
    "no-key": ("=x", "is not key=value"),
    "unknown": ("txet=x", "has no parameter 'txet'; did you mean 'text'?"),
    "hostile-key": ("\x1b[31m=x", "no parameter '\\x1b[31m'"),
    "nul": ("text=a\0b", "parameter text: 'a\\x00b' is given; a text without NUL"),
    "nul-in-tuple": ("paths=a\0b", "without NUL"),
    "nul-in-json": ('paths=["\\u0000"]', "parameter paths[0]: "),
    "nul-in-entry": ("labels.a=\0", "parameter labels.a: "),
    "nul-in-key": ("labels.\0=a", "without NUL"),
    "int-from-text": ("count=many", "parameter count: 'many' is given; an integer is allowed"),
    "int-from-float": ("count=1.0", "an integer is allowed"),
    "int-spelling": ("count=1_000", "an integer is allowed"),
    "int-digits": ("count=\u0663", "an integer is allowed"),
    "int-blank": ("count= 3", "an integer is allowed"),
    "int-null": ("count=null", "an integer is allowed"),
    "int-huge": ("count=" + "9" * 5000, "an integer is allowed"),
    "perhaps-int": ("limit=x", "an integer is allowed, or null"),
    "float-nan": ("share=nan", "a finite number is allowed"),
    "float-inf": ("share=1e999", "a finite number is allowed"),
    "bool-word": ("fast=yes", "true or false is allowed"),
    "bool-number": ("fast=1", "true or false is allowed"),
    "literal": ("mode=c", "one of a, b, 3, true is allowed"),
    "tuple-item": ("sizes=x", "an integer is allowed"),
    "tuple-json": ("sizes=[1,", "JSON is allowed"),
    "tuple-json-item": ("sizes=[1, 2.5]", "parameter sizes[1]: '2.5' is given"),
    "dict-text": ("labels=x", "JSON is allowed"),
    "dict-value": ("weights.a=x", "parameter weights.a: 'x' is given; a finite number"),
    "dict-duplicate": ('labels={"a": "1", "a": "2"}', "twice"),
    "no-dict": ("count.a=1", "count is int and has no entries"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_names_the_parameter_the_value_and_what_is_allowed(case: str, probe: Probe[Any, Any]) -> None:
    text, message = REFUSED[case]
    error = refused(probe, text)
    assert message in error.message
    assert error.exit_code == 2
    assert "The " in (error.hint or "")


def test_a_second_value_for_one_field(probe: Probe[Any, Any]) -> None:
    assert "this is the second" in refused(probe, "count=1", "count=2").message


def test_an_unknown_name_lists_those_there_are(probe: Probe[Any, Any]) -> None:
    hint = refused(probe, "zzz=1").hint or ""
    assert "text: str = '' - The text." in hint
    assert "groups: dict[str, tuple[int, ...]] = {} - The groups." in hint


def test_missing_parameters(strict: Probe[Any, Any]) -> None:
    error = refused(strict, "low=1")
    assert error.message == "strict: the parameters are missing: a, b"
    assert (error.hint or "").startswith("--set a=...")
    assert refused(strict, "a=1").message == "strict: the parameter is missing: b"


def test_invariants_of_the_probe(strict: Probe[Any, Any]) -> None:
    error = refused(strict, "a=1", "b=2", "low=10")
    assert error.message == "strict refuses its parameters: low is above high"
    assert "KeyError: 'bug'" in refused(strict, "a=1", "b=2", "low=13", "high=20", kind=ConfigError).message


def test_set_wins_over_the_file_wins_over_the_base(probe: Probe[Any, Any], tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("text: from the file\ncount: 2\nlabels: {a: file, b: file}\npaths: [u, v]\n")
    params = build(
        probe,
        ("count=3", "labels.a=set", "paths=z"),
        file,
        {"text": "base", "fast": True, "labels": {"c": "base"}},
    )
    assert params == probe.Params(
        text="from the file", count=3, fast=True, labels={"a": "set", "b": "file"}, paths=("z",)
    )


def test_a_json_file_is_a_parameter_file(probe: Probe[Any, Any], tmp_path: Path) -> None:
    file = tmp_path / "params.json"
    wanted = {"text": "\u00e9\U0001f600\n", "sizes": [1, 2], "share": 1, "limit": None, "mode": 3, "fast": True}
    file.write_text(json.dumps(wanted))
    params = build(probe, params_file=file)
    assert (params.text, params.sizes, params.share, params.mode) == ("\u00e9\U0001f600\n", (1, 2), 1.0, 3)
    assert type(params.share) is float


def test_a_json_file_is_read_as_json_and_explained_as_yaml(
    probe: Probe[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "params.txt"
    file.write_text('\n{\t"text": "\\ud83d\\ude00 \\/",\n\t"share": 1e-3, "labels": {"a": "b"}}')
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "remote_diag.strict_yaml", None)
        params = build(probe, params_file=file)
    assert (params.text, params.share, params.labels) == ("\U0001f600 /", 0.001, {"a": "b"})
    for text, place, message in (
        ('{"count": 1,\n "txet": "x"}', "2:2", "did you mean 'text'"),
        ('{"text":\n 12}', "2:2", "a text is allowed"),
        ('{"text": "a",\n "text": "b"}', "2:2", "duplicate key"),
        ('{"text": "a\\u0000"}', "1:10", "without NUL"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"params.txt:{place}: .*{message}"):
            build(probe, params_file=file)


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("count: 1\ntxet: x\n", "2:1", "no parameter 'txet'; did you mean 'text'?"),
        ("count: 1\ntext: 12\n", "2:7", "parameter text: '12' is given; a text is allowed"),
        ("paths:\n  - a\n  - 3\n", "3:5", "parameter paths[1]: '3' is given"),
        ("labels: {a: b, c: [d]}\n", "1:19", "parameter labels.c: "),
        ("fast: 1\n", "1:7", "true or false"),
        ('text: "a\\0b"\n', "1:7", "without NUL"),
        ("- a\n", "1:1", "is a mapping of names to values"),
        ("text: a\ntext: b\n", "2:1", "duplicate key 'text'"),
        ("fast: yes\n", "1:7", "is true to some YAML readers"),
    ],
)
def test_errors_in_a_file_have_a_place(
    text: str, place: str, message: str, probe: Probe[Any, Any], tmp_path: Path
) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(text)
    error = refused(probe, params_file=file, kind=ConfigError)
    assert error.exit_code == 3
    assert error.message.startswith(f"{file}:{place}: "), error.message
    assert message in error.message
    assert error.hint


def test_a_number_where_text_is_meant_says_quote_it(probe: Probe[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("text: 12\n")
    assert "quote it: '12'" in (refused(probe, params_file=tmp_path / "p.yaml", kind=ConfigError).hint or "")


def test_an_empty_file_says_nothing(probe: Probe[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("# nothing yet\n")
    assert build(probe, params_file=tmp_path / "p.yaml") == probe.Params()


@pytest.mark.parametrize(
    "base",
    [
        {"text": 1},
        {"count": True},
        {"count": 1.0},
        {"share": float("nan")},
        {"share": float("inf")},
        {"share": 10**400},
        {"count": 10**400},
        {"fast": 0},
        {"mode": 1},
        {"paths": "text"},
        {"paths": ["a\0"]},
        {"labels": {1: "a"}},
        {"labels": {"a": None}},
        {"weights": [1]},
        {"nothing": 1},
        {3: 1},
    ],
)
def test_mappings_are_held_to_the_types_as_well(base: Any, probe: Probe[Any, Any]) -> None:
    with pytest.raises(UsageProblem):
        coerce(probe, base)


def test_coerce_takes_instances_mappings_and_nothing(probe: Probe[Any, Any], strict: Probe[Any, Any]) -> None:
    assert coerce(probe, None) == probe.Params()
    assert coerce(probe, {"paths": ["a"]}) == probe.Params(paths=("a",))
    assert coerce(probe, probe.Params(count=4)) == probe.Params(count=4)
    for wrong in (3, "text", strict.Params("a", "b"), probe.Result("x")):
        with pytest.raises(UsageProblem, match="takes its Params or a mapping"):
            coerce(probe, wrong)
    with pytest.raises(UsageProblem, match="parameter count"):
        coerce(probe, probe.Params(count="3"))
    with pytest.raises(UsageProblem, match="without NUL"):
        coerce(probe, probe.Params(text="\0"))


def test_params_of_the_imported_module_fit_the_probe_of_the_same_file() -> None:
    found = load(paths.shipped_probes() / "hello.py")
    assert hello.Params is not found.Params
    assert coerce(found, hello.Params(name="Ada")) == found.Params(name="Ada")


def test_too_much_is_refused(probe: Probe[Any, Any]) -> None:
    with pytest.raises(UsageProblem, match="at most 4194304 are allowed"):
        coerce(probe, {"text": "x" * 5_000_000})


ANY_TEXT = st.text(st.characters(exclude_characters="\0"), max_size=200) | st.sampled_from(
    ["-x", "--", "'", '"', "$(id)", "`id`", "a&b;c|d", "\n", "\r\n", "\u2028", "\U0001f600", "\udcff", "%s", "\\", "[", "[]x", " "]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ANY_TEXT, key=ANY_TEXT.filter(lambda text: "=" not in text))
def test_any_text_arrives_as_it_was_given(text: str, key: str, probe: Probe[Any, Any]) -> None:
    params = build(probe, (f"text={text}", f"perhaps={text}", f"labels.{key}={text}"))
    assert (params.text, params.perhaps, params.labels) == (text, text, {key: text})
    assert on_host(params) == params
    given_in_python = coerce(probe, {"text": text, "paths": [text, text], "labels": {key: text}})
    assert on_host(given_in_python) == given_in_python
    assert given_in_python.paths == (text, text)


def test_a_large_text_arrives_as_it_was_given(probe: Probe[Any, Any]) -> None:
    text = "\U0001f600'\"\n-" * 20_000
    assert on_host(build(probe, (f"text={text}",))).text == text


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "text": ANY_TEXT,
    "perhaps": st.none() | ANY_TEXT,
    "count": st.integers(-(2**64), 2**64),
    "limit": st.none() | st.integers(),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "fast": st.booleans(),
    "mode": st.sampled_from(["a", "b", 3, True]),
    "paths": st.lists(ANY_TEXT).map(tuple),
    "sizes": st.none() | st.lists(st.integers()).map(tuple),
    "labels": st.dictionaries(ANY_TEXT, ANY_TEXT),
    "weights": st.none() | st.dictionaries(ANY_TEXT, st.floats(allow_nan=False, allow_infinity=False)),
    "groups": st.dictionaries(ANY_TEXT, st.lists(st.integers()).map(tuple)),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(values=st.fixed_dictionaries({}, optional=VALUES))
def test_every_instance_arrives_as_it_was(values: dict[str, Any], probe: Probe[Any, Any]) -> None:
    params = coerce(probe, values)
    assert params == probe.Params(**values)
    assert on_host(params) == params
    assert {name: type(value) for name, value in dataclasses.asdict(on_host(params)).items()} == {
        name: type(value) for name, value in dataclasses.asdict(params).items()
    }

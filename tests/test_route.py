"""The way to a host through jump hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag import route as module
from remote_diag.errors import ConfigError
from remote_diag.host import Host
from remote_diag.route import Hop, parse_hop, route
from remote_diag.ssh_config import SshSettings


@pytest.mark.parametrize(
    ("text", "hop"),
    [
        ("bastion", Hop("bastion")),
        ("ada@bastion", Hop("bastion", "ada")),
        ("bastion:2222", Hop("bastion", None, 2222)),
        ("ada@bastion:2222", Hop("bastion", "ada", 2222)),
        ("ssh://ada@bastion:2222", Hop("bastion", "ada", 2222)),
        ("ssh://bastion/", Hop("bastion")),
        ("[::1]:44", Hop("::1", None, 44)),
        ("ada@[fe80::1%eth0]", Hop("fe80::1%eth0", "ada")),
        ("::1", Hop("::1")),
        ("ada@2001:db8::7", Hop("2001:db8::7", "ada")),
        ("203.0.113.7:22", Hop("203.0.113.7", None, 22)),
    ],
)
def test_hops(text: str, hop: Hop) -> None:
    assert parse_hop(text) == hop


@pytest.mark.parametrize(
    "text",
    ["", "@", "a@", "a:", "a:0", "a:65536", "a:x", "-oX", "a@-oX", "-a@b", "a b", "a;b", "[::1", "a@b@c", "ssh://", "a\n"],
)
def test_no_hops(text: str) -> None:
    with pytest.raises(ConfigError, match="jump host"):
        parse_hop(text)


@given(st.text(max_size=40))
def test_any_text_is_a_hop_or_a_config_error(text: str) -> None:
    try:
        hop = parse_hop(text)
    except ConfigError:
        return
    assert hop.host
    assert not hop.host.startswith("-")
    assert hop.port is None or 1 <= hop.port <= 65535


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Stand in for ssh_config: host name -> its ProxyJump."""
    jumps: dict[str, tuple[str, ...]] = {}

    def resolve(host: Host) -> SshSettings:
        name = host.ssh or host.address or ""
        explicit = {None: jumps.get(name, ()), "none": ()}.get(host.jump, tuple((host.jump or "").split(",")))
        return SshSettings(
            name,
            name,
            host.port or 22,
            host.user or "root",
            identity_files=(Path(f"/keys/{name}"),),
            proxy_jump=explicit,
        )

    monkeypatch.setattr(module, "resolve", resolve)
    return jumps


def names(host: Host) -> list[str]:
    return [settings.hostname for _, settings in route(host)]


def test_direct(config: dict[str, tuple[str, ...]]) -> None:
    assert names(Host("gpu8", address="gpu")) == ["gpu"]


def test_order_of_several(config: dict[str, tuple[str, ...]]) -> None:
    config["gpu"] = ("one", "ada@two:2222", "three")
    legs = route(Host("gpu8", address="gpu"))
    assert [(settings.user, settings.hostname, settings.port) for _, settings in legs] == [
        ("root", "one", 22),
        ("ada", "two", 2222),
        ("root", "three", 22),
        ("root", "gpu", 22),
    ]
    assert {host.name for host, _ in legs} == {"gpu8"}


def test_first_jump_host_has_jump_hosts_of_its_own_and_the_others_have_not(config: dict[str, tuple[str, ...]]) -> None:
    config["gpu"] = ("one", "two")
    config["one"] = ("zero",)
    config["two"] = ("ignored",)
    assert names(Host("gpu8", address="gpu")) == ["zero", "one", "two", "gpu"]


@pytest.mark.parametrize(
    "jumps",
    [
        {"gpu": ("gpu",)},
        {"gpu": ("one",), "one": ("gpu",)},
        {"gpu": ("one",), "one": ("two",), "two": ("one",)},
        {"gpu": ("one", "one")},
    ],
)
def test_circles(config: dict[str, tuple[str, ...]], jumps: dict[str, tuple[str, ...]]) -> None:
    config.update(jumps)
    with pytest.raises(ConfigError, match="circle") as caught:
        route(Host("gpu8", address="gpu"))
    assert caught.value.host == "gpu8"


def test_too_long(config: dict[str, tuple[str, ...]]) -> None:
    config.update({f"h{number}": (f"h{number + 1}",) for number in range(100)})
    with pytest.raises(ConfigError, match="more than 16"):
        route(Host("gpu8", address="h0"))


def test_nothing_of_the_host_leaks_to_the_jump_host(config: dict[str, tuple[str, ...]]) -> None:
    config["gpu"] = ("one",)
    host = Host("gpu8", address="gpu", user="trainer", port=2222, identity_file=Path("/keys/mine"), host_key="SHA256:x")
    (hop, settings), _ = route(host)
    assert (settings.user, settings.port, hop.host_key) == ("root", 22, None)
    assert settings.identity_files == (Path("/keys/one"),)


def test_identity_beside_an_explicit_jump_is_offered_to_it_last(config: dict[str, tuple[str, ...]]) -> None:
    host = Host("gpu8", address="gpu", identity_file=Path("/keys/mine"), jump="one")
    (_, settings), _ = route(host)
    assert settings.identity_files == (Path("/keys/one"), Path("/keys/mine"))

"""Host keys: files are read tolerantly, keys are believed strictly; OpenSSH's own tools agree."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remote_diag import known_hosts
from remote_diag.errors import HostKeyError
from remote_diag.exitcodes import ExitCode
from remote_diag.host import Host
from remote_diag.known_hosts import (
    ChangedHostKey,
    HostKeyVerifier,
    UnknownHostKey,
    blob_type,
    fingerprint,
    look_up,
    lookup_name,
    matches,
    parse_line,
)
from remote_diag.ssh_config import SshSettings

needs_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def make_key(kind: str = "ssh-ed25519", seed: int = 1) -> bytes:
    """Return a public key in wire format; its content is arbitrary, only the type is read."""
    name = kind.encode()
    body = hashlib.sha256(f"{kind} {seed}".encode()).digest()
    return len(name).to_bytes(4, "big") + name + len(body).to_bytes(4, "big") + body


ED = make_key()
OTHER = make_key(seed=2)
RSA = make_key("ssh-rsa")
ECDSA = make_key("ecdsa-sha2-nistp256")
HOST = Host("gpu8", address="h.example", source="hosts.yaml:3")


def text(key: bytes) -> str:
    return f"{blob_type(key)} {base64.b64encode(key).decode()}"


def hashed(name: str) -> str:
    salt = name.encode()[:20].ljust(20, b".")
    digest = hmac.digest(salt, name.encode(), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rdiag's own file, somewhere private; it does not exist at first."""
    path = tmp_path / "own" / "known_hosts"
    monkeypatch.setattr(known_hosts, "own_known_hosts", lambda: path)
    return path


Make = Callable[..., HostKeyVerifier]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that makes a verifier whose user file holds the given lines."""

    def verifier(*lines: str | bytes, host: Host = HOST, port: int = 22, **fields: object) -> HostKeyVerifier:
        file = tmp_path / "known"
        file.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
        settings = SshSettings("h.example", "h.example", port, "root", user_known_hosts=(file,))
        return HostKeyVerifier(host, replace(settings, **fields))  # type: ignore[arg-type]

    return verifier


def verify(verifier: HostKeyVerifier, key: bytes = ED) -> str:
    return verifier.verify(blob_type(key), key)


class TestNames:
    @pytest.mark.parametrize(
        ("hosts", "name", "expected"),
        [
            ("h.example", "h.example", True),
            ("H.Example", "h.example", True),
            ("h.example", "hh.example", False),
            ("a,h.example,b", "h.example", True),
            ("203.0.113.7,h.example", "203.0.113.7", True),
            ("*.example", "h.example", True),
            ("*", "h.example", True),
            ("h?.example", "h1.example", True),
            ("h?.example", "h.example", False),
            ("*.example,!h.example", "h.example", False),
            ("!h.example,*.example", "h.example", False),
            ("!other.example,*.example", "h.example", True),
            ("!h.example", "other.example", False),
            ("[h.example]:2222", "[h.example]:2222", True),
            ("[h.example]:2222", "h.example", False),
            ("h.example", "[h.example]:2222", False),
            ("[h.example]:*", "[h.example]:2222", True),
            ("[*.example]:2222", "[h.example]:2222", True),
            ("[h]", "h", False),
            ("a*b*c", "axxbxxc", True),
            ("a*b*c", "axxcxxb", False),
            ("**a", "ba", True),
            ("", "h", False),
            (",", "h", False),
            ("!", "h", False),
            ("::1", "::1", True),
            (hashed("h.example"), "h.example", True),
            (hashed("h.example"), "other.example", False),
            (hashed("[h.example]:2222"), "[h.example]:2222", True),
        ],
    )
    def test_table(self, hosts: str, name: str, expected: bool) -> None:
        assert matches(hosts, name) is expected

    @pytest.mark.parametrize("hosts", ["|1|x", "|2|AAAA|AAAA", "|1|%%|%%", "|", "|1|AAAA|AAAA", "|1|é|é"])
    def test_damaged_hashes(self, hosts: str) -> None:
        with pytest.raises(ValueError, match="hashed name"):
            matches(hosts, "h.example")

    def test_many_stars_take_no_exponential_time(self) -> None:
        assert not matches("*a" * 2000 + "b", "a" * 2000)

    @given(st.text(alphabet="ab*?", max_size=8), st.text(alphabet="ab", max_size=8))
    def test_patterns_agree_with_regular_expressions(self, pattern: str, name: str) -> None:
        import re

        expression = "".join({"*": ".*", "?": "."}.get(character, character) for character in pattern)
        assert known_hosts._glob(pattern, name) == bool(re.fullmatch(expression, name))

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({}, "h.example"),
            ({"port": 2222}, "[h.example]:2222"),
            ({"hostname": "H.Example"}, "h.example"),
            ({"hostname": "::1", "port": 2222}, "[::1]:2222"),
            ({"host_key_alias": "Lab", "port": 2222}, "lab"),
        ],
    )
    def test_lookup_name(self, fields: dict[str, object], expected: str) -> None:
        settings = SshSettings("t", "h.example", 22, "root")
        assert lookup_name(replace(settings, **fields)) == expected  # type: ignore[arg-type]


class TestLines:
    @pytest.mark.parametrize("raw", [b"", b"   ", b"# comment", b"\t# comment", b"\r", b"#@revoked * x y"])
    def test_nothing(self, raw: bytes) -> None:
        assert parse_line(raw) is None

    @pytest.mark.parametrize(
        ("raw", "problem"),
        [
            (b"h.example", "fewer"),
            (b"h.example ssh-ed25519", "fewer"),
            (b"@revoked h.example ssh-ed25519", "fewer"),
            (b"@strange h.example ssh-ed25519 AAAA", "marker"),
            (b"@ h.example ssh-ed25519 AAAA", "marker"),
            (b"h.example 1024 35 1234567", "protocol 1"),
            (b"h " + b"x" * 70000, "longer"),
        ],
    )
    def test_junk(self, raw: bytes, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            parse_line(raw)

    @given(st.binary(max_size=400))
    @example(b"\xff\xfe\x00")
    @example(b"@revoked")
    @example(b"|1|| ssh-rsa =")
    def test_any_bytes_are_a_line_nothing_or_a_value_error(self, raw: bytes) -> None:
        try:
            line = parse_line(raw)
            if line is not None:
                matches(line.hosts, "h.example")
                assert blob_type(line.blob) == line.key_type
        except ValueError:
            return

    @given(st.binary(max_size=80))
    def test_any_bytes_have_a_type_or_a_value_error(self, blob: bytes) -> None:
        try:
            name = blob_type(blob)
        except ValueError:
            return
        assert blob.startswith(len(name).to_bytes(4, "big") + name.encode())


class TestFiles:
    def test_one_line_never_hides_the_others(self, make: Make) -> None:
        verifier = make(
            "h.example ssh-ed25519 %%%not-base64%%%",
            "@strange h.example x y",
            "@cert-authority *.other ssh-ed25519 AAAA",
            b"# a comment in latin-1: caf\xe9",
            b"h.example \xff \xfe",
            "h.example 1024 35 12345",
            "h.example " + text(ED).replace("ssh-ed25519", "ssh-rsa"),
            b"\x00\x01\x02",
            "nothing",
            "",
            f"  h.example\t {text(ED)}  comment\r",
        )
        assert verify(verifier).endswith("known:11")
        notes = "\n".join(verifier.notes)
        assert "known:1: line skipped: the key is not base64" in notes
        assert "known:2: line skipped: unknown marker @strange" in notes
        assert "more lines skipped" in notes

    def test_notes_are_bounded(self, make: Make) -> None:
        verifier = make(*["junk"] * 1000)
        with pytest.raises(UnknownHostKey):
            verify(verifier)
        assert len(verifier.notes) == known_hosts.NOTES_PER_FILE + 1
        assert "995 more lines" in verifier.notes[-1]

    def test_last_line_without_newline(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text(f"h.example {text(ED)}")
        assert [entry.number for entry in look_up([file], ["h.example"]).entries] == [1]

    def test_missing_files_and_dev_null_are_empty_without_a_word(self, tmp_path: Path) -> None:
        found = look_up([tmp_path / "missing", tmp_path / "missing/too", Path("/dev/null")], ["h.example"])
        assert (found.entries, found.notes) == ((), ())

    def test_what_is_no_regular_file_is_not_read(self, tmp_path: Path) -> None:
        pipe, folder = tmp_path / "pipe", tmp_path / "folder"
        os.mkfifo(pipe)
        folder.mkdir()
        found = look_up([pipe, folder, Path("/dev/zero")], ["h.example"])
        assert found.entries == ()
        assert len(found.notes) == 3
        assert all("not read" in note for note in found.notes)

    def test_too_large_a_file_is_not_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(known_hosts, "FILE_LIMIT", 1024 * 1024)
        file = tmp_path / "file"
        file.write_text(f"h.example {text(ED)}\n" + "#" * 1024 * 1024)
        found = look_up([file], ["h.example"])
        assert found.entries == ()
        assert "larger than 1 MB" in found.notes[0]

    def test_a_file_named_twice_is_read_once(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text(f"h.example {text(ED)}\n")
        assert len(look_up([file, file], ["h.example"]).entries) == 1

    @given(st.binary(max_size=2000))
    def test_any_file_can_be_read(self, tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
        file = tmp_path_factory.getbasetemp() / "any"
        file.write_bytes(data + b"\nh.example " + text(ED).encode() + b"\n")
        assert look_up([file], ["h.example"]).entries[-1].blob == ED


class TestAccepted:
    @pytest.mark.parametrize(
        ("hosts", "port"),
        [
            ("h.example", 22),
            ("203.0.113.7,h.example", 22),
            ("*.example", 22),
            (hashed("h.example"), 22),
            ("[h.example]:2222", 2222),
            ("[*.example]:*", 2222),
            (hashed("[h.example]:2222"), 2222),
        ],
    )
    def test_forms_of_the_name(self, make: Make, tmp_path: Path, hosts: str, port: int) -> None:
        verifier = make("# first", f"{hosts} {text(ED)} root@h", port=port)
        assert verify(verifier) == f"{tmp_path}/known:2"

    def test_any_of_several_keys_of_a_type(self, make: Make) -> None:
        verifier = make(f"h.example {text(OTHER)}", f"h.example {text(ED)}")
        assert verify(verifier).endswith(":2")
        assert verify(verifier, OTHER).endswith(":1")

    def test_alias_takes_the_place_of_name_and_port(self, make: Make) -> None:
        assert verify(make(f"lab {text(ED)}", port=2222, host_key_alias="Lab")).endswith(":1")
        with pytest.raises(UnknownHostKey):
            verify(make(f"[h.example]:2222 {text(ED)}", port=2222, host_key_alias="Lab"))

    def test_global_file_and_own_file_are_read_too(self, make: Make, own: Path, tmp_path: Path) -> None:
        shared = tmp_path / "global"
        shared.write_text(f"h.example {text(OTHER)}\n")
        own.parent.mkdir()
        own.write_text(f"h.example {text(ED)}\n")
        verifier = make("", global_known_hosts=(shared,))
        assert verify(verifier) == f"{own}:1"
        assert verify(verifier, OTHER) == f"{shared}:1"

    @pytest.mark.parametrize("announced", ["ssh-rsa", "rsa-sha2-256", "rsa-sha2-512"])
    def test_rsa_under_each_of_its_algorithms(self, make: Make, announced: str) -> None:
        assert make(f"h.example {text(RSA)}").verify(announced, RSA).endswith(":1")


class TestRefused:
    def test_unknown(self, make: Make) -> None:
        with pytest.raises(UnknownHostKey) as caught:
            verify(make(f"other.example {text(ED)}"))
        error = caught.value
        assert fingerprint(ED) in error.message
        assert "h.example port 22" in error.message
        assert "rdiag trust gpu8" in (error.hint or "")
        assert (error.host, error.phase, error.exit_code) == ("gpu8", "host-key", ExitCode.HOST_KEY)

    def test_plain_name_does_not_stand_for_another_port_but_is_mentioned(self, make: Make) -> None:
        with pytest.raises(UnknownHostKey) as caught:
            verify(make(f"h.example {text(ED)}", port=2222))
        assert "the same key is known as h.example" in caught.value.message
        with pytest.raises(UnknownHostKey) as caught:
            verify(make(f"h.example {text(OTHER)}", port=2222))
        assert "the same key" not in caught.value.message

    def test_changed_in_a_file_of_ssh(self, make: Make, tmp_path: Path) -> None:
        with pytest.raises(ChangedHostKey) as caught:
            verify(make("", f"[h.example]:2222 {text(OTHER)}", port=2222))
        error = caught.value
        assert fingerprint(ED) in error.message
        assert fingerprint(OTHER) in error.message
        assert f"{tmp_path}/known:2" in error.message
        assert f"ssh-keygen -R '[h.example]:2222' -f {tmp_path}/known" in (error.hint or "")
        assert "--replace" not in (error.hint or "")

    def test_changed_in_the_own_file(self, make: Make, own: Path) -> None:
        own.parent.mkdir()
        own.write_text(f"h.example {text(OTHER)}\n")
        with pytest.raises(ChangedHostKey) as caught:
            verify(make(""))
        assert "rdiag trust gpu8 --replace" in (caught.value.hint or "")
        assert "ssh-keygen -R" not in (caught.value.hint or "")

    def test_changed_under_a_pattern_is_edited_by_hand(self, make: Make, tmp_path: Path) -> None:
        with pytest.raises(ChangedHostKey) as caught:
            verify(make(f"*.example {text(OTHER)}"))
        assert f"edit {tmp_path}/known:1" in (caught.value.hint or "")
        assert "ssh-keygen -R" not in (caught.value.hint or "")

    def test_another_type_than_the_known_one_is_a_change(self, make: Make) -> None:
        with pytest.raises(ChangedHostKey):
            verify(make(f"h.example {text(RSA)}"))

    @pytest.mark.parametrize("port", [22, 2222])
    @pytest.mark.parametrize("pattern", ["h.example", "*", hashed("h.example")])
    @pytest.mark.parametrize("first", [True, False])
    def test_revoked_wins_wherever_it_stands(self, make: Make, pattern: str, port: int, first: bool) -> None:
        name = "h.example" if port == 22 else "[h.example]:2222"
        lines = [f"@revoked {pattern} {text(ED)}", f"{name} {text(ED)}", f"{name} {text(OTHER)}"]
        verifier = make(*(lines if first else reversed(lines)), port=port)
        with pytest.raises(HostKeyError, match="revoked") as caught:
            verify(verifier)
        assert fingerprint(ED) in caught.value.message
        assert not isinstance(caught.value, (UnknownHostKey, ChangedHostKey))
        assert "rdiag trust" not in (caught.value.hint or "")
        assert verify(verifier, OTHER)

    def test_revoked_in_any_file(self, make: Make, own: Path) -> None:
        own.parent.mkdir()
        own.write_text(f"@revoked * {text(ED)}\n")
        with pytest.raises(HostKeyError, match="revoked"):
            verify(make(f"h.example {text(ED)}"))

    def test_revoked_for_another_host_only(self, make: Make) -> None:
        assert verify(make(f"@revoked other.example {text(ED)}", f"h.example {text(ED)}"))

    def test_authority_alone(self, make: Make) -> None:
        verifier = make(f"@cert-authority *.example {text(ED)}")
        with pytest.raises(UnknownHostKey, match="certificates of hosts are not supported") as caught:
            verify(verifier)
        assert "rdiag trust gpu8" in (caught.value.hint or "")
        with pytest.raises(UnknownHostKey, match="authority"):
            verify(verifier, OTHER)

    def test_authority_beside_a_key_is_noted(self, make: Make) -> None:
        verifier = make(f"@cert-authority *.example {text(OTHER)}", f"h.example {text(ED)}")
        assert verify(verifier)
        assert any("@cert-authority" in note for note in verifier.notes)

    def test_certificate(self, make: Make) -> None:
        certificate = make_key("ssh-ed25519-cert-v01@openssh.com")
        with pytest.raises(HostKeyError, match="certificate"):
            verify(make(f"h.example {text(certificate)}"), certificate)

    @pytest.mark.parametrize("announced", ["ssh-rsa", "", "ssh-ed25519 ", "rsa-sha2-512"])
    def test_type_that_is_not_the_key_s(self, make: Make, announced: str) -> None:
        with pytest.raises(HostKeyError, match="could not be checked"):
            make(f"h.example {text(ED)}").verify(announced, ED)

    @pytest.mark.parametrize("blob", [b"", b"\x00\x00\x00\x0bssh-ed25519", b"\xff" * 64])
    def test_what_is_no_key(self, make: Make, blob: bytes) -> None:
        with pytest.raises(HostKeyError, match="could not be checked"):
            make(f"h.example {text(ED)}").verify("ssh-ed25519", blob)

    def test_a_check_that_fails_refuses(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object) -> None:
            raise MemoryError("no more")

        monkeypatch.setattr(known_hosts, "look_up", fail)
        verifier = make(f"h.example {text(ED)}")
        with pytest.raises(HostKeyError, match="could not be checked: MemoryError"):
            verify(verifier)
        assert verifier.preferred_key_types() == ()

    @given(st.binary(max_size=120))
    def test_no_other_key_is_ever_accepted(self, tmp_path_factory: pytest.TempPathFactory, blob: bytes) -> None:
        file = tmp_path_factory.getbasetemp() / "one"
        file.write_text(f"h.example {text(ED)}\n")
        settings = SshSettings("h.example", "h.example", 22, "root", user_known_hosts=(file,))
        for shown in (blob, ED + blob, ED[:-1] + blob):
            if shown != ED:
                with pytest.raises(HostKeyError):
                    HostKeyVerifier(HOST, settings).verify("ssh-ed25519", shown)


class TestPinned:
    @pytest.mark.parametrize("pinned", [fingerprint(ED), text(ED)])
    def test_wins_over_files(self, make: Make, pinned: str) -> None:
        verifier = make(f"h.example {text(OTHER)}", "junk", host=replace(HOST, host_key=pinned))
        assert verify(verifier) == "hosts.yaml"
        assert verifier.notes == ()
        with pytest.raises(HostKeyError, match="pins") as caught:
            verify(verifier, OTHER)
        assert fingerprint(ED) in caught.value.message
        assert fingerprint(OTHER) in caught.value.message
        assert "hosts.yaml:3" in caught.value.message

    @pytest.mark.parametrize("pinned", ["SHA256:", "ssh-ed25519 %%%", "ssh-ed25519 ", "", "x"])
    def test_nonsense_matches_nothing(self, make: Make, pinned: str) -> None:
        with pytest.raises(HostKeyError):
            verify(make(f"h.example {text(ED)}", host=replace(HOST, host_key=pinned)))


class TestPreferredTypes:
    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ([], ()),
            ([ED], ("ssh-ed25519",)),
            ([RSA], ("rsa-sha2-512", "rsa-sha2-256")),
            ([RSA, ED, ECDSA], ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256")),
            ([make_key("sk-ssh-ed25519@openssh.com"), ED], ("ssh-ed25519", "sk-ssh-ed25519@openssh.com")),
        ],
    )
    def test_known_keys(self, make: Make, keys: list[bytes], expected: tuple[str, ...]) -> None:
        assert make(*(f"h.example {text(key)}" for key in keys)).preferred_key_types() == expected

    def test_markers_and_other_hosts_do_not_count(self, make: Make) -> None:
        verifier = make(f"@revoked * {text(RSA)}", f"@cert-authority * {text(ECDSA)}", f"other {text(ED)}")
        assert verifier.preferred_key_types() == ()

    @pytest.mark.parametrize(
        ("pinned", "expected"), [(text(RSA), ("rsa-sha2-512", "rsa-sha2-256")), (fingerprint(RSA), ())]
    )
    def test_pinned(self, make: Make, pinned: str, expected: tuple[str, ...]) -> None:
        verifier = make(f"h.example {text(ED)}", host=replace(HOST, host_key=pinned))
        assert verifier.preferred_key_types() == expected


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    keygen("-q", "-t", "ed25519", "-N", "", "-C", "comment", "-f", str(path))
    return path.with_suffix(".pub")


@needs_keygen
class TestAgainstOpenSsh:
    """The same files, read by ssh-keygen."""

    def test_fingerprint(self, key: Path) -> None:
        kind, encoded, _ = key.read_text().split()
        blob = base64.b64decode(encoded)
        assert blob_type(blob) == kind
        assert keygen("-lf", str(key)).split()[1] == fingerprint(blob)

    @pytest.mark.parametrize(
        "hosts",
        [
            "h.example",
            "H.EXAMPLE",
            "*.example",
            "a,h.example",
            "*.example,!h.example",
            "!h.example,*",
            "!x,*",
            "h?example",
            "[h.example]:22",
            "[h.example]:2222",
            "[h.example]:*",
            "[*]:2222",
            "*]:2222",
            "h.example:2222",
            hashed("h.example"),
            hashed("[h.example]:2222"),
            "",
            "*",
        ],
    )
    @pytest.mark.parametrize("name", ["h.example", "[h.example]:2222"])
    def test_names(self, key: Path, tmp_path: Path, hosts: str, name: str) -> None:
        file = tmp_path / "file"
        file.write_text(f"{hosts} {key.read_text()}")
        found = subprocess.run(["ssh-keygen", "-F", name, "-f", str(file)], capture_output=True)
        assert bool(look_up([file], [name]).entries) == (found.returncode == 0)

    def test_names_that_ssh_keygen_hashed(self, key: Path, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text(f"h.example,203.0.113.7 {key.read_text()}[h.example]:2222 {key.read_text()}")
        keygen("-H", "-f", str(file))
        assert "h.example" not in file.read_text()
        for name in ("h.example", "203.0.113.7", "[h.example]:2222"):
            assert look_up([file], [name]).entries, name
        assert not look_up([file], ["other.example"]).entries

    @pytest.mark.parametrize("binary", [True, False])
    def test_revocation_file(self, make: Make, key: Path, tmp_path: Path, binary: bool) -> None:
        blob = base64.b64decode(key.read_text().split()[1])
        file = tmp_path / "revoked"
        if binary:
            keygen("-q", "-k", "-f", str(file), str(key))
        else:
            file.write_text(f"# lost\n{key.read_text()}")
        verifier = make(f"h.example {text(blob)}", f"h.example {text(OTHER)}", revoked_host_keys=file)
        with pytest.raises(HostKeyError, match="revoked"):
            verify(verifier, blob)
        if not binary:  # ssh-keygen refuses to look for a key that is none
            assert verify(verifier, OTHER)

    def test_binary_revocation_file_lets_other_keys_pass(self, make: Make, key: Path, tmp_path: Path) -> None:
        file, other = tmp_path / "revoked", tmp_path / "other"
        keygen("-q", "-t", "ed25519", "-N", "", "-f", str(other))
        keygen("-q", "-k", "-f", str(file), f"{other}.pub")
        blob = base64.b64decode(key.read_text().split()[1])
        assert verify(make(f"h.example {text(blob)}", revoked_host_keys=file), blob)


@pytest.mark.parametrize("kind", ["missing", "pipe", "folder"])
def test_revocation_file_that_cannot_be_read_refuses_every_key(make: Make, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "revoked"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    with pytest.raises(HostKeyError, match="could not be checked"):
        verify(make(f"h.example {text(ED)}", revoked_host_keys=file))


def keygen(*arguments: str) -> str:
    return subprocess.run(["ssh-keygen", *arguments], check=True, capture_output=True, text=True).stdout

"""The stream between client and agent: any cut gives the same frames, and damage never passes."""

from __future__ import annotations

import secrets
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag.agent.frames import MAX_NOISE, MAX_PAYLOAD, Decoder, Encoder, Frame, FrameError, encode

NONCE = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2

kinds = st.sampled_from(["hello", "log", "result", "end", "python-too-old"])
messages = st.lists(st.tuples(kinds, st.binary(max_size=300)), max_size=6)
# Noise that looks like frames on purpose: our magic word, headers with another nonce, newlines.
noise = st.one_of(
    st.binary(max_size=80),
    st.sampled_from([b"RDIAG1", b"RDIAG1 ", b"RDIAG1 RDIAG1 \n", b"\nRDIAG1 %s 0 end 2 00000000\n{}\n" % OTHER.encode()]),
)


def encoded(sent: list[tuple[str, bytes]]) -> list[bytes]:
    encoder = Encoder(NONCE)
    return [encoder.encode(kind, payload) for kind, payload in sent]


def expected(sent: list[tuple[str, bytes]]) -> list[Frame]:
    return [Frame(sequence, kind, payload) for sequence, (kind, payload) in enumerate(sent)]


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(messages, st.lists(st.integers(min_value=0), max_size=10))
def test_any_split_gives_the_same_frames(sent: list[tuple[str, bytes]], cuts: list[int]) -> None:
    decoder = Decoder(NONCE)
    received = [frame for piece in pieces(b"".join(encoded(sent)), cuts) for frame in decoder.feed(piece)]
    assert received == expected(sent)
    assert decoder.noise_bytes == 0
    assert not decoder.inside_frame


@given(messages, st.data())
def test_noise_before_and_between_frames_is_passed_over(sent: list[tuple[str, bytes]], data: st.DataObject) -> None:
    stream = b"".join(data.draw(noise) + frame for frame in encoded(sent)) + data.draw(noise)
    decoder = Decoder(NONCE)
    cuts = data.draw(st.lists(st.integers(min_value=0), max_size=6))
    assert [frame for piece in pieces(stream, cuts) for frame in decoder.feed(piece)] == expected(sent)


@given(messages.filter(bool))
def test_a_stream_cut_anywhere_never_yields_the_last_frame(sent: list[tuple[str, bytes]]) -> None:
    stream = b"".join(encoded(sent))
    start = len(b"".join(encoded(sent)[:-1]))
    for end in range(start, len(stream)):
        assert list(Decoder(NONCE).feed(stream[:end])) == expected(sent)[:-1]


def test_a_flipped_bit_never_yields_a_wrong_payload() -> None:
    sent = [("log", b"o first line\n"), ("result", b'{"draft_vocab_size": 32000}'), ("end", b'{"outcome": "ok"}')]
    stream = b"".join(encoded(sent))
    known = {"log", "result", "end"}
    for bit in range(len(stream) * 8):
        damaged = bytearray(stream)
        damaged[bit // 8] ^= 1 << bit % 8
        decoder = Decoder(NONCE)
        try:
            for frame in decoder.feed(bytes(damaged)):
                # A kind that no longer exists is the client's to refuse; under one that does, nothing has changed.
                assert frame.kind not in known or frame == expected(sent)[frame.sequence]
        except FrameError:
            continue


def test_frames_of_another_nonce_are_noise_and_ours_are_counted_by_nonce() -> None:
    decoder = Decoder(NONCE, OTHER)
    foreign = encode("a" * 32, 0, "end", b"{}")
    stream = foreign + encode(OTHER, 0, "hello") + encode(NONCE, 0, "started") + encode(NONCE, 1, "end")
    assert [frame.kind for frame in decoder.feed(stream)] == ["hello", "started", "end"]
    assert decoder.noise_bytes == len(foreign)
    assert bytes(decoder.noise) == foreign


@pytest.mark.parametrize(
    "header",
    [
        f"RDIAG1 {NONCE} 1 end 0 00000000",
        f"RDIAG1 {NONCE} 0 end 0",
        f"RDIAG1 {NONCE} 0 end -1 00000000",
        f"RDIAG1 {NONCE} 0 End 0 00000000",
        f"RDIAG1 {NONCE} 0 end 0 0000000g",
        f"RDIAG1 {NONCE} 0 end 99999999999 00000000",
        f"RDIAG1 {NONCE} 0 end {MAX_PAYLOAD + 1} 00000000",
    ],
)
def test_a_damaged_header_with_our_nonce_is_an_error(header: str) -> None:
    with pytest.raises(FrameError):
        list(Decoder(NONCE).feed(header.encode() + b"\n\n"))


def test_a_lost_and_a_repeated_frame_are_errors() -> None:
    first, second, third = encoded([("log", b"1"), ("log", b"2"), ("log", b"3")])
    for stream in (first + third, first + first, second):
        with pytest.raises(FrameError):
            list(Decoder(NONCE).feed(stream))


def test_kept_noise_and_memory_are_bounded() -> None:
    decoder = Decoder(NONCE)
    for _ in range(64):
        assert list(decoder.feed(secrets.token_bytes(1 << 16))) == []
    assert decoder.noise_bytes >= 63 << 16
    assert len(decoder.noise) == MAX_NOISE
    assert len(decoder._buffer) < 1 << 16


def test_a_payload_beyond_the_limit_is_not_encoded() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        encode(NONCE, 0, "log", bytes(MAX_PAYLOAD + 1))

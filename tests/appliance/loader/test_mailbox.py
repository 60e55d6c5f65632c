"""The mailbox: messages in whatever pieces they come, and never a wait for the other side."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from appliance import mailbox as module
from appliance.errors import ProtocolError
from appliance.mailbox import Mailbox
from appliance.protocol import Cancel, Exit, ModelReady, Progress, Tokens, Zeroize, encode
from tests.sim.channel import Channel

LIMIT = 4096


@pytest.fixture
def pair() -> Iterator[tuple[Mailbox, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        mailbox = Mailbox(ours, max_frame=LIMIT)
        yield mailbox, theirs
        mailbox.close()


def test_gives_messages_sent_together_in_order(pair: tuple[Mailbox, socket.socket]) -> None:
    mailbox, other = pair
    other.sendall(encode(Cancel("a")) + encode(Zeroize()) + encode(Exit()))
    assert mailbox.receive() == [Cancel("a"), Zeroize(), Exit()]
    assert mailbox.receive() == []
    assert mailbox.is_open()


def test_puts_a_message_together_byte_by_byte(pair: tuple[Mailbox, socket.socket]) -> None:
    mailbox, other = pair
    frame = encode(Cancel("request"))
    seen = []
    for number in range(len(frame)):
        other.sendall(frame[number : number + 1])
        seen += mailbox.receive()
    assert seen == [Cancel("request")]


def test_half_a_frame_blocks_nobody(pair: tuple[Mailbox, socket.socket]) -> None:
    mailbox, other = pair
    other.sendall(encode(Cancel("x"))[:-1])
    assert mailbox.receive() == []


def test_notices_that_the_other_side_is_gone_after_its_last_message(pair: tuple[Mailbox, socket.socket]) -> None:
    mailbox, other = pair
    other.sendall(encode(Exit()))
    other.close()
    assert mailbox.receive() == [Exit()]
    assert not mailbox.is_open()


@pytest.mark.parametrize(
    "data",
    [
        (LIMIT + 1).to_bytes(4, "big"),
        b"\xff\xff\xff\xff",
        b"\0\0\0\0",
        b"\0\0\0\2{}",
        b'\0\0\0\x11{"kind":"Nobody"}',
        b'\0\0\0\x13{"kind":"Zeroize"}x',
    ],
)
def test_refuses_what_is_no_message(pair: tuple[Mailbox, socket.socket], data: bytes) -> None:
    mailbox, other = pair
    other.sendall(data)
    with pytest.raises(ProtocolError) as refused:
        mailbox.receive()
    assert refused.value.code == "protocol.message"


def test_keeps_what_the_other_side_does_not_read_and_sends_it_later(pair: tuple[Mailbox, socket.socket]) -> None:
    mailbox, other = pair
    large = ModelReady(1, 2, [3], b"t" * (2 << 20), b"", b"")
    mailbox.send(large)
    mailbox.send(Progress(1, 2, 3, 4))
    assert mailbox.pending_bytes > 0
    received = bytearray()
    expected = encode(large) + encode(Progress(1, 2, 3, 4))
    while len(received) < len(expected):
        received += other.recv(1 << 20)
        mailbox.flush()
    assert bytes(received) == expected
    assert mailbox.pending_bytes == 0


def test_refuses_an_endless_backlog(pair: tuple[Mailbox, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox, _ = pair
    monkeypatch.setattr(module, "MAX_BACKLOG", 1 << 20)
    mailbox.send(Tokens("r", list(range(100000)), ""))
    assert mailbox.pending_bytes > 0
    with pytest.raises(ProtocolError) as refused:
        mailbox.send(Tokens("r", list(range(200000)), ""))
    assert refused.value.code == "protocol.backlog"


def test_sending_to_nobody_is_no_error(pair: tuple[Mailbox, socket.socket]) -> None:
    mailbox, other = pair
    other.close()
    mailbox.send(Zeroize())
    mailbox.send(Zeroize())
    assert not mailbox.is_open()


def test_drain_gives_up_on_a_reader_that_does_not_read(pair: tuple[Mailbox, socket.socket]) -> None:
    mailbox, _ = pair
    mailbox.send(ModelReady(1, 2, [3], b"t" * (4 << 20), b"", b""))
    mailbox.drain(0.01)
    assert mailbox.pending_bytes > 0


def test_drain_sends_everything_to_one_that_reads(pair: tuple[Mailbox, socket.socket]) -> None:
    mailbox, other = pair
    mailbox.send(Progress(1, 2, 3, 4))
    mailbox.drain(1.0)
    assert Channel(other).receive() == Progress(1, 2, 3, 4)


def test_the_mailbox_still_waits_for_nobody_after_a_drain(pair: tuple[Mailbox, socket.socket]) -> None:
    mailbox, _ = pair
    mailbox.send(ModelReady(1, 2, [3], b"t" * (4 << 20), b"", b""))
    mailbox.drain(0.01)
    assert mailbox.receive() == []
    assert mailbox.is_open()


def test_drain_stops_when_the_other_side_is_gone(pair: tuple[Mailbox, socket.socket]) -> None:
    mailbox, other = pair
    mailbox.send(ModelReady(1, 2, [3], b"t" * (4 << 20), b"", b""))
    other.close()
    mailbox.drain(1.0)
    assert not mailbox.is_open()

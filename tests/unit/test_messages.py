"""Frames and messages: they decode to what was encoded; other bytes are refused."""

from __future__ import annotations

import contextlib
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.wire import events, framing, messages
from horovod_runner.wire.job import Outcome, decode_outcome
from horovod_runner.wire.job_file import WorkerOutcome


@given(st.lists(st.binary(max_size=100), max_size=20), st.integers(1, 50))
def test_pieces_of_a_stream_become_batches_of_whole_frames(items: list[bytes], size: int) -> None:
    stream = b"".join(map(framing.frame, items))
    splitter = framing.FrameSplitter()
    batches = [splitter.feed(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert [item for batch in batches for item in framing.unframe(batch)] == items


def test_what_follows_something_else_in_a_stream_is_dropped() -> None:
    splitter = framing.FrameSplitter()
    with pytest.raises(ValueError, match=r" 4294967295 bytes.* 268435456$"):
        splitter.feed(framing.frame(b"a") + b"\xff" * 10)
    assert splitter.feed(framing.frame(b"b")) == b""


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_raise_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert b"".join(map(framing.frame, framing.unframe(data))) == data


_small = st.integers(-(2**31), 2**31)
_messages = st.one_of(
    st.builds(messages.Started, _small, _small),
    st.builds(events.Output, _small, st.sampled_from(["stdout", "stderr"]), st.text()),
    st.builds(events.Log, _small, st.text()),
    st.builds(messages.Failed, _small, _small, st.text(), st.booleans()),
    st.builds(messages.Ended, _small, _small),
    st.builds(events.Began, _small),
    st.builds(
        events.Report,
        _small,
        st.dictionaries(st.text(), st.floats(allow_nan=False) | _small),
        st.none() | _small,
        st.none() | _small,
        st.floats(allow_nan=False),
    ),
    st.builds(messages.FilePart, _small, st.text(), _small, st.binary()),
    st.builds(events.Unsaved, _small, _small, st.text()),
    st.builds(events.Untraced, _small, st.text()),
    st.builds(messages.Fetch, _small, st.text(), _small),
)


@given(_messages)
def test_an_encoded_message_decodes_to_the_same_message(message: messages.FromRank) -> None:
    assert messages.decode_batch(framing.frame(messages.encode(message))) == [message]


NAME, SHOWN = os.fsdecode(b"caf\xe9.csv"), r"caf\udce9.csv"


@pytest.mark.parametrize(
    "message",
    [events.Log(0, NAME), events.Report(0, {"loss": 0.5, NAME: 1}), events.Unsaved(0, 5, NAME)],
)
def test_names_of_files_that_are_no_utf_8_are_escaped(message: messages.FromRank) -> None:
    (found,) = messages.decode_batch(framing.frame(messages.encode(message)))
    assert repr(found) == repr(message).replace(repr(NAME)[1:-1], repr(SHOWN)[1:-1])


def test_an_outcome_with_such_a_name_arrives_as_it_was_otherwise() -> None:
    sent = Outcome(1, 1, gpus=("7",), worker=WorkerOutcome(False, 1, b"\xff", "E", NAME))
    found = decode_outcome(messages.encode(sent))
    assert found.worker is not None
    assert found.worker.traceback == SHOWN
    restored = found.worker._replace(traceback=NAME)
    assert msgspec.structs.replace(found, worker=restored) == sent


@given(st.binary(max_size=60))
def test_random_bytes_do_not_decode(data: bytes) -> None:
    for decode in (messages.decode_batch, messages.decode_orders):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            decode(framing.frame(data))


def test_a_message_of_the_driver_is_not_accepted_from_a_rank() -> None:
    with pytest.raises(msgspec.ValidationError):
        messages.decode_batch(framing.frame(messages.encode(messages.Stop("x"))))


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa0"], ids=["lists", "maps"])
def test_a_deeply_nested_message_does_not_decode(level: bytes) -> None:
    # The type does not check an extra field, which a later version may send.
    data = b"\x94\xa3Log\x00\xa1x" + level * 100_000 + b"\xc0"
    with pytest.raises(msgspec.DecodeError, match="nested"):
        messages.decode_batch(framing.frame(data))

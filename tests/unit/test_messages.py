"""Frames and messages: what is written is read, and nothing else is taken."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_runner import frames, messages


@given(st.lists(st.binary(max_size=100), max_size=20), st.data())
def test_a_stream_of_frames_is_cut_where_they_end(items: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(frames.frame(item) for item in items)
    assert frames.complete(stream) == len(stream)
    cut = data.draw(st.integers(0, len(stream)))
    end = frames.complete(stream[:cut])
    assert end <= cut
    assert list(frames.unframe(stream[:end])) + list(frames.unframe(stream[end:])) == items


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert b"".join(map(frames.frame, frames.unframe(data))) == data


def test_a_frame_larger_than_any_is_refused() -> None:
    with pytest.raises(ValueError, match="above the limit"):
        frames.complete(b"\xff\xff\xff\xff")


_small = st.integers(-(2**31), 2**31)
_sent = st.one_of(
    st.builds(messages.Started, _small, _small),
    st.builds(messages.Output, _small, st.sampled_from(["stdout", "stderr"]), st.text()),
    st.builds(messages.Log, _small, st.text()),
    st.builds(messages.Failed, _small, _small, st.text(), st.booleans()),
    st.builds(messages.Ended, _small, _small),
    st.builds(messages.Began, _small),
    st.builds(
        messages.Report,
        _small,
        st.dictionaries(st.text(), st.floats(allow_nan=False) | _small),
        st.none() | _small,
        st.none() | _small,
        st.floats(allow_nan=False),
    ),
    st.builds(messages.FilePart, _small, st.text(), _small, st.binary()),
    st.builds(messages.Unsaved, _small, _small, st.text()),
    st.builds(messages.Fetch, _small, st.text(), _small),
)


@given(_sent)
def test_a_message_survives_the_wire(message: messages.FromRank) -> None:
    assert messages.decode_from_rank(messages.encode(message)) == message


@given(st.binary(max_size=60))
def test_random_bytes_are_no_message(data: bytes) -> None:
    for decode in (messages.decode_from_rank, messages.decode_from_driver):
        with pytest.raises((msgspec.MsgspecError, ValueError)):
            decode(data)


def test_a_drivers_order_is_not_taken_from_a_rank() -> None:
    with pytest.raises(msgspec.ValidationError):
        messages.decode_from_rank(messages.encode(messages.Stop("x")))


@pytest.mark.parametrize("level", [b"\x91", b"\x81\xa0"], ids=["lists", "maps"])
def test_a_message_that_is_nested_as_deep_as_it_is_long_is_none(level: bytes) -> None:
    # Where one field too many stands, which a later version may send, anything may stand.
    data = b"\x94\xa3Log\x00\xa1x" + level * 100_000 + b"\xc0"
    with pytest.raises(msgspec.DecodeError, match="nested too deeply"):
        messages.decode_from_rank(data)

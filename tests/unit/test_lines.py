"""A worker's output, split into lines."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from horovod_runner.task.lines import LineSplitter


@given(st.text(alphabet=st.characters(exclude_characters="\r")), st.lists(st.integers(0, 200)))
def test_lines_do_not_depend_on_how_the_stream_is_cut(text: str, cuts: list[int]) -> None:
    data = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").encode()
    for hold in (True, False):
        stream, shown, lines = LineSplitter("stdout", hold), "", []
        edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
        for start, end in itertools.pairwise(edges):
            more, complete = stream.feed(data[start:end])
            shown, lines = shown + more, lines + complete
        more, complete = stream.feed(b"", final=True)
        shown, lines = shown + more, lines + complete
        assert shown == data.decode()
        assert lines == (data.decode().removesuffix("\n").split("\n") if data else [])


def test_invalid_utf8_is_replaced() -> None:
    assert LineSplitter("stderr", hold=True).feed(b"ab\xff\xfec\n") == (
        "ab\ufffd\ufffdc\n",
        ["ab\ufffd\ufffdc"],
    )


def test_only_the_last_state_of_a_progress_bar_is_a_line() -> None:
    stream = LineSplitter("stderr", hold=True)
    assert stream.feed(b"\r 10%\r 50%") == ("", [])
    assert stream.feed(b"\r100%\n") == ("100%\n", ["100%"])
    assert stream.feed(b"dos\r\n") == ("dos\n", ["dos"])


def test_a_single_ranks_progress_bar_moves() -> None:
    stream = LineSplitter("stderr", hold=False)
    assert stream.feed(b"\r 10%") == ("\r 10%", [])
    assert stream.feed(b"\r 20%\n") == ("\r 20%\n", [" 20%"])


def test_an_endless_line_is_shown_in_pieces() -> None:
    stream = LineSplitter("stdout", hold=True)
    shown = ""
    for _ in range(10):
        shown += stream.feed(b"x" * 50_000)[0]
    assert len(shown) >= 400_000

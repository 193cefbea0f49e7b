"""Writing all of some bytes to descriptors that accept only a part at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from horovod_runner.common.descriptors import write_all
from horovod_runner.common.files import unnamed_file

_DATA = bytes(range(256)) * 8192  # 2 MB: more than a pipe holds


def test_a_pipe_gets_all_bytes_in_order() -> None:
    read, write = os.pipe()
    received = bytearray()

    def receive() -> None:
        while data := os.read(read, 1 << 20):
            received.extend(data)

    reader = threading.Thread(target=receive)
    reader.start()
    write_all(write, _DATA)
    os.close(write)
    reader.join()
    os.close(read)
    assert received == _DATA


def test_writes_that_take_only_a_part_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:1000]))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:1000], at))
    with unnamed_file("test") as file:
        write_all(file.fileno(), _DATA)
        write_all(file.fileno(), memoryview(_DATA)[:3000], offset=len(_DATA) + 100)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == len(_DATA)  # an offset does not move it
        expected = _DATA + bytes(100) + _DATA[:3000]
        assert os.pread(file.fileno(), len(expected) + 1, 0) == expected


def test_a_temporary_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with unnamed_file("test", buffering=0) as file:
        file.write(b"x")
        assert list(tmp_path.iterdir()) == []

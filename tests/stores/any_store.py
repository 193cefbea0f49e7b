"""What a run does with a folder, wherever that is: a disk, S3, HDFS."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horovod_runner import DataError, load_checkpoint, load_run, save_checkpoint
from horovod_runner.data import parquet
from horovod_runner.host.folders.folder import Folder
from horovod_runner.host.folders.opening import open_folder
from horovod_runner.host.folders.urls import file_system
from horovod_runner.integrations.horovod_spark.store import Store
from horovod_runner.results import saved_run
from horovod_runner.tools.commands import cli
from tests.conftest import Ranks

#: What `horovod-runner doctor --path` finds of what every run needs.
NEEDED = dict.fromkeys(["folder", "write", "list", "read", "small files", "delete"], "ok")


def statuses(capsys: pytest.CaptureFixture[str], url: object, status: int = 0) -> dict[str, str]:
    """What the command finds, by the name of what it tries."""
    assert cli.main(["doctor", "--path", str(url), "--json"]) == status
    found = json.loads(capsys.readouterr().out)["findings"]
    return {each["name"]: each["status"] for each in found}


class AnyStore:
    """The tests; a class for each kind of store inherits them, and has a fixture ``url``."""

    def test_files_are_written_read_replaced_and_removed(self, url: str, tmp_path: Path) -> None:
        folder = made(url)
        part = tmp_path / "part"
        assert folder.names() == []
        assert folder.size("file") is None
        for content in (b"state", b"longer state"):
            part.write_bytes(content)
            folder.move_in(part, "file")
            assert not part.exists()
        folder.write("file.json", b"{}")
        folder.write("file.json", b"[]")
        assert sorted(folder.names()) == ["file", "file.json"]
        assert folder.read("file.json") == b"[]"
        assert folder.read_range("file", 7, 3) == b"sta"
        folder.copy_out("file", part)
        assert part.read_bytes() == b"longer state"
        folder.remove("file")
        folder.remove("file")
        assert folder.names() == ["file.json"]

    def test_the_doctor_finds_all_that_runs_need(
        self, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert statuses(capsys, f"{url}/new").items() >= NEEDED.items()

    def test_a_run_resumes_from_its_latest_checkpoint(self, url: str) -> None:
        def main(steps: int) -> tuple[int, int]:
            found = load_checkpoint()
            first = found.step + 1 if found else 1
            for step in range(first, steps + 1):
                save_checkpoint({"step": step, "bytes": os.urandom(1_000_000)}, step)
            return first, steps

        ranks = Ranks("local")
        kept = {"checkpoint_dir": f"{url}/checkpoints", "num_to_keep": 2}
        runner = ranks.runner(1, **kept)
        assert runner.run(main, steps=4) == (1, 4)
        assert [each.step for each in runner.last_run.checkpoints] == [3, 4]
        assert runner.last_run.latest_checkpoint.load()["step"] == 4
        assert ranks.run(1, main, {**kept, "resume": True}, steps=5) == (5, 5)

    def test_ranks_read_their_parts_of_a_dataset(self, url: str) -> None:
        write_rows(f"{url}/rows/year=2024/part-0.parquet", range(50))
        write_rows(f"{url}/rows/year=2025/part-1.parquet", range(50, 100))
        write_rows(f"{url}/rows/_SUCCESS", [])

        def main(rows: Any) -> list[tuple[int, int]]:
            batches = [*rows.batches(10)]
            return [
                (int(row), int(year))
                for batch in batches
                for row, year in zip(batch["id"], batch["year"], strict=True)
            ]

        parts = Ranks("local").runner(2).run_all(main, rows=parquet(f"{url}/rows"))
        assert [len(part) for part in parts] == [50, 50]
        assert {*parts[0], *parts[1]} == {(row, 2024 + (row >= 50)) for row in range(100)}

    def test_a_file_that_is_replaced_while_a_run_reads_is_noticed(self, url: str) -> None:
        file = f"{url}/changing/part-0.parquet"
        write_rows(file, range(50))

        def main(rows: Any) -> None:
            write_rows(file, range(50, 100))  # of the same size
            for _ in rows.batches(10):
                pass

        with pytest.raises(DataError, match="was changed or removed since the run began"):
            Ranks("local").runner(1).run(main, rows=parquet(file))

    def test_the_page_and_the_record_of_a_run(
        self, url: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        runner = Ranks("local").runner(1)
        runner.run(lambda: None)
        folder = made(f"{url}/pages")
        runner.last_run.report(f"{url}/pages/run.html")
        assert runner.last_run.run_id.encode() in folder.read("run.html")
        assert cli.main(["report", runner.last_run.run_id, "-o", f"{url}/pages/again.html"]) == 0
        assert "again.html" in folder.names()
        record = f"{runner.last_run.run_id}.run"
        folder.write(record, saved_run.path_of(runner.last_run.run_id).read_bytes())
        assert load_run(f"{url}/pages/{record}").status == "finished"
        capsys.readouterr()

    def test_a_store_of_estimators(self, url: str, tmp_path: Path) -> None:
        store = Store.create(url)
        store.fs.makedirs(store.get_localized_path(f"{url}/runs"), exist_ok=True)
        text = f"{store.prefix_path}/note"
        store.write_text(text, "hello")
        assert store.exists(text)
        assert store.read(text) == b"hello"
        (tmp_path / "local" / "sub").mkdir(parents=True)
        (tmp_path / "local" / "sub" / "model.bin").write_bytes(b"weights")
        store.sync_fn("run1")(str(tmp_path / "local"))
        copied = f"{store.get_run_path('run1')}/sub/model.bin"
        assert store.read(copied) == b"weights"
        write_rows(f"{url}/rows-of-store/part-0.parquet", range(10))
        rows = f"{store.prefix_path}/rows-of-store"
        assert store.is_parquet_dataset(rows)
        assert store.get_parquet_dataset(rows).read().num_rows == 10


def made(url: str) -> Folder:
    """A folder, which is created on a disk: stores do that with the first file."""
    folder = open_folder(url)
    if (path := folder.local("")) is not None:
        path.mkdir(parents=True)
    return folder


def write_rows(url: str, rows: Any) -> None:
    """Write a Parquet file with a column of numbers; a file without content for no rows."""
    files, path = file_system(url)
    files.makedirs(path.rpartition("/")[0], exist_ok=True)
    numbers = [*rows]
    with files.open(path, "wb") as file:
        if numbers:
            pq.write_table(pa.table({"id": numbers}), file)

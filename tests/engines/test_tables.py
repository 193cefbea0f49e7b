"""Tables as Spark writes them: Delta and Iceberg, by their own libraries, while runs read.

On a cluster of two executors, so that a DataFrame's rows go to the ranks' own disks.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from horovod_runner import ClusterConfig, DataConfig, DataError, HorovodRunner
from horovod_runner.data import Shard, delta
from tests.cluster.standalone import Place, StandaloneCluster
from tests.engines import EngineError
from tests.engines.maven import provide_jars
from tests.engines.versions import DELTA, ICEBERG
from tests.places import DAEMON, classic_session
from tests.programs import await_condition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.places("tables"), pytest.mark.timeout(900)]

ROWS = 1000
VECTORS = {"delta.enableDeletionVectors": "true"}
MAPPING = {"delta.columnMapping.mode": "name"}
UPGRADE = (
    "SET TBLPROPERTIES('delta.columnMapping.mode' = 'name', "
    "'delta.minReaderVersion' = '2', 'delta.minWriterVersion' = '5')"
)
_EVENT_SECONDS = 400


class Tables:
    """Tables of one session, each in a folder of its own."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self._folder = folder

    def delta(self, name: str, columns: str, properties: dict[str, str], part: str = "") -> str:
        """Create a Delta table; returns its path."""
        path = str(self._folder / name)
        self.spark.sql(
            f"CREATE TABLE delta.`{path}` ({columns}) USING delta "
            + (f"PARTITIONED BY ({part}) " if part else "")
            + (f"TBLPROPERTIES({_pairs(properties)})" if properties else "")
        )
        return path

    def iceberg(self, name: str, properties: dict[str, str]) -> str:
        """Create an Iceberg table with the columns id and x; returns its name."""
        self.spark.sql(
            f"CREATE TABLE ice.db.{name} (id bigint, x double) USING iceberg "
            f"TBLPROPERTIES({_pairs(properties)})"
        )
        return f"ice.db.{name}"

    def append(self, path: str, *columns: str, first: int = 0, count: int = ROWS) -> None:
        """Add rows to a Delta table, in two files for each partition."""
        rows = self.spark.range(first, first + count, 1, 2).selectExpr(*columns)
        rows.write.format("delta").mode("append").save(path)

    def alter(self, path: str, *changes: str) -> None:
        for change in changes:
            self.spark.sql(f"ALTER TABLE delta.`{path}` {change}")

    def read(self, path: str) -> DataFrame:
        return self.spark.read.format("delta").load(path)


def _pairs(properties: dict[str, str]) -> str:
    return ", ".join(f"'{name}' = '{value}'" for name, value in properties.items())


@pytest.fixture(scope="module")
def tables() -> Iterator[Tables]:
    """A session whose application has both libraries."""
    try:
        jars = provide_jars(
            f"tables-{DELTA}-{ICEBERG}",
            [
                f"io.delta:delta-spark_2.12:{DELTA}",
                f"org.apache.iceberg:iceberg-spark-runtime-3.5_2.12:{ICEBERG}",
            ],
            ["io.delta", "org.apache.iceberg"],
        )
    except EngineError as error:
        pytest.exit(str(error), returncode=1)
    # Ranks and executors look into it, and `tmp_path` has the name of a test in it.
    folder = Path(tempfile.mkdtemp(prefix="tables-"))
    conf = {
        "spark.jars": ",".join(map(str, jars.glob("*.jar"))),
        "spark.executor.cores": "2",
        "spark.executor.memory": "1g",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension,"
        "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.databricks.delta.retentionDurationCheck.enabled": "false",
        "spark.sql.catalog.ice": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.ice.type": "hadoop",
        "spark.sql.catalog.ice.warehouse": str(folder / "iceberg"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    with ExitStack() as stack:
        cluster = stack.enter_context(StandaloneCluster(folder, (Place(), Place())))
        settings = {"spark.master": cluster.master, **conf, **DAEMON}
        session = stack.enter_context(classic_session(settings))
        cluster.await_executors(session)
        yield Tables(session, folder)
    shutil.rmtree(folder)


def rows_of(path: str, **options: Any) -> list[dict[str, Any]]:
    """The rows that ranks would read."""
    reader: Any = delta(path, **options).prepare("train", None)
    batches = [
        batch
        for unit in range(len(reader.units))
        for batch in reader.read(unit, reader.schema.names)
    ]
    return _in_order([row for batch in batches for row in batch.to_pylist()])


def _in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: int(row["id"]))


def as_spark(tables: Tables, path: str) -> list[dict[str, Any]]:
    """The rows that Spark reads."""
    return _in_order([row.asDict() for row in tables.read(path).collect()])


def test_rows_of_deletion_vectors_and_of_odd_partitions(tables: Tables) -> None:
    path = tables.delta("vectors", "id bigint, x double, g string", VECTORS, part="g")
    tables.append(path, "id", "double(id) AS x", "concat('a b/=%?#é', id % 3) AS g")
    for change in ("DELETE FROM {} WHERE id % 10 = 0", "UPDATE {} SET x = -x WHERE id % 10 = 1"):
        tables.spark.sql(change.format(f"delta.`{path}`"))
        assert rows_of(path) == as_spark(tables, path)
    assert len(rows_of(path)) == ROWS - ROWS // 10
    tables.spark.sql(f"OPTIMIZE delta.`{path}`")
    assert rows_of(path) == as_spark(tables, path)


def test_columns_that_were_renamed_dropped_and_added_again(tables: Tables) -> None:
    path = tables.delta("mapped", "id bigint, x double, z double", {**MAPPING, **VECTORS})
    tables.append(path, "id", "double(id) AS x", "-1D AS z")
    tables.alter(path, "RENAME COLUMN x TO y", "DROP COLUMN z", "ADD COLUMN z double")
    tables.spark.sql(f"DELETE FROM delta.`{path}` WHERE id % 10 = 0")
    tables.append(path, "id", "double(id) AS y", "2D AS z", first=ROWS, count=10)
    rows = rows_of(path)
    assert rows == as_spark(tables, path)
    assert {row["z"] for row in rows} == {None, 2.0}


def test_names_in_old_files_that_mean_other_columns_now(tables: Tables) -> None:
    path = tables.delta("upgraded", "id bigint, a double, b double, c double, g int", {}, part="g")
    columns = ("id", "double(id) AS a", "-double(id) AS b", "7D AS c", "int(id % 2) AS g")
    tables.append(path, *columns)
    # The files go on to have the names that the columns had before.
    tables.alter(path, UPGRADE, "RENAME COLUMN a TO t", "RENAME COLUMN b TO a")
    tables.alter(path, "RENAME COLUMN t TO b", "DROP COLUMN c", "ADD COLUMN c double")
    tables.alter(path, "RENAME COLUMN g TO h")
    rows = rows_of(path)
    assert rows == as_spark(tables, path)
    assert rows[3] == {"id": 3, "a": -3.0, "b": 3.0, "c": None, "h": 1}
    some = rows_of(path, columns=["id", "a"], filter=[("a", "<=", -990.0), ("h", "==", 0)])
    assert [row["id"] for row in some] == [990, 992, 994, 996, 998]


def test_a_column_that_was_added_later_is_null_in_old_files(tables: Tables) -> None:
    path = tables.delta("added", "id bigint, t timestamp, g int", {}, part="g")
    far = "timestamp'9999-12-31 00:00:00' AS t"
    tables.append(path, "id", far, "int(if(id % 2 = 0, null, id % 3)) AS g")
    tables.alter(path, "ADD COLUMN z double")
    tables.append(path, "id", far, "5 AS g", "1.5D AS z", first=ROWS, count=10)
    rows = rows_of(path)
    for row in rows:
        row["t"] = row["t"].replace(tzinfo=None)
    assert rows == as_spark(tables, path)
    assert [row["id"] for row in rows_of(path, filter=[("z", ">", 0.0)])] == [*range(1000, 1010)]


def test_checkpoints_of_both_kinds(tables: Tables) -> None:
    for policy in ("classic", "v2"):
        properties = {"delta.checkpointPolicy": policy, "delta.checkpointInterval": "2"}
        path = tables.delta(
            f"checkpoint_{policy}", "id bigint, x double", {**properties, **VECTORS}
        )
        for number in range(4):
            tables.append(path, "id", "double(id) AS x", first=100 * number, count=100)
            tables.spark.sql(f"DELETE FROM delta.`{path}` WHERE id = {100 * number + 7}")
        assert rows_of(path) == as_spark(tables, path)


def test_what_is_not_supported_is_refused_by_name_before_the_launch(tables: Tables) -> None:
    runner = HorovodRunner(np=-2)
    wide = tables.delta("wide", "id bigint, k smallint", {"delta.enableTypeWidening": "true"})
    tables.append(wide, "id", "smallint(id) AS k")
    tables.alter(wide, "ALTER COLUMN k TYPE int")
    with pytest.raises(DataError, match=r"wide.*typeWidening.*spark\.read.*DROP FEATURE"):
        runner.run(read_ids, train=delta(wide))
    nested = tables.delta("nested", "id bigint, s struct<u:double>", MAPPING)
    tables.append(nested, "id", "named_struct('u', double(id)) AS s")
    with pytest.raises(DataError, match=r"'s'.*nested.*column mapping.*spark\.read"):
        runner.run(read_ids, train=delta(nested, columns=["id", "s"]))
    grown = tables.delta("grown", "id bigint, s struct<u:double>", {})
    tables.append(grown, "id", "named_struct('u', double(id)) AS s")
    tables.alter(grown, "ADD COLUMN s.v double")
    with pytest.raises(DataError, match=r"'s'.*grown.*fields were added"):
        runner.run(read_ids, train=delta(grown, columns=["id", "s.u"]))
    assert [row["id"] for row in rows_of(grown)] == [*range(ROWS)]  # without that column
    clone = f"{grown}_clone"
    tables.spark.sql(f"CREATE TABLE delta.`{clone}` SHALLOW CLONE delta.`{wide}`")
    with pytest.raises(DataError, match="clone"):
        runner.run(read_ids, train=delta(clone))


def read_ids(train: Shard, events: str = "") -> list[list[list[tuple[int, float]]]]:
    """The rows of this rank in two epochs, from all ranks; waits in the middle of the first."""
    import horovod.torch as hvd

    hvd.init()
    feed = train.batches(20, columns=["id", "x"], shuffle=True)
    epochs = []
    for epoch in range(2):
        seen: list[tuple[int, float]] = []
        for step, batch in enumerate(feed):
            real = feed.real
            seen += zip(batch["id"][:real].tolist(), batch["x"][:real].tolist(), strict=True)
            if events and epoch == 0 and step == 2:
                Path(events, f"rank-{hvd.rank()}").touch()
                await_condition(Path(events, "go").exists, _EVENT_SECONDS)
                if Path(events, "fail").exists():
                    hvd.barrier()
                    Path(events, "fail").unlink(missing_ok=True)
                    raise RuntimeError("the first attempt")
        epochs.append(seen)
    gathered: list[list[list[tuple[int, float]]]] = hvd.allgather_object(epochs)
    return gathered


def rows_while_spark_commits(
    tables: Tables, runner: HorovodRunner, data: Any, *commits: str, fail: bool = False
) -> list[list[tuple[int, float]]]:
    """The rows of each epoch, while Spark commits in the middle of the first."""
    with tempfile.TemporaryDirectory() as events:
        if fail:
            Path(events, "fail").touch()
        handle = runner.start(read_ids, train=data, events=events)
        try:
            await_condition(
                lambda: handle.done() or len([*Path(events).glob("rank-*")]) == 2, _EVENT_SECONDS
            )
            for commit in commits:
                tables.spark.sql(commit)
            Path(events, "go").touch()
            ranks = handle.result(timeout=_EVENT_SECONDS)
        finally:
            handle.cancel()
    return [sorted(row for rank in ranks for row in rank[epoch]) for epoch in range(2)]


def dataframe_runners(tables: Tables, folder: Path) -> list[HorovodRunner]:
    """One whose rows go to the ranks' disks, and one with a shared folder."""
    cluster = ClusterConfig(spark=tables.spark)
    folder.mkdir(parents=True, exist_ok=True)
    shared = DataConfig(shared_dir=str(folder))
    return [
        HorovodRunner(np=2, gpus_per_rank=0, cluster_config=cluster),
        HorovodRunner(np=2, gpus_per_rank=0, cluster_config=cluster, data_config=shared),
    ]


BEGAN = [[(number, float(number)) for number in range(ROWS) if number % 10]] * 2


def delta_table(tables: Tables, name: str) -> tuple[str, list[str]]:
    """A table with deletion vectors and a renamed column, and what is committed to it."""
    properties = {**VECTORS, **MAPPING}
    path = tables.delta(name, "id bigint, z double, g bigint", properties, part="g")
    tables.append(path, "id", "double(id) AS z", "id % 3 AS g")
    tables.alter(path, "RENAME COLUMN z TO x")
    table = f"delta.`{path}`"
    tables.spark.sql(f"DELETE FROM {table} WHERE id % 10 = 0")
    return path, [
        f"DELETE FROM {table} WHERE id % 10 = 1",
        f"UPDATE {table} SET x = -x WHERE id % 10 = 2",
        f"INSERT INTO {table} SELECT 5000 + id, 1D, 0 FROM range(50)",
        f"OPTIMIZE {table}",
        f"VACUUM {table} RETAIN 0 HOURS",
    ]


def iceberg_table(tables: Tables, name: str, version: str) -> tuple[str, list[str]]:
    """A table with rows deleted beside its files and a new column, and what is committed to it."""
    modes = {f"write.{each}.mode": "merge-on-read" for each in ("delete", "update", "merge")}
    table = tables.iceberg(name, {"format-version": version, **modes})
    tables.spark.range(0, ROWS, 1, 2).selectExpr("id", "double(id) AS x").writeTo(table).append()
    tables.spark.sql(f"DELETE FROM {table} WHERE id % 10 = 0")
    tables.spark.sql(f"ALTER TABLE {table} ADD COLUMN later double")
    return table, [
        f"DELETE FROM {table} WHERE id % 10 = 1",
        f"UPDATE {table} SET x = -x WHERE id % 10 = 2",
        f"INSERT INTO {table} SELECT 5000 + id, 1D, 2D FROM range(50)",
        f"CALL ice.system.rewrite_data_files(table => '{table}', "
        "options => map('rewrite-all', 'true'))",
    ]


def test_ranks_that_read_delta_keep_the_version(tables: Tables) -> None:
    path, commits = delta_table(tables, "kept")
    rows = rows_while_spark_commits(tables, HorovodRunner(np=-2), delta(path), *commits)
    assert rows == BEGAN
    assert len(rows_of(path)) == 850


def test_ranks_with_a_dataframe_of_delta_keep_the_version(tables: Tables, tmp_path: Path) -> None:
    for number, runner in enumerate(dataframe_runners(tables, tmp_path)):
        path, commits = delta_table(tables, f"kept_{number}")
        rows = rows_while_spark_commits(tables, runner, tables.read(path), *commits)
        assert rows == BEGAN
        assert tables.read(path).count() == 850


@pytest.mark.parametrize(("version", "kind"), [("2", "PARQUET"), ("3", "PUFFIN")])
def test_ranks_with_a_dataframe_of_iceberg_keep_the_snapshot(
    tables: Tables, tmp_path: Path, version: str, kind: str
) -> None:
    runner = dataframe_runners(tables, tmp_path)[version == "3"]
    table, commits = iceberg_table(tables, f"kept_{version}", version)
    deletes = tables.spark.table(f"{table}.delete_files").collect()
    assert {each["file_format"] for each in deletes} == {kind}
    data = tables.spark.read.format("iceberg").load(table)
    data = data.selectExpr("id", "coalesce(later, x) AS x")  # null in files without it
    assert rows_while_spark_commits(tables, runner, data, *commits) == BEGAN
    assert tables.spark.table(table).count() == 850


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_a_run_that_is_launched_again_has_the_rows_with_which_it_began(
    tables: Tables, kind: str
) -> None:
    runner = HorovodRunner(
        np=2, gpus_per_rank=0, max_restarts=1, cluster_config=ClusterConfig(spark=tables.spark)
    )
    if kind == "delta":
        path, commits = delta_table(tables, "again")
        data, commits = tables.read(path), commits[:-1]  # VACUUM would remove its files
    else:
        table, commits = iceberg_table(tables, "again", "2")
        data = tables.spark.table(table)
    assert rows_while_spark_commits(tables, runner, data, *commits, fail=True) == BEGAN
    assert len(runner.last_run.attempts) == 2

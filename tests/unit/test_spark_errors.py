"""Spark's errors in a line or two: which task was lost, and what to do."""

from __future__ import annotations

import pytest

from horovod_runner import LaunchError
from horovod_runner.driver.launcher import JobCancelledError
from horovod_runner.launchers import spark_errors


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("ExecutorLostFailure (executor 1 exited): gone \nDriver stacktrace:", "(executor 1 exi"),
        ("org.apache.SparkException: Python worker exited unexpectedly (crashed)", "unexpectedly"),
    ],
)
def test_a_lost_task_is_named(reason: str, shown: str) -> None:
    text = "Could not recover from a failed barrier task ResultTask(7, 3) finished unsuccessfully."
    lost = spark_errors.lost_task(RuntimeError(f"{text}\n{reason}"))
    assert lost is not None
    assert lost.task == 3
    assert shown in str(lost)
    assert "stacktrace" not in str(lost)


def test_the_failure_of_a_tasks_own_code_loses_no_task() -> None:
    text = "barrier task ResultTask(7, 3) finished unsuccessfully.\njava.io.IOException: no"
    assert spark_errors.lost_task(RuntimeError(text)) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Job 3 cancelled because Stage 5 was cancelled", JobCancelledError),
        ("[OPERATION_CANCELED] Operation has been canceled.", JobCancelledError),
        ("Job aborted due to stage failure", LaunchError),
    ],
)
def test_a_cancelled_job_is_no_failure(text: str, kind: type[Exception]) -> None:
    error = spark_errors.ended_by("the job of np=2", RuntimeError(text))
    assert type(error) is kind
    assert str(error).startswith("the job of np=2: ")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ModuleNotFoundError: No module named 'horovod_runner'", "no horovod_runner. Install it"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has 3.8", "another minor version of Python"),
        ("java.nio.channels.ClosedChannelException: Channel closed", "the session was stopped in"),
        (
            'status = StatusCode.UNAVAILABLE\n\tdetails = "failed to connect."\n\tdebug = "x"',
            "Connect server has ended: failed to connect. Was the session stopped?",
        ),
        (
            "Total size of serialized results of 2 tasks (2.9 GiB) is bigger than "
            "spark.driver.maxResultSize (1024.0 MiB)",
            "takes 2.9 GiB, and spark.driver.maxResultSize allows 1024.0 MiB. Write what is large "
            "inside main (save_checkpoint, or a file that all hosts share) and return its path; or "
            "start the session with a larger spark.driver.maxResultSize",
        ),
        (
            "CLIENT: Sent message larger than max (140010589 vs. 134217728)",
            "take 140 MB, and a message of Spark Connect at most 134 MB",
        ),
        ("", "RuntimeError. The executors' logs"),
        (
            "An error occurred while calling o1.collect.\n: org.apache.spark.SparkException: Job "
            "aborted.\n\tat a.b\nValueError: first\nKeyError: last\njava.io.IOException: c",
            "org.apache.spark.SparkException: Job aborted.; KeyError: last. The executors' logs",
        ),
        (
            "Job aborted\njava.io.IOException: first\njava.lang.OutOfMemoryError: second",
            "Job aborted; java.io.IOException: first. The executors' logs",
        ),
        ("java.io.IOException: once", "java.io.IOException: once. The executors' logs"),
    ],
)
def test_an_error_of_spark_is_a_line_or_two(text: str, told: str) -> None:
    explained = spark_errors.explain(RuntimeError(text))
    assert told in explained
    assert "\n" not in explained

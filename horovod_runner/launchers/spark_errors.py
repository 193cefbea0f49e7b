"""Reads Spark's errors: which task was lost, or what went wrong in a line or two."""

from __future__ import annotations

import re
import sys

from horovod_runner.driver.launcher import JobCancelledError, TaskLostError
from horovod_runner.errors import LaunchError

# "...barrier task ResultTask(7, 3) finished unsuccessfully.\nExecutorLostFailure (executor 1 ..."
_LOST_TASK = re.compile(
    r"barrier task \w+\(\d+, (?P<task>\d+)\) finished unsuccessfully\.\s*"
    r"(?P<reason>ExecutorLostFailure.*|.*Python worker exited unexpectedly.*)"
)
# "Job 3 cancelled because Stage 5 was cancelled", and the same in Spark 4; Spark Connect's words.
_CANCELLED = re.compile(r"\bJob \d+ cancelled|OPERATION_CANCELED")

_LARGE_RESULTS = re.compile(
    r"Total size of serialized results of \d+ tasks \(([^)]*)\) is bigger than "
    r"spark.driver.maxResultSize \(([^)]*)\)"
)
_LARGE_MESSAGE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")  # gRPC's


def ended_by(what: str, error: BaseException) -> LaunchError:
    """The exception for an error with which Spark ended a job; ``what`` names the job."""
    kind = JobCancelledError if _CANCELLED.search(str(error)) else LaunchError
    return kind(f"{what}: {explain(error)}")


def lost_task(error: BaseException) -> TaskLostError | None:
    """The lost task that ended the job, with Spark's reason; None if the error is another one."""
    lost = _LOST_TASK.search(str(error))
    if lost is None:
        return None
    return TaskLostError(int(lost["task"]), f"Spark says: {lost['reason'].strip()}.")


def explain(error: BaseException) -> str:
    """Spark's error in a line or two, with what to do where that is known."""
    text = str(error)
    if "No module named 'horovod_runner'" in text:
        return (
            "the executors' Python has no horovod_runner. Install it there (pip install "
            "horovod_runner on every host), or name the Python that has it: PYSPARK_PYTHON "
            "(with Spark Connect, in the server's environment), spark.pyspark.python."
        )
    if "PYTHON_VERSION_MISMATCH" in text:
        return (
            "the executors run another minor version of Python than the "
            f"{sys.version_info[0]}.{sys.version_info[1]} here, and PySpark requires the same. "
            "Name one that fits by PYSPARK_PYTHON (with Spark Connect, in the server's "
            "environment), or start this process with theirs."
        )
    if large := _too_large(text):
        return large
    if stopped := _stopped(text):
        return stopped
    summary = _first_lines(text) or type(error).__name__
    return f"{summary.rstrip('.')}. The executors' logs in Spark's UI say more."


def _stopped(text: str) -> str:
    """The text for a session that has ended; empty for other errors."""
    if "Channel closed" in text or "closed channel" in text:  # by this process
        return "the session was stopped in the middle of the run."
    closed = re.search(r'^\s*details = "(.*)"$', text, re.MULTILINE)
    if closed is None:  # gRPC's
        return ""
    return (
        f"the connection to the Spark Connect server has ended: {closed.group(1)} "
        "Was the session stopped?"
    )


def _too_large(text: str) -> str:
    """The text for data above a limit of Spark; empty for other errors."""
    if results := _LARGE_RESULTS.search(text):
        size, limit = results.groups()
        return (
            f"what the ranks returned takes {size}, and spark.driver.maxResultSize allows {limit}. "
            "Write what is large inside main (save_checkpoint, or a file that all hosts share) and "
            "return its path; or start the session with a larger spark.driver.maxResultSize, and a "
            "spark.driver.memory of several times that."
        )
    if message := _LARGE_MESSAGE.search(text):
        took, allowed = (int(number) / 1e6 for number in message.groups())
        return (
            f"main and its arguments, or what the ranks returned, take {took:.0f} MB, and a "
            f"message of Spark Connect at most {allowed:.0f} MB. Load and write what is large "
            "inside main, and pass paths (the server's limit is "
            "spark.connect.grpc.maxInboundMessageSize)."
        )
    return ""


def _first_lines(text: str) -> str:
    """The first line of an error that says something, and the exception under it."""
    # Py4J's first line only says that something went wrong in the JVM.
    lines = [line.strip(": ") for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("An error occurred while calling")]
    shown = lines[:1]
    errors = re.findall(r"^(\w[\w.]*(?:Error|Exception): .*)$", text, re.MULTILINE)
    of_python = [line for line in errors if not line.startswith(("org.", "java.", "py4j."))]
    for line in of_python[-1:] or errors[:1]:
        if line not in "".join(shown):
            shown.append(line)
    return "; ".join(shown)

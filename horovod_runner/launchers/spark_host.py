"""Finds what on this host keeps Spark's Java process from starting, for the error of its start.

Containers have users without a name, host names that Spark does not accept, and small limits.
Spark's own errors for these are stack traces of Java.
"""

from __future__ import annotations

import os
import pwd
import re
import resource
import socket
from collections.abc import Iterator
from typing import Final

from horovod_runner.common.text import memory_text
from horovod_runner.host import control_groups

_LEAST_FILES: Final = 1024
_LEAST_PROCESSES: Final = 256
#: Java's heap, for which Spark asks for 1 GB by default, and what Java needs beside it.
_LEAST_MEMORY: Final = 1_500_000_000


def likely_causes() -> list[str]:
    """The unusual settings of this host, and what to change; a sentence for each."""
    return [*_user(), *_host_name(), *_limits()]


def _user() -> Iterator[str]:
    user = os.getuid()
    try:
        pwd.getpwuid(user)
    except KeyError:
        yield (
            f"User {user} has no entry in /etc/passwd, and Spark's Hadoop asks for the user's "
            "name. Start the container with the image's own entry point (/opt/entrypoint.sh "
            "COMMAND), which adds one by libnss_wrapper, or choose another user."
        )


def _host_name() -> Iterator[str]:
    name = os.environ.get("SPARK_LOCAL_HOSTNAME", "")
    if name:
        return
    name = socket.gethostname()
    if not re.fullmatch(r"[A-Za-z0-9.-]+", name):
        yield (
            f"The host name {name} has a character that Spark's URLs do not allow. Give another "
            "one (docker run --hostname), or set SPARK_LOCAL_HOSTNAME=localhost."
        )
        return
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        yield (
            f"The host name {name} has no address, as with docker run --network none. Set "
            "SPARK_LOCAL_HOSTNAME=localhost, or use np=-N, which needs no Spark."
        )


def _limits() -> Iterator[str]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < _LEAST_FILES:
        yield (
            f"A process may open {files} files, and Spark needs more. Set at least {_LEAST_FILES} "
            "(ulimit -n, docker run --ulimit nofile=4096)."
        )
    processes = min(_process_limits(), default=_LEAST_PROCESSES)
    if processes < _LEAST_PROCESSES:
        yield (
            f"There may be {processes} processes and threads, and Spark alone starts about a "
            f"hundred. Set at least {_LEAST_PROCESSES} (docker run --pids-limit, --ulimit nproc)."
        )
    memory = control_groups.memory()
    if memory.in_container and memory.limit < _LEAST_MEMORY:
        yield (
            f"The container may use {memory_text(memory.limit)} of memory, and Spark's Java asks "
            "for 1 GB. Raise the limit (docker run --memory), or set spark.driver.memory."
        )


def _process_limits() -> Iterator[int]:
    user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if user >= 0:
        yield user
    found = control_groups.process_limit()
    if found is not None:
        yield found

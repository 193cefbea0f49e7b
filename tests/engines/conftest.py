"""The engines that several files of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import hadoop as engine
from tests.engines import required
from tests.engines.hadoop import Hadoop


@pytest.fixture(scope="session")
def hadoop() -> Iterator[Hadoop]:
    """HDFS and YARN; this process uses them."""
    with pytest.MonkeyPatch.context() as patch, required(engine.running()) as hadoop:
        for name, value in hadoop.environment.items():
            patch.setenv(name, value)
        yield hadoop

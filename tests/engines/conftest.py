"""The engines that several files of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import hadoop as engine
from tests.engines.hadoop import Hadoop
from tests.engines.maven import EngineError


@pytest.fixture(scope="session")
def hadoop() -> Iterator[Hadoop]:
    """HDFS and YARN; this process uses them."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            with engine.running() as hadoop:
                for name, value in hadoop.environment.items():
                    patch.setenv(name, value)
                yield hadoop
        except EngineError as error:
            pytest.exit(str(error), returncode=1)

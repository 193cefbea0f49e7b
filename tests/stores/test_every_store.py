"""The same tests over a disk, S3 and Azure; over HDFS they are in tests/engines/test_hdfs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores.any_store import AnyStore
from tests.stores.s3 import Server


class TestDisk(AnyStore):
    """A folder of this machine."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")


class TestS3(AnyStore):
    """A bucket."""

    @pytest.fixture
    def url(self, s3: Server) -> str:
        del s3
        return "s3://mine/store"


class TestAzure(AnyStore):
    """A container of Azure's emulator."""

    @pytest.fixture
    def url(self, azure: None) -> str:
        return "abfs://mine/store"

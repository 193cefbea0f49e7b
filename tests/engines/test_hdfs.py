"""Folders on a real HDFS: the tests of every store, and what HDFS alone does."""

from __future__ import annotations

import itertools

import pytest

from tests.engines.hadoop import Hadoop
from tests.stores.any_store import AnyStore

pytestmark = [pytest.mark.places("yarn"), pytest.mark.timeout(600)]
_number = itertools.count()


class TestHdfs(AnyStore):
    """A folder of a URL that names the NameNode."""

    @pytest.fixture
    def url(self, hadoop: Hadoop) -> str:
        return f"{hadoop.url}/store-{next(_number)}"

"""Folders on a real HDFS: the tests of every store, and what HDFS alone does."""

from __future__ import annotations

import itertools
from multiprocessing import get_context

import pytest

from horovod_runner.host.folders.opening import open_folder
from tests.engines.hadoop import Hadoop
from tests.stores.any_store import AnyStore

pytestmark = [pytest.mark.places("yarn"), pytest.mark.timeout(600)]
_number = itertools.count()


class TestHdfs(AnyStore):
    """A folder of a URL that names the NameNode."""

    @pytest.fixture
    def url(self, hadoop: Hadoop) -> str:
        return f"{hadoop.url}/store-{next(_number)}"


def test_a_process_that_has_used_hdfs_can_fork(hadoop: Hadoop) -> None:
    assert open_folder(f"{hadoop.url}/before-a-fork").names() == []
    child = get_context("fork").Process(target=int)
    child.start()
    child.join()
    assert child.exitcode == 0

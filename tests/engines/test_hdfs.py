"""Folders on a real HDFS: the tests of every store, and what HDFS alone does."""

from __future__ import annotations

import itertools
import os
import threading

import pytest

from horovod_runner import CheckpointError, HorovodRunner, load_checkpoint, save_checkpoint
from horovod_runner.host.folders.opening import open_folder
from tests.conftest import Ranks
from tests.contract.test_end import Calling
from tests.engines.hadoop import Hadoop
from tests.stores.any_store import AnyStore

pytestmark = [pytest.mark.places("yarn"), pytest.mark.timeout(600)]
_number = itertools.count()


class TestHdfs(AnyStore):
    """A folder of a URL that names the NameNode."""

    @pytest.fixture
    def url(self, hadoop: Hadoop) -> str:
        return f"{hadoop.url}/store-{next(_number)}"

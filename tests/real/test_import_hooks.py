"""The frameworks that are installed have what the import hooks look for."""

from __future__ import annotations

import contextlib
import io

import pytest

from horovod_runner import HorovodRunner
from horovod_runner.run.import_hooks import IMPORT_HOOKS
from tests.conftest import Ranks


@pytest.mark.horovod
@pytest.mark.parametrize("of_keras", [False, True])
def test_no_import_hook_fails(of_keras: bool) -> None:
    if of_keras:
        Ranks.needs_tensorflow()

    def main() -> list[str]:
        import importlib.util

        missing = []
        for hook in IMPORT_HOOKS:
            is_of_keras = "keras" in hook.module or "tensorflow" in hook.module
            if is_of_keras == of_keras and importlib.util.find_spec(hook.framework):
                try:
                    importlib.import_module(hook.modules[0])
                except ModuleNotFoundError:
                    missing += [] if len(hook.modules) > 1 else hook.modules
        return missing

    with contextlib.redirect_stdout(io.StringIO()) as output:
        missing = HorovodRunner(np=-1).run(main)
    assert missing == []
    assert "does not fit" not in output.getvalue()

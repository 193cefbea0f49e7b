"""Azure's blob storage, emulated by Azurite, which `make azurite` installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.programs import ROOT, Program

_ACCOUNT, _KEY = "me", "c2VjcmV0"
#: Its path; None where it is not installed.
PROGRAM = shutil.which("azurite-blob", path=f"{ROOT}/node_modules/.bin:{os.environ['PATH']}")


@contextmanager
def emulator(folder: Path) -> Iterator[str]:
    """Run Azurite; yields its connection string.

    Args:
        folder: for its files.
    """
    assert PROGRAM is not None
    command = [PROGRAM, "--blobPort", "0", "--location", str(folder)]
    command += ["--skipApiVersionCheck", "--disableTelemetry"]
    accounts = {**os.environ, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{_KEY}"}
    with Program(command, env=accounts, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        found = next(each for line in lines if (each := re.search(r"listens on (http\S+)", line)))
        yield (
            f"DefaultEndpointsProtocol=http;AccountName={_ACCOUNT};AccountKey={_KEY};"
            f"BlobEndpoint={found[1]}/{_ACCOUNT};"
        )
        process.terminate()

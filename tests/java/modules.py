"""Adds bytecode to the archives that Spark's Python workers import PySpark from.

Without it each application compiles PySpark anew, which takes a second.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import tempfile
from pathlib import Path
from py_compile import PycInvalidationMode

import pyspark

# No worker of the tests imports these modules, and to compile them would take most of the time.
_UNUSED = re.compile(r"/pyspark/(examples|ml|mllib|pandas|streaming|testing)/|/tests/")


def main() -> None:
    """Replace the archives of the installed PySpark."""
    for archive in Path(pyspark.__file__).parent.glob("python/lib/*.zip"):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as beside:
            shutil.unpack_archive(archive, folder)
            compileall.compile_dir(
                folder,
                quiet=2,
                rx=_UNUSED,
                legacy=True,  # beside the sources, where an archive's are looked for
                stripdir=folder,
                prependdir=str(archive),
                invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
            )
            made = shutil.make_archive(f"{beside}/modules", "zip", folder)
            # Not written in place: the file may be the same as one in an installer's cache.
            os.replace(shutil.copy(made, f"{archive}.new"), archive)


if __name__ == "__main__":
    main()

"""Jars from Maven Central, downloaded once."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.engines import CACHE, EngineError


def provide_jars(name: str, artifacts: Sequence[str], groups: Sequence[str] = ()) -> Path:
    """The folder of artifacts and what they depend on, downloaded once.

    Args:
        name: of the folder, with the version.
        artifacts: "group:artifact:version".
        groups: only jars of groups that begin with these words; empty for all.

    Raises:
        EngineError: Java or Maven is missing, or Maven Central cannot be reached.
    """
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            raise EngineError(f"{name}: {program} is not on PATH (Debian: default-jre, maven).")
    folder = CACHE / name
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as unfinished:
        Path(unfinished, "pom.xml").write_text(_project(artifacts))
        words = [f"-DincludeGroupIds={','.join(groups)}"] if groups else []
        done = subprocess.run(
            ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars", *words],
            cwd=unfinished, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise EngineError(f"{name}: Maven failed: {done.stdout[-500:]}")
        if not folder.exists():  # another process may have been faster
            Path(unfinished, "jars").rename(folder)
    return folder


def _project(artifacts: Sequence[str]) -> str:
    """A Maven project that depends on artifacts."""
    dependencies = "".join(
        "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>"
        "</dependency>".format(*artifact.split(":"))
        for artifact in artifacts
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>tests</groupId><artifactId>jars</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )

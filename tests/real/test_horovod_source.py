"""Tests of our patches on Horovod's release, which comes from pip's package index."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from horovod_runner.tools.horovod_build import build, patching, plan, source, toolchain
from tests import programs


def test_every_patch_applies_to_the_release_and_changes_it(tmp_path: Path) -> None:
    root = source.fetch(tmp_path)
    for patch in patching.read_patches(source.PATCHES):
        files = {root / hunk.path for hunk in patching.hunks(patch)}
        before = {file: file.read_bytes() for file in files}
        patching.apply(patch, root)
        assert {file: file.read_bytes() for file in files} != before, patch.name


def test_the_overlay_replaces_files_of_the_release_and_adds_what_is_included(
    tmp_path: Path,
) -> None:
    root = source.fetch(tmp_path)
    files = [file for file in source.OVERLAY.rglob("*") if file.is_file()]
    there = [root / file.relative_to(source.OVERLAY) for file in files]
    texts = [file.read_text() for file in (*files, *source.PATCHES.glob("*.patch"))]
    named = "".join(line for text in texts for line in text.splitlines() if "/" in line)
    for file in there:
        assert file.is_file() or f"/{file.name}" in named, file.name
    source.apply_patches(root)
    assert [file.read_bytes() for file in there] == [file.read_bytes() for file in files]


def test_a_torch_whose_headers_do_not_fit_costs_the_backend_only(tmp_path: Path) -> None:
    if toolchain.find_mpich() is None:
        pytest.skip("the backend is built with MPI")
    root = source.fetch(tmp_path)
    source.apply_patches(root)
    file = root / "horovod" / "torch" / "process_group.cc"
    file.write_text(file.read_text().replace("c10d/Work.hpp>", "c10d/Gone.hpp>"))
    environment = build.build_environment(plan.make_plan(["torch"], gpu=False), tmp_path)
    target = tmp_path / "horovod" / "torch"

    def run(*command: str) -> str:
        done = programs.run(*command, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    cmake = environment["HOROVOD_CMAKE"]
    run(
        cmake,
        *("-S", str(root), "-B", "build", "-DCMAKE_BUILD_TYPE=Release"),
        f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY_RELEASE={tmp_path}",
        f"-DPYTHON_EXECUTABLE:FILEPATH={sys.executable}",
    )
    built = run(cmake, "--build", "build", "--target", "process_group")
    assert "backend hvd is left out, because it does not compile: " in built
    library = target / f"process_group{sysconfig.get_config_var('EXT_SUFFIX')}"
    assert library.is_file()
    (target / "__init__.py").touch()
    (target.parent / "__init__.py").touch()
    shown = "from horovod.torch import process_group as p; print(vars(p)['missing'], dir(p))"
    said = run(sys.executable, "-c", shown)
    assert "Gone.hpp" in said
    assert "mpi_rank" not in said

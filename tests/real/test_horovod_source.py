"""Tests of our patches on Horovod's release, which comes from pip's package index."""

from __future__ import annotations

from pathlib import Path

from horovod_runner.tools.horovod_build import patching, source


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
    patches = "".join(patch.read_text() for patch in source.PATCHES.glob("*.patch"))
    overlay = "".join(file.read_text() for file in files)
    for file in there:
        added = (
            f'+#include "{file.name}"',
            f'+list(APPEND PYTORCH_SOURCES "${{PROJECT_SOURCE_DIR}}/{file.relative_to(root)}")',
        )
        included = f'#include "../{file.name}"' in overlay
        assert file.is_file() or included or any(each in patches for each in added), file.name
    source.apply_patches(root)
    assert [file.read_bytes() for file in there] == [file.read_bytes() for file in files]

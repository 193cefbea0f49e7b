"""Tests of the patches for Horovod's source: their files, and how they are applied."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from horovod_runner import InstallError
from horovod_runner.tools.horovod_build import patching, source
from horovod_runner.tools.horovod_build.patching import Patch

PATCHES = patching.read_patches(source.PATCHES)
DIFF = """\
--- a/horovod/a.cc
+++ b/horovod/a.cc
@@ -1,3 +1,4 @@
 one
-two
+TWO
+2
 three
@@ -5,2 +6 @@ function
 five
-six
--- a/b.py
+++ b/b.py
@@ -1 +1 @@
--- one
+++ two
"""
A = "one\ntwo\nthree\nfour\nfive\nsix\nseven"  # without a newline at its end


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A source that DIFF fits."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "a.cc").write_bytes(A.encode())
    (tmp_path / "b.py").write_bytes(b"-- one\n\r\n")
    return tmp_path


def test_a_patch_changes_its_lines_only(root: Path) -> None:
    patching.apply(Patch("x.patch", "", DIFF), root)
    assert (root / "horovod" / "a.cc").read_text() == "one\nTWO\n2\nthree\nfour\nfive\nseven"
    assert (root / "b.py").read_bytes() == b"++ two\n\r\n"


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("horovod/a.cc", A.replace("two", "too"), r"hunk 1 of horovod/a\.cc .*line 1 "),
        ("horovod/a.cc", A.replace("three", "three "), "hunk 1 of horovod/a.cc"),
        ("horovod/a.cc", A.replace("six", "6"), r"hunk 2 of horovod/a\.cc .*line 5 "),
        ("horovod/a.cc", f"zero\n{A}", "hunk 1 of horovod/a.cc"),  # moved by one line
        ("horovod/a.cc", "one\ntwo", "hunk 1 of horovod/a.cc"),
        ("b.py", "", "hunk 1 of b.py"),
        ("b.py", None, r"x\.patch .*b\.py, .*exist"),
    ],
)
def test_a_patch_that_does_not_fit_names_file_and_hunk(
    root: Path, path: str, text: str | None, message: str
) -> None:
    (root / path).unlink()
    if text is not None:
        (root / path).write_text(text)
    with pytest.raises(InstallError, match=message) as caught:
        patching.apply(Patch("x.patch", "", DIFF), root)
    assert "x.patch" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("--- a/horovod/a.cc\n+++ b/horovod/a.cc\n", "", 3),
        ("+++ b/b.py\n", "+++ b/c.py\n", 14),
        ("@@ -1,3 +1,4 @@", "@@ 1,3 @@", 5),
        ("@@ -1,3 +1,4 @@", "@@ -1,4 +1,4 @@", 11),
        ("@@ -1,3 +1,4 @@", "@@ -1,2 +1,4 @@", 11),
        (" one\n", "one\n", 6),
        ("+++ two\n", "", 18),
        ("--- one\n+++ two\n", "", 17),
        ("@@ -1 +1 @@\n--- one\n", "@@ -1,0 +1 @@\n", 18),  # an insertion without context
        ("+++ two\n", "+++ two\n\\ No newline at end of file\n", 19),
        (DIFF, "", 3),
    ],
)
def test_a_damaged_patch_names_the_line(root: Path, old: str, new: str, line: int) -> None:
    assert old in DIFF
    damaged = Patch("x.patch", "Subject\n\n", DIFF.replace(old, new, 1))
    with pytest.raises(InstallError, match=rf"x\.patch .*damaged.* line {line} "):
        patching.apply(damaged, root)


def test_a_folder_without_patches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match=rf"^{tmp_path} .*patches.*reinstall"):
        patching.read_patches(tmp_path)


def test_patches_are_numbered_from_one() -> None:
    assert [int(patch.name[:2]) for patch in PATCHES] == list(range(1, len(PATCHES) + 1))


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_says_why_and_every_hunk_changes_lines(patch: Patch) -> None:
    paragraph = r".+\n(?:  .+\n)*"
    header = rf".+\n\nWhy: {paragraph}Seen: {paragraph}Upstream: {paragraph}"
    assert re.fullmatch(header, patch.header)
    hunks = patching.hunks(patch)
    assert hunks
    assert all(hunk.old != hunk.new for hunk in hunks)

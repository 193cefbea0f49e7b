"""Archives of folders: only what stays inside is unpacked, with any version of Python."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from horovod_runner.common.files import unpack


@pytest.mark.parametrize("has_filter", [True, False])
@pytest.mark.parametrize("hostile", [None, "path", "link"])
def test_nothing_gets_out_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hostile: str | None, has_filter: bool
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("1 2 3")
    archive, folder = tmp_path / "archive.tar", tmp_path / "there"
    with tarfile.open(archive, "x") as tar:
        tar.add(tmp_path / "model", "model")
        if hostile == "path":
            tar.add(tmp_path / "model" / "weights", "../outside")
        elif hostile == "link":
            link = tarfile.TarInfo("model/passwords")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
    if not has_filter:  # Python before 3.11.4
        monkeypatch.delattr(tarfile, "data_filter")
        plain = staticmethod(lambda member, _folder: member)
        monkeypatch.setattr(tarfile.TarFile, "extraction_filter", plain, raising=False)
    folder.mkdir()
    if hostile is None:
        unpack(archive, folder)
        assert (folder / "model" / "weights").read_text() == "1 2 3"
        return
    with pytest.raises((tarfile.FilterError, ValueError)):
        unpack(archive, folder)
    assert not (tmp_path / "outside").exists()
    assert not (folder / "model" / "passwords").exists()

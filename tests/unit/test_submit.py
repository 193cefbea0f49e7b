"""What `horovod-runner run` makes of its command line, before anything is launched."""

from __future__ import annotations

import sys
import traceback
import types
from pathlib import Path

import pytest

from horovod_runner.tools.commands import cli
from horovod_runner.tools.commands.run import UsageError, find_main
from horovod_runner.worker.script import Imported, Script


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(
        "from os import path as where\n\ndef main():\n    return 3\n"
    )
    (tmp_path / "broken.py").write_text("x = 1\ndef main(:\n")
    (tmp_path / "coded.py").write_text("# coding: nothing\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "job.py").write_text("async_main = main = print\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_file_a_function_of_it_and_one_of_a_module_are_found(folder: Path) -> None:
    whole = find_main("train.py", None)
    assert isinstance(whole, Script)
    assert whole.__qualname__ == "train.py"
    for found in (find_main("train.py:main", None), find_main("train.py", "main")):
        assert isinstance(found, Script)
        assert found() == 3
    assert isinstance(find_main("package.job:main", None), Imported)
    assert isinstance(find_main("package.job", "main"), Imported)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("by_mark", b"\xef\xbb\xbfname = '\xc3\xa9'\n"),
        ("by_line", b"# coding: latin-1\nname = '\xe9'\n"),
    ],
)
def test_a_file_may_name_its_encoding(folder: Path, module: str, source: bytes) -> None:
    (folder / f"{module}.py").write_bytes(source + b"def main():\n    return name\n")
    assert isinstance(find_main(f"{module}:main", None), Imported)
    assert find_main(f"{module}.py:main", None)() == "\u00e9"


@pytest.mark.parametrize(
    ("target", "function", "told"),
    [
        ("nowhere.py", None, r"^nowhere\.py .*No such file"),
        ("train.py:fit", None, "^train.py .* fit$"),
        ("train.py:main", "main", "^train.py:main .*--function main$"),
        ("broken.py", None, "broken.py, line 2: "),
        ("coded.py", None, "^coded.py cannot be read: unknown encoding.*nothing"),
        ("coded:main", None, "^coded cannot be read: unknown encoding.*nothing"),
        ("package.job", None, "^package.job .*package.module:main"),
        ("package.job:fit", None, "^package.job .* fit$"),
        ("package.nothing:main", None, " package.nothing .*installed"),
        ("nothing.at.all:main", None, "^nothing.at.all .*'nothing'$"),
    ],
)
def test_what_is_not_there_is_told(
    folder: Path, target: str, function: str | None, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        find_main(target, function)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.py"], "nowhere.py cannot be read"),
        (["train.py", "--np", "0"], "--np cannot be 0: above 0 ranks run"),
        (["train.py", "--master", "local[2]"], "--master requires --np"),
        (["train.py", "--np", "-1", "--resume"], "--resume requires --checkpoint-dir"),
        (["train.py", "--np", "-2", "--master", "local[2]"], "--np -2 starts processes on this"),
        (["train.py", "--np", "2", "--conf", "a=b"], "--conf requires --master"),
        (["train.py", "--np", "-1", "--ship-modules", "nowhere"], "--ship-modules: No module"),
        (["train.py", "--np", "-1", "--env", "A"], "'A' is not NAME=VALUE"),
        (["train.py", "--gpu", "--cpu"], "not allowed with argument"),
        (["--all"], "arguments are required: TARGET"),
    ],
)
def test_wrong_usage_has_status_2_and_says_what_is_wrong(
    folder: Path,
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["horovod-runner"])
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    try:
        status = cli.main(["run", *arguments])
    except SystemExit as error:  # argparse's own
        status = int(error.code or 0)
    assert status == 2
    assert told in capsys.readouterr().err


def test_a_script_runs_as_main_and_its_traceback_has_its_lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "fails.py"
    source = "if __name__ == '__main__':\n    raise ValueError(__file__)  # here\n"
    path.write_text(source)
    script = find_main(str(path), None)
    path.unlink()  # as on another host
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    with pytest.raises(ValueError, match=r"fails\.py") as caught:
        script()
    assert "# here" in "".join(traceback.format_exception(caught.value))


def test_a_script_has_no_future_import_that_it_does_not_make(folder: Path) -> None:
    (folder / "typed.py").write_text("def main(x: int = 1): return main.__annotations__['x']\n")
    script = find_main("typed.py:main", None)
    assert isinstance(script, Script)
    assert script() is int

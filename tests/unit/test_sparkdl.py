"""horovod_runner.sparkdl: its names exist after install(), and never hide a real sparkdl."""

from __future__ import annotations

from pathlib import Path

from tests import programs


def run(code: str, folder: Path) -> str:
    """Return what the code prints in a new process."""
    env = {"PYTHONPATH": f"{folder}:{programs.ROOT}", "PATH": ""}
    done = programs.run_python(code, env=env)
    return done.stdout + done.stderr


def test_without_install_there_is_no_sparkdl(tmp_path: Path) -> None:
    assert "No module named 'sparkdl'" in run("import horovod_runner, sparkdl", tmp_path)


def test_install_makes_the_names_of_sparkdl_importable(tmp_path: Path) -> None:
    code = """
        import horovod_runner.sparkdl
        horovod_runner.sparkdl.install()
        horovod_runner.sparkdl.install()
        from sparkdl import HorovodRunner
        from sparkdl.horovod import log_to_driver
        import sparkdl.horovod.tensorflow.keras as names
        print(HorovodRunner is horovod_runner.HorovodRunner)
        print(log_to_driver is horovod_runner.log_to_driver)
        print(names.__name__)
        try:
            from sparkdl import XGBoostRegressor
        except ImportError as error:
            print(error)
        try:
            import sparkdl.xgboost
        except ImportError as error:
            print(error)
    """
    assert run(code, tmp_path).splitlines() == [
        "True",
        "True",
        "sparkdl.horovod.tensorflow.keras",
        "cannot import name 'XGBoostRegressor' from 'sparkdl' (unknown location)",
        "No module named 'sparkdl.xgboost'",
    ]


def test_a_real_sparkdl_is_never_hidden(tmp_path: Path) -> None:
    (tmp_path / "sparkdl").mkdir()
    (tmp_path / "sparkdl" / "__init__.py").write_text("real = True\n")
    code = """
        from horovod_runner.integrations import sparkdl as names
        names.install_where_missing()
        import sparkdl
        print(sparkdl.real, names.is_installed())
        try:
            names.install()
        except ImportError as error:
            print(error)
    """
    first, second = run(code, tmp_path).splitlines()
    assert first == "True False"
    assert second.startswith(f"a real sparkdl is installed ({tmp_path}/sparkdl")

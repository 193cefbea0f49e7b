"""Drivers in YARN's application master: `spark-submit --deploy-mode cluster --archives`."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

import psutil
import pytest

from horovod_runner import load_run
from horovod_runner.checkpoints.checkpoint import find_complete
from horovod_runner.host.folders.opening import open_folder
from tests.engines.hadoop import ROOT, Hadoop
from tests.engines.test_yarn import settings
from tests.programs import Program

pytestmark = [pytest.mark.places("yarn"), pytest.mark.timeout(900)]
_PYTHON = "./environment/bin/python"
_FOLDER = "hdfs:///cluster-mode"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An environment as venv-pack makes it, whose packages are those of this one."""
    made = tmp_path / "made"
    base = f"{sys.base_prefix}/bin/python3"
    subprocess.run([base, "-m", "venv", "--without-pip", "--symlinks", str(made)], check=True)
    names = {"base": str(made), "platbase": str(made)}
    packages = [path for path in sys.path if path.endswith("site-packages")]
    Path(sysconfig.get_path("purelib", vars=names), "here.pth").write_text(
        "\n".join([str(ROOT), *packages])
    )
    packed = tmp_path / "environment.tar.gz"
    with tarfile.open(packed, "w:gz") as file:
        file.add(made, ".")
    return packed


def submit(hadoop: Hadoop, archive: Path) -> list[str]:
    """The command of a user."""
    conf = {
        **settings(hadoop),
        "spark.submit.deployMode": "cluster",
        "spark.yarn.appMasterEnv.PYSPARK_PYTHON": _PYTHON,
        "spark.executorEnv.PYSPARK_PYTHON": _PYTHON,
        "spark.yarn.maxAppAttempts": "2",
        "spark.driver.memory": "512m",
        "spark.driver.memoryOverhead": "2g",
    }
    for name in ("spark.pyspark.python", "spark.executorEnv.PYTHONPATH", "spark.driver.host"):
        del conf[name]
    words = [f"{hadoop.environment['SPARK_HOME']}/bin/spark-submit"]
    for name, value in conf.items():
        words += ["--conf", f"{name}={value}"]
    program = Path(__file__).with_name("resumed_by_yarn.py")
    return [*words, "--archives", f"{archive}#environment", str(program), _FOLDER]


def test_the_second_attempt_of_the_application_resumes_from_hdfs(
    hadoop: Hadoop, archive: Path
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYSPARK_PYTHON"}
    folder = open_folder(_FOLDER)
    with Program(submit(hadoop, archive), env=environment) as submitted:
        while not find_complete(folder):
            assert submitted.poll() is None
            time.sleep(0.5)
        (master,) = application_masters()
        master.kill()
        assert submitted.wait() == 0
    names = folder.names()
    assert "page.html" in names
    (record,) = (name for name in names if name.endswith(".run"))
    run = load_run(f"{_FOLDER}/{record}")
    assert run.status == "finished"
    assert "resumed from step 3" in run.result_text
    assert "/environment/bin/python" in run.result_text


def application_masters() -> list[psutil.Process]:
    """The Java processes of drivers in cluster mode."""
    found = []
    for each in psutil.process_iter(["name", "cmdline"]):
        with contextlib.suppress(psutil.Error):
            words = each.info["cmdline"] or []
            is_master = "org.apache.spark.deploy.yarn.ApplicationMaster" in words
            if each.info["name"] == "java" and is_master:
                found.append(each)
    return found

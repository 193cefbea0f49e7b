"""What the images' entry point runs, with programs that print their arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.programs import ROOT, run, script


def test_gpus_are_listed_as_spark_reads_them(tmp_path: Path) -> None:
    script(tmp_path / "nvidia-smi", "printf '0\\n1\\n'")
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run(ROOT / "docker" / "gpu_addresses.sh", env=path, check=True)
    assert json.loads(done.stdout) == {"name": "gpu", "addresses": ["0", "1"]}


_EXECUTOR = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver:7078",
    "SPARK_JAVA_OPT_0": "-Dspark.app.name=two words",
    "SPARK_JAVA_OPT_1": "-Xss4m",
    "SPARK_EXECUTOR_MEMORY": "1g",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "4",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.3",
    "SPARK_EXECUTOR_POD_NAME": "digits-exec-3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
}


def _enter(folder: Path, *words: str, **variables: str) -> list[str]:
    """The arguments with which the entry point runs a program."""
    for name in ("java", "spark-submit", "other"):
        script(folder / "bin" / name, 'printf \'%s\\n\' "$0" "$@"')
    home = {"JAVA_HOME": str(folder), "SPARK_HOME": str(folder), "HOME": str(folder)}
    path = f"{folder}/bin:{os.environ['PATH']}"
    environment = {**home, "PATH": path, **variables}
    done = run(ROOT / "docker" / "entrypoint.sh", *words, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_word_executor_starts_an_executors_java_with_its_options(tmp_path: Path) -> None:
    said = _enter(tmp_path, "executor", **_EXECUTOR)
    assert said[:5] == [
        f"{tmp_path}/bin/java",
        "-Dspark.app.name=two words",
        "-Xss4m",
        "-Xms1g",
        "-Xmx1g",
    ]
    assert said[5:8] == [
        "-cp",
        f"{tmp_path}/conf:{tmp_path}/jars/*",
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
    ]
    assert dict(zip(said[8::2], said[9::2], strict=True)) == {
        "--driver-url": "spark://CoarseGrainedScheduler@driver:7078",
        "--executor-id": "3",
        "--cores": "4",
        "--app-id": "spark-1",
        "--hostname": "10.0.0.3",
        "--podName": "digits-exec-3",
        "--resourceProfileId": "0",
    }


def test_the_word_driver_submits_in_client_mode_at_the_pods_address(tmp_path: Path) -> None:
    said = _enter(tmp_path, "driver", "train.py", "--np=2", SPARK_DRIVER_BIND_ADDRESS="10.0.0.2")
    assert said == [
        f"{tmp_path}/bin/spark-submit",
        "--deploy-mode",
        "client",
        "--conf",
        "spark.driver.bindAddress=10.0.0.2",
        "--conf",
        "spark.executorEnv.SPARK_DRIVER_POD_IP=10.0.0.2",
        "train.py",
        "--np=2",
    ]


def test_other_words_are_a_command(tmp_path: Path) -> None:
    assert _enter(tmp_path, "other", "word") == [f"{tmp_path}/bin/other", "word"]

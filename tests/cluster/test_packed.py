"""spark-submit to a cluster whose executors have neither Horovod nor this package.

The job brings what they lack: an environment packed by venv-pack, and a module of the user's.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse

import pyspark
import pytest

from tests.cluster.standalone import Place, StandaloneCluster
from tests.programs import ROOT, run

# Without an import of torch, which takes each process of the tests seconds.
_TORCH = runpy.run_path(str(Path(find_spec("torch").origin or "").with_name("version.py")))
pytestmark = [
    pytest.mark.spark,
    pytest.mark.horovod,
    pytest.mark.skipif(bool(_TORCH["cuda"]), reason="torch for GPUs takes minutes to pack"),
]
NEEDED = ["torch", "numpy", "pandas", "pyarrow", "cloudpickle", "msgspec", "psutil", "pyzmq"]
NEEDED += ["tqdm", "packaging", "PyYAML", "venv-pack"]
OURS = {"horovod", "horovod_runner", "horovod-runner"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment for the executors, made as docs/where/standalone.md says."""
    folder = tmp_path_factory.mktemp("packed")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
    pip += ["--python", str(environment / "bin" / "python")]
    # The wheel that `horovod-runner install` has built for this environment.
    built = json.loads(importlib.metadata.distribution("horovod").read_text("direct_url.json"))
    wheel = unquote(urlparse(built["url"]).path)
    here = {package.name: package.version for package in importlib.metadata.distributions()}
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={here[name]}\n" for name in here if name not in OURS))
    subprocess.run([*pip, "--constraint", str(constraints), *NEEDED], check=True)
    subprocess.run([*pip, "--no-deps", wheel, str(ROOT)], check=True)
    # Not .tar: Spark unpacks it with Java, which refuses the link to the interpreter.
    archive = folder / "environment.tar.gz"
    pack = [str(environment / "bin" / "venv-pack"), "--prefix", str(environment), "--quiet"]
    pack += ["--compress-level", "1"]
    exclude = ["--exclude", "*/torch/include/*", "--exclude", "*/tests/*"]
    subprocess.run([*pack, *exclude, "--output", str(archive)], check=True)
    return archive


def test_archives_and_py_files_bring_what_executors_lack(packed: Path, tmp_path: Path) -> None:
    helper = tmp_path / "helper.py"
    helper.write_text("def scale(x):\n    return 3 * x\n")
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from pyspark.sql import SparkSession
        from horovod_runner import ClusterConfig, HorovodRunner
        from helper import scale

        def main(x):
            import horovod.torch as hvd
            import torch
            hvd.init()
            total = hvd.allreduce(torch.tensor([x]), op=hvd.Sum)
            places = hvd.allgather_object((sys.prefix, hvd.__file__))
            return scale(total.item()), places

        spark = SparkSession.builder.getOrCreate()
        cluster = ClusterConfig(spark=spark)
        runner = HorovodRunner(np=2, gpus_per_rank=0, cluster_config=cluster)
        total, places = runner.run(main, x=1.0)
        for prefix, horovod in places:
            assert prefix.endswith("/environment"), prefix
            assert horovod.startswith(prefix), horovod
        print("total", total)
        spark.stop()
        """)
    )
    with StandaloneCluster(tmp_path, [Place()]) as cluster:
        done = run(
            Path(pyspark.__file__).parent / "bin" / "spark-submit",
            *("--master", cluster.master, "--executor-memory", "512m"),
            *("--py-files", helper, "--archives", f"{packed}#environment"),
            script,
            env={
                **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                "PYSPARK_DRIVER_PYTHON": sys.executable,
                "PYSPARK_PYTHON": "./environment/bin/python",
            },
        )
    assert "total 6.0" in done.stdout, done.stdout + done.stderr

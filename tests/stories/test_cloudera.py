"""Cloudera's image classifier: on CPUs, on GPUs by one argument, and its workers spun down."""

from __future__ import annotations

import io
import json
import re
import runpy
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.standalone import StandaloneCluster
from tests.preload import COMMAND, WARM
from tests.programs import ROOT, Program, run

pytestmark = [pytest.mark.spark, pytest.mark.horovod, pytest.mark.usefixtures("nothing_left")]
SCRIPT = str(ROOT / "examples" / "image_classifier.py")


def classify(*arguments: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run(*WARM, SCRIPT, *arguments)
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done


def accuracy(output: str) -> float:
    found = re.search(r"accuracy on \d+ held-out images: (\S+)%", output)
    assert found, output
    return float(found[1])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real images in a folder for each class: scanned digits of two kinds."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("photos")
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        if label in (0, 1):
            place = folder / ("zero", "one")[label]
            place.mkdir(exist_ok=True)
            image = Image.fromarray((pixels * 15.9).astype("uint8")).resize((40, 30))
            image.save(place / f"{number}.{'jpg' if number % 2 else 'png'}")
    return folder


def test_it_learns_on_cpus() -> None:
    done = classify("--workers", "2", "--epochs", "3", "--size", "16")
    assert accuracy(done.stdout) > 85
    assert done.stdout.count("on 2 CPU worker(s)") == 3


# Slow: starts a cluster of two nodes, and spark-submit twice.
def test_a_gpu_for_each_worker_of_two_nodes_by_one_argument(photos: Path, tmp_path: Path) -> None:
    # Spark schedules GPUs whose names alone are real; the training itself then runs on CPUs.
    with StandaloneCluster(tmp_path) as cluster:
        where = ["--master", cluster.master, "--nodes", "2", "--workers", "4", "--gpu"]
        what = ["--images", str(photos), "--size", "16", "--batch-size", "8", "--epochs", "4"]
        done = classify(*where, *what)
    table = re.findall(r"HorovodRunner: +(\d)  \S+ +\d+ +(\d)$", done.stderr, re.MULTILINE)
    assert [rank for rank, _ in table] == ["0", "1", "2", "3"]
    assert sorted(gpu for _, gpu in table) == ["0", "1", "2", "3"]
    assert accuracy(done.stdout) > 90


def test_gpus_that_are_not_there_are_told() -> None:
    done = classify("--gpu", exit_code=1)
    assert "has 0 GPUs, and 2 ranks there need 2" in done.stderr


def test_a_folder_without_images_is_told(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    done = classify("--images", str(tmp_path), exit_code=1)
    assert "a folder for each class is expected" in done.stderr


def test_cifar_10_is_read_from_its_binary_files(tmp_path: Path) -> None:
    import numpy as np
    from PIL import Image

    # As the page of the data set describes it: a label, then 1024 bytes of each colour.
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), np.uint8)
    labels = np.array([3, 0, 9, 3, 1, 7], np.uint8)
    records = np.concatenate([labels[:, None], pixels.reshape(6, -1)], axis=1)
    records[:4].tofile(tmp_path / "data_batch_1.bin")
    records[4:].tofile(tmp_path / "test_batch.bin")
    load = runpy.run_path(SCRIPT)["load"]
    table, names = load(str(tmp_path))
    assert table["label"].to_pylist() == labels.tolist()
    assert (names[3], len(names)) == ("cat", 10)
    for encoded, expected in zip(table["image"].to_pylist(), pixels, strict=True):
        image = np.asarray(Image.open(io.BytesIO(encoded)))
        assert (image == expected.transpose(1, 2, 0)).all()
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "data_batch_1").touch()
    with pytest.raises(SystemExit, match=r"/pickled: .*cifar-10-binary\.tar\.gz"):
        load(str(tmp_path / "pickled"))


@pytest.mark.usefixtures("own_records")
def test_ctrl_c_spins_all_workers_down() -> None:
    with Program(
        [*WARM, SCRIPT, "--epochs", "1000", "--size", "16"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "epoch  1 on 2 CPU" in line:
                break
        process.send_signal(signal.SIGINT)
        assert "interrupted: all workers have ended" in process.stdout.read()
    assert process.returncode == 130
    listed = json.loads(run(COMMAND, "ps", "--json", check=True).stdout)
    assert [each for each in listed if each["entry"] is not None] == []

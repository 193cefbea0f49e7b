"""Keeps a cluster up by hand."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.engines import EngineError
from tests.engines.kubernetes.cluster import Cluster


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="k8s-") as folder, Cluster(Path(folder)) as cluster:
        print(f"export KUBECONFIG={cluster.kubeconfig}")
        print(f"spark-submit --master k8s://{cluster.url}; logs in {folder}/log; Ctrl-C ends it")
        try:
            sys.stdin.read()
        except KeyboardInterrupt:
            print("ending the cluster")


if __name__ == "__main__":
    try:
        main()
    except EngineError as missing:
        sys.exit(str(missing))

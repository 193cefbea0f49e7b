"""Writes images without an engine: archives as `docker save` makes them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


def write_image(
    path: Path,
    tag: str,
    root: Path,
    entrypoint: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Write an image of one layer.

    Args:
        path: the archive.
        tag: the image's name, as pods name it.
        root: the folder whose content becomes the image's root.
        entrypoint: what its containers run.
        environment: the variables of its containers.

    Returns:
        The archive.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for found in sorted(root.iterdir()):
            tar.add(found, found.name, filter=_of_root)
    content = layer.getvalue()
    variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", **(environment or {})}
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Entrypoint": [*entrypoint],
            "Env": [f"{name}={value}" for name, value in variables.items()],
            "WorkingDir": "/tmp",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
    }
    described = [{"Config": "config.json", "RepoTags": [tag], "Layers": ["layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        for name, data in _files(config, described, content):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def _files(config: object, described: object, layer: bytes) -> Iterator[tuple[str, bytes]]:
    yield "config.json", json.dumps(config).encode()
    yield "layer.tar", layer
    yield "manifest.json", json.dumps(described).encode()


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member

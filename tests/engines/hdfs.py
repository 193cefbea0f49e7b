"""HDFS alone, in the two forms that large clusters have: two NameNodes, and Kerberos.

    python -m tests.engines.hdfs ha|kerberos

starts one of them by hand and prints how to use it. The KDC is Debian's krb5-kdc.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests import programs
from tests.engines import EngineError
from tests.engines.hadoop import (
    HDFS,
    HDFS_SITE,
    HOST,
    JAVA,
    ROOT,
    Daemon,
    hadoop_jars,
    keep_up,
    spread,
    write_conf,
)
from tests.programs import free_ports

_NAME_NODE = f"{HDFS}.namenode.NameNode"
_NAME_NODE_SERVES, _DATA_NODE_SERVES = "NameNode RPC up at", "Successfully sent block"
_SERVICE = "cluster"
_PATH = os.pathsep.join((os.environ["PATH"], "/usr/sbin", "/sbin"))
_KDC_PACKAGES = ("krb5-kdc", "krb5-admin-server", "krb5-user")
_REALM = "TEST"
_KRB5 = f"""\
[libdefaults]
default_realm = {_REALM}
dns_lookup_kdc = false
dns_canonicalize_hostname = false
rdns = false
udp_preference_limit = 1
[realms]
{_REALM} = {{
  kdc = {HOST}:PORT
}}
"""
_KDC = f"""\
[kdcdefaults]
kdc_listen = ""
kdc_tcp_listen = {HOST}:PORT
[realms]
{_REALM} = {{
  database_name = FOLDER/principals
  key_stash_file = FOLDER/stash
}}
[logging]
kdc = STDERR
"""


class Cluster:
    """Daemons of HDFS in a folder.

    Attributes:
        conf: the folder that HADOOP_CONF_DIR names.
        url: of HDFS.
        daemons: by name.
        variables: of all processes, in addition to this process's.
    """

    def __init__(self, folder: Path, url: str, sites: Mapping[str, Mapping[str, str]]) -> None:
        self.conf = folder / "conf"
        self.url = url
        self.daemons: dict[str, Daemon] = {}
        self.variables: dict[str, str] = {}
        self.folder = folder
        self._java = [*JAVA, "-cp", f"{self.conf}:{hadoop_jars()}/*"]
        core = {"fs.defaultFS": url, "hadoop.tmp.dir": str(folder / "data")}
        write_conf(
            self.conf,
            {
                "core-site": {**core, **sites.get("core-site", {})},
                "hdfs-site": {**HDFS_SITE, **sites["hdfs-site"]},
            },
        )

    def start(self, name: str, command: Sequence[str], ready: str) -> None:
        """Start a daemon; does not wait for it."""
        self.daemons[name] = Daemon(name, command, ready, self.folder / f"{name}.log")

    def java(self, class_: str, *words: str) -> list[str]:
        """The command for one of Hadoop's classes."""
        options = [f"-Djava.security.krb5.conf={path}"] if (path := self._krb5()) else []
        return [*self._java, *options, class_, *words]

    def _krb5(self) -> str:
        return self.variables.get("KRB5_CONFIG", "")

    def command(self, class_: str, *words: str) -> str:
        """Run one of Hadoop's commands by its class, as `hdfs` does; returns its output.

        Raises:
            EngineError: it failed.
        """
        return run(self.java(class_, *words), self.variables)

    def close(self) -> None:
        """End all daemons."""
        for daemon in reversed(self.daemons.values()):
            daemon.close()


def run(command: Sequence[str], variables: Mapping[str, str]) -> str:
    """Run a command; returns its output. Raises EngineError where it fails."""
    done = programs.run(*command, variables={"PATH": _PATH, **variables})
    if done.returncode:
        raise EngineError(f"{command[-2:]}: {done.stdout[-300:]}{done.stderr[-700:]}")
    return done.stdout


@contextmanager
def two_name_nodes() -> Iterator[Cluster]:
    """HDFS as a name service: nn1 is active, nn2 stands by; see :func:`fail_over`."""
    with _folder() as folder, ExitStack() as stack:
        ports = iter(free_ports(4))
        service = f"dfs.ha.namenodes.{_SERVICE}"
        settings = {"dfs.nameservices": _SERVICE, service: "nn1,nn2"}
        for name in ("nn1", "nn2"):
            ending = f"{_SERVICE}.{name}"
            settings[f"dfs.namenode.rpc-address.{ending}"] = f"{HOST}:{next(ports)}"
            settings[f"dfs.namenode.http-address.{ending}"] = f"{HOST}:{next(ports)}"
            settings[f"dfs.namenode.name.dir.{ending}"] = str(folder / name)
        settings |= {
            "dfs.namenode.shared.edits.dir": f"file://{folder}/edits",
            f"dfs.client.failover.proxy.provider.{_SERVICE}": (
                f"{HDFS}.namenode.ha.ConfiguredFailoverProxyProvider"
            ),
            "dfs.ha.fencing.methods": "shell(/bin/true)",
        }
        cluster = Cluster(folder, f"hdfs://{_SERVICE}", {"hdfs-site": settings})
        stack.callback(cluster.close)
        cluster.command(_NAME_NODE, *_id("nn1"), "-format", "-force")
        shutil.copytree(folder / "nn1", folder / "nn2")
        for name in ("nn1", "nn2"):
            cluster.start(name, cluster.java(_NAME_NODE, *_id(name)), _NAME_NODE_SERVES)
        for daemon in cluster.daemons.values():
            daemon.await_start()
        _activate(cluster, "nn1")
        _start_data_node(cluster)
        yield cluster


def fail_over(cluster: Cluster) -> None:
    """End the NameNode nn1, and make nn2 the active one."""
    cluster.daemons.pop("nn1").close()
    _activate(cluster, "nn2")


def _activate(cluster: Cluster, name: str) -> None:
    # It would look first whether the other one, which may have ended, is active.
    words = ("-transitionToActive", "--forceactive")
    cluster.command("org.apache.hadoop.hdfs.tools.DFSHAAdmin", *words, name)


def _id(name: str) -> list[str]:
    return spread([f"dfs.ha.namenode.id={name}"])


def _start_data_node(cluster: Cluster) -> None:
    cluster.start("datanode", cluster.java(f"{HDFS}.datanode.DataNode"), _DATA_NODE_SERVES)
    cluster.daemons["datanode"].await_start()


@contextmanager
def with_kerberos() -> Iterator[Cluster]:
    """HDFS that knows its users by Kerberos alone, and encrypts all that it sends.

    The user `me` has a ticket in the cache that KRB5CCNAME names in the cluster's variables.

    Raises:
        EngineError: krb5kdc is missing and apt could not install it, or it does not run here.
    """
    subprocess.run([ROOT / ".ci" / "debian-packages", *_KDC_PACKAGES], check=False)
    if shutil.which("krb5kdc", path=_PATH) is None:
        raise EngineError(f"Kerberos: krb5kdc is missing (Debian: {' '.join(_KDC_PACKAGES)}).")
    with _folder() as folder, ExitStack() as stack:
        keys = str(folder / "keytab")
        rpc, http, port = free_ports(3)
        server = f"hdfs/localhost@{_REALM}"
        secure = {
            "dfs.namenode.http-address": f"{HOST}:{http}",
            "dfs.namenode.kerberos.principal": server,
            "dfs.namenode.keytab.file": keys,
            "dfs.datanode.kerberos.principal": server,
            "dfs.datanode.keytab.file": keys,
            "dfs.web.authentication.kerberos.principal": f"HTTP/localhost@{_REALM}",
            "dfs.web.authentication.kerberos.keytab": keys,
            "dfs.block.access.token.enable": "true",
            "dfs.data.transfer.protection": "privacy",
            "ignore.secure.ports.for.testing": "true",
        }
        core = {
            "hadoop.security.authentication": "kerberos",
            "hadoop.security.authorization": "true",
            "hadoop.rpc.protection": "privacy",
        }
        sites = {"core-site": core, "hdfs-site": secure}
        cluster = Cluster(folder, f"hdfs://localhost:{rpc}", sites)
        stack.callback(cluster.close)
        for name, text in (("krb5.conf", _KRB5), ("kdc.conf", _KDC)):
            filled = text.replace("PORT", str(port)).replace("FOLDER", str(folder))
            (folder / name).write_text(filled)
        cluster.variables = {
            "KRB5_CONFIG": str(folder / "krb5.conf"),
            "KRB5_KDC_PROFILE": str(folder / "kdc.conf"),
            "KRB5CCNAME": f"FILE:{folder}/ticket",
        }
        _start_kdc(cluster)
        for principal in (server, f"HTTP/localhost@{_REALM}", f"me@{_REALM}"):
            for query in (f"addprinc -randkey {principal}", f"ktadd -k {keys} {principal}"):
                run(["kadmin.local", "-q", query], cluster.variables)
        run(["kinit", "-k", "-t", keys, "me"], cluster.variables)
        cluster.command(_NAME_NODE, "-format", "-force")
        cluster.start("namenode", cluster.java(_NAME_NODE), _NAME_NODE_SERVES)
        cluster.daemons["namenode"].await_start()
        _start_data_node(cluster)
        yield cluster


def _start_kdc(cluster: Cluster) -> None:
    run(["kdb5_util", "create", "-s", "-r", _REALM, "-P", "secret"], cluster.variables)
    variables = {"PATH": _PATH, **cluster.variables}
    settings = [f"{name}={value}" for name, value in variables.items()]
    cluster.start("kdc", ["env", *settings, "krb5kdc", "-n"], "commencing operation")
    cluster.daemons["kdc"].await_start()


def fetch_token(cluster: Cluster) -> Path:
    """A file with a delegation token of the user `me`, for HADOOP_TOKEN_FILE_LOCATION."""
    path = cluster.folder / "token"
    fetcher = "org.apache.hadoop.hdfs.tools.DelegationTokenFetcher"
    cluster.command(fetcher, "--renewer", "me", str(path))
    return path


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hdfs-") as folder:
        yield Path(folder)


def _used(cluster: Cluster) -> Iterator[str]:
    yield f"# HDFS is {cluster.url}. Logs are in {cluster.folder}."
    for name, value in {**cluster.variables, "HADOOP_CONF_DIR": str(cluster.conf)}.items():
        yield f"export {name}={value}"


if __name__ == "__main__":
    keep_up({"ha": two_name_nodes, "kerberos": with_kerberos}[sys.argv[1]](), _used)

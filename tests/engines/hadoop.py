"""HDFS and YARN on this machine: NameNode, DataNode, ResourceManager and two NodeManagers.

    python -m tests.engines.hadoop

starts them by hand and prints how to use them. They end with Ctrl-C, or with the process that holds
them; so do all containers. Hadoop's jars come from Maven Central once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil

from tests.engines import EngineError
from tests.engines.maven import provide_jars
from tests.engines.versions import HADOOP
from tests.programs import ROOT, free_ports, run

HOST = "127.0.0.1"
_START_SECONDS = 180
_NODE_MB = 8192
_MODULES = (
    "hadoop-common",
    "hadoop-hdfs",
    "hadoop-hdfs-client",
    "hadoop-yarn-server-resourcemanager",
    "hadoop-yarn-server-nodemanager",
    "hadoop-yarn-server-timelineservice",  # without it the ResourceManager does not start
)
JAVA = (
    *("java", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    "--add-opens=java.base/java.lang=ALL-UNNAMED",
)
HDFS, _YARN = "org.apache.hadoop.hdfs.server", "org.apache.hadoop.yarn.server"
_LOGGING = """\
log4j.rootLogger=INFO,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{HH:mm:ss} %p %c{2}: %m%n
"""


class Daemon:
    """A daemon of Hadoop's, a process of its own; :meth:`close` also ends what it has started.

    Args:
        name: of its log.
        command: what starts it.
        ready: a regular expression for the line of its log by which it serves.
        log: the file that receives all it says.

    Attributes:
        pid: of the daemon itself.
    """

    def __init__(self, name: str, command: Sequence[str], ready: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._ready = re.compile(ready)
        self._serves = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.reaper", *command],
            cwd=ROOT, env={**os.environ, "JAVA_HOME": _java_home()},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.pid = int(self._process.stdout.readline())
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self.log.open("w") as log:
            for line in self._process.stderr:
                log.write(line)
                log.flush()
                if self._ready.search(line):
                    self._serves.set()
        self._serves.set()  # it has ended

    def await_start(self) -> None:
        """Wait until it serves.

        Raises:
            EngineError: it has ended, or says nothing.
        """
        served = self._serves.wait(_START_SECONDS)
        if not served or not self._reading.is_alive():
            last = "".join(self.log.read_text().splitlines(keepends=True)[-5:])
            raise EngineError(f"Hadoop: {self.name} does not serve: {last}")

    def has_started(self, pid: int) -> bool:
        """Whether a process is one of the daemon's, or of its containers'."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        return any(each.pid == pid for each in children)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send the daemon alone a signal: its containers live on."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """End it, with all that it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reading.join()


class Hadoop:
    """Running daemons.

    Attributes:
        conf: the folder that HADOOP_CONF_DIR names.
        url: of HDFS.
        daemons: by name: namenode, datanode, resourcemanager, node1, node2.
    """

    def __init__(self, folder: Path, jars: Path, settings: Mapping[str, str]) -> None:
        self.conf = folder / "conf"
        self.daemons: dict[str, Daemon] = {}
        self._folder = folder
        self._classes = f"{self.conf}:{jars}/*"
        names, *pairs = free_ports(7)
        self.url = f"hdfs://{HOST}:{names}"
        http, *resources = (f"{HOST}:{port}" for port in pairs)
        self.resources_url = f"http://{resources[0]}"
        write_conf(
            self.conf,
            {
                "core-site": {"fs.defaultFS": self.url, "hadoop.tmp.dir": str(folder / "data")},
                "hdfs-site": {"dfs.namenode.http-address": http, **HDFS_SITE},
                "yarn-site": {
                    **dict(zip(_RESOURCE_MANAGER, resources, strict=True)),
                    **_YARN_SITE,
                    "yarn.application.classpath": f"{jars}/*",
                    **settings,
                },
            },
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process that uses this Hadoop."""
        import pyspark

        return {
            "HADOOP_CONF_DIR": str(self.conf),
            "YARN_CONF_DIR": str(self.conf),
            "SPARK_HOME": str(Path(pyspark.__file__).parent),
        }

    def start(self) -> None:
        """Format HDFS, start all daemons, and wait until they serve."""
        name_node = f"{HDFS}.namenode.NameNode"
        formatted = run(*self._java(name_node), "-format", "-force")
        if formatted.returncode:
            raise EngineError(f"Hadoop: HDFS cannot be formatted: {formatted.stderr[-500:]}")
        self._start("namenode", self._java(name_node), "NameNode RPC up at")
        self._start("datanode", self._java(f"{HDFS}.datanode.DataNode"), "Successfully sent block")
        manager = f"{_YARN}.resourcemanager.ResourceManager"
        self._start("resourcemanager", self._java(manager), "Transitioned to active state")
        for name in ("node1", "node2"):
            self.start_node(name)
        for daemon in self.daemons.values():
            daemon.await_start()

    def restart(self, name: str) -> None:
        """End the NameNode or the DataNode and start it again; the files are kept."""
        assert name in {"namenode", "datanode"}
        self.daemons[name].close()
        class_ = {"namenode": "NameNode", "datanode": "DataNode"}[name]
        ready = {"namenode": "NameNode RPC up at", "datanode": "Successfully sent block"}[name]
        self._start(name, self._java(f"{HDFS}.{name}.{class_}"), ready)
        self.daemons[name].await_start()

    def start_node(self, name: str) -> None:
        """Start a NodeManager; does not wait for it."""
        folder = self._folder / name
        places = {"local-dirs": folder / "local", "log-dirs": folder / "logs"}
        words = [f"-Dyarn.nodemanager.{key}={path}" for key, path in places.items()]
        # Its generic options come behind the class.
        command = [*self._java(f"{_YARN}.nodemanager.NodeManager"), *spread(words)]
        self._start(name, command, "Registered with ResourceManager")

    def _start(self, name: str, command: Sequence[str], ready: str) -> None:
        self.daemons[name] = Daemon(name, command, ready, self._folder / f"{name}.log")

    def _java(self, class_: str) -> list[str]:
        return [*JAVA, "-cp", self._classes, class_]

    def submit(self, queue: str, command: str, *, megabytes: int) -> str:
        """Start an application that is nothing but its master, with a shell command; its id."""
        new = self._ask("new-application", {})
        body = {
            "application-id": new["application-id"],
            "application-name": command,
            "application-type": "SHELL",
            "queue": queue,
            "am-container-spec": {"commands": {"command": command}},
            "max-app-attempts": 1,
            "resource": {"memory": megabytes, "vCores": 1},
        }
        self._ask("", body)
        return str(new["application-id"])

    def kill_application(self, application: str) -> None:
        """End an application."""
        self._ask(f"{application}/state", {"state": "KILLED"}, method="PUT")

    def _ask(self, path: str, body: Mapping[str, Any], method: str = "POST") -> Any:
        request = urllib.request.Request(
            f"{self.resources_url}/ws/v1/cluster/apps/{path}?user.name=root".replace("/?", "?"),
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Accept": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read() or b"null")

    def close(self) -> None:
        """End all daemons, and what runs in their containers."""
        for daemon in reversed(self.daemons.values()):
            daemon.close()

    def command(self, class_: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Hadoop's by its class, as `yarn` and `hdfs` do."""
        return run(*self._java(class_), *words)


def _java_home() -> str:
    """The home of the Java on PATH; NodeManagers pass it on to their containers."""
    java = shutil.which("java")
    assert java is not None
    return str(Path(java).resolve().parents[1])


def hadoop_jars() -> Path:
    """The folder of Hadoop's jars; see :func:`provide_jars`."""
    modules = [f"org.apache.hadoop:{module}:{HADOOP}" for module in _MODULES]
    return provide_jars(f"hadoop-{HADOOP}", modules)


@contextmanager
def running(settings: Mapping[str, str] | None = None) -> Iterator[Hadoop]:
    """Start Hadoop; everything ends with the block, or with this process.

    Args:
        settings: of yarn-site.xml, beside this file's.

    Raises:
        EngineError: it cannot run here.
    """
    jars = hadoop_jars()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hadoop-"))
        Path(folder).chmod(0o755)
        hadoop = Hadoop(Path(folder), jars, settings or {})
        stack.callback(hadoop.close)
        hadoop.start()
        yield hadoop


HDFS_SITE = {
    "dfs.replication": "1",
    "dfs.datanode.address": f"{HOST}:0",
    "dfs.datanode.http.address": f"{HOST}:0",
    "dfs.datanode.ipc.address": f"{HOST}:0",
    "dfs.permissions.enabled": "false",
    "dfs.namenode.safemode.extension": "0",
}
_RESOURCE_MANAGER = (
    "yarn.resourcemanager.webapp.address",
    "yarn.resourcemanager.address",
    "yarn.resourcemanager.scheduler.address",
    "yarn.resourcemanager.resource-tracker.address",
    "yarn.resourcemanager.admin.address",
)
_QUEUES = "yarn.scheduler.capacity.root"
_PREEMPTION = "yarn.resourcemanager.monitor.capacity.preemption"
_YARN_SITE = {
    "yarn.nodemanager.address": f"{HOST}:0",
    "yarn.nodemanager.localizer.address": f"{HOST}:0",
    "yarn.nodemanager.webapp.address": f"{HOST}:0",
    "yarn.nodemanager.resource.memory-mb": str(_NODE_MB),
    "yarn.nodemanager.resource.cpu-vcores": "8",
    # A container that takes more memory than it asked for is killed.
    "yarn.nodemanager.pmem-check-enabled": "true",
    # The default leaves the kill to cgroups, even where YARN uses none.
    "yarn.nodemanager.resource.memory.enforced": "false",
    "yarn.nodemanager.vmem-check-enabled": "false",
    "yarn.nodemanager.container-monitor.interval-ms": "500",
    "yarn.nodemanager.disk-health-checker.enable": "false",
    "yarn.log-aggregation-enable": "true",
    "yarn.scheduler.minimum-allocation-mb": "256",
    # A NodeManager that is killed is missed soon.
    "yarn.nm.liveness-monitor.expiry-interval-ms": "10000",
    "yarn.resourcemanager.nodemanagers.heartbeat-interval-ms": "250",
    # Half of the cluster belongs to the queue `urgent`. Who has borrowed it gives it back at once.
    # The queue `small` has room for an application master and one container of some size.
    f"{_QUEUES}.queues": "default,urgent,small",
    f"{_QUEUES}.small.capacity": "10",
    f"{_QUEUES}.small.maximum-capacity": "20",
    f"{_QUEUES}.small.user-limit-factor": "4",
    f"{_QUEUES}.default.capacity": "40",
    f"{_QUEUES}.default.maximum-capacity": "100",
    f"{_QUEUES}.default.user-limit-factor": "4",
    f"{_QUEUES}.urgent.capacity": "50",
    f"{_QUEUES}.urgent.maximum-capacity": "100",
    f"{_QUEUES}.urgent.user-limit-factor": "4",
    "yarn.scheduler.capacity.maximum-am-resource-percent": "0.9",
    "yarn.resourcemanager.scheduler.monitor.enable": "true",
    f"{_PREEMPTION}.monitoring_interval": "500",
    f"{_PREEMPTION}.max_wait_before_kill": "1000",
    f"{_PREEMPTION}.total_preemption_per_round": "1.0",
    f"{_PREEMPTION}.natural_termination_factor": "1.0",
}


def write_conf(folder: Path, sites: Mapping[str, Mapping[str, str]]) -> None:
    """Write the XML files of a folder that HADOOP_CONF_DIR names."""
    # The jars of Maven hold no web pages, and the daemons ask for their folders.
    for name in ("hdfs", "datanode", "cluster", "node", "secondary", "journal"):
        (folder / "webapps" / name).mkdir(parents=True)
    (folder / "log4j.properties").write_text(_LOGGING)
    for site, settings in sites.items():
        root = ElementTree.Element("configuration")
        for name, value in settings.items():
            each = ElementTree.SubElement(root, "property")
            ElementTree.SubElement(each, "name").text = name
            ElementTree.SubElement(each, "value").text = value
        ElementTree.ElementTree(root).write(folder / f"{site}.xml")


def spread(words: Sequence[str]) -> list[str]:
    """Hadoop reads "-D name=value" as two words."""
    return [part for word in words for part in ("-D", word.removeprefix("-D"))]


def keep_up(cluster: AbstractContextManager[Any], used: Callable[[Any], Iterable[str]]) -> None:
    """Start a cluster, print how it is used, and keep it until Ctrl-C.

    Args:
        cluster: starts it.
        used: the lines, for what that gives.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # a shell ignores SIGINT in the background
        signal.signal(number, signal.default_int_handler)
    try:
        with cluster as running:
            print("\n".join(used(running)), flush=True)
            signal.pause()
    except KeyboardInterrupt:
        pass
    except EngineError as error:
        sys.exit(str(error))


def _used(hadoop: Hadoop) -> Iterator[str]:
    yield f"# HDFS is {hadoop.url}, YARN's pages are at {hadoop.resources_url}/cluster."
    yield f"# Logs are in {hadoop.conf.parent}."
    for name, value in hadoop.environment.items():
        yield f"export {name}={value}"


if __name__ == "__main__":
    keep_up(running(), _used)

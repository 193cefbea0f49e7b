"""Runs the cluster's daemons inside its namespaces; :mod:`.cluster` starts this module there.

It prints a line when it needs its network and a line when the cluster is ready, and ends when its
standard input does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.engines.kubernetes.build import CNI, binaries
from tests.engines.kubernetes.network import (
    API_SERVICE,
    CLUSTER,
    MACHINE,
    NODES,
    SERVICES,
    pods_of,
)

NEEDS_NETWORK = "needs network"
READY = "ready"
_START_SECONDS = 180.0
# A kubelet sets these for the whole machine where they differ. It finds its own values instead.
_KERNEL = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}
# Files that daemons leave in the machine's folders.
_OWN = ("/run", "/var/log", "/var/lib/cni", "/var/lib/kubelet")
CGROUP = "horovod_runner-kubernetes"


class Daemons:
    """The daemons, with their files in a folder.

    Args:
        folder: is on a disk; has certificates, configurations, logs and the nodes' data.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = binaries()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("pki", "log"):
            (folder / name).mkdir()

    def start(self) -> None:
        self._own_files()
        self._connect()
        self._certify()
        self._start_control_plane()
        self._start_dns()
        for node in NODES:
            self._start_node(node)
        self._until_it_works("get", "node", *NODES)  # each kubelet registers its own
        self._kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=120s")
        # Pods without it are refused.
        self._until_it_works("get", "serviceaccount", "default")

    def _own_files(self) -> None:
        """Keep from the machine what daemons write outside of their folder."""
        for path in _OWN:
            Path(path).mkdir(parents=True, exist_ok=True)
            run("mount", "-t", "tmpfs", "tmpfs", path)
        for name, value in _KERNEL.items():
            path = self._folder / name.replace("/", ".")
            path.write_text(f"{value}\n")
            run("mount", "--bind", str(path), f"/proc/sys/{name}")

    def _connect(self) -> None:
        run("ip", "link", "set", "lo", "up")
        run("ip", "address", "add", f"{CLUSTER}/24", "dev", "eth0")
        run("ip", "link", "set", "eth0", "up")
        run("ip", "route", "add", "default", "via", MACHINE)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def _certify(self) -> None:
        pki = self._folder / "pki"
        run("openssl", "genrsa", "-out", f"{pki}/accounts.key", "2048")
        self._certificate("ca", "/CN=horovod_runner-tests", "keyUsage=critical,keyCertSign")
        names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
        listed = [f"DNS:{name}" for name in names]
        listed += [f"IP:{address}" for address in ("127.0.0.1", API_SERVICE, CLUSTER)]
        self._certificate("apiserver", "/CN=kube-apiserver", f"subjectAltName={','.join(listed)}")
        self._user("admin", "/O=system:masters/CN=admin")
        for node in NODES:
            self._user(node, f"/O=system:nodes/CN=system:node:{node}")

    def _certificate(self, name: str, subject: str, extension: str) -> None:
        pki = self._folder / "pki"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30"]
        command += ["-keyout", f"{pki}/{name}.key", "-out", f"{pki}/{name}.crt"]
        command += ["-subj", subject, "-addext", extension]
        if name != "ca":
            command += ["-CA", f"{pki}/ca.crt", "-CAkey", f"{pki}/ca.key"]
        run(*command)

    def _user(self, name: str, subject: str) -> None:
        """A client's certificate, and the file by which it connects."""
        self._certificate(name, subject, "extendedKeyUsage=clientAuth")
        pki = self._folder / "pki"
        cluster = {"server": f"https://{CLUSTER}:6443", "certificate-authority": f"{pki}/ca.crt"}
        user = {"client-certificate": f"{pki}/{name}.crt", "client-key": f"{pki}/{name}.key"}
        self._write(
            f"{name}.conf",
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "tests", "cluster": cluster}],
                "users": [{"name": name, "user": user}],
                "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": name}}],
                "current-context": "tests",
            },
        )

    def _start_control_plane(self) -> None:
        pki, url = self._folder / "pki", "http://127.0.0.1:2379"
        self._start(
            "etcd",
            "--data-dir=/run/etcd",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            "--listen-peer-urls=http://127.0.0.1:2380",
        )
        # Debian's etcd 3.4 cannot serve watch lists. Pods leave a lost node after 5 s, not 300.
        self._start(
            "kube-apiserver",
            f"--etcd-servers={url}",
            f"--service-cluster-ip-range={SERVICES}",
            "--secure-port=6443",
            f"--advertise-address={CLUSTER}",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--kubelet-client-certificate={pki}/admin.crt",
            f"--kubelet-client-key={pki}/admin.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki}/accounts.key",
            f"--service-account-signing-key-file={pki}/accounts.key",
            "--feature-gates=WatchList=false",
            "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC",
            "--default-not-ready-toleration-seconds=5",
            "--default-unreachable-toleration-seconds=5",
        )
        self._until_it_works("get", "--raw", "/readyz")
        admin = f"--kubeconfig={self._folder}/admin.conf"
        self._start(
            "kube-controller-manager",
            admin,
            f"--service-account-private-key-file={pki}/accounts.key",
            f"--root-ca-file={pki}/ca.crt",
            "--leader-elect=false",
            "--node-monitor-grace-period=20s",
        )
        self._start("kube-scheduler", admin, "--leader-elect=false")
        self._start(
            "kube-proxy",
            admin,
            "--proxy-mode=iptables",
            f"--hostname-override={NODES[0]}",
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        )

    def _start_dns(self) -> None:
        """Serve the services' names: dnsmasq reads them from a file that follows the cluster."""
        names = self._folder / "names"
        names.touch()
        server = self._start(
            "dnsmasq",
            "--keep-in-foreground",
            "--no-resolv",
            "--no-hosts",
            f"--addn-hosts={names}",
            "--local=/cluster.local/",
            f"--listen-address={CLUSTER}",
            "--bind-interfaces",
            "--user=root",
            "--pid-file",
            "--log-facility=-",
        )
        threading.Thread(target=self._follow_services, args=(names, server), daemon=True).start()

    def _follow_services(self, names: Path, server: subprocess.Popen[bytes]) -> None:
        command = ["get", "endpointslices", "--all-namespaces", "--watch", "--output=name"]
        with subprocess.Popen(self._kubectl_line(*command), stdout=subprocess.PIPE) as watch:
            assert watch.stdout is not None
            for _ in watch.stdout:
                names.write_text(self._names())
                server.send_signal(1)  # SIGHUP: dnsmasq reads its files again

    def _names(self) -> str:
        """Lines for each service: its own address, or for a headless one those of its pods."""
        listed = json.loads(
            self._kubectl("get", "services,endpointslices", "--all-namespaces", "--output=json")
        )["items"]
        addresses: dict[tuple[str, str], list[str]] = {}
        for item in listed:
            if item["kind"] == "EndpointSlice":
                owner = item["metadata"].get("labels", {}).get("kubernetes.io/service-name", "")
                found = addresses.setdefault((item["metadata"]["namespace"], owner), [])
                for endpoint in item["endpoints"] or []:
                    found += endpoint["addresses"]
        lines = []
        for item in listed:
            if item["kind"] == "Service":
                key = item["metadata"]["namespace"], item["metadata"]["name"]
                own = item["spec"].get("clusterIP", "None")
                for address in addresses.get(key, []) if own == "None" else [own]:
                    lines.append(f"{address} {key[1]}.{key[0]}.svc.cluster.local\n")
        return "".join(lines)

    def _start_node(self, node: str) -> None:
        data = self._folder / node
        (data / "cni").mkdir(parents=True)
        ranges = [[{"subnet": pods_of(node)}]]
        addresses = {"type": "host-local", "ranges": ranges, "dataDir": f"/run/{node}/addresses"}
        addresses["routes"] = [{"dst": "0.0.0.0/0"}]
        plugins = [{"type": "ptp", "ipam": addresses}]
        network = {"cniVersion": "0.4.0", "name": f"pods-{node}", "plugins": plugins}
        self._write(f"{node}/cni/10-pods.conflist", network)
        socket = f"{data}/containerd.sock"
        (data / "containerd.toml").write_text(_CONTAINERD.format(data=data, node=node, cni=CNI))
        self._start("containerd", f"--config={data}/containerd.toml", name=f"containerd-{node}")
        self._until(lambda: _works("ctr", "-a", socket, "version"), f"containerd of {node}")
        for archive in self._folder.glob("*.tar"):
            load_image(socket, archive)
        for group in _control_groups(node):
            group.mkdir(parents=True, exist_ok=True)
        number = NODES.index(node)
        configuration = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{CGROUP}/{node}",
            "failSwapOn": False,
            "failCgroupV1": False,
            "containerRuntimeEndpoint": f"unix://{socket}",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{self._folder}/pki/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "clusterDomain": "cluster.local",
            "clusterDNS": [CLUSTER],
            "port": 10250 + 10 * number,
            "healthzPort": 10248 + 10 * number,
            "podLogsDir": f"{data}/logs",
            "nodeStatusUpdateFrequency": "4s",
            "nodeLeaseDurationSeconds": 15,
            "imageGCHighThresholdPercent": 100,  # no registry has the images of a full disk
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        }
        self._write(f"{node}/kubelet.json", configuration)
        self._start(
            "kubelet",
            f"--config={data}/kubelet.json",
            f"--kubeconfig={self._folder}/{node}.conf",
            f"--hostname-override={node}",
            f"--root-dir={data}",
            f"--node-ip={CLUSTER}",
            name=f"kubelet-{node}",
        )

    def _start(self, program: str, *options: str, name: str = "") -> subprocess.Popen[bytes]:
        built = self._bin / program
        command = [str(built) if built.exists() else program, *options]
        with (self._folder / "log" / f"{name or program}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._processes[name or program] = process
        return process

    def _write(self, name: str, content: object) -> None:
        (self._folder / name).write_text(json.dumps(content, indent=1))

    def _kubectl_line(self, *words: str) -> list[str]:
        return [str(self._bin / "kubectl"), f"--kubeconfig={self._folder}/admin.conf", *words]

    def _kubectl(self, *words: str) -> str:
        return run(*self._kubectl_line(*words))

    def _until_it_works(self, *words: str) -> None:
        self._until(lambda: _works(*self._kubectl_line(*words)), f"kubectl {' '.join(words)}")

    def _until(self, works: Any, what: str) -> None:
        """Wait for something that offers no event. A daemon that has ended is named at once."""
        deadline = time.monotonic() + _START_SECONDS
        while not works():
            ended = [
                name for name, process in self._processes.items() if process.poll() is not None
            ]
            if ended or time.monotonic() > deadline:
                logs = [self._folder / "log" / f"{name}.log" for name in ended]
                shown = "\n".join(path.read_text(errors="replace")[-2000:] for path in logs)
                raise RuntimeError(f"{what} does not work; ended: {ended or 'none'}\n{shown}")
            time.sleep(0.3)


_CONTAINERD = """version = 2
root = "{data}/containerd"
state = "/run/{node}/containerd"
[grpc]
address = "{data}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "localhost/pause:1"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{cni}"
conf_dir = "{data}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""


def _control_groups(node: str) -> list[Path]:
    """A node's control groups: one of version 2, or one of each controller of version 1."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root / CGROUP / node]
    return [folder / CGROUP / node for folder in root.iterdir() if folder.is_dir()]


def load_image(socket: str, archive: Path) -> None:
    """Give an image to a node, by the socket of its containerd."""
    run("ctr", "--address", socket, "--namespace", "k8s.io", "images", "import", str(archive))


def run(*command: str, given: str | None = None) -> str:
    """Run a command; returns its output. Raises RuntimeError, with its message, where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=given)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _works(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main() -> None:
    print(NEEDS_NETWORK, flush=True)
    sys.stdin.readline()
    Daemons(Path(sys.argv[1])).start()
    print(READY, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

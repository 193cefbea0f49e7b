"""A Kubernetes cluster of two nodes on this machine, without an image registry.

    python -m tests.engines.kubernetes

starts one by hand and prints how to use it. It ends with Ctrl-C, or with the process that holds it.

All of it, from etcd to the processes in pods, lives in PID, mount and network namespaces of its
own: the kernel ends everything when the first process there ends, and nothing stays mounted.

    this machine  10.89.0.1 -- 10.89.0.2  API server, etcd, scheduler, controller manager,
                                          kube-proxy, DNS
                                          node1: kubelet, containerd, pods 10.89.1.0/24
                                          node2: kubelet, containerd, pods 10.89.2.0/24
"""

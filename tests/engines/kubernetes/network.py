"""Addresses of the cluster; the same on every machine, because they are seen on this one alone."""

MACHINE = "10.89.0.1"
#: The API server, the nodes and the DNS server.
CLUSTER = "10.89.0.2"
SERVICES = "10.96.0.0/16"
#: The API server as pods see it: the first address of the services.
API_SERVICE = "10.96.0.1"
INTERFACE = "hr-kubernetes"
NODES = ("node1", "node2")


def pods_of(node: str) -> str:
    """The subnet of a node's pods."""
    return f"10.89.{NODES.index(node) + 1}.0/24"

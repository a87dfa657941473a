"""Judgement of the network: connections, links, bandwidth and the all-reduce, beside the rates that links promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rl_launch.doctor.cluster.survey import Survey
from rl_launch.doctor.cluster.tournament import SlowNode, blame
from rl_launch.doctor.cluster.words import grouped, rate, size
from rl_launch.doctor.findings import Finding

FASTEST_OF_ONE_STREAM = 1.25e9
"""Bytes/s that one TCP connection of Python reaches on any machine; faster links are not judged by it."""

_POOR = 0.25
"""Share of the promised rate below which an all-reduce of NCCL takes the wrong way."""


def ports(survey: Survey) -> Iterator[Finding]:
    """Connections between nodes, in both directions."""
    for (sender, receiver), problem in survey.broken.items():
        remedy = "Allow TCP between the nodes on all ports, and check that Ray has the address of the right interface."
        yield Finding(f"ports from {sender} to {receiver}", "missing", problem, remedy)
    if survey.rates and not survey.broken:
        yield Finding("ports", "ok", "every node connects to a free port of every other node")


def links(survey: Survey) -> Iterator[Finding]:
    """Links that are down, or slower than those of most nodes."""
    down = {
        name: f"not active: {', '.join(each.inactive_infiniband)}"
        for name, each in survey.readings.items()
        if each.inactive_infiniband
    }
    yield from grouped("InfiniBand of", down, "warning", "Check the port (ibstat) and the subnet manager.")
    ethernet = {name: each.ethernet_bytes_per_s for name, each in survey.readings.items()}
    infiniband = {name: sum(each.infiniband_bytes_per_s.values()) or None for name, each in survey.readings.items()}
    for what, rates in (("network interface", ethernet), ("InfiniBand", infiniband)):
        known = {name: found for name, found in rates.items() if found is not None}
        if not known:
            continue
        usual, _ = Counter(known.values()).most_common(1)[0]
        slow = {name: f"{rate(found)}, most nodes have {rate(usual)}" for name, found in known.items() if found < usual}
        yield from grouped(f"{what} of", slow, "warning", "Check its cables and ports (ethtool, ibstat).")


def bandwidth(survey: Survey) -> Iterator[Finding]:
    """Nodes and pairs of nodes that are slower than the others."""
    if not survey.rates:
        return
    found = blame(survey.rates)
    for name, node in found.nodes.items():
        yield _slow_node(name, node)
    for (sender, receiver), slow in found.pairs.items():
        if (sender, receiver) not in survey.broken:
            text = f"{rate(slow)}, the median of the cluster is {rate(found.rate)}"
            remedy = "Check the path between these two nodes: switches, cables, routes."
            yield Finding(f"bandwidth from {sender} to {receiver}", "warning", text, remedy)
    promised = [each.ethernet_bytes_per_s for each in survey.readings.values() if each.ethernet_bytes_per_s]
    text = f"{rate(found.rate)} by TCP, the median of {len(survey.rates)} transfers between pairs of nodes"
    text += f"; the interfaces promise {rate(min(promised))}" if promised else "; the interfaces promise no rate"
    if promised and found.rate < min(promised) / 2 and min(promised) <= FASTEST_OF_ONE_STREAM:
        yield Finding("bandwidth", "warning", text, "Check the network: other traffic, MTU, switches.")
    else:
        yield Finding("bandwidth", "ok", text)


def _slow_node(name: str, node: SlowNode) -> Finding:
    text = f"{node.verb} at {rate(node.rate)}, the median of the cluster is {rate(node.others)}"
    remedy = "Check its link (ethtool, ibstat, ip -s link), or take the node out of the cluster."
    return Finding(f"bandwidth of {name}", "warning", text, remedy)


def all_reduce(survey: Survey) -> Iterator[Finding]:
    """The all-reduce in the process group that models have."""
    found, library = survey.all_reduce, survey.device.collectives
    if found.skipped:
        yield Finding("all-reduce", "warning" if found.remedy else "ok", f"not measured: {found.skipped}", found.remedy)
        return
    hint = "NCCL_DEBUG=INFO" if library == "nccl" else "GLOO_SOCKET_IFNAME"
    remedy = f"Check the network of these nodes; see {hint} and the other variables of docs/several-machines.md."
    yield from grouped("all-reduce on", found.problems, "missing", remedy)
    speed = found.bus_bytes_per_s
    if speed is None:
        return
    assert found.seconds is not None
    text = (
        f"{rate(speed)} of bus bandwidth by {library} over {found.num_ranks} ranks on {found.num_nodes} nodes "
        f"({size(found.num_bytes)} in {1000 * found.seconds:.3g} ms)"
    )
    kind, promised = _promise(survey)
    text += f"; {kind} promises {rate(promised)}" if promised else "; the links promise no rate"
    if library == "nccl" and promised and speed < _POOR * promised:
        remedy = "Run it with NCCL_DEBUG=INFO to see the links in use, and set NCCL_IB_HCA or NCCL_SOCKET_IFNAME."
        yield Finding("all-reduce", "warning", text, remedy)
    else:
        yield Finding("all-reduce", "ok", text)


def _promise(survey: Survey) -> tuple[str, float | None]:
    """The slowest link of an all-reduce and its rate in bytes/s; None if it is unknown."""
    readings = [survey.readings[name] for name in survey.usable if name in survey.readings]
    if survey.all_reduce.num_nodes == 1:
        speeds = [gpu.nvlink_bytes_per_s for each in readings for gpu in each.gpus.gpus]
        return "NVLink", min((speed for speed in speeds if speed), default=None)
    fabrics = [sum(each.infiniband_bytes_per_s.values()) for each in readings]
    if survey.device.collectives == "nccl" and fabrics and all(fabrics):
        return "InfiniBand", min(fabrics)
    rates = [each.ethernet_bytes_per_s for each in readings if each.ethernet_bytes_per_s]
    return "Ethernet", min(rates, default=None)

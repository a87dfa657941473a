"""Measurements between nodes: transfers over TCP between all pairs, and an all-reduce over all ranks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence

from rl_core.devices import NODE_ADDRESS, Device
from rl_launch.doctor.cluster.node_probe import CONNECT_TIMEOUT_S
from rl_launch.doctor.cluster.probes import Probes
from rl_launch.doctor.cluster.survey import AllReduce, ClusterNode

TRANSFER_S = 0.5
"""Duration of one transfer in seconds."""

ALL_REDUCE_BYTES = {"nccl": 256 * 2**20, "gloo": 16 * 2**20}
"""Size of the tensor of an all-reduce, by library."""

_MODULE = "rl_core.torch.all_reduce"
_SLACK_S = 20.0


def measure_transfers(
    probes: Probes, nodes: Mapping[str, ClusterNode], *, seconds: float = TRANSFER_S
) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], str]]:
    """Return the bandwidth in bytes/s by sender and receiver, and the reasons of pairs without a connection.

    The pairs of a round transfer at the same time, first in one direction and then in the other. Pairs with a node that
    stops to answer are left out.

    Args:
        probes: Probes of the nodes.
        nodes: Nodes by name.
        seconds: Duration of each transfer.
    """
    rates: dict[tuple[str, str], float] = {}
    broken: dict[tuple[str, str], str] = {}
    limit = seconds + 4 * CONNECT_TIMEOUT_S + _SLACK_S
    ports = probes.ask(lambda actor, _: actor.listen.remote(), "a free port")
    for pairs in rounds(probes.names):
        for directed in (pairs, [(second, first) for first, second in pairs]):
            asked = [pair for pair in directed if not probes.silent.keys() & set(pair)]
            token = secrets.token_bytes(32)
            received = {receiver: probes.actors[receiver].receive.remote(token, seconds) for _, receiver in asked}
            sent = {
                sender: probes.actors[sender].send.remote(nodes[receiver].address, ports[receiver], token, seconds)
                for sender, receiver in asked
            }
            arrived = probes.answers(received, "data from another node", timeout_s=limit)
            problems = probes.answers(sent, "sending data to another node", timeout_s=limit)
            for sender, receiver in asked:
                if sender not in problems or receiver not in arrived:
                    continue
                result = arrived[receiver]
                if problem := problems[sender] or result.problem:
                    broken[sender, receiver] = problem
                rates[sender, receiver] = 0.0 if problem else result.num_bytes / result.seconds
    return rates, broken


def measure_all_reduce(
    probes: Probes,
    nodes: Sequence[ClusterNode],
    device: Device,
    *,
    python: str,
    ranks_per_node: int,
    variables: Mapping[str, Mapping[str, str]],
    timeout_s: float,
) -> AllReduce:
    """Measure an all-reduce over the ranks of these nodes, in the process group that models of the device have.

    Args:
        probes: Probes of the nodes, with their GPUs.
        nodes: Nodes; rank 0 is on the first one.
        device: Kind of device.
        python: Interpreter with torch, which every node must have.
        ranks_per_node: Ranks on each node.
        variables: Environment variables of the ranks of each node that its Ray does not have, by name.
        timeout_s: Limit in seconds.
    """
    names = [node.name for node in nodes]
    has_python = probes.ask(lambda actor, _: actor.has_program.remote(python), "a look at its files", names)
    if lacking := [name for name, found in has_python.items() if not found]:
        return AllReduce(
            skipped=f"{python} does not exist on {', '.join(lacking)}",
            remedy="The run builds the environments of its workers there. Afterwards they can be measured.",
        )
    nodes = [node for node in nodes if node.name in has_python]
    head, num_ranks = nodes[0], ranks_per_node * len(nodes)
    ports = probes.ask(lambda actor, _: actor.free_port.remote(), "a free port", [head.name])
    if not ports:
        return AllReduce(skipped=f"{head.name} does not answer", remedy="See above.")
    num_bytes = ALL_REDUCE_BYTES[device.collectives]
    first = {node.name: ranks_per_node * position for position, node in enumerate(nodes)}
    addresses = {node.name: node.address for node in nodes}

    def arguments(rank: int, local_rank: int) -> str:
        place = {"address": head.address, "port": ports[head.name], "device": device.name, "timeout_s": timeout_s}
        ranks = {"rank": rank, "world_size": num_ranks, "local_rank": local_rank}
        return json.dumps({**place, **ranks, "num_bytes": num_bytes})

    ends = probes.ask(
        lambda actor, name: actor.run_ranks.remote(
            [python, "-P", "-m", _MODULE],
            [arguments(first[name] + local, local) for local in range(ranks_per_node)],
            {NODE_ADDRESS: addresses[name], **variables[name]},
            timeout_s,
        ),
        "the all-reduce",
        list(first),
        timeout_s=timeout_s + _SLACK_S,
    )
    problems = {name: probes.silent[name] for name in first if name in probes.silent}
    for name, found in ends.items():
        if failed := [end.error or f"exit code {end.code}" for end in found if end.code]:
            problems[name] = failed[0]
        elif any(end.code is None for end in found):
            problems[name] = f"it did not finish within {timeout_s:.0f} s"
    seconds = None if problems else json.loads(ends[head.name][0].output.splitlines()[-1])["seconds"]
    return AllReduce(num_ranks, len(nodes), num_bytes, seconds, problems)


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return all pairs of nodes in rounds of disjoint pairs: n - 1 rounds for an even number of nodes, n for an odd one
    (https://en.wikipedia.org/wiki/Round-robin_tournament#Circle_method).
    """
    circle: list[str | None] = [*nodes] if len(nodes) % 2 == 0 else [*nodes, None]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(first, second) for first, second in pairs if first is not None and second is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found

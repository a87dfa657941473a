"""The examination of a cluster: probes on its nodes, in the order of their dependencies, and the report."""

from __future__ import annotations

import os
import platform
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import ray
from ray._private.state import available_resources_per_node

from rl_core.devices import Device
from rl_launch.cluster.device import check_devices
from rl_launch.cluster.machine import check_ray_address
from rl_launch.cluster.nodes import PreparedNode, listing_problems, sharing_problems
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.doctor.cluster.judgement import judged
from rl_launch.doctor.cluster.measurements import TRANSFER_S, measure_all_reduce, measure_transfers
from rl_launch.doctor.cluster.node_probe import NodeProbe
from rl_launch.doctor.cluster.probes import Probes
from rl_launch.doctor.cluster.survey import AllReduce, ClusterNode, Survey
from rl_launch.doctor.findings import Report
from rl_launch.doctor.needs import needs_of_plan
from rl_launch.recipes import source_name
from rl_launch.run_config.inputs import model_names
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.role_envs import role_specs
from rl_launch.worker_envs.provision import availability_of
from rl_launch.worker_envs.variables import chosen_variables, worker_variables

TIMEOUT_S = 60.0
"""Default limit of each probe in seconds."""

_PATIENCE_S = 30.0
"""Maximum time in seconds until a file of one node is visible on another."""

_ALL_REDUCE_LIMITS = 3
"""Limit of the all-reduce, which imports torch on every node, in limits of a probe."""


class ClusterReport(NamedTuple):
    """Report on whether a cluster can run a recipe.

    Attributes:
        report: Findings, and whether the recipe can run.
        survey: Results of the probes.
    """

    report: Report
    survey: Survey

    def as_json(self) -> dict[str, Any]:
        """Return the keys of `Report.as_json` and of `Survey.as_json`."""
        return {**self.report.as_json(), **self.survey.as_json()}


def examine_cluster(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    timeout_s: float = TIMEOUT_S,
    transfer_s: float = TRANSFER_S,
    probe: type[NodeProbe] = NodeProbe,
) -> ClusterReport:
    """Examine the Ray cluster that a run of a recipe would use: the one at RAY_ADDRESS, or a Ray that is
    started on this machine. Nothing is left running on any node.

    Args:
        recipe: Its name, a YAML file, or a run directory.
        overrides: `key=value`.
        timeout_s: Limit of each probe in seconds; the limit of the all-reduce is three times as long.
        transfer_s: Duration of each transfer between two nodes in seconds.
        probe: Class of the probes.

    Raises:
        ConfigError: If the config is wrong, or no cluster answers.
    """
    plan = read_plan(recipe, overrides)
    config = plan.config.cluster
    check_ray_address()
    check_devices(config)
    names = model_names(plan)
    folders = {key: name for key, name in names.items() if Path(name).is_dir()}
    # A path that does not exist is reported by the checks of the recipe.
    hub_names = sorted({name for name in names.values() if name not in folders.values() and name[0] not in "/.~"})
    chosen = chosen_variables(config.env_vars)
    with VirtualCluster.of(config, plan.device) as cluster:
        survey = Survey(
            device=cluster.device,
            num_nodes=cluster.num_nodes,
            ranks_per_node=cluster.ranks_per_node,
            autoscaling=config.autoscaling,
            nodes=living_nodes(cluster.device),
            versions={"python": platform.python_version(), "ray": ray.__version__},
            cuda=_cuda_of(plan, cluster.device),
            runs=Path(plan.config.run_dir).expanduser().parent if plan.config.run_dir else Path("runs"),
        )
        runs = survey.runs.absolute()
        with Probes(list(survey.nodes.values()), survey.silent, timeout_s=timeout_s, probe=probe) as probes:
            survey.readings = probes.ask(lambda actor, _: actor.readings.remote(str(runs)), "facts of the node")
            survey.clocks = probes.clocks()
            patience_s = min(_PATIENCE_S, timeout_s / 2)
            survey.unshared, survey.unlike_models = _folders(probes, survey.nodes, runs, folders, patience_s)
            survey.hub = _hub(probes, hub_names, chosen, timeout_s / 2) if hub_names else None
            survey.rates, survey.broken = measure_transfers(probes, survey.nodes, seconds=transfer_s)
            survey.all_reduce = _all_reduce(plan, cluster, survey, probes, chosen, timeout_s)
    findings = tuple(judged(survey))
    report = Report(source_name(recipe), survey.device.name, findings, place="on this cluster")
    return ClusterReport(report, survey)


def _cuda_of(plan: RunPlan, device: Device) -> str:
    """Return the CUDA version that the workers' builds of torch need; empty if they need none."""
    if not device.runs_on_gpus:
        return ""
    needs = needs_of_plan(plan, "", num_gpus=1)
    found = availability_of(needs.workers.values(), needs.worker_envs).values()
    return max((offer.torch.cuda or "" for offer in found if offer.torch is not None), default="")


def living_nodes(device: Device) -> dict[str, ClusterNode]:
    """Return the living nodes of Ray by name, the driver's first."""
    home = ray.get_runtime_context().get_node_id()
    living = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeID"] != home, node["NodeManagerHostname"], node["NodeManagerAddress"]),
    )
    uses = Counter(node["NodeManagerHostname"] for node in living)
    found = {}
    for node in living:
        hostname, address, resources = node["NodeManagerHostname"], node["NodeManagerAddress"], node["Resources"]
        name = hostname if uses[hostname] == 1 else address
        found[name] = ClusterNode(
            name=name,
            id=node["NodeID"],
            address=address,
            hostname=hostname,
            num_devices=int(resources.get("GPU" if device.has_gpus else "CPU", 0)),
            object_store_bytes=int(resources.get("object_store_memory", 0)),
            is_drivers=node["NodeID"] == home,
        )
    return found


def _folders(
    probes: Probes, nodes: Mapping[str, ClusterNode], runs: Path, folders: Mapping[str, str], patience_s: float
) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return nodes that do not share the folder of runs, and nodes that do not have a model folder, by its key."""
    others = [name for name in probes.names if not nodes[name].is_drivers]
    if not others:
        return {}, {}
    token = uuid4().hex
    absent = [each for each in (runs, *runs.parents) if not each.exists()]
    place = runs / f".doctor-{token[:8]}"
    try:
        place.mkdir(parents=True)
    except OSError as error:
        return {name: f"it cannot be made: {error.strerror}" for name in probes.names if nodes[name].is_drivers}, {}
    try:
        (place / "driver").write_text(token)
        seen = probes.ask(
            lambda actor, name: actor.meet.remote(
                str(place), token, nodes[name].id, list(folders.values()), patience_s
            ),
            "the check of the run directory",
            others,
        )
        found = sharing_problems({nodes[name].id: sight for name, sight in seen.items()}, place, token, patience_s)
        problems = {name: found[nodes[name].id] for name in seen if nodes[name].id in found}
    finally:
        shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):  # Others may use them meanwhile.
            for each in absent:
                each.rmdir()
    return problems, {f"{key} {folder}": listing_problems(folder, seen) for key, folder in folders.items()}


def _hub(probes: Probes, names: Sequence[str], variables: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """Return problems of nodes with the model hub, or with its cache if HF_HUB_OFFLINE is set."""
    chosen = {**os.environ, **variables}
    if chosen.get("HF_HUB_OFFLINE", "").lower() in {"1", "on", "true", "yes"}:
        absent = probes.ask(
            lambda actor, _: actor.absent_in_cache.remote(list(names), dict(variables)), "the cache of the hub"
        )
        return {name: f"not in the cache of the hub: {', '.join(found)}" for name, found in absent.items() if found}
    endpoint = chosen.get("HF_ENDPOINT") or "https://huggingface.co"
    url = f"{endpoint.rstrip('/')}/{names[0]}/resolve/main/config.json"
    found = probes.ask(lambda actor, _: actor.hub_problem.remote(url, timeout_s), "the hub")
    return {name: f"{endpoint} cannot be reached: {problem}" for name, problem in found.items() if problem}


def _all_reduce(
    plan: RunPlan, cluster: VirtualCluster, survey: Survey, probes: Probes, chosen: Mapping[str, str], timeout_s: float
) -> AllReduce:
    device, ranks = cluster.device, cluster.ranks_per_node
    nodes = [survey.nodes[name] for name in survey.usable if name in survey.readings]
    if len(nodes) * ranks < 2:
        return AllReduce(skipped="there is only one rank")
    specs = role_specs(plan.backends, [], device)
    offers = availability_of(specs.values(), plan.config.cluster.worker_envs)
    offer = next((offers[spec] for spec in specs.values() if offers[spec].torch is not None), None)
    if offer is None or not offer.python:
        return AllReduce(
            skipped="the environment of the recipe's workers is not built yet",
            remedy="Run rl worker-envs with the recipe, then this command again.",
        )
    if device.runs_on_gpus:
        free = {node: each.get("GPU", 0) for node, each in available_resources_per_node().items()}
        if busy := [node.name for node in nodes if free.get(node.id, 0) < ranks]:
            return AllReduce(
                skipped=f"GPUs of {', '.join(busy)} are in use by other runs of this Ray cluster",
                remedy="Run this command when they have ended.",
            )
    general = {**worker_variables(offer.python), **device.worker_variables(1)}
    variables = {}
    for node in nodes:
        network = PreparedNode(node.address, survey.readings[node.name].facts, {}).network_variables
        variables[node.name] = {**general, **network, **cluster.network_variables, **chosen}
    with ExitStack() as held:
        if device.runs_on_gpus:
            # Ray gives these probes GPUs that no run uses meanwhile.
            probes = held.enter_context(Probes(nodes, probes.silent, timeout_s=timeout_s, num_gpus=ranks))
        return measure_all_reduce(
            probes,
            nodes,
            device,
            python=offer.python,
            ranks_per_node=ranks,
            variables=variables,
            timeout_s=_ALL_REDUCE_LIMITS * timeout_s,
        )

"""The checks before a run find the fork servers of its workers."""

import os
from types import SimpleNamespace

import pytest

from rl_core.devices import CPU, REHEARSAL
from rl_core.fork_server.request import server_address
from rl_launch.backends import POLICY
from rl_launch.cluster.node_task import usable_cores
from rl_launch.placement.topology import GENERATION
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime import processes as module
from rl_launch.runtime.processes import Processes

PYTHON = "/envs/worker/bin/python"


@pytest.mark.parametrize("device", [CPU, REHEARSAL])
def test_a_check_and_its_worker_are_forked_from_the_same_process(device, monkeypatch):
    overrides = ["policy.env_vars={SOME: policy}", "cluster.env_vars={SOME: all, OTHER: all}"]
    plan = read_plan("grpo-arithmetic", overrides)
    config, backends = plan.config, plan.backends
    roles = (POLICY, GENERATION)
    envs = SimpleNamespace(interpreters=dict.fromkeys(roles, PYTHON))
    checks = {}

    def engine_problems(python, check, section, *, variables, imports, fork_server_s):
        checks[check.partition(".")[0]] = (server_address(imports, {**os.environ, **variables}), fork_server_s)
        return []

    monkeypatch.setattr(module, "engine_problems", engine_problems)
    module.check_engines(plan, envs, device)

    network = {"GLOO_SOCKET_IFNAME": "lo", "RL_NODE_ADDRESS": "127.0.0.1"}
    facts = SimpleNamespace(cores=usable_cores())
    node = SimpleNamespace(facts=facts, interpreters=envs.interpreters, network_variables=network)
    preloads = backends.preloads(device)
    processes = Processes(
        SimpleNamespace(device=device, network_variables=None, ranks_per_node=device.ranks_per_node(config.cluster)),
        {"n": node},
        None,
        logs="",
        timeouts=None,
        env_vars=config.cluster.env_vars,
        env_vars_by_role={role: each.config.env_vars for role, each in backends.by_role.items()},
        preloads=preloads,
        fork_server_s=None,
    )
    for role, engine in ((POLICY, "rl_dtensor"), (GENERATION, "rl_vllm")):
        made = processes.on("n", role, shares_cores=role == POLICY)
        address, stay = checks[engine]
        assert address == server_address(preloads[role].modules, {**os.environ, **made.variables})
        assert f"--idle={stay:g} " in made.python
    assert processes.on("n", POLICY).variables["SOME"] == "policy"

"""Settings of the tests of every package."""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # examples have no deadline, as the machine may be busy, and are the same in every run
    settings.load_profile("ci")

PACKAGES = Path(__file__).parent / "packages"

LONGEST_FIRST = (
    "rl-algos/tests/data/test_large.py",
    "rl-algos/tests/agents/test_documents.py",
    "rl-algos/tests/test_isolation.py",
    "rl-core/tests/environments/test_failing_turns.py",
    "rl-core/tests/ray/test_calls.py",
    "rl-core/tests/test_isolation.py",
    "rl-core/tests/environments/test_hostile_verifiers.py",
    "rl-core/tests/ray/test_model.py",
    "rl-core/tests/torch/transport/test_transport.py",
    "rl-core/tests/fork_server/test_fork_server.py",
    "rl-dtensor/tests/test_gpu_check.py",
    "rl-dtensor/tests/test_compile.py",
    "rl-dtensor/tests/test_documents.py",
    "rl-envs/tests/sandbox/test_abuses.py",
    "rl-envs/tests/test_isolation.py",
    "rl-envs/tests/sandbox/test_hostile_peers.py",
    "rl-launch/tests/cluster/test_nodes.py",
    "rl-launch/tests/cluster/test_ray_nodes.py",
    "rl-launch/tests/worker_envs/test_provision.py",
    "rl-launch/tests/commands/test_stacks.py",
    "rl-launch/tests/session/test_run_session.py",
    "rl-launch/tests/cli/test_environments.py",
    "rl-megatron/tests/test_gpu_check.py",
    "rl-megatron/tests/test_checkpoint.py",
    "rl-vllm/tests/test_replica_process.py",
    "rl-vllm/tests/test_generator.py",
    "rl-vllm/tests/test_documents.py",
    "rl-vllm/tests/patches/test_expert_layers.py",
    "rl-vllm/tests/test_served_models.py",
    "rl-vllm/tests/patches/test_head_bias.py",
)
"""Modules of packages in which few tests take long, the longest of each package first. Begun last, one of them would
keep a single processor busy at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the modules of a package: the longest first, the others by their number of tests."""
    num_tests = Counter(item.path for item in items)
    ranks = {PACKAGES / module: rank for rank, module in enumerate(LONGEST_FIRST)}
    if all(item.path.is_relative_to(PACKAGES) for item in items):
        items.sort(key=lambda item: (ranks.get(item.path, len(ranks)), -num_tests[item.path]))

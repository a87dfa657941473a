"""What must hold between the sections of a config before any process starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, cast

from rl_core.config import (
    Config,
    Problem,
    ProblemError,
    RawConfig,
    Resolved,
    did_you_mean,
    is_changed,
)
from rl_core.devices import Device
from rl_core.errors import ConfigError
from rl_core.model import HEADLESS_ROLES
from rl_core.model_config import (
    local_hf_config,
    num_experts_of,
)
from rl_launch.backends import (
    Backends,
    GenerationBackend,
    ModelBackend,
)
from rl_launch.cluster.device import AUTO, resolve_device
from rl_launch.model_files.adapter_folder import initial_adapter_problems
from rl_launch.model_files.local_models import MADE_HERE
from rl_launch.model_files.model_facts import model_problems
from rl_launch.model_files.model_folder import MODEL_FILES, TOKENIZER_FILES, adapter_problems, folder_problems
from rl_launch.placement.topology import (
    Topology,
    colocated_problems,
    replica_bound_problems,
    topology_problems,
    weight_sync_problems,
)
from rl_launch.root_config import POLICY, ClusterConfig, RunConfig
from rl_launch.run_config.plan import RunPlan, plugin_of
from rl_launch.session.callbacks.callback_classes import callback_problems

Check = Callable[[RunPlan], Iterable[Problem]]


def _folder_checks(plan: RunPlan) -> Iterator[Problem]:
    # checked here already, because the libraries that load the folder take seconds to import
    config = plan.config
    tokenizer = config.policy.tokenizer
    for key in plan.model_sections:
        section = plan.section(key)
        has_tokenizer = key == POLICY and tokenizer.name is None
        if section.model_name not in MADE_HERE:
            files = (*MODEL_FILES, TOKENIZER_FILES) if has_tokenizer else MODEL_FILES
            yield from folder_problems(f"{key}.model_name", section.model_name, files)
        lora = section.lora_cfg
        if lora.enabled and lora.target_modules and not lora.match_all_linear:
            yield from adapter_problems(f"{key}.lora_cfg.target_modules", section.model_name, lora.target_modules)
        yield from initial_adapter_problems(f"{key}.lora_cfg", lora)
        if "tokenizer" in section.model_fields_set and section.tokenizer != tokenizer:
            yield Problem(f"{key}.tokenizer", "differs from policy.tokenizer, which makes all tokens; remove this key")
    if tokenizer.name is not None and tokenizer.name not in MADE_HERE:
        yield from folder_problems("policy.tokenizer.name", tokenizer.name, (TOKENIZER_FILES,))
    try:
        tokenizer.template_text()
    except ValueError as error:
        yield Problem("policy.tokenizer.chat_template", str(error))


def _model_fact_checks(plan: RunPlan) -> Iterator[Problem]:
    config = plan.config
    read = {model.section: model.spec.role for model in plan.backends.models.values()}
    for key in plan.model_sections:
        yield from model_problems(
            key,
            plan.section(key),
            longest_row=config.policy.max_total_sequence_length,
            has_scalar_head=read.get(key) in HEADLESS_ROLES,
            is_trained_from=key in read,
        )


def _algorithm_checks(plan: RunPlan) -> Iterator[Problem]:
    for check in plan.plugin.checks:
        yield from check(plan.config)


def _checkpointing_checks(plan: RunPlan) -> Iterator[Problem]:
    key = plan.config.checkpointing.metric_key
    names_of = plan.plugin.validation_metrics
    if key is None or not key.startswith("val/") or names_of is None or (known := names_of(plan.config)) is None:
        return
    recorded = list(known)
    if not any(fnmatchcase(key, name) for name in recorded):
        said = f"validation records {', '.join(recorded)}" if recorded else "this run does not validate"
        yield Problem(
            "checkpointing.metric_name",
            f"nothing records {key!r}{did_you_mean(key, recorded)}; {said}; null keeps the newest checkpoints",
        )


def _push_checks(plan: RunPlan) -> Iterator[Problem]:
    checkpointing = plan.config.checkpointing
    if checkpointing.push_to is None:
        for key in ("push_checkpoints", "push_adapter", "push_private"):
            if is_changed(checkpointing, key):
                yield Problem(
                    f"checkpointing.{key}", "has no effect without checkpointing.push_to; set that, or remove it"
                )
        return
    if not checkpointing.enabled:
        yield Problem(
            "checkpointing.push_to", "pushes checkpoints, but checkpointing.enabled is false; remove one of them"
        )
    if checkpointing.push_checkpoints == "best" and checkpointing.metric_name is None:
        yield Problem(
            "checkpointing.push_checkpoints",
            "got best, but checkpointing.metric_name, which ranks checkpoints, is not set; set it (val:loss)",
        )
    if checkpointing.push_adapter and not plan.config.policy.lora_cfg.enabled:
        yield Problem(
            "checkpointing.push_adapter", "pushes adapters, but policy.lora_cfg.enabled is false; remove this key"
        )


def _callback_checks(plan: RunPlan) -> Iterator[Problem]:
    yield from callback_problems(plan.config)
    if plan.config.callbacks and not plan.plugin.trains:
        yield Problem("callbacks", f"training calls them, and {plan.plugin.name} trains nothing; remove this key")


def _backend_checks(plan: RunPlan) -> Iterable[Problem]:
    config, backends = plan.config, plan.backends
    chosen = [(model.section, model.plugin) for model in backends.models.values()]
    if backends.generation is not None:
        chosen.append((POLICY, backends.generation.plugin))
    return [
        problem.at(f"{key}.{problem.key}")
        for key, found in chosen
        for check in found.checks
        for problem in check(plan.section(key), config)
    ]


def _replay_checks(plan: RunPlan) -> Iterator[Problem]:
    """Find replay of a routing that does not exist or is not reported."""
    config, backends = plan.config, plan.backends
    for model in backends.models.values():
        if model.replays_routing:
            problem = _replay_problem(model, backends.generation, config.cluster)
            if problem:
                key = f"{model.section}.{model.plugin.key}.{model.plugin.replay_key}"
                yield Problem(key, f"{problem}; or set {model.plugin.replay_key}=false")


def _lora_sync_checks(plan: RunPlan) -> Iterator[Problem]:
    """Find adapters that are to be sent by themselves, and do not exist or that the generator does not apply."""
    config, generation = plan.config, plan.backends.generation
    if generation is None or generation.config.lora_sync != "adapter":
        return
    key = f"{POLICY}.generation.lora_sync"
    if generation.config.weight_sync_encoding == "changes":
        yield Problem(
            f"{POLICY}.generation.weight_sync_encoding",
            "got changes, but with lora_sync=adapter the adapters alone travel, which change as a whole; set it to "
            "full, or lora_sync=merged",
        )
    if not generation.model.lora_cfg.enabled:
        yield Problem(
            key,
            "adapter sends the adapters of policy.lora_cfg, which is not enabled; set policy.lora_cfg.enabled=true, or "
            "lora_sync=merged",
        )
    elif config.cluster.device != AUTO or not os.environ.get("RAY_ADDRESS"):
        # on another machine's cluster the generator checks it when it starts
        device = resolve_device(config.cluster)
        problem = generation.plugin.adapter_problem(generation.backend, generation.model, device)
        if problem:
            yield Problem(key, f"got adapter, but generation.backend is {generation.plugin.name}: {problem}")


def _replay_problem(model: ModelBackend, generation: GenerationBackend | None, cluster: ClusterConfig) -> str:
    """Why a model cannot replay the generator's routing; empty if it can, as far as is known here."""
    fields = local_hf_config(model.config)
    if fields and not num_experts_of(fields):
        return f"replays the routing of experts, but {model.config.model_name} has none; choose a mixture of experts"
    if model.section != POLICY:
        return "replays the policy's routing, which differs from this model's; remove this key"
    if generation is None:
        return "replays the routing of rollouts, but this algorithm has no rollouts; remove this key"
    if cluster.device == AUTO and os.environ.get("RAY_ADDRESS"):
        return ""  # the generator checks it when it starts
    problem = generation.plugin.routing_problem(generation.backend, resolve_device(cluster))
    if not problem:
        return ""
    return f"needs the experts that the generator chose, which {generation.plugin.name} does not report: {problem}"


def _topology_checks(plan: RunPlan) -> Iterator[Problem]:
    yield from colocated_problems(plan.backends.claims)
    yield from _placement_problems(plan.config.cluster, plan.backends)


def model_checks(plan: RunPlan) -> Iterator[Problem]:
    """Checks of the policy alone."""
    config, policy = plan.config, plan.backends.models[POLICY]
    if config.policy.model_name not in MADE_HERE:
        yield from folder_problems("policy.model_name", config.policy.model_name, MODEL_FILES)
    for check in policy.plugin.checks:
        for problem in check(config.policy, config):
            yield problem.at(f"{POLICY}.{problem.key}")
    yield from _placement_problems(config.cluster, Backends({POLICY: policy}))


def check_placement(plan: RunPlan, device: Device) -> None:
    """Refuse parallel sizes that do not divide the devices of the `cluster` section, once the kind of device is known.

    Raises:
        ConfigError: listing every problem.
    """
    problems = list(_problems_of(topology_of(plan.config.cluster, plan.backends, device)))
    if problems:
        raise ConfigError("\n".join(f"{problem.key}: {problem.message}" for problem in problems))


def topology_of(cluster: ClusterConfig, backends: Backends, device: Device) -> Topology:
    """The devices of a `cluster` section as a run distributes them."""
    return backends.topology(cluster.num_nodes, device.ranks_per_node(cluster), device)


def _placement_problems(cluster: ClusterConfig, backends: Backends) -> Iterator[Problem]:
    # the devices of another machine's cluster are known once Ray has connected to it: `check_placement`
    if cluster.device != AUTO or not os.environ.get("RAY_ADDRESS"):
        yield from _problems_of(topology_of(cluster, backends, resolve_device(cluster)))


def _problems_of(topology: Topology) -> Iterator[Problem]:
    yield from weight_sync_problems(topology)
    yield from replica_bound_problems(topology)
    yield from topology_problems(topology)


CHECKS: tuple[Check, ...] = (
    _folder_checks,
    _algorithm_checks,
    _checkpointing_checks,
    _push_checks,
    _callback_checks,
)
"""Checks of the config of a run."""

BACKEND_CHECKS: tuple[Check, ...] = (
    _model_fact_checks,
    _backend_checks,
    _replay_checks,
    _lora_sync_checks,
    _topology_checks,
)
"""Those that need to know which backends it chooses."""


class PlanChecks:
    """Plans a config that is being read, and checks the plan.

    Args:
        raw: what the user wrote.
        checks: run on a plan even if its backends cannot be told.
        backend_checks: run on a plan with backends.
    """

    def __init__(
        self, raw: RawConfig, checks: Sequence[Check] = CHECKS, backend_checks: Sequence[Check] = BACKEND_CHECKS
    ) -> None:
        self._plan: RunPlan | None = None
        self._raw, self._checks, self._backend_checks = raw, checks, backend_checks

    def __call__(self, read: Config) -> Iterator[Problem]:
        config = cast(RunConfig, read)
        try:
            self._plan = plan = RunPlan.of(config, self._raw)
        except ProblemError as error:
            yield from error.problems
            plan = RunPlan(config, plugin_of(config), Backends({}), self._raw)
            checks = [*self._checks]
        else:
            checks = [*self._checks, *self._backend_checks]
        for check in checks:
            yield from check(plan)

    def planned(self, resolved: Resolved[Any]) -> RunPlan:
        """Return the plan of the config that passed. It has the config as it was resolved, which also knows the
        environment variables that stand in it: their values are never written to files."""
        assert self._plan is not None, "a config without problems has a plan"
        return replace(self._plan, config=cast(RunConfig, resolved.config))

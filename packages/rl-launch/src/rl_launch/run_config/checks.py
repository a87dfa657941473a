"""Checks of the sections of a config against each other, before any process starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from rl_core.config import (
    Config,
    Problem,
    ProblemError,
    RawConfig,
    Resolved,
    WhenChanged,
    is_changed,
    keys_when_changed,
    nearest_as_remedy,
)
from rl_core.devices import Device
from rl_core.errors import ConfigProblems
from rl_core.facts.hf_config import num_experts_of
from rl_core.model import HEADLESS_ROLES
from rl_core.model_config import BackendConfig, local_family, local_hf_config, local_image_token
from rl_launch.backends import Backends
from rl_launch.model_files.adapter_folder import initial_adapter_problems
from rl_launch.model_files.local_models import MADE_HERE
from rl_launch.model_files.model_facts import model_problems
from rl_launch.model_files.model_folder import MODEL_FILES, TOKENIZER_FILES, adapter_problems, folder_problems
from rl_launch.placement.topology import (
    colocated_problems,
    replica_bound_problems,
    topology_problems,
    weight_sync_problems,
)
from rl_launch.push.destinations import destination_of
from rl_launch.root_config import DRAFT_HEAD, DRAFTER, POLICY, ClusterConfig, RunConfig, leaf_of, max_age, section_of
from rl_launch.run_config.inputs import device_here, profiling_checks
from rl_launch.run_config.plan import RunPlan, plugin_of
from rl_launch.run_session.callbacks import callback_problems
from rl_launch.run_session.guardrails import FOUND_METRICS, factor_of

Check = Callable[[RunPlan], Iterable[Problem]]


def _folder_checks(plan: RunPlan) -> Iterator[Problem]:
    # Checked here already, because the libraries that load the folder take seconds to import.
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
        own = section.has_own_tokens
        if not own and "tokenizer" in section.model_fields_set and section.tokenizer != tokenizer:
            reason = "differs from policy.tokenizer, which produces all tokens"
            yield Problem(f"{key}.tokenizer", reason, remedy="Remove this key")
    for key, name in plan.plugin.further_models(config).items():
        if name not in MADE_HERE:
            yield from folder_problems(key, name, MODEL_FILES)
    if tokenizer.name is not None and tokenizer.name not in MADE_HERE:
        yield from folder_problems("policy.tokenizer.name", tokenizer.name, (TOKENIZER_FILES,))
    try:
        tokenizer.template_text()
    except ValueError as error:
        yield Problem("policy.tokenizer.chat_template", str(error))


def _model_fact_checks(plan: RunPlan) -> Iterator[Problem]:
    config = plan.config
    read = {model.section: model.spec for model in plan.backends.models.values()}
    length = config.policy.max_total_sequence_length
    for key in plan.model_sections:
        section, spec = plan.section(key), read.get(key)
        yield from model_problems(
            key,
            section,
            longest_row=section.max_total_sequence_length if section.has_own_tokens else length,
            length_key=f"{key if section.has_own_tokens else POLICY}.max_total_sequence_length",
            has_scalar_head=spec is not None and spec.role in HEADLESS_ROLES,
            needs_scalar_head=spec is not None and spec.role == "reward_model" and not spec.trains,
            is_trained_from=spec is not None,
        )
    for key, name in plan.plugin.further_models(config).items():
        place, section = key.removesuffix(".model_name"), config.policy.model_copy(update={"model_name": name})
        own_length = getattr(plan.section(place), "max_total_sequence_length", None)
        yield from model_problems(
            place,
            section,
            longest_row=own_length or length,
            length_key=f"{place if own_length else POLICY}.max_total_sequence_length",
            has_scalar_head=False,
            is_trained_from=False,
        )


def _model_code_checks(plan: RunPlan) -> Iterator[Problem]:
    generation, needs = plan.backends.generation, "runs no code that comes with a model"
    for model in plan.backends.models.values():
        if model.config.trust_remote_code is not None and not model.plugin.runs_model_code:
            reason = f"is not supported by the training backend {model.plugin.name}, which {needs}"
            yield Problem(f"{model.section}.trust_remote_code", reason, remedy="Use dtensor, or another model")
    if generation is None or generation.plugin.runs_model_code or generation.model.trust_remote_code is None:
        return
    reason = f"{needs}, but policy.trust_remote_code is set"
    yield Problem("policy.generation.backend", reason, got=generation.plugin.name, remedy="Set hf")


def _vision_checks(plan: RunPlan) -> Iterator[Problem]:
    backends = plan.backends
    for model in backends.models.values():
        if model.config.vision.enabled and model.plugin.images is None:
            reason = f"is not supported by the training backend {model.plugin.name}, which has no vision towers"
            remedy = "Use dtensor or megatron, or set it to false, which trains the language model only"
            yield Problem(f"{model.section}.vision.enabled", reason, got=True, remedy=remedy)
        elif model.config.vision.enabled and local_family(model.config) and local_image_token(model.config) is None:
            reason = f"needs a vision-language model, but {model.config.model_name} takes no images"
            yield Problem(f"{model.section}.vision.enabled", reason, got=True, remedy="Remove this key")
    generation = backends.generation
    if generation is None or not generation.model.vision.enabled:
        return
    if generation.plugin.images is None:
        reason = "takes no images, but policy.vision.enabled is true"
        remedy = "Set vllm or hf, or remove policy.vision.enabled"
        yield Problem("policy.generation.backend", reason, got=generation.plugin.name, remedy=remedy)
    elif (device := device_here(plan.config.cluster)) and (  # otherwise the generator checks it when it starts
        problem := generation.plugin.image_problem(generation.backend, generation.model, device)
    ):
        reason = f"is not supported by generation.backend={generation.plugin.name} here: {problem}"
        yield Problem("policy.vision.enabled", reason, got=True)


def _checkpointing_checks(plan: RunPlan) -> Iterator[Problem]:
    key = plan.config.checkpointing.metric_key
    names_of = plan.plugin.validation_metrics
    if key is None or not key.startswith("val/") or names_of is None or (known := names_of(plan.config)) is None:
        return
    recorded = list(known)
    if not any(fnmatchcase(key, name) for name in recorded):
        reason = "is not a metric of the validation" if recorded else "needs validation, but this run does not validate"
        remedy = f"{nearest_as_remedy(key, recorded)} Use null to keep the newest checkpoints".strip()
        got, allowed = plan.config.checkpointing.metric_name, ", ".join(recorded)
        yield Problem("checkpointing.metric_name", reason, got=got, allowed=allowed, remedy=remedy)


def _push_checks(plan: RunPlan) -> Iterator[Problem]:
    checkpointing = plan.config.checkpointing
    if checkpointing.push_to is None:
        for key in ("push_checkpoints", "push_adapter", "push_private"):
            if is_changed(checkpointing, key):
                remedy = "Set checkpointing.push_to, or remove this key"
                yield Problem.unused(f"checkpointing.{key}", "without checkpointing.push_to", remedy=remedy)
        return
    try:
        destination_of(checkpointing.push_to)
    except ValueError as error:
        yield Problem("checkpointing.push_to", str(error))
    if not checkpointing.enabled:
        reason = "pushes checkpoints, but checkpointing.enabled is false"
        yield Problem("checkpointing.push_to", reason, got=checkpointing.push_to, remedy="Remove one of the two")
    if checkpointing.push_checkpoints == "best" and checkpointing.metric_name is None:
        reason = "needs checkpointing.metric_name to rank checkpoints, but it is not set"
        remedy = "Set checkpointing.metric_name, for example to val:loss"
        yield Problem("checkpointing.push_checkpoints", reason, got="best", remedy=remedy)
    if checkpointing.push_adapter and not plan.config.policy.lora_cfg.enabled:
        reason = "pushes adapters, but policy.lora_cfg.enabled is false"
        yield Problem("checkpointing.push_adapter", reason, got=True, remedy="Remove this key")


def _plugin_checks(plan: RunPlan) -> Iterator[Problem]:
    for check in plan.plugin.checks:
        yield from check(plan.config)
    yield from callback_problems(plan.config)
    if plan.config.callbacks and not plan.plugin.trains:
        yield Problem.unused("callbacks", f"with algorithm: {plan.plugin.name}, because only training calls them")


def _switch_checks(plan: RunPlan) -> Iterator[Problem]:
    """Yield the keys of sections that nobody switched on. One that is switched off may keep its keys."""
    assert plan.raw is not None, "checks run on a config that was read"
    backends = {model.section: model for model in plan.backends.models.values()}
    for key, section, written in _sections(plan.root, plan.raw.plain()):
        switch = type(section).model_fields.get("enabled")
        if switch is None or switch.default or getattr(section, "enabled", None) or "enabled" in written:
            continue
        if isinstance(section, BackendConfig):
            parent, _, own = key.rpartition(".")
            model = backends.get(parent)
            if model is None or model.plugin.key == own or getattr(model.backend, "enabled", None):
                continue
        for name in written:
            if name in type(section).model_fields.keys() - section.read_when_off and is_changed(section, name):
                remedy = f"Set {key}.enabled=true, or remove this key"
                yield Problem.unused(f"{key}.{name}", f"without {key}.enabled=true", remedy=remedy)


def _unused_backend_checks(plan: RunPlan) -> Iterator[Problem]:
    """Yield the keys of backends that the run does not use, unless their choice was made over them: a recipe has keys
    of its own backend, which the command line may change."""
    assert plan.raw is not None, "checks run on a config that was read"
    for path, choice, other in plan.unused_backends():
        section = section_of(plan.config, path)
        if getattr(section, "enabled", None) is False or not plan.raw.is_written(path):
            continue
        for name in type(section).model_fields:
            key = f"{path}.{name}"
            if is_changed(section, name) and plan.raw.layer(key) >= plan.raw.layer(choice):
                value = str(section_of(plan.config, choice)).replace("True", "true")
                yield Problem.unused(key, f"with {choice}={value}", remedy=f"Set {other}, or remove this key")


def _sections(
    parent: Config, written: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the path of every section that the user wrote, the section, and its keys with the written values. A section
    that is switched off is left out, with everything in it."""
    for name, values in written.items():
        section = getattr(parent, name, None)
        if isinstance(section, Config) and isinstance(values, Mapping) and values.get("enabled") is not False:
            yield path + name, section, values
            yield from _sections(section, values, f"{path}{name}.")


def _backend_checks(plan: RunPlan) -> Iterable[Problem]:
    return [
        problem.at(f"{chosen.section}.{problem.key}")
        for chosen in plan.backends.by_role.values()
        for check in chosen.plugin.checks
        for problem in check(plan.section(chosen.section), plan.config)
    ]


def _replay_checks(plan: RunPlan) -> Iterator[Problem]:
    """Yield the problems of replaying a routing that does not exist or is not reported."""
    generation = plan.backends.generation
    for model in plan.backends.models.values():
        if not model.replays_routing:
            continue
        fields, remedy = local_hf_config(model.config), "Remove this key"
        if fields and not num_experts_of(fields):
            reason = f"replays the routing of experts, but {model.config.model_name} has no experts"
            remedy = "Choose a mixture-of-experts model, or remove this key"
        elif model.section != POLICY:
            reason = "replays the routing of the policy, which does not apply to this model"
        elif generation is None:
            reason = "replays the routing of rollouts, but this algorithm has no rollouts"
        elif (device := device_here(plan.config.cluster)) and (  # otherwise the generator checks it when it starts
            problem := generation.plugin.routing_problem(generation.backend, device)
        ):
            name = generation.plugin.name
            reason = f"needs the experts that the generator chose, but {name} does not report them: {problem}"
            remedy = f"Otherwise set {model.plugin.replay_key}=false"
        else:
            continue
        key = f"{model.section}.{model.plugin.key}.{model.plugin.replay_key}"
        yield Problem(key, reason, got=True, remedy=remedy)


def _lora_sync_checks(plan: RunPlan) -> Iterator[Problem]:
    """Yield the problems of sending only adapters that the policy lacks or the generator does not apply."""
    config, generation = plan.config, plan.backends.generation
    if generation is None or generation.config.lora_sync != "adapter":
        return
    key = f"{POLICY}.generation.lora_sync"
    if (encoding := generation.config.weight_sync_encoding) != "full":
        because = "all of their values change" if encoding == "changes" else "they are small enough to be sent whole"
        reason = f"saves nothing with lora_sync=adapter, because only adapters are sent and {because}"
        remedy = "Set it to full, or set lora_sync=merged"
        yield Problem(f"{POLICY}.generation.weight_sync_encoding", reason, got=encoding, remedy=remedy)
    if not generation.model.lora_cfg.enabled:
        reason = "sends the adapters of policy.lora_cfg, but LoRA is disabled"
        yield Problem(key, reason, got="adapter", remedy="Set policy.lora_cfg.enabled=true, or lora_sync=merged")
    elif (device := device_here(config.cluster)) and (  # otherwise the generator checks it when it starts
        problem := generation.plugin.adapter_problem(generation.backend, generation.model, device)
    ):
        reason = f"is not supported by generation.backend={generation.plugin.name} here: {problem}"
        yield Problem(key, reason, got="adapter")


def _exact_checks(plan: RunPlan) -> Iterator[Problem]:
    """Yield the problems of exact logprobs with a trainer or generator that does not compute them."""
    generation, policy = plan.backends.generation, plan.backends.models.get(POLICY)
    device = device_here(plan.config.cluster)  # Without a device yet, the workers check when they start.
    if generation is None or policy is None or device is None or not generation.config.exact:
        return
    for plugin, backend in ((policy.plugin, policy.backend), (generation.plugin, generation.backend)):
        if problem := plugin.exact_problem(backend, generation.model, device):
            reason = f"is not supported by {plugin.name} here: {problem}"
            yield Problem(f"{POLICY}.generation.exact", reason, got=True, remedy="Otherwise set it to false")
            return


def _drafter_checks(plan: RunPlan) -> Iterator[Problem]:
    """Yield the problems of training a draft model that the generator does not draft with."""
    backends = plan.backends
    if DRAFTER not in backends.models or backends.generation is None:
        return
    generation, name = backends.generation, backends.models[DRAFTER].config.model_name
    drafts_with = generation.plugin.draft_model(generation.backend)
    if drafts_with is None:
        reason = f"trains a draft model, but the generator ({generation.plugin.name}) drafts with none"
        setting = f"policy.generation.vllm_cfg.speculation={{method: draft_model, model: {name}}}"
        yield Problem(DRAFTER, reason, remedy=f"Set {setting}, or remove this section")
    elif Path(drafts_with).expanduser() != Path(name).expanduser():
        reason = f"is trained, but the generator drafts with {drafts_with}"
        yield Problem(f"{DRAFTER}.model_name", reason, got=name, remedy="Set both to the same folder")


def _draft_head_checks(plan: RunPlan) -> Iterator[Problem]:
    """Yield the problems of a draft head that the generator does not draft with, or that cannot train."""
    backends = plan.backends
    for key in plan.model_sections:
        if key != POLICY and plan.section(key).draft_head is not None:
            reason = "trains a draft head, but generation serves only the policy, whose hidden states a head reads"
            yield Problem(f"{key}.{DRAFT_HEAD}", reason, remedy=f"Write it as {POLICY}.{DRAFT_HEAD}")
    policy, generation, key = backends.models.get(POLICY), backends.generation, f"{POLICY}.{DRAFT_HEAD}"
    head = None if policy is None else policy.config.draft_head
    if policy is None or head is None:
        return
    if not policy.plugin.trains_draft_heads:
        reason = f"is not supported by the training backend {policy.plugin.name}"
        yield Problem(key, reason, remedy="Train the policy with dtensor, or remove this section")
    if DRAFTER in backends.models:
        reason = f"trains a draft head, but {DRAFTER} trains a draft model, and generation drafts with one of them"
        yield Problem(key, reason, remedy="Remove one of the two sections")
        return
    drafts_with = None if generation is None else generation.plugin.draft_head(generation.backend)
    if drafts_with is None:
        engine = None if generation is None else f"the generator ({generation.plugin.name}) drafts with none"
        reason = f"trains a draft head, but {engine or 'this algorithm has no generator'}"
        setting = f"policy.generation.vllm_cfg.speculation={{method: eagle3, model: {head.model_name}}}"
        remedy = f"Set {setting}, with method mtp for a layer for multi-token prediction, or remove this section"
        yield Problem(key, reason, remedy=remedy)
    elif Path(drafts_with).expanduser() != Path(head.model_name).expanduser():
        reason = f"is trained, but the generator drafts with {drafts_with}"
        yield Problem(f"{key}.model_name", reason, got=head.model_name, remedy="Set both to the same folder")


def _topology_checks(plan: RunPlan) -> Iterator[Problem]:
    yield from colocated_problems(plan.backends.claims)
    yield from _placement_problems(plan.config.cluster, plan.backends, device_here(plan.config.cluster))


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise ConfigProblems("\n".join(f"{problem.key}: {problem.message}" for problem in problems), problems)


def model_checks(plan: RunPlan) -> Iterator[Problem]:
    """Yield the problems of the policy only."""
    config, policy = plan.config, plan.backends.models[POLICY]
    if config.policy.model_name not in MADE_HERE:
        yield from folder_problems("policy.model_name", config.policy.model_name, MODEL_FILES)
    for check in policy.plugin.checks:
        for problem in check(config.policy, config):
            yield problem.at(f"{POLICY}.{problem.key}")
    yield from _placement_problems(config.cluster, Backends({POLICY: policy}), device_here(config.cluster))


def check_placement(plan: RunPlan, device: Device) -> None:
    """Refuse parallel sizes that do not divide the devices of the `cluster` section, once the kind of device is known.

    Raises:
        ConfigProblems: If there are problems; lists all of them.
    """
    _refuse(list(_placement_problems(plan.config.cluster, plan.backends, device)))


def check_models(plan: RunPlan, names: Mapping[str, str]) -> None:
    """Refuse what the configs of the models rule out, once they are on this machine.

    Args:
        plan: Plan of the run with the folders of its models.
        names: Names of the models for messages, by folder.

    Raises:
        ConfigProblems: If there are problems; lists all of them.
    """

    def named(text: str) -> str:
        for folder, name in names.items():
            text = text.replace(folder, name)
        return text

    _refuse([problem.rewritten(named) for check in MODEL_CHECKS for problem in check(plan)])


def _placement_problems(cluster: ClusterConfig, backends: Backends, device: Device | None) -> Iterator[Problem]:
    if device is not None:  # otherwise `check_placement` checks it
        topology = backends.topology(cluster.num_nodes, device.ranks_per_node(cluster), device)
        yield from weight_sync_problems(topology)
        yield from replica_bound_problems(topology)
        yield from topology_problems(topology)


SKIPPED = "train/grad_norm"
"""Metric whose bound a trainer knows before an optimizer step."""


def _replay_record_checks(plan: RunPlan) -> Iterator[Problem]:
    if plan.config.logger.replay_enabled and not plan.plugin.generates:
        because = "because this algorithm samples nothing, and `rl replay` needs no record of it"
        yield Problem.unused("logger.replay_enabled", because)


def _guardrail_checks(plan: RunPlan) -> Iterator[Problem]:
    config = plan.config
    changes = any(rule.change for rule in config.guardrails.values())
    fixed = keys_when_changed(plan.root, WhenChanged.NEW_RUN) if changes else {}
    for name, rule in config.guardrails.items():
        key = f"guardrails.{name}"
        bounds = [bound for bound in ("above", "below", "falls_by", "rises_by") if getattr(rule, bound) is not None]
        if any(math.isnan(getattr(rule, bound)) for bound in bounds):
            yield Problem(key, "has a bound that is not a number, which no value breaks", remedy="Give a number")
        if rule.above is not None and rule.below is not None and rule.above < rule.below:
            reason = f"is broken by every value: above is {rule.above:g} and below is {rule.below:g}"
            yield Problem(key, reason, remedy="Set above to the upper end of the range, and below to the lower end")
        if not bounds and rule.metric not in FOUND_METRICS:
            reason = "has no bound, and no finding of rl show is about its metric"
            remedy = f"Set above, below, falls_by or rises_by, or choose one of {', '.join(FOUND_METRICS)}"
            yield Problem(f"{key}.metric", reason, got=rule.metric, remedy=remedy)
        if rule.change and rule.action != "rollback":
            yield Problem.unused(f"{key}.change", f"with action {rule.action}")
        if rule.action in ("warn", "skip_step", "stop") and is_changed(rule, "max_actions"):
            yield Problem.unused(f"{key}.max_actions", f"with action {rule.action}")
        if rule.action in ("rollback", "lower_staleness") and not config.checkpointing.enabled:
            remedy = "Set checkpointing.enabled=true, or choose warn or stop"
            yield Problem(f"{key}.action", "needs the checkpoints of the run", got=rule.action, remedy=remedy)
        if rule.action == "skip_step":
            if rule.metric != SKIPPED or bounds != ["above"]:
                reason = f"skips optimizer steps, before which only {SKIPPED} is known"
                remedy = f"Set metric: {SKIPPED} and above alone, or choose another action"
                yield Problem(f"{key}.action", reason, got=rule.action, remedy=remedy)
            elif config.policy.skipped_grad_norm not in (None, rule.above):
                yield Problem("policy.skipped_grad_norm", f"differs from {key}.above", remedy="Remove one of them")
            if is_changed(rule, "patience"):
                yield Problem.unused(f"{key}.patience", "with action skip_step, which judges every step")
        if rule.action == "lower_staleness" and max_age(config) is None:
            reason = "needs rollouts that are older than the weights which train on them"
            yield Problem(f"{key}.action", reason, got=rule.action, remedy="Set async_grpo.enabled, or choose another")
        for changed, value in rule.change.items():
            if changed == "guardrails" or changed.startswith(("guardrails.", "cluster.", "run_dir")):
                yield Problem(f"{key}.change", f"cannot change {changed}", remedy="Change settings of the training")
                continue
            try:
                present = leaf_of(config, changed)
            except (AttributeError, KeyError, TypeError):
                yield Problem(f"{key}.change", f"has {changed!r}, which is not a key of this config")
                continue
            if any(each == changed or each.startswith(f"{changed}.") for each in fixed):
                yield Problem(f"{key}.change", f"cannot change {changed}, which needs a new run")
                continue
            if factor_of(value) is not None and (isinstance(present, bool) or not isinstance(present, int | float)):
                reason = f"multiplies {changed}, whose value is {present!r}"
                yield Problem(f"{key}.change", reason, got=value, remedy="Give a value instead of a factor")


CHECKS: tuple[Check, ...] = (
    _folder_checks,
    _plugin_checks,
    _checkpointing_checks,
    _push_checks,
    _switch_checks,
    _guardrail_checks,
    _replay_record_checks,
    profiling_checks,
)
"""Checks of the config of a run."""

MODEL_CHECKS: tuple[Check, ...] = (
    _model_fact_checks,
    _model_code_checks,
    _backend_checks,
    _replay_checks,
    _vision_checks,
)
"""Checks that compare the config with the configs of models, as far as these are on this machine."""

BACKEND_CHECKS: tuple[Check, ...] = (
    *MODEL_CHECKS,
    _unused_backend_checks,
    _exact_checks,
    _lora_sync_checks,
    _drafter_checks,
    _draft_head_checks,
    _topology_checks,
)
"""Checks that need to know the backends of the run."""


class PlanChecks:
    """Plan a config that is being read, and check the plan.

    Args:
        raw: Values that the user wrote.
        checks: Checks that run even if the backends of the plan are not known.
        backend_checks: Checks that run on a plan with backends.
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
        named: set[str] = set()
        for check in checks:
            for problem in check(plan):
                if not problem.is_unused or problem.key not in named:  # without effect for one reason is enough
                    yield problem
                named.add(problem.key)

    def planned(self, resolved: Resolved[Any]) -> RunPlan:
        """Return the plan of the config that passed. It has the config as it was resolved, which also knows the
        environment variables in it: their values are never written to files."""
        assert self._plan is not None, "a config without problems has a plan"
        return replace(self._plan, config=cast(RunConfig, resolved.config))

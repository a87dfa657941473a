"""The config of a whole run: one strict type, assembled from the sections of the installed packages."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rl_core.config import (
    Config,
    EnvVars,
    PathText,
    Problem,
    ProblemError,
    RawConfig,
    Resolved,
    WhenChanged,
    assemble,
    did_you_mean,
    is_changed,
    load,
    refusal,
    resolve,
)
from rl_core.devices import Device
from rl_core.environments.instance import environment_types
from rl_core.errors import ConfigError, ConfigProblems
from rl_core.model import HEADLESS_ROLES
from rl_core.model_config import (
    ColocatedConfig,
    GenerationConfig,
    ModelConfig,
    OptimizerConfig,
    local_hf_config,
    num_experts_of,
)
from rl_core.plugins import (
    ALGORITHMS,
    ENVIRONMENTS,
    GENERATORS,
    POLICIES,
    AlgorithmPlugin,
    algorithm_named,
    names,
)
from rl_core.plugins.user_code import is_in_file
from rl_launch.backends import (
    POLICY,
    Backends,
    GenerationBackend,
    ModelBackend,
    backends_of,
    installed,
    model_sections,
    section_of,
)
from rl_launch.cluster.device import AUTO, resolve_device
from rl_launch.foreign_keys.hints import ForeignHints
from rl_launch.model_files.absent_run import absent_run
from rl_launch.model_files.adapter_folder import initial_adapter_problems
from rl_launch.model_files.local_models import MADE_HERE
from rl_launch.model_files.model_facts import model_problems
from rl_launch.model_files.model_folder import MODEL_FILES, TOKENIZER_FILES, adapter_problems, folder_problems
from rl_launch.model_files.run_models import with_models_of_runs
from rl_launch.placement.topology import (
    Topology,
    colocated_problems,
    replica_bound_problems,
    topology_problems,
    weight_sync_problems,
)
from rl_launch.recipes import RECIPES
from rl_launch.run_config.validation_off import takes_out_validation, without_validation
from rl_launch.session.callbacks.callback_classes import callback_problems
from rl_launch.session.config import CallbackConfig, CheckpointingConfig, LoggerConfig
from rl_launch.session.directory.run_folder import is_run


class ClusterConfig(Config):
    """Nodes, devices, environments of workers, and time limits of the start."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    num_nodes: int = Field(default=1, gt=0)
    """Number of machines; more than one need a Ray cluster, named by RAY_ADDRESS."""
    gpus_per_node: int = Field(default=1, gt=0)
    """GPUs to use on each machine."""
    device: Literal["auto", "cuda", "cpu", "rehearsal"] = "auto"
    """Device of the models; `auto` is CUDA if there are GPUs. `rehearsal` runs `num_nodes` nodes of `gpus_per_node`
    GPUs on this machine's CPU: everything but the kernels is as on a cluster of GPUs, so use a tiny model."""
    cpu_ranks_per_node: int = Field(default=1, gt=0)
    """Ranks on each machine if the device is the CPU."""
    worker_envs: Literal["auto", "shared", "isolated"] = "auto"
    """Environments of the workers: the driver's (`shared`), ones that are built for them (`isolated`), or the driver's
    if it has all they need and built ones otherwise (`auto`)."""
    autoscaling: bool = False
    """Whether the cluster adds nodes on request; a run then waits for devices that it lacks."""
    placement_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for devices that others use, or that an autoscaling cluster adds."""
    replacement_timeout_s: float = Field(default=300.0, ge=0)
    """After the loss of a node: longest wait for another one if the remaining devices do not suffice."""
    process_timeout_s: float = Field(default=300.0, gt=0)
    """Longest wait for the first answer of a process, or of a node."""
    worker_envs_timeout_s: float = Field(default=3600.0, gt=0)
    """Longest time to build the environments of workers on nodes other than the driver's."""
    fork_server_s: float | None = Field(default=None, ge=0)
    """How long a Python interpreter that has imported an engine stays for the next worker, which it forks in a fraction
    of the time, and for the next check of a config, at most 120; 0: every process imports by itself. Unset: 600 on CPU;
    on GPUs 0, until it has been tried on them."""
    start_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest time to load a model: large ones read hundreds of gigabytes."""
    env_vars: EnvVars = {}
    """Environment variables of all workers on all nodes. Workers also get the driver's that begin with `NCCL_`,
    `GLOO_`, `UCX_`, `FI_`, `HF_`, `TRANSFORMERS_`, `TOKENIZERS_`, `TORCH_`, `PYTORCH_`, `TORCHINDUCTOR_`,
    `TORCHDYNAMO_`, `TRITON_`, `NVTE_`, `VLLM_`, `OMP_`, `GOMP_`, `MKL_`, `KMP_`, `CUDA_` or `MALLOC_`, except paths of
    CUDA, numbers of threads and secrets (`HF_TOKEN`), which must be named here: `HF_TOKEN: ${oc.env:HF_TOKEN}`.
    Values that are set here win."""


class EnvironmentsConfig(Config):
    """Settings of environments, which score completions, by name."""


class RootConfig(Config):
    algorithm: Annotated[str, WhenChanged.NEW_RUN]
    """Name of the algorithm, such as `grpo` (`rl recipes` lists recipes with theirs), or `file.py:NAME` of one in a
    file of yours."""
    run_dir: Annotated[PathText | None, WhenChanged.RESUME] = None
    """Folder of the run, resumed if it holds one; if unset, a new folder under `runs`."""
    callbacks: Annotated[list[str | CallbackConfig], WhenChanged.RESUME] = []
    """Your classes that training calls at its start and end, after steps, evaluations and saves: `file.py:Class`,
    or `{type: file.py:Class, settings: {...}}`."""


def read_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Resolved[RootConfig]:
    """The config of a run, from a recipe, a YAML file, a run directory or nested values, with overrides.

    Everything that needs no engine is checked.

    Raises:
        ConfigError: listing every problem.
    """
    raw = read_raw(source, overrides)
    if raw.select("algorithm") is None and (guess := _guessed_algorithm(raw)):
        raise _without_algorithm(raw, guess)
    return _read(raw, source)


def _read(raw: RawConfig, source: str | Path | Mapping[str, Any]) -> Resolved[RootConfig]:
    algorithm = _algorithm(raw)
    hints = ForeignHints(algorithm.name)
    if algorithm.generates and not isinstance(source, Mapping) and is_run(Path(source).expanduser()):
        check_environments(raw)
    try:
        return resolve(
            raw,
            root_type(algorithm, raw),
            checks=(
                _folder_checks,
                _model_fact_checks,
                *algorithm.checks,
                _checkpointing_checks,
                _push_checks,
                _callback_checks,
                _backend_checks,
                _replay_checks,
                _lora_sync_checks,
                _topology_checks,
            ),
            hint=hints,
        )
    except ConfigProblems as error:
        remarks = hints.remarks(raw.name) if raw.files else []
        raise ConfigProblems("\n".join([str(error), *remarks]), error.problems) from None


def _guessed_algorithm(raw: RawConfig) -> str:
    """The installed algorithm whose own section the user wrote; empty if there is not exactly one."""
    written = raw.plain()
    found = [name for name in names(ALGORITHMS) if name in written]
    return found[0] if len(found) == 1 else ""


def _without_algorithm(raw: RawConfig, guess: str) -> ConfigProblems:
    """The error about a config that does not name its algorithm, with its other problems as they would be with the
    algorithm that its sections belong to."""
    known = ", ".join(names(ALGORITHMS))
    missing = Problem(
        "algorithm", f"must be set; the section {guess} belongs to algorithm: {guess}; installed algorithms: {known}"
    )
    others: tuple[tuple[str, str], ...] = ()
    remarks: list[str] = []
    try:
        _read(raw.with_values({"algorithm": guess}, "guessed"), {})
    except ConfigProblems as error:
        others, remarks = error.problems, ForeignHints.remarks_in(str(error))
    except ConfigError as error:
        remarks = [str(error)]
    whole = refusal([missing, *(Problem(key, message) for key, message in others)], raw)
    return ConfigProblems("\n".join([str(whole), *remarks]), whole.problems)


def read_model_config(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> Any:
    """The config of a run, or of a single model, of which only the policy will be started: the settings of generation
    need not fit the devices.

    Args:
        source: the YAML file of a resolved config, or plain values of `policy` and `cluster`.

    Raises:
        ConfigError: listing every problem.
    """
    raw = load(source, overrides)
    sections: dict[str, Any] = {"policy": _policy_type(generates=False), "cluster": ClusterConfig}
    is_run = raw.select("algorithm") is not None
    return resolve(raw, type_of(raw) if is_run else assemble("Model", sections), checks=(_model_checks,)).config


def read_raw(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RawConfig:
    """The values that the user wrote, before a schema has read them; without keys of a validation that a later layer
    turns off by `data.validation: null`.
    """
    found: str | Path | Mapping[str, Any] = source
    if not isinstance(source, Mapping):
        if problem := absent_run(str(source)):
            raise ConfigError(problem)
        folder = Path(source).expanduser()
        written = folder / "config.yaml"
        found = written if folder.is_dir() and written.is_file() else source
    raw = with_models_of_runs(load(found, overrides, search=[RECIPES]))
    if takes_out_validation(raw):
        with suppress(ConfigError):  # reported when the config is read
            return without_validation(raw, _algorithm(raw))
    return raw


def check_environments(raw: RawConfig) -> None:
    """Refuse the config of a run that uses an environment which is not installed.

    Raises:
        ConfigError: naming it.
    """
    known = names(ENVIRONMENTS)
    sections = raw.select("env") or {}
    own = [name for name, section in sections.items() if section and (section.get("type") or section.get("rewards"))]
    missing = [name for name in sections if name not in known and name not in own]
    if missing:
        listed = ", ".join(map(repr, missing))
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(
            f"environment {listed} {verb} not installed, and {raw.name} has settings of it: install the package that "
            f"the run was started with (installed environments: {', '.join(known) or 'none'})"
        )


def type_of(raw: RawConfig) -> type[RootConfig]:
    """The root type for the `algorithm` of a config."""
    return root_type(_algorithm(raw), raw)


def root_type(algorithm: AlgorithmPlugin, raw: RawConfig) -> type[RootConfig]:
    """The root of a run: the algorithm's sections, those of installed backends and environments, and the runtime's.

    Raises:
        ConfigError: if a section chooses something that does not exist.
    """
    own = {key: _section(key, kind, raw) for key, kind in algorithm.sections.items()}
    sections: dict[str, Any] = {
        **own,
        **_nested(_model_types(algorithm, raw), own),
        "checkpointing": CheckpointingConfig,
        "logger": LoggerConfig,
        "cluster": ClusterConfig,
    }
    if algorithm.generates:
        sections["env"] = environments_type(raw)
    return assemble("Root", sections, base=RootConfig)  # type: ignore[return-value]  # a subclass of its base


def environments_type(raw: RawConfig) -> type[Config]:
    """The section `env`: the installed environments, and those that the user wrote.

    Raises:
        ConfigError: if one has a type that does not exist.
    """
    return _section("env", _environments_type, raw)


def _section(key: str, kind: Any, raw: RawConfig) -> type[Config]:
    if isinstance(kind, type):
        return kind
    try:
        chosen: type[Config] = kind(raw.select(key))
    except ProblemError as error:
        at = [(f"{key}.{problem.key}", problem.message) for problem in error.problems]
        raise ConfigError("\n".join(f"{path} ({raw.origin(path)}): {message}" for path, message in at)) from None
    return chosen


def _environments_type(written: Any) -> type[Config]:
    return assemble("Environments", environment_types(written, installed(ENVIRONMENTS)), base=EnvironmentsConfig)


def _algorithm(raw: RawConfig) -> AlgorithmPlugin:
    name = raw.select("algorithm")
    if name is None:
        known = ", ".join(names(ALGORITHMS))
        raise ConfigError(f"algorithm ({raw.name}): must be set; installed algorithms: {known}")
    if isinstance(name, str) and is_in_file(name):
        try:
            return algorithm_named(name)
        except ConfigError as error:
            raise ConfigError(f"algorithm ({raw.origin('algorithm')}): {error}") from None
    if not isinstance(name, str) or name not in names(ALGORITHMS):
        known, near = ", ".join(names(ALGORITHMS)), did_you_mean(str(name), names(ALGORITHMS))
        place = raw.origin("algorithm")
        raise ConfigError(f"algorithm ({place}): got {name!r}{near}; installed algorithms: {known}")
    return algorithm_named(name)


def _model_types(algorithm: AlgorithmPlugin, raw: RawConfig) -> dict[str, type[Config]]:
    """Types of the sections that hold models, by dotted key."""

    def names_in(key: str) -> tuple[str, ...]:
        written = raw.select(key)
        # a name with a dot is not a key; the type of the section refuses it
        return tuple(name for name in written if "." not in str(name)) if isinstance(written, Mapping) else ()

    others = assemble("Model", {**_backend_types(POLICIES), "colocated": ColocatedConfig}, base=ModelConfig)
    types = dict.fromkeys(algorithm.model_keys(names_in), others)
    types[POLICY] = _policy_type(generates=algorithm.generates)
    for key, defaults in algorithm.training_defaults(partial(_value_written, raw)).items():
        adapts = _value_written(raw, f"{key}.lora_cfg.enabled") is True
        types[key] = _trained_by_default(types[key], defaults.rows, defaults.adapter_lr if adapts else defaults.lr)
    return types


def _value_written(raw: RawConfig, key: str) -> Any:
    """The value that the user wrote at a key; None if there is none, or if it is wrong, which is reported later."""
    try:
        return raw.select(key)
    except ConfigError:
        return None


def _trained_by_default(model: type[Config], rows: int, lr: float) -> type[Config]:
    """The type of a section of a model, with other defaults of what it trains with."""
    arguments = {**OptimizerConfig().kwargs, "lr": lr}
    optimizer = assemble("Optimizer", {}, base=OptimizerConfig, defaults={"kwargs": arguments})
    return assemble(model.__name__, {"optimizer": optimizer}, base=model, defaults={"train_global_batch_size": rows})


def _policy_type(*, generates: bool) -> type[Config]:
    sections: dict[str, Any] = _backend_types(POLICIES)
    if generates:
        sections["generation"] = assemble("Generation", _backend_types(GENERATORS), base=GenerationConfig)
    return assemble("Policy", sections, base=ModelConfig)


def _backend_types(group: str) -> dict[str, type[Config]]:
    return {found.key: found.config for found in installed(group).values()}


def _nested(types: Mapping[str, type[Config]], around: Mapping[str, type[Config]]) -> dict[str, type[Config]]:
    """Types by dotted key as sections within sections, those of `around` among them."""
    nested = {key: kind for key, kind in types.items() if "." not in key}
    for head in dict.fromkeys(key.partition(".")[0] for key in types if "." in key):
        below = {key.partition(".")[2]: kind for key, kind in types.items() if key.startswith(f"{head}.")}
        nested[head] = assemble(head.title(), _nested(below, {}), base=around.get(head, Config))
    return nested


def _folder_checks(config: Any) -> Iterator[Problem]:
    # checked here already, because the libraries that load the folder take seconds to import
    tokenizer = config.policy.tokenizer
    for key in model_sections(config):
        section = section_of(config, key)
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


def _model_fact_checks(config: Any) -> Iterator[Problem]:
    try:
        read = {model.section: model.spec.role for model in backends_of(config).models.values()}
    except ProblemError:
        return
    for key in model_sections(config):
        yield from model_problems(
            key,
            section_of(config, key),
            longest_row=config.policy.max_total_sequence_length,
            has_scalar_head=read.get(key) in HEADLESS_ROLES,
            is_trained_from=key in read,
        )


def _checkpointing_checks(config: Any) -> Iterator[Problem]:
    key = config.checkpointing.metric_key
    names_of = algorithm_named(config.algorithm).validation_metrics
    if key is None or not key.startswith("val/") or names_of is None or (known := names_of(config)) is None:
        return
    recorded = list(known)
    if not any(fnmatchcase(key, name) for name in recorded):
        said = f"validation records {', '.join(recorded)}" if recorded else "this run does not validate"
        yield Problem(
            "checkpointing.metric_name",
            f"nothing records {key!r}{did_you_mean(key, recorded)}; {said}; null keeps the newest checkpoints",
        )


def _push_checks(config: Any) -> Iterator[Problem]:
    checkpointing = config.checkpointing
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
    if checkpointing.push_adapter and not config.policy.lora_cfg.enabled:
        yield Problem(
            "checkpointing.push_adapter", "pushes adapters, but policy.lora_cfg.enabled is false; remove this key"
        )


def _callback_checks(config: Any) -> Iterator[Problem]:
    yield from callback_problems(config)
    if config.callbacks and not algorithm_named(config.algorithm).run:
        yield Problem("callbacks", f"training calls them, and {config.algorithm} trains nothing; remove this key")


def _backend_checks(config: Any) -> Iterable[Problem]:
    try:
        backends = backends_of(config)
    except ProblemError as error:
        return error.problems
    chosen = [(model.section, model.plugin) for model in backends.models.values()]
    if backends.generation is not None:
        chosen.append((POLICY, backends.generation.plugin))
    return [
        replace(problem, key=f"{key}.{problem.key}")
        for key, found in chosen
        for check in found.checks
        for problem in check(section_of(config, key), config)
    ]


def _replay_checks(config: Any) -> Iterator[Problem]:
    """Find replay of a routing that does not exist or is not reported."""
    try:
        backends = backends_of(config)
    except ProblemError:
        return
    for model in backends.models.values():
        if model.replays_routing:
            problem = _replay_problem(model, backends.generation, config.cluster)
            if problem:
                key = f"{model.section}.{model.plugin.key}.{model.plugin.replay_key}"
                yield Problem(key, f"{problem}; or set {model.plugin.replay_key}=false")


def _lora_sync_checks(config: Any) -> Iterator[Problem]:
    """Find adapters that are to be sent by themselves, and do not exist or that the generator does not apply."""
    try:
        generation = backends_of(config).generation
    except ProblemError:
        return
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


def _replay_problem(model: ModelBackend, generation: GenerationBackend | None, cluster: Any) -> str:
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


def _topology_checks(config: Any) -> Iterator[Problem]:
    try:
        backends = backends_of(config)
    except ProblemError:
        return
    yield from colocated_problems(backends.claims)
    yield from _placement_problems(config.cluster, backends)


def _model_checks(config: Any) -> Iterator[Problem]:
    """Checks of the policy alone."""
    try:
        policy = backends_of(config).models[POLICY]
    except ProblemError as error:
        yield from error.problems
        return
    if config.policy.model_name not in MADE_HERE:
        yield from folder_problems("policy.model_name", config.policy.model_name, MODEL_FILES)
    for check in policy.plugin.checks:
        for problem in check(config.policy, config):
            yield replace(problem, key=f"{POLICY}.{problem.key}")
    yield from _placement_problems(config.cluster, Backends({POLICY: policy}))


def check_placement(cluster: Any, backends: Backends, device: Device) -> None:
    """Refuse parallel sizes that do not divide the devices of a `cluster` section, once the kind of device is known.

    Raises:
        ConfigError: listing every problem.
    """
    problems = list(_problems_of(topology_of(cluster, backends, device)))
    if problems:
        raise ConfigError("\n".join(f"{problem.key}: {problem.message}" for problem in problems))


def topology_of(cluster: Any, backends: Backends, device: Device) -> Topology:
    """The devices of a `cluster` section as a run distributes them."""
    return backends.topology(cluster.num_nodes, device.ranks_per_node(cluster), device)


def _placement_problems(cluster: Any, backends: Backends) -> Iterator[Problem]:
    # the devices of another machine's cluster are known once Ray has connected to it: `check_placement`
    if cluster.device != AUTO or not os.environ.get("RAY_ADDRESS"):
        yield from _problems_of(topology_of(cluster, backends, resolve_device(cluster)))


def _problems_of(topology: Topology) -> Iterator[Problem]:
    yield from weight_sync_problems(topology)
    yield from replica_bound_problems(topology)
    yield from topology_problems(topology)

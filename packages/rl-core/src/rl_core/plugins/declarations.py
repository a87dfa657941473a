"""Declarations of plugins: config, requirement and the code that they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import packages_distributions
from typing import TYPE_CHECKING, Any

from rl_core.user_code import FromFile

if TYPE_CHECKING:
    from rl_core.config import Config, Problem
    from rl_core.devices import Device
    from rl_core.facts.model_size import RankMemory
    from rl_core.facts.rank_layout import EngineLayout, RankLayout
    from rl_core.model import ModelSpec
    from rl_core.model_config import ModelConfig

SectionNames = Callable[[str], tuple[str, ...]]
"""From the dotted key of a section of a config to the keys of the sections in it; none if there is no such section."""


WrittenValues = Callable[[str], Any]
"""From a dotted key of a config to the value that the user wrote there; None if there is none."""

POLICIES = "rl.policies"
"""Entry-point group of training backends."""
GENERATORS = "rl.generators"
"""Entry-point group of generation engines."""
ENVIRONMENTS = "rl.environments"
"""Entry-point group of environments."""
ALGORITHMS = "rl.algorithms"
"""Entry-point group of algorithms."""
DATASETS = "rl.datasets"
"""Entry-point group of datasets."""

KINDS = {
    POLICIES: "training backend",
    GENERATORS: "generation engine",
    ENVIRONMENTS: "environment",
    ALGORITHMS: "algorithm",
    DATASETS: "dataset",
}
"""Groups of entry points, each with a description of its plugins."""


@dataclass(frozen=True)
class Requirement:
    """Packages that a class needs in its environment: a distribution and, by device (`cpu`, `cuda`), its extras.

    Args:
        distribution: Name for pip.
        extras: Device to the extras that bring the engine there.
        imports: Modules whose presence shows that the extras are installed.
    """

    distribution: str
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    imports: tuple[str, ...] = ()


def requirement_of(path: str) -> Requirement:
    """Return the requirement of a function or class that is named as `package.module:Name`: the distribution installed
    here that has the package. Of a package that no distribution has, only that it can be imported."""
    package = path.partition(":")[0].partition(".")[0]
    providers = packages_distributions().get(package, ["rl-core"])
    return Requirement(providers[0], imports=(package,))


def nothing_further(config: object) -> tuple[Requirement, ...]:
    """For a backend or an algorithm whose workers need the same packages whatever its config."""
    return ()


def reports_routing(config: object, device: Device) -> str:
    """For a generator whose completions can carry the experts that tokens were sent to, wherever it runs."""
    return ""


def reports_no_routing(config: object, device: Device) -> str:
    """For a generator whose completions never carry the experts that tokens were sent to."""
    return "it does not report routing. Choose another generation.backend"


def applies_no_adapters(config: object, model: ModelConfig, device: Device) -> str:
    """For a generator that serves whole weights only."""
    return "it does not apply adapters. Set lora_sync=merged, or choose generation.backend=vllm"


def is_not_exact(config: object, model: ModelConfig, device: Device) -> str:
    """For a backend whose results for a row depend on the other rows of its batch."""
    return "its kernels add in an order that depends on the batch. Use dtensor with the hf generator on cpu"


def on_own_devices(config: object) -> int:
    """For a generator whose engine runs on devices of the run."""
    return 0


def drafts_with_no_model(config: object) -> str | None:
    """For a generator that never decodes speculatively with a draft model."""
    return None


def serves_images(config: object, model: ModelConfig, device: Device) -> str:
    """For a generator that serves every model with images, if it serves any."""
    return ""


@dataclass(frozen=True)
class Preload:
    """Modules that a worker process imports before its work is known, so that many processes can share one import.

    Args:
        modules: Imported in this order. They start no thread and use no GPU; `rl_core.fork_server` has the rest.
        variables: Environment variables that they read when they are imported; those that the user set win.
    """

    modules: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MeshCase:
    """One way to train a model: a mesh, the layout of rows on it, and the weights that train.

    Args:
        mesh: Its name, `tp2 x pp2`.
        num_ranks: Its ranks.
        settings: Settings of the backend's config.
        is_packed: True if rows are packed, rather than padded.
        has_adapters: True if adapters train, rather than all weights.
    """

    mesh: str
    num_ranks: int
    settings: Mapping[str, Any]
    is_packed: bool
    has_adapters: bool

    @property
    def layout(self) -> str:
        """`packed, full`, or the like."""
        return f"{'packed' if self.is_packed else 'padded'}, {'adapters' if self.has_adapters else 'full'}"

    def __str__(self) -> str:
        return f"{self.mesh}, {self.layout}"


@dataclass(frozen=True)
class BackendPlugin:
    """Declaration of a training backend or a generation engine, without heavy imports.

    Args:
        name: As users write it.
        key: Where its config lives, in a model's section (`dtensor_cfg`) or in `policy.generation` (`vllm_cfg`).
        config: Type of that config; a training backend's extends `rl_core.model_config.BackendConfig`, an engine's that
            may compute in fewer bits `rl_core.model_config.EngineConfig`.
        worker: `"package.module:Class"`, a `ModelWorker` or a `Generator`, imported in the worker's environment.
        follower: `"package.module:Class"` of the part of a replica on each node after the first, imported in the
            generator's environment; built with the generator's arguments and the `rl_core.ray.host.Place` of the first
            node. Its `start` is awaited, and it ends with its process. Empty if a replica of this generator must be on
            one node.
        requirement: Requirement of that environment.
        preload: Function from the backend's config and the device to what its workers import in any case; if None, the
            module of `worker`.
        further: Function from the backend's config to what else that environment needs with these settings, such as an
            extra with a kernel that they choose.
        ranks: Function from the backend's config to the number of ranks that one model (training: one data-parallel
            shard times model parallel) or one replica (generation) needs at least; the world must be a multiple of it.
        checks: Static checks, called as `check(section, config)` before any process starts, with the section of the
            model (for an engine, of the model it serves) and the whole resolved config. Keys of their problems are
            relative to that section, whatever its role.
        preflight: `"package.module:function"`, called in the worker's environment before Ray starts, with that section
            as plain data; returns problems as text that begins with a key of the section.
        selfcheck: `"package.module:function"` of a training backend, called in the worker's environment with a model's
            folder or hub name, and with None or the one `rl_core.plugins.MeshCase` to check; yields a
            `FamilyCase` for each mesh, layout of rows and kind of training on a tiny model of its family, on CPU, and
            raises `ConfigError` if there is no such family.
        mesh_case: Function from the section of a model to the case that its mesh comes down to at a small size.
        memory: Function of a training backend, from the model's section, the backend's config, the size of the model,
            the number of ranks, and the size of the part that trains (`trained=`), to the memory of the rank with the
            most parameters; None if it is not estimated.
        layout: Function of a training backend, from the model's section, the backend's config, the number of ranks and
            the device, to the `RankLayout` from which `rl plan` estimates memory and time; None if it is not estimated.
        engine_layout: The same of a generator for one replica, from the model's section, its config, the device and
            whether it shares the device (`is_shared=`), to an `EngineLayout`.
        counted: `"package.module:function"` of a training backend, called in the worker's environment with the section
            of a model and the backend's settings as plain data, the fields of the model's Hugging Face config and the
            number of ranks; it counts the bytes of a training step on the model's real layers, by name. Empty if it
            does not.
        replay_key: Boolean key of a training backend's config that makes its passes send tokens to the experts that the
            generator chose; empty if it has none. The generator then reports them.
        routing_problem: For a generator: function from its config and the device to why its completions cannot
            carry the experts that tokens were sent to (`Placement.reports_routing`); empty if they can.
        adapter_problem: For a generator: function from its config, the model and the device to why it cannot
            apply the low-rank adapters of the policy itself (`GenerationConfig.lora_sync`); empty if it can.
        exact_problem: Function from the backend's config, the model and the device to why its logprobs are not the bits
            that every other exact backend computes (`GenerationConfig.exact`); empty if they are.
        keeps_cache: True if a generator can continue with keys and values of a request that a weight update interrupted
            (`Placement.keeps_cache`).
        images: Further requirement of the environment if the model takes images (`policy.vision.enabled`); None for a
            backend that refuses such models.
        image_problem: For a generator with `images`: function from its config, the model and the device to why it
            cannot serve this model with images; empty if it can.
        servers: For a generator: function from its config to the number of its replicas that run elsewhere, so that
            they need no device of the run and read weights from files; 0 if the engine is the run's own.
        draft_model: For a generator: function from its config to the draft model that it decodes speculatively with and
            takes the weights of (`rl_core.weights.Manifest.target`), a folder or hub name; None if there is none.
        draft_head: For a generator: function from its config to the folder of the draft head that it decodes
            speculatively with and takes the weights of; None if there is none.
        trains_draft_heads: True if a training backend trains a draft head with a policy (`ModelConfig.draft_head`).
        runs_model_code: True if it can run code that comes with a model's files (`ModelConfig.trust_remote_code`).
        held_families: Model types (as in `config.json`) whose every mesh the backend's own tests hold; a run of another
            family checks its case first.
        family_table: `"package:file"` with results of the self-check, which a run reads instead of checking again; as
            `rl_launch.doctor.family.FamilyTable` reads it. Empty if there are none.
        converter: `"package.module:function"` of a training backend, called in the worker's environment with the folder
            of a checkpoint that other programs wrote with the backend's library, an empty folder, and a folder or hub
            name with the config and tokenizer of the model. It writes Hugging Face files and prints one JSON object:
            `num_files`, `num_tensors` and `num_bytes`, and the folder that it read as `source`, or a `problem`. Empty
            if it reads no such checkpoints.
    """

    name: str
    key: str
    config: type[Config]
    worker: str
    requirement: Requirement
    ranks: Callable[[Any], int]
    follower: str = ""
    further: Callable[[Any], tuple[Requirement, ...]] = nothing_further
    preload: Callable[[Any, Device], Preload] | None = None
    checks: tuple[Callable[[Any, Any], Iterable[Problem]], ...] = ()
    preflight: str = ""
    selfcheck: str = ""
    mesh_case: Callable[[Any], MeshCase] | None = None
    memory: Callable[..., RankMemory] | None = None
    layout: Callable[[ModelConfig, Any, int, Device], RankLayout] | None = None
    engine_layout: Callable[..., EngineLayout] | None = None
    counted: str = ""
    replay_key: str = ""
    routing_problem: Callable[[Any, Device], str] = reports_no_routing
    adapter_problem: Callable[[Any, ModelConfig, Device], str] = applies_no_adapters
    exact_problem: Callable[[Any, ModelConfig, Device], str] = is_not_exact
    keeps_cache: bool = False
    images: Requirement | None = None
    image_problem: Callable[[Any, ModelConfig, Device], str] = serves_images
    servers: Callable[[Any], int] = on_own_devices
    draft_model: Callable[[Any], str | None] = drafts_with_no_model
    draft_head: Callable[[Any], str | None] = drafts_with_no_model
    trains_draft_heads: bool = False
    runs_model_code: bool = False
    held_families: frozenset[str] = frozenset()
    family_table: str = ""
    converter: str = ""

    def preload_of(self, config: object, device: Device) -> Preload:
        """Return the modules that its workers import in any case, with this backend's config."""
        return self.preload(config, device) if self.preload else Preload((self.worker.partition(":")[0],))


@dataclass(frozen=True)
class EnvironmentPlugin:
    """An environment: its settings under `env.<name>` and the path of its class.

    Args:
        environment: `"package.module:Class"`, built as `Class(config)` in the environment's processes; or
            `"package.module:function"`, a scoring function as `rl_core.environments.reward_function.as_environment`
            takes it, which gets no settings.
        tools: `"package.module:function"` that returns the tools which the policy may call, functions or JSON schemas,
            from the settings; called on the driver. Empty for an environment without tools.
        row_check: `"package.module:function"`, called on the driver as `function(info, config)` for every row before a
            run starts. It raises `ValueError` for a row that no completion can answer, and imports nothing heavy. Empty
            to accept all rows.
        machine_check: `"package.module:function"`, called by `rl doctor` as `function(config)` with the settings: why
            the environment cannot run on this machine, and what to do; an empty string if it can. Empty if it runs
            wherever its requirement is installed.
        runs_agents: True if it runs the agent of a conversation (`rl_core.AgentRun`) and scores what
            that leaves; such an environment scores no responses.
        brings_agent: True if that agent is the environment's own, so that there is no command.
    """

    name: str
    config: type[Config]
    environment: str
    requirement: Requirement
    tools: str = ""
    row_check: str = ""
    machine_check: str = ""
    runs_agents: bool = False
    brings_agent: bool = False


@dataclass(frozen=True)
class DatasetPlugin:
    """A dataset by name.

    Args:
        load: `"package.module:function"`, called as `load(settings, split)` and returning rows (mappings) that a
            processor turns into prompts or training conversations; runs in the driver unless `requirement` names more
            than the driver has.
        requirement: Requirement of `load`.
        settings: Type of the settings, for listings, editors and checks: unknown and wrong settings are refused before
            a run starts, and `load` gets the settings with their defaults. If None, `load` gets what the user wrote.
        tasks: `"package.module:function"` of a dataset that chooses among tasks by its setting `task`: returns a
            `DatasetTask` for each, without importing what `load` needs, and nothing if that is not installed.
    """

    name: str
    load: str
    requirement: Requirement
    settings: type[Config] | None = None
    tasks: str = ""


@dataclass(frozen=True)
class DatasetTask:
    """A task of a dataset that has several.

    Args:
        name: The setting `task`.
        doc: One line.
        settings: Keys of the setting `config`, with their types and defaults as text.
    """

    name: str
    doc: str
    settings: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class ModelNeed:
    """A model that an algorithm needs.

    Args:
        section: Config section that holds it, one of `AlgorithmPlugin.model_sections`.
        spec: Its head, and whether it trains.
        exported: True if checkpoints hold its Hugging Face files. The role `policy` is always exported.
    """

    section: str
    spec: ModelSpec
    exported: bool = False


def export_suffixes(needs: Mapping[str, ModelNeed]) -> dict[str, str]:
    """Roles whose Hugging Face files checkpoints hold, and the end of the names of their folders: `hf` and
    `adapter` for the role `policy`, `hf_ROLE` and `adapter_ROLE` for another role."""
    return {"policy": "", **{role: f"_{role}" for role, need in needs.items() if need.exported and role != "policy"}}


@dataclass(frozen=True)
class TrainingDefaults:
    """Training defaults of a model in an algorithm, used for keys that its config section does not set.

    Args:
        lr: Learning rate of `policy.optimizer.kwargs`.
        adapter_lr: Learning rate of adapters, if `lora_cfg.enabled`.
        rows: `train_global_batch_size`.
    """

    lr: float
    adapter_lr: float
    rows: int


def no_defaults(written: WrittenValues) -> Mapping[str, TrainingDefaults]:
    """Return the `training_defaults` of an algorithm whose models train by the defaults of `ModelConfig`."""
    return {}


def no_models(config: Any) -> Mapping[str, str]:
    """Return the `further_models` of an algorithm that generates with the policy only."""
    return {}


@dataclass(frozen=True)
class AlgorithmPlugin:
    """Declaration of an algorithm.

    Args:
        sections: Config sections it adds to the root, by key (`grpo`, `loss_fn`, `data`, ...): the type of each, or a
            function from what is written there, as plain values, to the type; it raises a `ProblemError` if that
            chooses what does not exist.
        implementation: `"package.module:Class"` or `"file.py:Class"`, an `Algorithm`, imported once a command needs it.
        generates: True if it needs rollouts; the config then has `policy.generation`.
        trains: True if it has a `run`; if not, it only evaluates.
        evaluates: True if it has an `evaluation` by rollouts.
        with_tasks: Function from the declaration of an algorithm without rollouts to the declaration of its runs whose
            config has the section `eval`: they generate, to score tasks as they train. None if it does not support it.
        evaluates_in_training: Function from the resolved config to whether a run evaluates as it trains: the plan is
            then in its `Components`, and the environments of the plan are started next to the environments of its
            rollouts.
        validation_metrics: Function from the resolved config to the names of the `val/` metrics that its run records,
            or to None if they are not known before the run; None is the same for all configs.
        without_validation: Dotted keys that ask for a validation or need one, with the values that do not; a config
            that inherits them and takes out `data.validation` gets these.
        models: Function from the resolved config to the models that the run needs, by role. The role `policy` is the
            model whose weights are published and exported; others are exported if their need has `exported`.
        model_sections: Config sections that hold a model, as dotted keys from the root: `policy`, `value`,
            `teachers.math`. The root gets one of each.
        optional_models: Keys of further sections that hold a model if the user writes them: `teacher`, or `teachers.*`
            for sections with any names in `teachers`.
        training_defaults: Function from the values that the user wrote to the defaults of models that train, by the key
            of their section; a model that is not named has the defaults of `ModelConfig`.
        requirements: Requirements of its losses and rollout programs; the extras only where models run.
        further: Function from the resolved config to further requirements, such as `requirement_of` a loss that the
            user names.
        checks: Static checks on the whole resolved config.
        further_models: Function from the resolved config to the models that it generates with in addition to the
            policy: folders or hub names, by the dotted key that names each, which ends in `.model_name`.
    """

    name: str
    sections: Mapping[str, type[Config] | Callable[[Any], type[Config]]]
    implementation: str
    generates: bool
    models: Callable[[Any], Mapping[str, ModelNeed]]
    model_sections: tuple[str, ...] = ("policy",)
    optional_models: tuple[str, ...] = ()
    training_defaults: Callable[[WrittenValues], Mapping[str, TrainingDefaults]] = no_defaults
    requirements: tuple[Requirement, ...] = ()
    further: Callable[[Any], tuple[Requirement, ...]] = nothing_further
    trains: bool = True
    evaluates: bool = False
    with_tasks: Callable[[AlgorithmPlugin], AlgorithmPlugin] | None = None
    evaluates_in_training: Callable[[Any], bool] | None = None
    validation_metrics: Callable[[Any], Iterable[str] | None] | None = None
    without_validation: Mapping[str, Any] = field(default_factory=dict)
    checks: tuple[Callable[[Any], Iterable[Problem]], ...] = ()
    further_models: Callable[[Any], Mapping[str, str]] = no_models

    @property
    def scoring(self) -> AlgorithmPlugin | None:
        """Declaration of its runs that score tasks as they train, if it differs; see `with_tasks`."""
        return None if self.with_tasks is None else self.with_tasks(self)

    @property
    def root_keys(self) -> tuple[str, ...]:
        """Keys of the root that configs of this algorithm may have, and not all other configs."""
        models = (key.partition(".")[0] for key in (*self.model_sections, *self.optional_models))
        return tuple(dict.fromkeys((*self.sections, *models, *(("env",) if self.generates else ()))))

    def model_keys(self, names_in: SectionNames) -> tuple[str, ...]:
        """Return the keys of the models of a config with these sections."""
        written = []
        for key in self.optional_models:
            head, is_named, _ = key.partition(".*")
            names = names_in(head)
            written += [f"{head}.{name}" for name in names] if is_named else [key] if names else []
        return (*self.model_sections, *written)


TYPES: Mapping[str, type[Any]] = {
    POLICIES: BackendPlugin,
    GENERATORS: BackendPlugin,
    ENVIRONMENTS: EnvironmentPlugin,
    ALGORITHMS: AlgorithmPlugin,
    DATASETS: DatasetPlugin,
}
"""Groups of entry points, each with the class of its plugins."""


@dataclass(frozen=True)
class OpponentNeed:
    """Weights that play against the policy, and the agents whose turns they take.

    Args:
        name: Name, unique in the run.
        shares: Share of the plays where it takes an agent's turns, by agent.
        update_every: Number of weight versions until it takes over the policy's weights, as they are then; None
            for a model that never changes.
        pool: Number of the newest of these versions; the one that plays is drawn from them.
        model_name: Folder or hub name of the model that never changes; None for versions of the policy.
        seed: Seed of the draws.
    """

    name: str
    shares: Mapping[str, float]
    update_every: int | None = None
    pool: int = 1
    model_name: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class RolloutNeeds:
    """The program that an algorithm's rollout workers run, and the environments that it needs.

    Args:
        program: `"package.module:Class"` of a `RolloutProgram`, or a class in a file of the user's.
        program_args: Its keyword arguments.
        environments: Names of the environments that score its prompts, as `rl_core.environments.instance.instance_of`
            takes them.
        max_seconds: Timeout of one rollout in seconds; None for no limit.
        keeps_cache: As `rl_core.rollouts.generation.Placement.keeps_cache`.
        max_steps: Number of training steps of the run; 1 if nothing is trained.
        opponents: Weights that play against the policy.
        sample_prompts: Token ids of the data's first prompts, for engines to prove that they compute what the policy
            computes; random tokens are used without them.
        judges: Settings of the language models that judge, by name.
        judged: Rewards by these judges, by environment and reported name.
        scored: Environments whose rollouts reward models score.
        later: Functions of `env.<name>.rewards` that ask reward models, by environment: they are called when all
            rollouts of a step have ended, and not where these are sampled.
        changes_under_way: True if the weights may change while rollouts are under way.
    """

    program: str | FromFile
    program_args: Mapping[str, Any]
    environments: frozenset[str]
    max_seconds: float | None = None
    keeps_cache: bool = False
    max_steps: int = 1
    opponents: tuple[OpponentNeed, ...] = ()
    sample_prompts: tuple[tuple[int, ...], ...] = ()
    judges: Mapping[str, Any] = field(default_factory=dict)
    judged: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scored: frozenset[str] = frozenset()
    later: Mapping[str, frozenset[str]] = field(default_factory=dict)
    changes_under_way: bool = False

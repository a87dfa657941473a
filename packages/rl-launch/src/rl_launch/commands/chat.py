"""`rl chat`: a conversation with a model, through the generator and the rollout workers of a run."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl_algos.rollouts.worker.program import REPLY_PROGRAM
from rl_core.data.batch import TOKENS
from rl_core.errors import ConfigError, RLError
from rl_core.model_config import ColocatedConfig
from rl_core.plugins import GENERATORS, BackendPlugin, RolloutNeeds, plugin, plugins
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.pool import RolloutPool, RolloutTask
from rl_core.rollouts.rollout import Message, Prompt
from rl_launch.cluster.device import check_devices
from rl_launch.commands.train import with_local_models
from rl_launch.evaluation.source import ALGORITHM, evaluation_of
from rl_launch.model_files.model_facts import check_tokenizer
from rl_launch.model_files.model_folder import check_models
from rl_launch.root_config import POLICY, with_section, with_values
from rl_launch.run_config.checks import check_placement
from rl_launch.run_config.inputs import model_names
from rl_launch.run_config.plan import RunPlan
from rl_launch.session.directory.checkpoint_name import CheckpointName
from rl_launch.session.directory.run_folder import RunFolder
from rl_launch.worker_envs.driver import missing
from rl_launch.worker_envs.spec import worker_env

S = TypeVar("S")
_log = logging.getLogger(__name__)

_BACKEND = "policy.generation.backend"
_SMALLEST = "hf"
"""Generator that needs no engine except a training backend's."""


@dataclass(frozen=True)
class Sampling:
    """How replies are drawn; None takes the value of the config's validation.

    Args:
        temperature: 0 is greedy.
        max_new_tokens: Maximum number of tokens of a reply.
    """

    temperature: float | None = None
    max_new_tokens: int | None = None


class AnswerFailed(RLError):
    """A reply that the generator did not give; its message gives the reason."""


class PoolAnswerer:
    """Has a pool of rollout workers answer, one question at a time.

    Args:
        pool: Serves the model, with `ReplyProgram`.
        sampling: How replies are drawn.
        seed: Seed of the first reply; each has another one.
    """

    def __init__(self, pool: RolloutPool, sampling: SamplingParams, *, seed: int = 0) -> None:
        self._pool = pool
        self._sampling = sampling
        self._seed = seed

    def __call__(self, tokens: np.ndarray, messages: Sequence[Message]) -> tuple[np.ndarray, bool]:
        """Return int32 `[tokens]` that the model samples after these, and whether they were cut off.

        A reply that the caller did not wait for to its end is left out when the next one is waited for.

        Raises:
            AnswerFailed: If the generator gives no reply.
        """
        prompt = Prompt(f"chat:{self._seed}", tuple(messages), tokens, "", {}, "", "the chat")
        [ticket] = self._pool.submit([RolloutTask(prompt, self._sampling, (self._seed,))])
        self._seed += 1
        done, group = self._pool.next_done()
        while done != ticket:
            done, group = self._pool.next_done()
        [report] = group.rollouts
        if report.status == "failed":
            raise AnswerFailed(report.failure)
        return group.columns.ragged(TOKENS)[0][len(tokens) :], report.status == "truncated"


def chat_plan(source: str, overrides: Sequence[str]) -> RunPlan:
    """Return the resolved config of one replica of a model.

    The generator is that of the run or the config; for a model, or a run that generates nothing, vLLM if it is
    installed here and else `hf`.

    Args:
        source: As of `rl eval`: a run, `RUN:STEP`, `RUN:best`, a model's folder or hub name, a recipe or a YAML file.
        overrides: Keys to set.

    Raises:
        ConfigError, RunDirectoryError: As `rl_launch.evaluation.source.evaluation_of`.
    """
    plan = evaluation_of(source, overrides).plan
    if plan.plugin.name == ALGORITHM and not any(each.startswith(_BACKEND) for each in overrides):
        plan = evaluation_of(source, [f"{_BACKEND}={_installed_generator(plan)}", *overrides]).plan
    config, found = plan.config, plan.backends.generation
    if found is None:
        raise ConfigError(f"algorithm: {plan.plugin.name} does not generate. Pass a run or a model")
    one = {"colocated": ColocatedConfig(), "min_replicas": None, "max_replicas": None}
    config = with_section(config, POLICY, _with(config.policy, "generation", one))
    ranks = found.plugin.ranks(found.backend)
    if ranks <= max(config.cluster.gpus_per_node, config.cluster.cpu_ranks_per_node):  # else a replica spans nodes
        config = _with(config, "cluster", {"num_nodes": 1, "gpus_per_node": ranks, "cpu_ranks_per_node": ranks})
    return plan.with_config(config)


def system_prompt_of(source: str) -> str:
    """Return the system message that a run's training data had; empty if there is none, or not one for all.

    Raises:
        ConfigError: If its file cannot be read.
    """
    named = CheckpointName.parse(source)
    if named is None:
        return ""
    data = RunFolder(named.run).config().get("data") or {}
    train, default = data.get("train"), data.get("default") or {}
    datasets = [each for each in (train if isinstance(train, list) else [train]) if isinstance(each, Mapping)]
    files = {each.get("system_prompt_file") or default.get("system_prompt_file") for each in datasets}
    if any(each.get("prompt_file") or default.get("prompt_file") for each in datasets):
        _log.info("the run inserted its prompts into a prompt_file, which the chat does not do")
    [file] = files if len(files) == 1 else [None]
    if file is None:
        return ""
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the system message of the run cannot be read: {file}: {error}; give another one by --system TEXT, or "
            "--system '' for none"
        ) from None


@dataclass(frozen=True)
class ServedModel:
    """A model that answers.

    Args:
        answer: Returns the tokens that follow those of a conversation, as `PoolAnswerer`.
        tokenizer: Its tokenizer.
        tool_format: Format of its tool calls, as `policy.tokenizer.tool_format`.
        name: Folder or name of the model.
        max_tokens: Maximum number of tokens of a conversation.
    """

    answer: PoolAnswerer
    tokenizer: Any
    tool_format: str | None
    name: str
    max_tokens: int


@contextmanager
def serving(plan: RunPlan, sampling: Sampling, *, num_turns: int, seed: int = 0) -> Iterator[ServedModel]:
    """Serve a model until the context is left.

    Args:
        plan: Of `chat_plan`.
        sampling: How replies are drawn.
        num_turns: Turns that the chat template must be able to render; 1 or more.
        seed: Seed of the sampling.

    Raises:
        ConfigError, WorkerEnvironmentError: Before anything is started.
        RLError: If the generator does not start.
    """
    # imports transformers, which takes a second
    from rl_algos.rollouts.setup import validation_sampling
    from rl_algos.rollouts.worker.conversation_checks import check_turns
    from rl_algos.rollouts.worker.programs import DEFAULT_PROGRAM
    from rl_algos.tokenizer import load_tokenizer

    check_devices(plan.config.cluster)
    check_models(model_names(plan))
    plan = with_local_models(plan)
    policy = plan.config.policy
    tokenizer = load_tokenizer(policy.tokenizer, policy.model_name, policy.vision)
    check_tokenizer(tokenizer, policy)
    ends = check_turns(
        policy, tokenizer, {}, program=DEFAULT_PROGRAM, max_turns=num_turns, turns_key="policy", renders_anew=True
    )
    longest = policy.max_total_sequence_length
    drawn = validation_sampling(policy.generation, ends.sampled)
    given = {name: value for name, value in vars(sampling).items() if value is not None}
    needs = RolloutNeeds(REPLY_PROGRAM, {"max_tokens": longest}, frozenset())
    with _pool(plan, needs) as pool:
        answer = PoolAnswerer(pool, replace(drawn, **given), seed=seed)
        yield ServedModel(answer, tokenizer, policy.tokenizer.tool_format, policy.model_name, longest)


@contextmanager
def _pool(plan: RunPlan, needs: RolloutNeeds) -> Iterator[RolloutPool]:
    # Ray takes a second to import, which checks that fail should not wait for
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.runtime.runtime import Runtime, check_engines, provision_workers

    plan, device = plan.without_models(), plan.device
    assert plan.backends.generation is not None, "`chat_plan` refuses others"
    check_placement(plan, device)
    envs = provision_workers(plan, needs, device)
    check_engines(plan, envs, device)
    _log.info("starting Ray and %s", plan.backends.generation.plugin.name)
    with (
        tempfile.TemporaryDirectory(prefix="rl-chat-") as logs,
        VirtualCluster.of(plan.config.cluster, device) as cluster,
        Runtime(plan, envs, cluster, Path(logs)) as runtime,
    ):
        yield runtime.evaluation_pool(needs)


def _installed_generator(plan: RunPlan) -> str:
    """Return the configured generator if this environment has its engine, else the smallest."""
    name = plan.config.policy.generation.backend
    if name not in plugins(GENERATORS) or _SMALLEST not in plugins(GENERATORS):
        return str(name)
    found: BackendPlugin = plugin(GENERATORS, name)
    extras = plan.device.extras
    return _SMALLEST if missing(worker_env(found.requirement, extras)) else str(name)


def _with(section: S, key: str, changes: Mapping[str, Any]) -> S:
    return with_values(section, {key: with_values(getattr(section, key), changes)})

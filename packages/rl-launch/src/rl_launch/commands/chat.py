"""`rl chat`: a conversation with a model, through the generator and the rollout workers of a run."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.worker.program import REPLY_PROGRAM
from rl_core.data.batch import TOKENS
from rl_core.errors import ConfigError, DataError, RLError
from rl_core.model_config import ColocatedConfig
from rl_core.plugins import GENERATORS, RolloutNeeds, plugin, plugins
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
from rl_launch.run_session.directory.checkpoint_name import CheckpointName
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.worker_envs.driver import missing
from rl_launch.worker_envs.spec import worker_env

if TYPE_CHECKING:
    from rl_algos.rollouts.worker.dialogue import Dialogue

S = TypeVar("S")
_log = logging.getLogger(__name__)

_BACKEND = "policy.generation.backend"
_SMALLEST = "hf"
"""Generator that needs no engine except a training backend's."""

COMMANDS = {
    "/reset": "forget the conversation",
    "/system": "TEXT: replace the system message and clear the conversation; without TEXT, show it",
    "/raw": "show the conversation as the model reads it, with special tokens",
    "/help": "list the commands",
    "/quit": "end (or Ctrl-D)",
}

Answerer = Callable[[np.ndarray, Sequence[Message]], tuple[np.ndarray, bool]]
"""Returns int32 `[tokens]` that follow a conversation, and whether they were cut off; raises `AnswerFailed` if there is
no answer."""


class AnswerFailed(RLError):
    """A reply that the generator did not give; its message gives the reason."""


class PoolAnswerer:
    """Has a pool of rollout workers answer, one question at a time.

    Args:
        pool: Serves the model, with `ReplyProgram`.
        sampling: How replies are drawn.
        seed: Seed of the first reply; each further reply has a different seed.
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

    The generator of the run or the config is used; for a model, or a run that generates nothing, vLLM if it is
    installed here and else `hf`.

    Args:
        source: As of `rl eval`: a run, `RUN:STEP`, `RUN:best`, a model's folder or hub name, a recipe or a YAML file.
        overrides: Keys to set.

    Raises:
        ConfigError, RunDirectoryError: As `rl_launch.evaluation.source.evaluation_of`.
    """
    plan = evaluation_of(source, overrides).plan
    if plan.plugin.name == ALGORITHM and not any(each.startswith(_BACKEND) for each in overrides):
        name = str(plan.config.policy.generation.backend)
        if name in plugins(GENERATORS) and _SMALLEST in plugins(GENERATORS):
            needed = worker_env(plugin(GENERATORS, name).requirement, plan.device.extras)
            name = _SMALLEST if missing(needed) else name
        plan = evaluation_of(source, [f"{_BACKEND}={name}", *overrides]).plan
    config, found = plan.config, plan.backends.generation
    if found is None:
        raise ConfigError(f"algorithm: {plan.plugin.name} does not generate. Pass a run or a model")
    one = {"colocated": ColocatedConfig(), "min_replicas": None, "max_replicas": None}
    config = with_section(config, POLICY, _with(config.policy, "generation", one))
    ranks = found.plugin.ranks(found.backend)
    if ranks <= max(config.cluster.gpus_per_node, config.cluster.cpu_ranks_per_node):  # else a replica spans nodes
        config = _with(config, "cluster", {"num_nodes": 1, "gpus_per_node": ranks, "cpu_ranks_per_node": ranks})
    return plan.with_config(config)


def _with(section: S, key: str, changes: Mapping[str, Any]) -> S:
    return with_values(section, {key: with_values(getattr(section, key), changes)})


def system_prompt_of(source: str) -> str:
    """Return the system message of a run's training data; empty if there is none, or not one for all.

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
            f"the system message of the run cannot be read: {file}: {error}; give another message by --system TEXT, or "
            "--system '' for none"
        ) from None


@dataclass(frozen=True)
class ServedModel:
    """A model that answers.

    Args:
        answer: Returns the tokens that follow a conversation; see `PoolAnswerer`.
        tokenizer: Its tokenizer.
        tool_format: Format of its tool calls, as `policy.tokenizer.tool_format`.
        name: Folder or name of the model.
        max_tokens: Maximum number of tokens of a conversation.
    """

    answer: Answerer
    tokenizer: Any
    tool_format: str | None
    name: str
    max_tokens: int


@contextmanager
def serving(
    plan: RunPlan, *, temperature: float | None, max_new_tokens: int | None, num_turns: int, seed: int = 0
) -> Iterator[ServedModel]:
    """Serve a model until the context is left.

    Args:
        plan: Plan from `chat_plan`.
        temperature: Sampling temperature, 0 is greedy; None for the temperature of the config's validation.
        max_new_tokens: Maximum number of tokens of a reply; None for the limit of the config's validation.
        num_turns: Turns that the chat template must be able to render; 1 or more.
        seed: Seed of the sampling.

    Raises:
        ConfigError, WorkerEnvironmentError: Before anything is started.
        RLError: If the generator does not start.
    """
    # imports transformers, which takes a second
    from rl_algos.rollouts.setup import validation_sampling
    from rl_algos.rollouts.worker.conversation_checks import check_turns
    from rl_algos.tokenizer import load_tokenizer

    check_devices(plan.config.cluster)
    check_models(model_names(plan))
    plan = with_local_models(plan)
    policy = plan.config.policy
    tokenizer = load_tokenizer(policy.tokenizer, policy.model_name, policy.vision)
    check_tokenizer(tokenizer, policy)
    # the chat renders the whole conversation in each turn
    turns = RolloutConfig(max_rollout_turns=num_turns, rewritten_history="split")
    ends = check_turns(policy, turns, tokenizer, {}, turns_key="policy")
    longest = policy.max_total_sequence_length
    given = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    chosen: Any = {name: value for name, value in given.items() if value is not None}
    drawn = replace(validation_sampling(policy.generation, ends.sampled), **chosen)
    needs = RolloutNeeds(REPLY_PROGRAM, {"max_tokens": longest}, frozenset())

    # Ray takes a second to import, which checks that fail should not wait for
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.runtime.processes import check_engines, provision_workers
    from rl_launch.runtime.runtime import Runtime

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
        answer = PoolAnswerer(runtime.evaluation_pool(needs), drawn, seed=seed)
        yield ServedModel(answer, tokenizer, policy.tokenizer.tool_format, policy.model_name, longest)


@dataclass
class ChatLoop:
    """A conversation line by line.

    Args:
        dialogue: The conversation.
        answer: The model.
        say: Shows the model's text.
        note: Shows remarks of this program.
        waiting: Shown while the model answers.
        max_tokens: Maximum number of tokens of a conversation; None if it is not limited.
    """

    dialogue: Dialogue
    answer: Answerer
    say: Callable[[str], None]
    note: Callable[[str], None]
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    max_tokens: int | None = None

    def run(self, lines: Iterable[str]) -> None:
        """Answer lines until they end, or one of them is `/quit`. An interruption (Ctrl-C) of an answer drops it."""
        for text in filter(None, map(str.strip, lines)):
            if text == "/quit":
                return
            if text.startswith("/") and not text.startswith("//"):
                self._command(text)
                continue
            try:
                self.ask(text.removeprefix("/"))
            except KeyboardInterrupt:
                self.note("(interrupted; the conversation is unchanged)")
            except AnswerFailed as error:
                self.note(f"no answer: {error}. Use /reset to start over")

    def ask(self, text: str) -> None:
        """Ask, and show the answer.

        Raises:
            AnswerFailed: If there is none, or the chat template cannot render the question.
        """
        from jinja2 import TemplateError

        try:
            tokens = self.dialogue.ask(text)
        except (ConfigError, DataError, ValueError, TemplateError) as error:
            raise AnswerFailed(f"the chat template cannot render it: {error}") from None
        with self.waiting():
            sampled, is_cut = self.answer(tokens, self.dialogue.messages)
        text = self.dialogue.answer(sampled).text
        self.say(text)
        if not text and not is_cut:
            self.note("(the model ended its turn without text; use /raw to show the tokens)")
        if is_cut and self.max_tokens is not None and self.dialogue.num_tokens >= self.max_tokens:
            self.note(
                f"(cut off: the conversation has the {self.max_tokens} tokens that policy.max_total_sequence_length "
                "allows; use /reset to start over)"
            )
        elif is_cut:
            self.note(f"(cut off after {len(sampled)} tokens; increase --max-new-tokens to allow more)")

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        match name:
            case "/reset":
                self.dialogue.reset()
                self.note("(the conversation is empty)")
            case "/system" if argument:
                self.dialogue.system = argument.strip()
                self.dialogue.reset()
                self.note("(the system message was replaced, and the conversation is empty)")
            case "/system":
                self.note(self.dialogue.system or "(no system message)")
            case "/raw":
                self.note(f"{self.dialogue.raw}\n({self.dialogue.num_tokens} tokens)")
            case "/help":
                self.note("\n".join(f"{command:8} {what}" for command, what in COMMANDS.items()))
            case _:
                known = ", ".join(COMMANDS)
                self.note(
                    f"{name} is not a command; commands: {known}. A message that begins with / is written with two"
                )

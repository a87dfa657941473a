"""`rl eval`: scoring a model on prompts, without a policy that trains."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rl_algos.data.contamination import overlaps
from rl_algos.evaluation.summary import PromptScore, listed, summarize
from rl_algos.judges.needs import with_judges
from rl_algos.rollouts.driver.judged import ModelJudges
from rl_algos.rollouts.driver.task_evaluation import EvaluationPlan, EvaluationTask
from rl_algos.rollouts.setup import model_judges
from rl_core.config import option
from rl_core.environments.trial import Trial
from rl_core.errors import ConfigError, RolloutsFailed, RunDirectoryError
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutPool, Ticket
from rl_core.rollouts.rollout import Prompt
from rl_launch.cluster.device import check_devices
from rl_launch.commands.data_rows import training_rows
from rl_launch.commands.train import with_local_models
from rl_launch.evaluation.folder import Done, EvaluationFolder, identity_of, prompt_digest
from rl_launch.evaluation.progress import EvaluationProgress
from rl_launch.evaluation.result import EvaluationResult, ScoredPrompt
from rl_launch.evaluation.source import RUN_DIR, evaluation_of, new_checkpoints
from rl_launch.model_files.model_facts import check_tokenizer
from rl_launch.run_config.checks import check_placement
from rl_launch.run_config.inputs import check_inputs
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_session.directory.row_files import name_images
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.runtime.role_envs import trials_on, try_here, try_in

_log = logging.getLogger(__name__)

JUDGED_TOGETHER = 64
"""Number of groups that models judge at once, which may take the devices of the engines for that."""


def evaluate(plan: RunPlan, *, folder: str | Path, trained: RunPlan | None = None) -> EvaluationResult:
    """Score the weights at `policy.model_name` on the tasks of a config, or on its validation data.

    Finished groups are kept in the folder. An evaluation that was killed there continues with the others, and a
    finished one is only summarised again. Samples that fail score 0 and are counted.

    Args:
        plan: Plan of a run, or of an evaluation.
        folder: Folder for the results, rollouts and logs.
        trained: Plan of the run that trained the model, to find the prompts that its training rows contain; None to
            leave that out.

    Raises:
        ConfigError: If the algorithm does not evaluate by rollouts, or this machine does not have the devices or
            nodes, before anything is loaded.
        RunDirectoryError: If the folder holds anything else, or an evaluation of something else.
        RolloutsFailed: If every sample failed.
    """
    config = plan.config
    if not plan.plugin.evaluates:
        tasks = option("--tasks gsm8k", "tasks=['gsm8k']")
        raise ConfigError(
            f"algorithm: {plan.plugin.name} does not support evaluation by rollouts. Pass a run or a model with tasks, "
            f"such as {tasks}, or use a config of another algorithm"
        )
    place = EvaluationFolder(folder, config.logger.run_dir_access)
    place.check()
    check_devices(config.cluster)
    check_inputs(plan, is_evaluation=True)
    name_images(config.policy.vision, place.path)
    evaluation = plan.algorithm.evaluation(config)
    untried = try_here(trials_on(config, evaluation.attempts()), config.cluster.worker_envs)
    written, plan = plan, with_local_models(plan)
    config = plan.config

    # imports transformers, which takes a second
    from rl_algos.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.policy.tokenizer, config.policy.model_name, config.policy.vision)
    check_tokenizer(tokenizer, config.policy)
    rollouts: EvaluationPlan = evaluation.plan(tokenizer)
    # Models that are made here have their folders only now.
    rollouts = replace(rollouts, needs=with_judges(rollouts.needs, config))
    contained = None
    if trained is not None:
        asked = {task.name: {prompt.id: prompt.messages for prompt in _prompts(task)} for task in rollouts.tasks}
        contained = overlaps(asked, training_rows(trained.config))
    identity, samples = identity_of(config, rollouts), {task.name: task.num_samples for task in rollouts.tasks}
    done = place.open(identity, written.root, samples)
    try:
        if any(_waiting(task, done) for task in rollouts.tasks):
            _log.info("results: %s", place.path)
            done |= _roll_out(plan, rollouts, place, done, untried)
        result = replace(_result(place, config.policy.model_name, rollouts, done), contamination=contained)
        place.write_result(result.as_json())
        return result
    finally:
        place.close()


def follow(
    run: str, overrides: Sequence[str] = (), tasks: Sequence[str] = (), *, contamination: bool = False
) -> Iterator[EvaluationResult]:
    """Evaluate the checkpoints of a run as they are saved, until the run ends.

    Args:
        run: Folder of the run.
        overrides: Keys to set; the results of each checkpoint are in a folder of `run_dir`.
        tasks: Names of tasks; the tasks of the run if empty.
        contamination: True to find the prompts that the training rows of the run contain.

    Yields:
        The result of each checkpoint. One that the run has removed meanwhile is left out.

    Raises:
        RunDirectoryError: If there is no such run, or it ends without a checkpoint.
    """
    path = RunFolder(run).path.resolve()
    folders = [each.removeprefix(RUN_DIR) for each in overrides if each.startswith(RUN_DIR)]
    folder = Path(folders[-1]).expanduser() if folders else path.parent / f"eval-{path.name}"
    step = 0
    for step in new_checkpoints(path):
        place = folder / f"step_{step}"
        try:
            given = evaluation_of(f"{path}:{step}", [*overrides, f"{RUN_DIR}{place}"], tasks)
            yield evaluate(given.plan, folder=place, trained=given.training() if contamination else None)
        except Exception:
            if (path / "checkpoints" / f"step_{step}").is_dir():
                raise
            _log.warning("step %d: the run has removed the checkpoint; see checkpointing.keep_top_k", step)
    if not step:
        raise RunDirectoryError(
            f"{path} has ended without a checkpoint with Hugging Face files. See checkpointing.save_period and "
            "export_period"
        )


def roll_out(
    plan: EvaluationPlan,
    pool: RolloutPool,
    place: EvaluationFolder,
    done: Done,
    console: Console,
    judges: ModelJudges | None = None,
) -> Done:
    """Roll out all groups that are not done, and keep each as it ends, or has been judged.

    Args:
        plan: Tasks of the evaluation, with their groups.
        pool: Serves the model.
        place: Open folder of the results.
        done: Scores of the groups that were finished before.
        console: Console for the progress.
        judges: Models that judge the rollouts; None without such models.
    """
    waiting = [(task.name, group) for task in plan.tasks for group in _waiting(task, done)]
    names = dict(zip(pool.submit([group for _, group in waiting]), [name for name, _ in waiting], strict=True))
    found: Done = {}
    reward = sum(score.mean for score in done.values())
    with EvaluationProgress(len(waiting) + len(done), len(done), reward, console) as progress:
        ended: list[tuple[Ticket, RolloutGroup]] = []
        for number in range(1, len(names) + 1):
            ended.append(pool.next_done())
            if judges is None:
                groups = [group for _, group in ended]
            elif number == len(names) or len(ended) == JUDGED_TOGETHER:
                groups = judges.judged([group for _, group in ended])
            else:
                continue
            for (ticket, _), group in zip(ended, groups, strict=True):
                score = place.append(names[ticket], group)
                found[names[ticket], group.prompt.id] = score
                progress.advance(score.mean)
            ended = []
    return found


def _roll_out(
    plan: RunPlan, rollouts: EvaluationPlan, place: EvaluationFolder, done: Done, untried: list[Trial]
) -> Mapping[tuple[str, str], PromptScore]:
    """Run `roll_out` with the processes that it needs."""
    # Ray takes a second to import, which checks that fail should not wait for
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.runtime.processes import provision_workers
    from rl_launch.runtime.runtime import Runtime

    plan, device = plan.for_evaluation(), plan.device
    check_placement(plan, device)
    envs = provision_workers(plan, rollouts.needs, device)
    try_in(envs.interpreters, untried)
    with VirtualCluster.of(plan.config.cluster, device) as cluster, Runtime(plan, envs, cluster, place.logs) as runtime:
        pool = runtime.evaluation_pool(rollouts.needs)
        started = time.monotonic()
        judges = model_judges(plan.config, runtime.ranks)
        try:
            found = roll_out(rollouts, pool, place, done, Console(stderr=True), judges)
        finally:
            if judges is not None:
                judges.close()
        _log.info("%d prompts in %.1f s", len(found), time.monotonic() - started)
        return found


def _waiting(task: EvaluationTask, done: Done) -> list[Any]:
    return [group for group in task.groups if (task.name, group.prompt.id) not in done]


def _prompts(task: EvaluationTask) -> list[Prompt]:
    return [group.prompt for group in task.groups] + [prompt for prompt, _ in task.refused]


def _result(place: EvaluationFolder, model: str, plan: EvaluationPlan, done: Done) -> EvaluationResult:
    """Return the result of all groups.

    Raises:
        RolloutsFailed: If every sample failed; the next evaluation in the folder then begins anew.
    """
    tasks, prompts = {}, {}
    for task in plan.tasks:
        refused = [PromptScore.refused(p.id, p.dataset, reason, task.num_samples) for p, reason in task.refused]
        scores = [done[task.name, group.prompt.id] for group in task.groups] + refused
        tasks[task.name] = summary = summarize(scores, plan.scoring)
        if summary.num_failed == summary.num_rollouts and task.groups:
            aside = place.set_aside()
            raise RolloutsFailed(
                f"all {summary.num_rollouts} samples of {task.name} failed: {listed(summary.failures)}. They were "
                f"moved to {aside}. Run the same command to start over"
            )
        prompts[task.name] = tuple(
            ScoredPrompt(prompt.id, prompt_digest(prompt), tuple(sample.reward for sample in score.samples))
            for prompt, score in zip(_prompts(task), scores, strict=True)
        )
    return EvaluationResult(place.path, model, tasks, prompts, plan.scoring.confidence)

"""The proof that no prompt was lost or trained twice, on run directories that were written by the real session."""

import json
import shutil
from pathlib import Path

import counting_run as counting
import numpy as np
import pytest
from typer.testing import CliRunner

from rl_algos.data.stream import Stream
from rl_algos.grpo.config import GRPOConfig
from rl_algos.grpo.loop import train
from rl_algos.losses.policy import PolicyLoss
from rl_algos.policy_gradient.objective import Objective
from rl_algos.rollouts.driver.source import PacedRolloutSource
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_core.errors import RunDirectoryError
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan
from rl_core.testing.fakes import FakeModel, FakeWeights
from rl_launch.cli import app
from rl_launch.run_session import LoggerConfig, RunSession
from rl_launch.run_session.checkpoints.manifest import read_state, write_state
from rl_launch.run_session.directory.exactly_once import described, prove
from rl_launch.run_session.directory.run_folder import RunFolder
from rl_launch.run_session.rollouts import rollout_store

PROMPTS = [Prompt(f"p{i}", (), np.array([1], np.int32), "math") for i in range(30)]
SAMPLING = SamplingParams(max_new_tokens=2)


class Killed(BaseException):
    """The end of the process."""


class LastFirstPool:
    """Ends the newest group first; every fifth prompt's rewards are all equal.

    Args:
        killed_after: groups after which the process ends; None for never.
    """

    def __init__(self, killed_after=None):
        self._killed_after = killed_after
        self._num_done = self._num_tasks = 0
        self._tasks = {}

    def submit(self, tasks):
        tickets = list(range(self._num_tasks, self._num_tasks + len(tasks)))
        self._num_tasks += len(tasks)
        self._tasks |= zip(tickets, tasks, strict=True)
        return tickets

    def next_done(self):
        self._num_done += 1
        if self._num_done == self._killed_after:
            raise Killed
        ticket, task = self._tasks.popitem()
        return ticket, RolloutGroup.of(task.prompt, [self._rollout(task, place) for place in range(2)])

    def adopt(self, update, *, in_flight=False):
        self.version = update.version

    def turns(self):
        return {}

    num_replicas = 1

    def idle_share(self):
        return None

    def speculation(self):
        return None

    def _rollout(self, task, place):
        reward = 0.0 if int(task.prompt.id[1:]) % 5 == 0 else float(place)
        return Rollout(
            prompt_id=task.prompt.id,
            tokens=np.array([1, 2, 3], np.int32),
            loss_mask=np.array([0, 1, 1], np.uint8),
            generation_logprobs=np.zeros(3, np.float32),
            spans=(WeightSpan(self.version, 2),),
            turns=(Turn("2 3", None, {"reward": reward}),),
            rewards={"reward": reward},
            stop_reason="stop",
        )


def run(folder, *, steps, staleness=2, killed_after=None, rollout_period=1, **rule):
    settings = GRPOConfig(
        num_prompts_per_step=3, num_generations_per_prompt=2, max_num_steps=steps, use_dynamic_sampling=True
    )
    policy = FakeModel()
    source = PacedRolloutSource(
        LastFirstPool(killed_after),
        Stream([PROMPTS], seed=3),
        sampling=SAMPLING,
        num_generations=2,
        seed=0,
        max_staleness=staleness,
        prompts_per_step=3,
        **rule,
    )
    logger = LoggerConfig(tensorboard_enabled=False, rollout_period=rollout_period)
    with RunSession(folder, counting.CountingConfig(logger=logger)) as session:
        taken = RolloutSteps(settings, source, FakeWeights(policy), Validation([], SAMPLING, settings), session)
        train(settings, Objective(PolicyLoss()), policy=policy, steps=taken, rows_per_minibatch=6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of six steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run(folder, steps=6)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    """A run of its own to change."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def rewrite_ledger(folder, **changes):
    checkpoint = RunFolder(folder).checkpoints()[-1].path / "state"
    state = read_state(checkpoint, "rollouts")
    for name, change in changes.items():
        state["ledger"][name] = change(state["ledger"][name].copy())
    write_state(checkpoint, "rollouts", state)


def test_a_run_accounts_for_every_prompt(whole):
    proof = prove(RunFolder(whole))
    assert proof.holds
    assert (proof.contradictions, proof.gaps) == ((), ())
    assert (proof.step, proof.num_trained, proof.num_compared) == (6, 18, 6)
    assert proof.num_pending == 0
    assert proof.dropped
    assert proof.num_drawn == proof.num_trained + sum(proof.dropped.values()) + proof.num_pending
    assert list(described(proof))[-1] == "No prompt was lost or trained twice."


@pytest.mark.parametrize("killed_after", [1, 5, 13, 20])
def test_a_run_that_was_killed_accounts_for_every_prompt_and_goes_on(tmp_path, killed_after):
    folder = tmp_path / "run"
    run(folder, steps=2)
    with pytest.raises(Killed):
        run(folder, steps=50, killed_after=killed_after)
    proof = prove(RunFolder(folder))
    assert (proof.holds, proof.num_pending) == (True, 6 if proof.step > 2 else 0)
    run(folder, steps=8)
    proof = prove(RunFolder(folder))
    assert (proof.holds, proof.num_trained, proof.num_compared) == (True, 24, 8)


OVER_SAMPLING = {"num_ahead": 2, "in_flight": True, "overlaps_training": False}


@pytest.mark.parametrize("killed_after", [6, 20])
@pytest.mark.parametrize(
    "rule",
    [
        {"sampler": "in_order"},
        {"sampler": "ready_first"},
        {"sampler": "ready_first", **OVER_SAMPLING},
        {"sampler": "windowed", "window": 4, **OVER_SAMPLING},
    ],
    ids=lambda rule: "-".join(map(str, rule.values())),
)
def test_a_killed_run_accounts_for_every_prompt_with_each_sampler_and_with_over_sampling(tmp_path, rule, killed_after):
    folder = tmp_path / "run"
    run(folder, steps=2, **rule)
    with pytest.raises(Killed):
        run(folder, steps=50, killed_after=killed_after, **rule)
    assert prove(RunFolder(folder)).holds
    run(folder, steps=8, **rule)
    proof = prove(RunFolder(folder))
    assert (proof.holds, proof.gaps, proof.num_trained, proof.num_compared) == (True, (), 24, 8)


def test_a_prompt_that_was_trained_twice_is_found(copy):
    first = (copy / "rollouts/step_1.jsonl").read_text().splitlines(keepends=True)
    with (copy / "rollouts/step_4.jsonl").open("a") as file:
        file.writelines(first[:2])
    proof = prove(RunFolder(copy))
    assert not proof.holds
    assert proof.contradictions == (
        f"step 4 has rollouts of {json.loads(first[0])['prompt_id']}, which its ledger does not have",
    )


def test_a_step_that_trained_nothing_of_the_ledger_is_found(copy):
    def without_step_3(versions):
        return np.where(versions == 4, 0, versions)

    rewrite_ledger(copy, versions=without_step_3, reasons=lambda reasons: np.zeros_like(reasons))
    assert "step 3 is in metrics.jsonl, but no draw was trained by it" in prove(RunFolder(copy)).contradictions


def test_a_draw_that_left_with_a_version_of_no_step_is_found(copy):
    def late(versions):
        versions[0] = 99
        return versions

    rewrite_ledger(copy, versions=late)
    found = prove(RunFolder(copy)).contradictions
    assert "1 draws left with weight version 99, which no step up to 6 has recorded" in found


def test_rollouts_that_are_not_there_are_gaps_and_no_contradiction(copy):
    (copy / "rollouts/step_2.jsonl").unlink()
    lines = (copy / "rollouts/step_5.jsonl").read_text().splitlines(keepends=True)
    (copy / "rollouts/step_5.jsonl").write_text("".join(lines[2:]))
    proof = prove(RunFolder(copy))
    assert proof.holds
    assert proof.gaps[0] == "rollouts/step_2.jsonl does not exist"
    assert proof.gaps[1].startswith("rollouts/step_5.jsonl lacks the rollouts of 1 of its")


@pytest.mark.parametrize(("period", "written"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (4, [4]), (3, [3, 6])])
def test_rollouts_that_the_config_leaves_out_are_one_gap(tmp_path, period, written):
    run(tmp_path, steps=6, rollout_period=period)
    proof = prove(RunFolder(tmp_path))
    assert RunFolder(tmp_path).rollout_steps() == written
    assert (proof.holds, proof.num_compared) == (True, len(written))
    left_out = f"logger.rollout_period is {period}, so the rollouts of {6 - len(written)} steps were not written"
    assert proof.gaps == (() if period == 1 else (left_out,))


def test_archived_rollouts_are_compared(copy, monkeypatch):
    monkeypatch.setattr(rollout_store, "STEPS_PER_ARCHIVE", 4)
    rollout_store.archive_before(copy / "rollouts", 104)
    assert (copy / "rollouts/steps_1-4.zip").is_file()
    proof = prove(RunFolder(copy))
    assert (proof.holds, proof.gaps, proof.num_compared) == (True, (), 6)


def test_a_run_without_a_ledger_is_refused(tmp_path):
    counting.run(tmp_path, counting.config(max_num_steps=2))
    with pytest.raises(RunDirectoryError, match="has no checkpoint with a ledger of prompts"):
        prove(RunFolder(tmp_path))


def supervised(folder, *, drawn=(30,), steps=(1, 2, 3), rows=(12, 24, 30)):
    """Write the folder of a run without rollouts whose data have 20 rows."""
    state = folder / "checkpoints/step_3/state"
    state.mkdir(parents=True)
    for name in ("run.json", "config.yaml"):
        (folder / name).write_text("{}")
    (state.parent / "manifest.json").write_text('{"step": 3, "files": {}, "metrics": {}}')
    write_state(state, "data", {"drawn": np.array(drawn), "sizes": [20]})
    lines = [{"step": step, "train/epoch": count / 20} for step, count in zip(steps, rows, strict=True)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunFolder(folder)


def test_a_run_without_rollouts_accounts_for_its_rows(tmp_path):
    proof = prove(supervised(tmp_path))
    assert (proof.holds, proof.num_drawn, proof.num_trained, proof.num_compared) == (True, 30, 30, 3)
    assert list(described(proof))[-1] == "No row was lost or trained twice."


@pytest.mark.parametrize(
    ("changed", "contradiction"),
    [
        ({"drawn": (42,)}, "step 3 had drawn 30 rows, but its checkpoint continues after 42"),
        ({"steps": (1, 2, 2)}, "step 2 is followed by step 2 in metrics.jsonl"),
        ({"steps": (1, 3), "rows": (12, 24)}, "step 1 is followed by step 3 in metrics.jsonl"),
        ({"steps": (1, 2), "rows": (12, 24)}, "step 3 is not in metrics.jsonl"),
        ({"rows": (12, 18, 30)}, "step 2 drew 6 rows, and others 12"),
        ({"rows": (12, 12, 30), "drawn": (30,)}, "step 2 drew 0 rows, and others 18"),
    ],
)
def test_rows_that_were_lost_or_trained_twice_are_found(tmp_path, changed, contradiction):
    assert contradiction in prove(supervised(tmp_path, **changed)).contradictions


def test_the_command_prints_the_proof_and_exits_with_1_if_it_does_not_hold(copy):
    good = CliRunner().invoke(app, ["doctor", "run", str(copy), "--json"])
    assert good.exit_code == 0
    assert json.loads(good.stdout)["holds"] is True
    rewrite_ledger(copy, versions=lambda versions: np.full_like(versions, 99))
    bad = CliRunner().invoke(app, ["doctor", "run", str(copy)])
    assert bad.exit_code == 1
    assert "The account does not hold." in bad.stdout

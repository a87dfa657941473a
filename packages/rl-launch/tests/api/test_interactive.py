"""Sessions whose loop is the caller's, over a run directory, with models and rollouts that need no process."""

import json
import signal
from contextlib import ExitStack

import numpy as np
import pytest

from rl_algos import NLLLoss, RolloutSteps, Validation, build_batch
from rl_algos.grpo.config import GRPOConfig
from rl_core import Components, Prompt, RLError, SamplingParams
from rl_core.config import Config
from rl_core.errors import ConfigError
from rl_core.testing import FakeModel, FakeRolloutSource, FakeWeights
from rl_launch.api.interactive import Session
from rl_launch.run_session import CheckpointingConfig, LoggerConfig, RunSession


class RootConfig(Config):
    run_dir: str | None = None
    checkpointing: CheckpointingConfig = CheckpointingConfig(save_period=100)
    logger: LoggerConfig = LoggerConfig(tensorboard_enabled=False)


GRPO = GRPOConfig(num_prompts_per_step=2, num_generations_per_prompt=2)
PROMPTS = [Prompt(str(n), (), np.array([1, 2], np.int32), "math") for n in range(50)]


class Opened:
    """A session in a folder, and what it drives."""

    def __init__(self, folder, **checkpointing):
        config = RootConfig(checkpointing=CheckpointingConfig(**{"save_period": 100} | checkpointing))
        self.policy = FakeModel()
        self.source = FakeRolloutSource(PROMPTS, lambda prompt, sampled: float(sampled[0] > 5))
        held = ExitStack()
        run = held.enter_context(RunSession(folder, config))
        held.enter_context(run.with_models())
        weights = FakeWeights(self.policy)
        validation = Validation(PROMPTS[:1], SamplingParams(max_new_tokens=3), GRPO)
        rolling = RolloutSteps(GRPO, self.source, weights, validation, run)
        self.session = Session(config, Components({"policy": self.policy}, None), run, rolling, held)


def make_step(session, step, seen=None):
    batch = build_batch(session.rollouts(), GRPO)
    if seen is not None:
        seen.append((step, batch.ragged("tokens").values.tolist()))
    session.models["policy"].accumulate(batch, NLLLoss())
    session.models["policy"].apply()
    session.publish()
    session.record({"mine": float(step)})


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_steps_are_recorded_saved_and_resumed(tmp_path):
    folder, seen, expected = tmp_path / "run", [], []
    with Opened(tmp_path / "whole").session as session:
        for step in session.steps(4):
            make_step(session, step, expected)
    with Opened(folder).session as session:
        for step in session.steps(2):
            make_step(session, step, seen)
    again = Opened(folder)
    with again.session as session:
        for step in session.steps(4):
            make_step(session, step, seen)
    assert [row["mine"] for row in rows_of(folder)] == [1.0, 2.0, 3.0, 4.0]
    assert seen == expected
    assert again.policy.num_steps == 4
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"step_4"}


def test_an_interrupted_step_is_made_again_with_its_rollouts(tmp_path):
    opened, seen = Opened(tmp_path / "run"), []
    session = opened.session

    def cell():
        for step in session.steps(3):
            batch = build_batch(session.rollouts(), GRPO)
            opened.policy.accumulate(batch, NLLLoss())
            if step == 2:
                seen.append((step, batch.ragged("tokens").values.tolist()))
                signal.raise_signal(signal.SIGINT)
            opened.policy.apply()
            session.publish()

    with pytest.raises(KeyboardInterrupt):
        cell()
    steps = iter(session.steps(3))
    assert next(steps) == 2
    with pytest.raises(ValueError, match="there is no gradient to step with"):
        opened.policy.apply()
    for step in session.steps(3):
        make_step(session, step, seen)
    session.close()
    assert [step for step, _ in seen] == [2, 2, 3]
    assert seen[0] == seen[1]
    assert opened.policy.num_steps == 3
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]


def test_an_interrupt_tears_neither_a_collection_nor_a_publication_apart(tmp_path, monkeypatch):
    opened = Opened(tmp_path / "run")
    session, source, done = opened.session, opened.source, []

    def interrupting(name):
        method = getattr(source, name)

        def call(*args, **kwargs):
            signal.raise_signal(signal.SIGINT)
            found = method(*args, **kwargs)
            done.append(name)
            return found

        monkeypatch.setattr(source, name, call)

    steps = session.steps(2)
    assert next(steps) == 1
    interrupting("collect")
    with pytest.raises(KeyboardInterrupt):
        session.rollouts()
    assert done == ["collect"]
    assert len(session.rollouts()) == 2
    assert done == ["collect"]
    interrupting("adopt")
    with pytest.raises(KeyboardInterrupt):
        session.publish()
    assert done == ["collect", "adopt"]
    session.close()


def test_a_second_interrupt_is_immediate(tmp_path, monkeypatch):
    opened = Opened(tmp_path / "run")

    def hang(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second interrupt was kept")

    steps = opened.session.steps(2)
    next(steps)
    monkeypatch.setattr(opened.source, "collect", hang)
    with pytest.raises(KeyboardInterrupt):
        opened.session.rollouts()
    opened.session.close()


def test_a_step_that_was_left_is_not_saved_as_the_one_before_it(tmp_path, caplog):
    opened = Opened(tmp_path / "run")
    opened.policy.revision = 0
    with opened.session as session:
        for step in session.steps(5):
            make_step(session, step)
            opened.policy.revision += 1
            if step == 2:
                session.checkpoint()
            if step == 4:
                break
    assert (
        "step 4 was left before its end, and step 3 can no longer be saved; the newest checkpoint is 2" in caplog.text
    )
    resumed = Opened(tmp_path / "run")
    assert next(iter(resumed.session.steps(5))) == 3
    assert resumed.policy.num_steps == 2
    resumed.session.close()


def test_what_a_session_cannot_do_is_refused(tmp_path):
    session = Opened(tmp_path / "run", enabled=False).session
    for name in ("rollouts", "publish"):
        with pytest.raises(RLError, match=f"{name}: no step is in progress; call it in the loop over session.steps"):
            getattr(session, name)()
    with pytest.raises(RLError, match="record: no step is in progress"):
        session.record({"mine": 1.0})
    for _ in session.steps(2):
        break
    with pytest.raises(ConfigError, match=r"this session makes 2 steps, and 3 were asked for"):
        session.steps(3)
    with pytest.raises(ConfigError, match=r"checkpointing\.enabled is false"):
        session.checkpoint()
    session.close()
    session.close()

"""Stand-ins for testing loops: no process, no engine, and results that follow only from the inputs."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.metrics import Metric, results
from rl_core.model import Loss, Metrics, Read, Saved, SavedFile, StepSettings, read_columns
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import Evaluation
from rl_core.rollouts.rollout import Prompt, Rollout, Turn, WeightSpan
from rl_core.run import Checkpointable
from rl_core.weights import WeightUpdate


class FakeModel:
    """A `Model` with one parameter: the number of steps it has taken.

    Every read and metric follows from that number and the tokens of the batch. `calls` holds what was asked, in order:
    the method and the batch.
    """

    trains = True

    def __init__(self) -> None:
        self.num_steps = 0
        self.reference_steps = 0.0
        self.calls: list[tuple[str, Batch]] = []
        self._saved: tuple[SavedFile, ...] = ()
        self._has_gradient = False

    def infer(self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0) -> Batch:
        """Return numbers in (-1, 0], 0 at the first token of a row; the reference has numbers as before the first
        step, or as of its last update."""
        self.calls.append(("infer_reference" if reference else "infer", batch))
        tokens = batch.ragged(TOKENS)
        version = round(self.reference_steps) if reference else self.num_steps
        columns: dict[str, Ragged | np.ndarray] = {}
        for read in reads:
            if read.name == "scores":
                columns["scores"] = _numbers(tokens, version).sums().astype(np.float32)
            elif read.name == "topk":
                columns["topk_ids"] = tokens.like(np.tile(np.arange(read.k, dtype=np.int32), (len(tokens.values), 1)))
                numbers = _numbers(tokens, version).values[:, None] / temperature
                columns["topk_logprobs"] = tokens.like(numbers - np.arange(read.k, dtype=np.float32))
            elif read.name == "logprobs_at":
                ids = batch.ragged(read.column)
                numbers = _numbers(tokens, version).values[:, None] / np.float32(temperature) - ids.values
                columns["logprobs_at"] = tokens.like(np.where(ids.values < 0, 0, numbers).astype(np.float32))
            else:
                columns[read.name] = tokens.like(_numbers(tokens, version).values / np.float32(temperature))
        return Batch(columns)

    def update_reference(self, share: float = 1.0) -> None:
        """Move the reference's number of steps towards the model's."""
        self.reference_steps += share * (self.num_steps - self.reference_steps)

    def evaluate(self, batch: Batch, loss: Loss) -> Metrics:
        """Return the mean token id over one more than the number of steps, once the batch has what the loss needs."""
        self.calls.append(("evaluate", batch))
        return self._metrics(batch, loss)

    def accumulate(self, batch: Batch, loss: Loss) -> tuple[Metrics, Batch]:
        """See `evaluate`, with the reads of the loss as `infer` has them."""
        self.calls.append(("accumulate", batch))
        self._has_gradient = True
        columns = self.infer(batch, loss.reads, temperature=loss.temperature)
        self.calls.pop()
        return self._metrics(batch, loss), columns

    def apply(self, settings: StepSettings | None = None, *, adapter: int | None = None) -> Metrics:
        """Make one more step."""
        if not self._has_gradient:
            raise ValueError("there is no gradient to step with; call accumulate first")
        self._has_gradient = False
        self.num_steps += 1
        counts = {"skipped_steps": Metric(0.0, reduction="sum")}
        lr = 1e-3 if settings is None or settings.lr is None else settings.lr
        return {"grad_norm": Metric(1.0), "lr": Metric(lr, over_updates="last"), **counts}

    def discard(self, *, adapter: int | None = None) -> None:
        """Forget that there is a gradient."""
        self._has_gradient = False

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """See `evaluate`, then one more step."""
        self.calls.append(("train_step", batch))
        metrics, self._has_gradient = self._metrics(batch, loss), True
        return {**metrics, **self.apply()}

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write the numbers of steps, at once."""
        self._saved = self.export(path)

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...]:
        """Return the files of the last save, which is never under way."""
        return self._saved

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """Read the numbers of steps."""
        saved = json.loads((Path(path) / "model.json").read_text(encoding="utf-8"))
        self.num_steps, self.reference_steps = saved["num_steps"], saved["reference_steps"]

    def export(self, path: str) -> tuple[SavedFile, ...]:
        """Write the numbers of steps, too."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"num_steps": self.num_steps, "reference_steps": self.reference_steps}).encode()
        (folder / "model.json").write_bytes(content)
        return (SavedFile("model.json", len(content), hashlib.sha256(content).hexdigest(), 0),)

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """Nothing: it has no adapters."""
        return ()

    def _metrics(self, batch: Batch, loss: Loss) -> dict[str, Metric]:
        batch.require(TOKENS, *loss.columns, *read_columns(loss.reads))
        totals = loss.totals(batch)
        if not all(np.isfinite(total) and total >= 0 for total in totals.values()):
            raise ValueError(f"totals of a loss are finite and not negative, got {dict(totals)}")
        tokens = batch.ragged(TOKENS).values
        mean = float(tokens.mean()) / (1 + self.num_steps)
        return {"loss": Metric(mean), "num_tokens": Metric(float(len(tokens)), reduction="sum")}


class FakeWeights:
    """`Weights` that count versions.

    Attributes:
        version: The last version given.
        published: Number of steps of the model by version.
    """

    def __init__(self, model: FakeModel) -> None:
        self._model = model
        self.version = 0
        self.published: dict[int, int] = {}

    def publish(self) -> WeightUpdate:
        """Return the next version."""
        self.version += 1
        self.published[self.version] = self._model.num_steps
        return WeightUpdate(self.version)

    def state(self) -> Mapping[str, Any]:
        """Return the last version given."""
        return {"version": self.version}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from that version."""
        self.version = state["version"]


@dataclass
class FakeRun:
    """A `Run` that records the calls of a loop.

    Args:
        folder: Where checkpoints go; another `FakeRun` on the same folder resumes.
        save_period: Steps from one checkpoint to the next, 0 for none.
        end_after: The run saves and ends after this step, as if it were stopped from outside.
        metrics: Recorded metrics, by step.
        phases: Names of phases, in the order they began.
        groups: Rollouts recorded, by step.
        batches: Batches of the rollouts recorded, by step.
        validated: Rollouts of validations recorded, by step.
        stop_reason: Argument of the loop to `stop`.
    """

    folder: Path | None = None
    save_period: int = 0
    end_after: int | None = None
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    phases: list[str] = field(default_factory=list)
    groups: dict[int, list[RolloutGroup]] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    validated: dict[int, list[RolloutGroup]] = field(default_factory=dict)
    stop_reason: str = ""
    _max_steps: int = 0

    def steps(
        self, max_steps: int, *, models: Mapping[str, Saved], state: Mapping[str, Checkpointable]
    ) -> Iterator[int]:
        """See `Run.steps`."""
        self._max_steps = max_steps
        start = 1
        if self.folder is not None and (self.folder / "loop.pickle").exists():
            saved = pickle.loads((self.folder / "loop.pickle").read_bytes())
            for name, model in models.items():
                model.load(str(self.folder / name))
            for name, part in state.items():
                part.restore(saved["state"][name])
            start = int(saved["step"]) + 1
        return self._steps(start, models, state)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note the name."""
        self.phases.append(name)
        yield

    def record(self, step: int, metrics: Mapping[str, float | Metric]) -> None:
        """Merge into the metrics of the step; a metric is recorded once."""
        line = self.metrics.setdefault(step, {})
        twice = sorted(set(line) & set(metrics))
        if twice:
            raise ValueError(f"step {step}: {twice} recorded twice")
        line.update(results(metrics))

    def record_rollouts(
        self, step: int, groups: Sequence[RolloutGroup], advantages: np.ndarray, *, batch: Batch | None = None
    ) -> None:
        """Keep the groups and the batch; the first rollouts have the advantages, those set aside none."""
        rollouts = sum(len(group.rollouts) for group in groups)
        if len(advantages) > rollouts:
            raise ValueError(f"{rollouts} rollouts have at most as many advantages, got {len(advantages)}")
        self.groups[step] = list(groups)
        if batch is not None:
            self.batches[step] = batch

    def record_validation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Keep the groups."""
        self.validated[step] = list(groups)

    def due(self, period: int, step: int, *, at_end: bool = False) -> bool:
        """See `Run.due`."""
        return bool(period and step % period == 0) or (at_end and step == self._max_steps)

    def stop(self, reason: str) -> None:
        """End after the current step."""
        self.stop_reason = reason

    def _steps(self, start: int, models: Mapping[str, Saved], state: Mapping[str, Checkpointable]) -> Iterator[int]:
        for step in range(start, self._max_steps + 1):
            yield step
            ends = bool(self.stop_reason) or step in (self.end_after, self._max_steps)
            if self.folder is not None and (ends or self.due(self.save_period, step)):
                for name, model in models.items():
                    model.save(str(self.folder / name))
                saved = {"step": step, "state": {name: part.state() for name, part in state.items()}}
                (self.folder / "loop.pickle").write_bytes(pickle.dumps(saved))
            if ends:
                return


@dataclass
class FakeRolloutSource:
    """A `RolloutSource` that draws completions at random, the same ones for the same prompt, place and draw.

    Args:
        prompts: Taken in order, once.
        reward: Function from a prompt and the sampled tokens int32 `[tokens]` to a reward.
        num_generations: Rollouts per prompt.
        completion_length: Number of tokens of a completion.
        vocab_size: Token ids are below it.
        versions: Adopted versions.
    """

    prompts: Sequence[Prompt]
    reward: Callable[[Prompt, np.ndarray], float]
    _: KW_ONLY
    num_generations: int = 4
    completion_length: int = 3
    vocab_size: int = 10
    versions: list[int] = field(default_factory=list)
    _position: int = 0
    _trained: int = 0

    def collect(self, num_groups: int, *, num_later: int | None = None) -> list[RolloutGroup]:
        """Return groups of the next prompts; fewer at their end."""
        start = self._position
        prompts = self.prompts[start : start + num_groups]
        self._position += len(prompts)
        return [self._group(prompt, start + i, self.num_generations) for i, prompt in enumerate(prompts)]

    def set_aside(self, groups: Sequence[RolloutGroup], reason: str) -> None:
        """Do nothing: nobody asks for what became of a prompt."""

    def metrics(self) -> Mapping[str, float]:
        """No numbers."""
        return {}

    def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, num_generations: int = 1) -> Evaluation:
        """Return groups of the given prompts; the position stays."""
        return Evaluation([self._group(prompt, index, num_generations) for index, prompt in enumerate(prompts)])

    def adopt(self, update: WeightUpdate) -> None:
        """Note the version in `versions`; groups collected so far count as trained."""
        self.versions.append(update.version)
        self._trained = self._position

    def state(self) -> Mapping[str, Any]:
        """Return the position as of the last `adopt`."""
        return {"position": self._trained}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the position."""
        self._position = self._trained = state["position"]

    def close(self) -> None:
        """Nothing to end."""

    def _group(self, prompt: Prompt, draw: int, num_generations: int) -> RolloutGroup:
        if not self.versions:
            raise RuntimeError("rollouts before any weights were adopted")
        return RolloutGroup.of(prompt, [self._rollout(prompt, draw, place) for place in range(num_generations)])

    def _rollout(self, prompt: Prompt, draw: int, place: int) -> Rollout:
        random = np.random.default_rng((draw, place))
        sampled = random.integers(self.vocab_size, size=self.completion_length, dtype=np.int32)
        before, reward = len(prompt.token_ids), float(self.reward(prompt, sampled))
        mask = np.concatenate([np.zeros(before, dtype=np.uint8), np.ones(len(sampled), dtype=np.uint8)])
        return Rollout(
            prompt_id=prompt.id,
            tokens=np.concatenate([prompt.token_ids, sampled]).astype(np.int32),
            loss_mask=mask,
            generation_logprobs=mask.astype(np.float32) * np.float32(-np.log(self.vocab_size)),
            spans=(WeightSpan(self.versions[-1], len(sampled)),),
            turns=(Turn(" ".join(map(str, sampled)), None, {"reward": reward}),),
            rewards={"reward": reward},
            stop_reason="stop",
        )


def _numbers(tokens: Ragged, version: int) -> Ragged:
    """Return float32 in (-1, 0], 0 where a row starts, different for another token, position or version."""
    within = np.arange(len(tokens.values)) - np.repeat(tokens.offsets[:-1], tokens.lengths)
    mixed = (tokens.values.astype(np.int64) * 7919 + within * 104729 + version * 1299709) % 10007
    return tokens.like(np.where(within == 0, 0.0, -mixed / 10007).astype(np.float32))

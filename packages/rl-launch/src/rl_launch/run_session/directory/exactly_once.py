"""Verify from a run directory that no prompt or row was lost or trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from rl_algos.rollouts.driver.ledger import Ledger, digest
from rl_core.errors import RunDirectoryError
from rl_launch.run_session.checkpoints.manifest import read_state
from rl_launch.run_session.directory.run_folder import RunFolder, SavedCheckpoint

_ROWS_UNIT = "rows"
_STATE, _ROLLOUTS, _ROWS = "state", "rollouts", "data"


@dataclass(frozen=True)
class Proof:
    """The account of every prompt that a run drew up to its newest checkpoint.

    Args:
        step: Step of that checkpoint.
        num_drawn: Prompts drawn; trained, dropped and pending ones add up to them.
        num_trained: Prompts with rollouts that a step trained on.
        dropped: Prompts that trained nothing, by the reason.
        num_pending: Prompts drawn ahead that a later step trains on, or a resumed run.
        num_compared: Steps whose written rollouts were compared with the ledger.
        contradictions: Sentences, each on something that should not be; none if every prompt was trained once, dropped
            for a reason, or is pending.
        gaps: Sentences on what could not be compared, as the run has not kept it.
        unit: `prompts`, or `rows` of a run without rollouts.
    """

    step: int
    num_drawn: int
    num_trained: int
    dropped: Mapping[str, int]
    num_pending: int
    num_compared: int
    contradictions: tuple[str, ...] = field(default=())
    gaps: tuple[str, ...] = field(default=())
    unit: str = "prompts"

    @property
    def holds(self) -> bool:
        """True if nothing contradicts it."""
        return not self.contradictions

    def as_json(self, path: str) -> dict[str, Any]:
        """Return the object that `rl doctor run --json` prints."""
        return {"schema": 1, "run": path, "holds": self.holds, **asdict(self)}


def prove(run: RunFolder) -> Proof:
    """Compare the ledger of the newest checkpoint with the metrics and the rollouts that the run has written.

    A draw has one state in the ledger: trained or dropped by one step, or pending. The weight versions in
    `metrics.jsonl` name that step, and `rollouts/step_<n>.jsonl` must hold the rollouts of the step's prompts, each as
    often as the ledger has it.

    A run without rollouts draws rows in an order that follows from its seed, so the number of rows drawn by each step
    is the account: see `_of_rows`.

    Raises:
        RunDirectoryError: If no checkpoint has a ledger or a number of rows.
    """
    newest = run.checkpoints()[-1:]
    if newest and (newest[0].path / _STATE / f"{_ROWS}.json").is_file():
        return _of_rows(run, newest[0])
    checkpoint, ledger = _newest_ledger(run)
    steps = {row["weight_version"]: row["step"] for row in run.metrics() if row.get("weight_version") is not None}
    left = ledger.left()
    by_step = {steps[version]: draws for version, draws in left.items() if version in steps}
    contradictions = [
        f"step {step} is in metrics.jsonl, but no draw was trained by it"
        for step in sorted(steps.values())
        if step <= checkpoint.step and step not in by_step
    ]
    gaps: list[str] = []
    for version, draws in left.items():
        if steps.get(version, checkpoint.step + 1) > checkpoint.step:
            sentence = f"{len(draws)} draws left with weight version {version}"
            if run.description().origin:
                gaps.append(f"{sentence}, before the run branched off")
            else:
                contradictions.append(f"{sentence}, which no step up to {checkpoint.step} has recorded")
    logger = run.config().get("logger", {})
    written, num_compared, period = set(run.rollout_steps()), 0, int(logger.get("rollout_period", 1))
    num_left_out = 0
    for step in sorted(step for step in by_step if step <= checkpoint.step):
        if step not in written and not (period and step % period == 0):
            num_left_out += 1
            continue
        if step not in written:
            gaps.append(f"rollouts/step_{step}.jsonl does not exist")
            continue
        num_compared += 1
        expected = Counter(ledger.digest(draw) for draw in by_step[step])
        # An index of 0 occurs once for each group.
        for prompt in (record["prompt_id"] for record in run.rollouts(step) if record["index"] == 0):
            if expected[digest(prompt)] > 0:
                expected[digest(prompt)] -= 1
            else:
                contradictions.append(f"step {step} has rollouts of {prompt}, which its ledger does not have")
        if missing := expected.total():
            gaps.append(
                f"rollouts/step_{step}.jsonl lacks the rollouts of {missing} of its {len(by_step[step])} prompts"
            )
    if num_left_out:
        gaps.append(f"logger.rollout_period is {period}, so the rollouts of {num_left_out} steps were not written")
    return Proof(
        checkpoint.step,
        ledger.num_drawn,
        sum(map(len, ledger.trained().values())),
        {reason: len(draws) for reason, draws in ledger.dropped().items()},
        ledger.num_pending,
        num_compared,
        tuple(contradictions),
        tuple(gaps),
    )


def _of_rows(run: RunFolder, checkpoint: SavedCheckpoint) -> Proof:
    """Compare the position in the data of a checkpoint with the steps that the run has recorded.

    Each step up to the checkpoint is in `metrics.jsonl` once, and has drawn as many rows as the others; only the last
    one of a run may have drawn fewer. The rows of all steps add up to the position.
    """
    state = read_state(checkpoint.path / _STATE, _ROWS)
    recorded = [row for row in run.metrics() if 0 < row["step"] <= checkpoint.step]
    contradictions = []
    for row, following in pairwise(recorded):
        if following["step"] != row["step"] + 1:
            contradictions.append(f"step {row['step']} is followed by step {following['step']} in metrics.jsonl")
    if not recorded or recorded[-1]["step"] != checkpoint.step:
        contradictions.append(f"step {checkpoint.step} is not in metrics.jsonl")
    if "drawn" not in state or contradictions:
        gaps = () if "drawn" in state else ("the position of a stream, which does not count rows",)
        return Proof(checkpoint.step, 0, 0, {}, 0, len(recorded), tuple(contradictions), gaps, _ROWS_UNIT)
    num_drawn, num_rows = int(sum(state["drawn"])), int(sum(state["sizes"]))
    positions = [round(row["train/epoch"] * num_rows) for row in recorded]
    if positions[-1] != num_drawn:
        contradictions.append(
            f"step {checkpoint.step} had drawn {positions[-1]} rows, but its checkpoint continues after {num_drawn}"
        )
    taken = [after - before for before, after in pairwise(positions)]
    usual = max(taken, default=0)
    for row, count in zip(recorded[1:], taken, strict=True):
        if count <= 0 or (count != usual and row is not recorded[-1]):
            contradictions.append(f"step {row['step']} drew {count} rows, and others {usual}")
    num_trained = positions[-1]
    return Proof(checkpoint.step, num_drawn, num_trained, {}, 0, len(recorded), tuple(contradictions), (), _ROWS_UNIT)


def described(proof: Proof) -> Iterator[str]:
    """Yield the lines of a proof."""
    yield f"Up to the checkpoint of step {proof.step}, {proof.num_drawn} {proof.unit} were drawn:"
    yield f"  {proof.num_trained} trained, each by one step"
    for reason, count in proof.dropped.items():
        yield f"  {count} dropped: {reason}"
    yield f"  {proof.num_pending} pending"
    compared = "The rows" if proof.unit == _ROWS_UNIT else "The written rollouts"
    against = "position in the data" if proof.unit == _ROWS_UNIT else "ledger"
    yield f"{compared} of {proof.num_compared} steps were compared with the {against}."
    yield from (f"Not compared: {gap}." for gap in proof.gaps)
    yield from (f"Contradiction: {contradiction}." for contradiction in proof.contradictions)
    yield (
        f"No {proof.unit.removesuffix('s')} was lost or trained twice." if proof.holds else "The account does not hold."
    )


def _newest_ledger(run: RunFolder) -> tuple[SavedCheckpoint, Ledger]:
    ledger = Ledger()
    for checkpoint in reversed(run.checkpoints()):
        if not (checkpoint.path / _STATE / f"{_ROLLOUTS}.json").is_file():
            continue
        state = read_state(checkpoint.path / _STATE, _ROLLOUTS)
        if "ledger" not in state:
            continue
        try:
            ledger.restore(state["ledger"])
        except (ValueError, KeyError) as error:
            raise RunDirectoryError(f"{checkpoint.path} has a ledger that cannot be read: {error}") from None
        return checkpoint, ledger
    raise RunDirectoryError(
        f"{run.path} has no checkpoint with a ledger of prompts, which lists the prompts that were drawn and trained. "
        "Runs with rollouts save it with every checkpoint (checkpointing.save_period)."
    )

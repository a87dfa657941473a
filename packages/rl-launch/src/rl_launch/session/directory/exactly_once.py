"""Verify from a run directory that no prompt was lost or trained twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rl_algos.rollouts.driver.ledger import Ledger, digest
from rl_core.errors import RunDirectoryError
from rl_launch.session.checkpoints.manifest import read_state
from rl_launch.session.directory.run_folder import RunFolder, SavedCheckpoint

_STATE, _ROLLOUTS = "state", "rollouts"


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
    """

    step: int
    num_drawn: int
    num_trained: int
    dropped: Mapping[str, int]
    num_pending: int
    num_compared: int
    contradictions: tuple[str, ...] = field(default=())
    gaps: tuple[str, ...] = field(default=())

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

    Raises:
        RunDirectoryError: If no checkpoint has a ledger.
    """
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


def described(proof: Proof) -> Iterator[str]:
    """Yield the lines of a proof."""
    yield f"Up to the checkpoint of step {proof.step}, {proof.num_drawn} prompts were drawn:"
    yield f"  {proof.num_trained} trained, each by one step"
    for reason, count in proof.dropped.items():
        yield f"  {count} dropped: {reason}"
    yield f"  {proof.num_pending} pending"
    yield f"The written rollouts of {proof.num_compared} steps were compared with the ledger."
    yield from (f"Not compared: {gap}." for gap in proof.gaps)
    yield from (f"Contradiction: {contradiction}." for contradiction in proof.contradictions)
    yield "No prompt was lost or trained twice." if proof.holds else "The account does not hold."


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

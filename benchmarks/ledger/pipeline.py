"""Bubbles of a pipeline, from the order of its ranks' passes."""

from __future__ import annotations

from rl_dtensor.training.pipeline import Action, one_forward_one_backward


def bubble(size: int, num_microbatches: int, *, num_chunks: int = 1, backward: float = 2.0) -> float:
    """Return the share of the time in which a pipeline rank waits, if all passes of one direction take equally long and
    nothing else takes any time.

    Args:
        size: Number of pipeline ranks.
        num_microbatches: Number of microbatches; a multiple of `size` if there are several chunks.
        num_chunks: Number of chunks of layers on each rank.
        backward: Duration of a backward pass, relative to a forward pass.
    """
    lasts = {"forward": 1.0, "backward": backward}
    waiting = [list(one_forward_one_backward(rank, size, num_chunks, num_microbatches))[::-1] for rank in range(size)]
    busy = num_chunks * num_microbatches * (1.0 + backward)
    done: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * size
    while any(waiting):
        before = len(done)
        for rank, actions in enumerate(waiting):
            while actions and (ready := _ready(actions[-1], rank, size, num_chunks, done)) is not None:
                action = actions.pop()
                clock[rank] = max(clock[rank], ready) + lasts[action.kind]
                done[action.kind, action.chunk * size + rank, action.microbatch] = clock[rank]
        assert len(done) > before, "the ranks wait for one another"
    return 1.0 - busy / max(clock)


def _ready(
    action: Action, rank: int, size: int, num_chunks: int, done: dict[tuple[str, int, int], float]
) -> float | None:
    """Return the time when the input of a pass is ready; None if the pass that makes it has not run."""
    stage, last = action.chunk * size + rank, size * num_chunks - 1
    if action.kind == "forward":
        return 0.0 if stage == 0 else done.get(("forward", stage - 1, action.microbatch))
    source = ("forward", stage) if stage == last else ("backward", stage + 1)
    return done.get((*source, action.microbatch))

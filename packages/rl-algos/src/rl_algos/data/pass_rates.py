"""Rows by the share of completions that an evaluation has found right."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rl_algos.data.config import PassRateConfig
from rl_core.errors import DataError
from rl_core.rollouts.rollout import Message

ROLLOUTS = "rollouts.jsonl"
"""File in the folder of an evaluation with a record of every rollout."""

_log = logging.getLogger(__name__)


def positions_within(settings: PassRateConfig, name: str, prompts: Iterable[Sequence[Message]]) -> np.ndarray:
    """Return the positions of the prompts whose pass rate is within the bounds.

    Args:
        settings: Bounds of the pass rate, and the folder of an evaluation with the results.
        name: Name of their dataset, for messages.
        prompts: Messages of each prompt.

    Raises:
        DataError: If there are no results, or no prompt is within the bounds.
    """
    known = pass_rates(settings)
    rates = np.array([known.get(_digest(prompt), np.nan) for prompt in prompts])
    kept = np.flatnonzero([settings.keeps(rate) for rate in rates])
    num_known = int(np.isfinite(rates).sum())
    found = (
        f"{name}: {len(kept)} of {len(rates)} rows have a pass rate {settings.bounds} in {settings.results}; "
        f"{num_known - len(kept)} have another one, and {len(rates) - num_known} were not evaluated"
    )
    if not num_known:
        problem = f"{found}. Prompts are matched as strings"
        raise DataError(f"{problem}: evaluate this split, with the same prompt_file and system_prompt_file")
    if not len(kept):
        raise DataError(f"{found}, so no rows remain; change pass_rate.above or pass_rate.below")
    _log.info("%s; the others are excluded", found)
    return kept


def reason_to_leave_out(settings: PassRateConfig, known: Mapping[bytes, float], prompt: Sequence[Message]) -> str:
    """Return why a prompt is left out of training by its pass rate; empty if it is kept.

    Args:
        settings: Bounds of the pass rate.
        known: Pass rates as `pass_rates` returns them.
        prompt: Messages of the prompt.
    """
    rate = known.get(_digest(prompt), np.nan)
    if settings.keeps(rate):
        return ""
    fact = f"its pass rate is {rate:.3g}" if np.isfinite(rate) else "it was not evaluated"
    return f"{fact}, and data.train.pass_rate keeps rows {settings.bounds}"


def pass_rates(settings: PassRateConfig) -> Mapping[bytes, float]:
    """Return the share of samples with at least the reward that counts as right, by the digest of the prompt. Samples
    that failed are not counted.

    Raises:
        DataError: If the folder has no results.
    """
    path = Path(settings.results) / ROLLOUTS
    if not path.is_file():
        raise DataError(
            f"{Path(settings.results)} (pass_rate.results) is not the folder of an evaluation: it does not contain "
            f"{ROLLOUTS}. Pass the folder that `rl eval ... run_dir=FOLDER` wrote"
        )
    counts: dict[bytes, tuple[int, int]] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
            except ValueError:
                # An evaluation that was killed, or is still running, may end within a line.
                if line.endswith(b"\n"):
                    raise DataError(f"{path}, line {number}: not a JSON object; evaluate again") from None
                continue
            if record["status"] != "failed":
                key = _digest(record["prompt"])
                passed, total = counts.get(key, (0, 0))
                is_right = record["rewards"].get("reward", 0.0) >= settings.pass_threshold
                counts[key] = (passed + is_right, total + 1)
    if not counts:
        raise DataError(f"{settings.results} (pass_rate.results) has no samples, because all of them failed")
    return {key: passed / total for key, (passed, total) in counts.items()}


def _digest(messages: Sequence[Message]) -> bytes:
    text = json.dumps(list(messages), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=16).digest()

"""A host whose model predicts each token from the one before it: true gradients by formula, AdamW, and files.

Run as a program, it serves the API until a signal, as `rl serve tinker` does: `bigram_host.py FOLDER PORT [CALLS]`.
It writes a line to the file CALLS for each call that changes an adapter, before the call returns.
"""

import asyncio
import json
import math
import signal
import sys
from collections.abc import Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from rl_algos.losses.targets import (
    ADVANTAGES,
    CLIP_HIGH,
    CLIP_LOW,
    LOSS_SUM,
    SAMPLING_LOGPROBS,
    TARGETS,
    WEIGHTS,
    TargetNLLLoss,
)
from rl_core.data.batch import TOKENS, Batch
from rl_core.metrics import Metric
from rl_core.model import AdapterSettings, StepSettings
from rl_core.rollouts.rollout import Completion, WeightSpan
from rl_launch.root_config import TinkerConfig
from rl_launch.runtime.adapter_places import AdapterWork
from rl_launch.tinker.server import TinkerServer

VOCAB = 12
END = 0
"""Id that ends a completion."""


class Adapter:
    """Two factors of a table of logits, with their moments and gradients."""

    def __init__(self, settings: AdapterSettings, vocab_size: int) -> None:
        self.scale = settings.alpha / settings.rank
        first = np.random.default_rng(settings.seed).normal(size=(vocab_size, settings.rank))
        self.factors = [first / math.sqrt(settings.rank), np.zeros((settings.rank, vocab_size))]
        self.moments = [np.zeros((2, *factor.shape)) for factor in self.factors]
        self.steps = 0
        self.gradient: list[np.ndarray] | None = None

    @property
    def table(self) -> np.ndarray:
        return self.scale * self.factors[0] @ self.factors[1]

    def arrays(self) -> dict[str, np.ndarray]:
        named = {f"factor{i}": factor for i, factor in enumerate(self.factors)}
        moments = {f"moment{i}": moment for i, moment in enumerate(self.moments)}
        return {**named, **moments, "scale": np.array(self.scale), "steps": np.array(self.steps)}

    @classmethod
    def of(cls, arrays, *, with_optimizer: bool) -> "Adapter":
        adapter = cls.__new__(cls)
        adapter.scale = float(arrays["scale"])
        adapter.factors = [arrays["factor0"].copy(), arrays["factor1"].copy()]
        adapter.moments = [arrays[f"moment{i}"] * (1.0 if with_optimizer else 0.0) for i in range(2)]
        adapter.steps = int(arrays["steps"]) if with_optimizer else 0
        adapter.gradient = None
        return adapter


class BigramHost:
    base_model, tokenizer = "tiny/bigram", "tiny/bigram"
    max_rank = 8

    def __init__(
        self, num_slots: int = 4, calls: Path | None = None, vocab_size: int = VOCAB, max_length: int = 64
    ) -> None:
        self.num_slots, self.vocab_size, self.max_length = num_slots, vocab_size, max_length
        self.adapters: dict[str, Adapter] = {}
        self.num_together: list[int] = []
        self._calls = calls
        self._exported: dict[Path, np.ndarray] = {}

    def _note(self, call: str, adapter: str) -> None:
        if self._calls is not None:
            with self._calls.open("a") as file:
                file.write(f"{call} {adapter}\n")

    def create(self, adapter, settings):
        assert len(self.adapters) < self.num_slots
        self.adapters[adapter] = Adapter(settings, self.vocab_size)

    def accumulate(self, works: Sequence[AdapterWork]):
        assert len({work.adapter for work in works}) == len(works)
        self.num_together.append(len(works))
        return [self._passed(work, learns=True) for work in works]

    def evaluate(self, work):
        return self._passed(work, learns=False)

    def _passed(self, work: AdapterWork, *, learns: bool):
        adapter = self.adapters[work.adapter]
        tokens, targets = work.batch.ragged(TOKENS), work.batch.ragged(TARGETS)
        table, on_table = adapter.table, np.zeros((self.vocab_size, self.vocab_size))
        read = np.zeros(targets.values.shape, dtype=np.float32)
        loss = 0.0
        for start, end in zip(tokens.offsets, tokens.offsets[1:], strict=False):
            before, at = tokens.values[start : end - 1], targets.values[start + 1 : end]
            logits = table[before]
            logits = logits - logits.max(1, keepdims=True)
            probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            logprobs = np.where(at < 0, 0.0, np.log(np.take_along_axis(probabilities, at.clip(0), 1)))
            read[start + 1 : end] = logprobs
            columns = {name: work.batch.ragged(name).values[start + 1 : end] for name in work.loss.columns}
            value, slopes = objective(work.loss, logprobs, columns)
            loss += value
            for place, (token, ids) in enumerate(zip(before, at, strict=True)):
                for target, slope in zip(ids, slopes[place], strict=True):
                    if target >= 0:
                        on_table[token] -= slope * probabilities[place]
                        on_table[token, target] += slope
        if learns:
            first, second = adapter.factors
            added = [adapter.scale * on_table @ second.T, adapter.scale * first.T @ on_table]
            adapter.gradient = [a + b for a, b in zip(adapter.gradient or [0, 0], added, strict=True)]
        return {LOSS_SUM: Metric(loss, reduction="sum")}, Batch({"logprobs_at": targets.like(read)})

    def apply(self, adapter, settings: StepSettings):
        self._note("apply", adapter)
        own = self.adapters[adapter]
        if own.gradient is None:
            raise ValueError("there is no gradient")
        norm = math.sqrt(sum(float((each**2).sum()) for each in own.gradient))
        factor = min(1.0, settings.max_grad_norm / norm) if norm else 1.0
        (beta1, beta2), eps = settings.kwargs["betas"], settings.kwargs["eps"]
        own.steps += 1
        for values, moments, gradient in zip(own.factors, own.moments, own.gradient, strict=True):
            moments[0] = beta1 * moments[0] + (1 - beta1) * factor * gradient
            moments[1] = beta2 * moments[1] + (1 - beta2) * (factor * gradient) ** 2
            mean, square = moments[0] / (1 - beta1**own.steps), moments[1] / (1 - beta2**own.steps)
            values *= 1 - settings.lr * settings.kwargs["weight_decay"]
            values -= settings.lr * mean / (np.sqrt(square) + eps)
        own.gradient = None
        return {"grad_norm": Metric(norm), "lr": Metric(settings.lr)}

    def save(self, adapter, folder: Path):
        folder.mkdir(parents=True)
        np.savez(folder / "state.npz", **self.adapters[adapter].arrays())

    def load(self, adapter, folder: Path, *, with_optimizer):
        assert adapter in self.adapters or len(self.adapters) < self.num_slots
        with np.load(folder / "state.npz") as arrays:
            self.adapters[adapter] = Adapter.of(arrays, with_optimizer=with_optimizer)

    def export(self, adapter, folder: Path):
        folder.mkdir(parents=True)
        np.save(folder / "table.npy", self.adapters[adapter].table)

    def release(self, adapter):
        del self.adapters[adapter]

    def _table(self, adapter: Path | None) -> np.ndarray:
        if adapter is None:
            return np.zeros((self.vocab_size, self.vocab_size))
        # As an engine does, it keeps what it has loaded from a folder.
        if adapter not in self._exported:
            self._exported[adapter] = np.load(adapter / "table.npy")
        return self._exported[adapter]

    async def sample(self, request, adapter=None):
        await asyncio.sleep(0)
        table, random = self._table(adapter), np.random.default_rng(request.seed)
        token, ids, logprobs = int(request.token_ids[-1]), [], []
        params = request.sampling
        while len(ids) < params.max_new_tokens and (not ids or ids[-1] not in params.stop_token_ids):
            logits = table[token] / (params.temperature or 1e-6)
            found = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            token = int(random.choice(self.vocab_size, p=np.exp(found) / np.exp(found).sum()))
            ids.append(token)
            logprobs.append(found[token])
        reason = "stop" if ids[-1] in params.stop_token_ids else "length"
        numbers = np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32)
        return Completion(*numbers, reason, (WeightSpan(0, len(ids)),))

    async def score(self, token_ids, adapter=None):
        table = self._table(adapter)
        logprobs = table - np.log(np.exp(table).sum(1, keepdims=True))
        return [0.0, *(float(logprobs[a, b]) for a, b in pairwise(token_ids))]


def objective(loss, logprobs: np.ndarray, columns) -> tuple[float, np.ndarray]:
    """Return a loss of one row and its slopes by the logprobs, both by formula."""
    if isinstance(loss, TargetNLLLoss):
        return -float((columns[WEIGHTS] * logprobs).sum()), -columns[WEIGHTS]
    logp, q, a = logprobs[:, 0], columns[SAMPLING_LOGPROBS], columns[ADVANTAGES]
    ratio = np.exp(logp - q)
    if loss.objective == "importance_sampling":
        value, slopes = -ratio * a, -ratio * a
    elif loss.objective == "dro":
        value, slopes = loss.beta / 2 * (logp - q) ** 2 - logp * a, loss.beta * (logp - q) - a
    else:
        clipped = np.clip(ratio, columns[CLIP_LOW], columns[CLIP_HIGH])
        if loss.objective == "cispo":
            value, slopes = -clipped * logp * a, -clipped * a
        else:
            assert loss.objective == "ppo"
            value = -np.minimum(ratio * a, clipped * a)
            slopes = np.where(ratio * a <= clipped * a, -ratio * a, 0.0)
    return float(value.sum()), slopes[:, None]


@contextmanager
def hosting(*args, **settings):
    yield BigramHost(*args, **settings)


async def serve(folder: Path, port: int, calls: Path | None) -> None:
    config = TinkerConfig(port=port, save_every=3)
    server = TinkerServer(lambda: hosting(4, calls), config, folder, [END])
    await server.start()
    sys.stdout.write(json.dumps({"url": server.url}) + "\n")
    sys.stdout.flush()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) > 3 else None))

"""One completion while it is being decoded."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from rl_core.generation import GenerationRequest
from rl_core.rollout import Completion, StopReason, WeightSpan
from rl_core.torch.generation.sampling import uniforms
from rl_core.torch.generation.stop_text import StopText


class Row:
    """A request, what was sampled for it, and who waits for it.

    Args:
        limit: most tokens sampled, by the request and by the context.
        stop_text: where the request has stop strings.
    """

    def __init__(self, request: GenerationRequest, limit: int, stop_text: StopText | None) -> None:
        self.request = request
        self.future: Future[Completion] = Future()
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.limit = limit
        self._stop_text = stop_text
        self._uniforms = uniforms(request.seed, limit)
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.token_ids)

    def token(self, index: int) -> int:
        """A token of the prompt and what was sampled after it, by its index."""
        prompt = self.request.token_ids
        return int(prompt[index]) if index < len(prompt) else self.tokens[index - len(prompt)]

    @property
    def uniform(self) -> float:
        """What draws the next token."""
        return float(self._uniforms[len(self.tokens)])

    def append(self, token: int, logprob: float, version: int) -> bool:
        """Take a sampled token; True where it ends the completion, which is then handed over."""
        self.tokens.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)
        stopped = self._stop_text is not None and self._stop_text.append(token)
        if stopped or token in self._stop_token_ids:
            self._end("stop")
            return True
        if len(self.tokens) == self.limit:
            self._end("length")
            return True
        return False

    def _end(self, reason: StopReason) -> None:
        versions, counts = np.unique(self._versions, return_counts=True)
        completion = Completion(
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            stop_reason=reason,
            spans=tuple(WeightSpan(int(v), int(n)) for v, n in zip(versions, counts, strict=True)),
        )
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(completion)

"""One completion while it is being decoded."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from rl_core.rollouts.generation import GenerationRequest
from rl_core.rollouts.rollout import Completion, StopReason, WeightSpan
from rl_core.torch.generation.sampling import uniforms
from rl_core.torch.generation.stop_text import StopText


class Row:
    """A request, the tokens sampled for it, and the future of its completion.

    Args:
        limit: Maximum number of tokens sampled, by the request and by the context.
        stop_text: None if the request has no stop strings.
    """

    def __init__(self, request: GenerationRequest, limit: int, stop_text: StopText | None) -> None:
        self.request = request
        self.future: Future[Completion] = Future()
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._routing: list[np.ndarray] = []
        self.limit = limit
        self._stop_text = stop_text
        self._uniforms = uniforms(request.seed, request.num_sampled + limit)[request.num_sampled :]
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.token_ids)

    def token(self, index: int) -> int:
        """Return a token of the prompt or of those sampled after it, by its index."""
        prompt = self.request.token_ids
        return int(prompt[index]) if index < len(prompt) else self.tokens[index - len(prompt)]

    @property
    def uniform(self) -> float:
        """Uniform number that draws the next token."""
        return float(self._uniforms[len(self.tokens)])

    def add_routing(self, experts: np.ndarray) -> None:
        """Take the experts, int16 `[tokens, layers, experts per token]`, that the next of its tokens were sent to."""
        self._routing.append(experts)

    def append(self, token: int, logprob: float, version: int) -> bool:
        """Take a sampled token; True if it ends the completion, which is then handed over."""
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

    def interrupt(self) -> None:
        """End the completion with the tokens that it has, which may be none."""
        self._end("abort")

    def _end(self, reason: StopReason) -> None:
        versions, counts = np.unique(self._versions, return_counts=True)
        completion = Completion(
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            stop_reason=reason,
            spans=tuple(WeightSpan(int(v), int(n)) for v, n in zip(versions, counts, strict=True)),
            routed_experts=np.concatenate(self._routing) if self._routing else None,
        )
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(completion)

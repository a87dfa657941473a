"""Where an agent finds the policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Address:
    """URL and keys of one rollout.

    Args:
        rollout: Identifies the rollout at its server.
        root_url: URL that Anthropic's clients take, `http://HOST:PORT/rollouts/ID`.
        api_key: Key of this rollout. No other rollout takes it, and this one only until it has ended.
        reward_key: Key with which rewards of this rollout may be posted; empty if they may not.
    """

    rollout: str
    root_url: str
    api_key: str
    reward_key: str = ""

    @property
    def base_url(self) -> str:
        """URL that OpenAI's clients take."""
        return f"{self.root_url}/v1"

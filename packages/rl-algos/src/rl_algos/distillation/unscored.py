"""The environment of prompts that nobody scores: a teacher is all that the student learns from."""


def unscored() -> float:
    """Return the reward of every response: 0."""
    return 0.0

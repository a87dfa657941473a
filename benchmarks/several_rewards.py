"""Two rewards of a sum, by name: for estimators that normalise each by itself."""


def score(response: str, answer: str) -> dict[str, float]:
    """Return two rewards: 1 if the sum is right, and 1 if it is a number of as many digits as the answer."""
    said = response.strip()
    return {"right": float(said == answer), "form": float(said.isdigit() and len(said) == len(answer))}

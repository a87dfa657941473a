"""Two rewards of a sum, by name: for estimators that normalise each by itself."""


def score(response: str, answer: str) -> dict[str, float]:
    """1 each if the sum is right, and if it is a number of as many digits as the answer."""
    said = response.strip()
    return {"right": float(said == answer), "form": float(said.isdigit() and len(said) == len(answer))}

"""How the math grader scores pairs of answers of known truth, next to math-verify.

    uv run --isolated --package rl-envs benchmarks/graders.py [--per-kind N] [--seeds 1 2 3] [--disagreements N]

`answer_pairs.py` makes the pairs from values, so that their truth is known. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence

from answer_pairs import Pair, pairs
from math_verify import parse, verify

from rl_envs.math.verdict import judge_in_time
from rl_envs.time_limit import within

Verdict = bool | None
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def ours(pair: Pair) -> Verdict:
    return judge_in_time(pair.said, pair.known, "auto")


def by_math_verify(pair: Pair) -> Verdict:
    def compare() -> Verdict:
        known, said = (parse(f"${text}$", parsing_timeout=None) for text in (pair.known, pair.said))
        return verify(known, said, timeout_seconds=None) if known and said else None

    return within(5.0, compare)


GRADERS: dict[str, Callable[[Pair], Verdict]] = {"ours": ours, "math-verify": by_math_verify}
COLUMNS: dict[str, Callable[[Verdict, Pair], bool]] = {
    "wrong answers paid": lambda verdict, pair: verdict is True and not pair.same,
    "right answers unpaid": lambda verdict, pair: verdict is not True and pair.same,
    "undecided": lambda verdict, pair: verdict is None,
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--per-kind", type=int, default=40)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--disagreements", type=int, default=2)
    arguments.add_argument("--quick", action="store_true")
    given = arguments.parse_args()
    chosen = dict.fromkeys(
        pair
        for seed in given.seeds[: 1 if given.quick else None]
        for pair in pairs(seed, 12 if given.quick else given.per_kind)
    )
    print_table(list(chosen), given.disagreements)


def print_table(chosen: Sequence[Pair], disagreements: int) -> None:
    """Grade all pairs, and print what each grader did by kind, its time, and pairs that they grade differently."""
    counts: Counter[tuple[str, str, str]] = Counter()
    seconds: Counter[str] = Counter()
    unlike: dict[str, list[str]] = {}
    for pair in chosen:
        verdicts: dict[str, Verdict] = {}
        for name, grade in GRADERS.items():
            started = time.process_time()
            verdicts[name] = grade(pair)
            seconds[name] += time.process_time() - started
            for column, holds in COLUMNS.items():
                counts.update({(kind, name, column): holds(verdicts[name], pair) for kind in (pair.kind, "all")})
        if verdicts["ours"] is not pair.same or verdicts["math-verify"] is not pair.same:
            truth = "same" if pair.same else "different"
            row = f"| `{pair.known}` | `{pair.said}` | {truth} | {verdicts['ours']} | {verdicts['math-verify']} |"
            unlike.setdefault(pair.kind, []).append(row)
    sizes = Counter(pair.kind for pair in chosen)
    print("| kind | pairs | " + " | ".join(f"{name}: {column}" for name in GRADERS for column in COLUMNS) + " |")
    print("|---|---:|" + "---:|" * (len(GRADERS) * len(COLUMNS)))
    for kind, size in [*sizes.items(), ("all", len(chosen))]:
        cells = (str(counts[kind, name, column]) for name in GRADERS for column in COLUMNS)
        print(f"| {kind} | {size} | " + " | ".join(cells) + " |")
    print("\nSeconds of processor time: " + ", ".join(f"{name} {seconds[name]:.1f}" for name in GRADERS))
    print("\n| known | said | truth | ours | math-verify |\n|---|---|---|---|---|")
    print("\n".join(row for rows in unlike.values() for row in rows[:disagreements]))


if __name__ == "__main__":
    signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
    main()

"""Functions and classes in files beside a recipe, which are not part of a package."""

import re
from pathlib import Path

from runs import Run, rollouts_of, steps_of

README = Path(__file__).parents[1] / "packages/rl-algos/README.md"


def test_the_estimator_and_the_loss_of_the_readme_train_a_policy(grpo, tmp_path):
    text = README.read_text(encoding="utf-8")
    for name in ("mine.py", "run.yaml"):
        found = re.search(rf"^# {re.escape(name)}\n.*?(?=^```)", text, re.DOTALL | re.MULTILINE)
        assert found
        (tmp_path / name).write_text(found[0])
    _, *settings = grpo
    run = Run.start(
        tmp_path / "run",
        str(tmp_path / "run.yaml"),
        *settings,
        "grpo.max_num_steps=2",
        "policy.generation.backend=hf",
    )
    run.finish()
    steps = steps_of(run.folder)
    assert [line["policy/surprise"] > 0 for line in steps] == [True, True]
    for line in steps:
        rows = rollouts_of(run.folder)[line["step"]]
        # less than the whole advantage of the last token, on the mean of a rollout's tokens
        assert max(abs(row["advantage"]) for row in rows) < line["advantage/max"]

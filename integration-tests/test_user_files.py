"""Functions and classes in files beside a recipe, which are not part of a package."""

import re
from pathlib import Path

from runs import rollouts_of, steps_of

from rl_core.testing.exhaustive import exhaustive

ROOT = Path(__file__).parents[1]


def write_files(document, folder, *names):
    """Files as a document prints them."""
    text = document.read_text(encoding="utf-8")
    for name in names:
        found = re.search(rf"^# {re.escape(name)}\n.*?(?=^```)", text, re.DOTALL | re.MULTILINE)
        assert found
        (folder / name).write_text(found[0])


def test_the_estimator_and_the_loss_of_the_readme_train_a_policy(driver, grpo, tmp_path):
    write_files(ROOT / "packages/rl-algos/README.md", tmp_path, "mine.py", "run.yaml")
    _, *settings = grpo
    run = tmp_path / "run"
    driver.train(run, str(tmp_path / "run.yaml"), *settings, "grpo.max_num_steps=2", "policy.generation.backend=hf")
    steps = steps_of(run)
    assert [line["policy/surprise"] > 0 for line in steps] == [True, True]
    for line in steps:
        rows = rollouts_of(run)[line["step"]]
        # less than the whole advantage of the last token, on the mean of a rollout's tokens
        assert max(abs(row["advantage"]) for row in rows) < line["advantage/max"]


@exhaustive
def test_the_algorithm_of_the_guide_trains_from_its_file(driver, tmp_path):
    write_files(ROOT / "docs/adding-an-algorithm.md", tmp_path, "focal.py", "focal.yaml")
    run = tmp_path / "run"
    driver.train(run, str(tmp_path / "focal.yaml"), "checkpointing.save_period=3")
    steps = steps_of(run)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    (copy,) = (run / "code").iterdir()
    assert copy.read_text() == (tmp_path / "focal.py").read_text()

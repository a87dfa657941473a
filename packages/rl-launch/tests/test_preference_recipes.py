"""Each loss of preference learning passes the checks of a run."""

import pytest

from rl_algos.dpo.loss import LOSSES
from rl_core.config import to_yaml
from rl_core.errors import ConfigError
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan

ON_CPU = ["cluster.device=cpu"]
LOSS = """
from dataclasses import dataclass
from rl_core.model import LOGPROBS

@dataclass(frozen=True)
class Mine:
    weight: float = 1.0
    implementation: str = "mine.py:compute"
    columns = ("loss_mask", "is_chosen")
    reads = (LOGPROBS,)
    temperature = 1.0

    def totals(self, batch):
        return {"pairs": len(batch) / 2}
"""


@pytest.mark.parametrize("recipe", ["dpo-tiny", "dpo-helpsteer3"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_starts_from_a_recipe(loss, recipe):
    device = ON_CPU if recipe == "dpo-tiny" else []
    config = read_plan(recipe, [*device, f"dpo.loss={loss}"]).config
    assert config.dpo.loss.name == loss
    assert list(RunPlan.of(config).backends.models) == ["policy"]


def test_a_loss_in_a_file_beside_the_recipe_starts_and_loads_back(tmp_path):
    (tmp_path / "mine.py").write_text(LOSS)
    (tmp_path / "run.yaml").write_text("defaults: dpo-tiny\ndpo: {loss: {name: mine.py:Mine, weight: 0.5}}\n")
    config = read_plan(tmp_path / "run.yaml", ON_CPU).config
    assert config.dpo.loss.name == f"{tmp_path}/mine.py:Mine"
    assert config.dpo.loss.weight == 0.5
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "config.yaml").write_text(to_yaml(config))
    assert to_yaml(read_plan(tmp_path / "kept").config) == to_yaml(config)


def test_a_key_that_a_loss_in_a_file_does_not_have_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text(LOSS)
    (tmp_path / "run.yaml").write_text("defaults: dpo-tiny\ndpo: {loss: {name: mine.py:Mine, wieght: 0.5}}\n")
    with pytest.raises(ConfigError, match=r"dpo\.loss\.wieght .*weight"):
        read_plan(tmp_path / "run.yaml", ON_CPU)

"""Whole weights on the ranks of one copy of the model."""

import numpy as np
import pytest
from layouts import EP, PP, TP, write_family

from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.torch.files.model_files import WeightFiles

PLAIN = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})


@pytest.mark.parametrize(
    ("family", "settings", "holders"),
    [
        pytest.param("qwen3", {TP: 2}, [0, 1], id="tp2 dp2"),
        pytest.param("qwen3_moe", {PP: 2, EP: 2}, [0, 1, 2, 3], id="pp2 ep2: dense weights in groups of their own"),
    ],
)
def test_whole_weights_reach_all_ranks_of_the_first_copy(ranks, tmp_path, family, settings, holders):
    folder = write_family(tmp_path, family)
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=PLAIN)
    with PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), 4, **settings):
        outcomes = ranks.run("megatron_factories:whole_weights", [()] * 4)
    assert [told for told, _ in outcomes] == [holders] * 4
    assert [bool(found) for _, found in outcomes] == [rank in holders for rank in range(4)]
    with WeightFiles.of(folder).open() as files:
        for name in outcomes[0][1]:
            expected = files.read(name, ()).numpy()
            assert all(np.array_equal(outcomes[rank][1][name], expected) for rank in holders)

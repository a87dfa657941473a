from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rl_algos.data.stream import Stream
from rl_algos.losses.tokens import NLLLoss
from rl_algos.sft.algorithm import SFT
from rl_algos.sft.config import SFTConfig
from rl_algos.sft.data import TrainingRow
from rl_algos.supervised.data import SupervisedData
from rl_core.run import Components
from rl_core.testing.fakes import FakeModel, FakeRun

ROWS = [
    TrainingRow(f"r{i}", np.full(2 + i % 3, i, np.int32), np.array([0, 1, 1, 1][: 2 + i % 3], np.uint8))
    for i in range(6)
]


def trained(stream, *, batch_size=3, steps=2):
    policy, run = FakeModel(), FakeRun()
    policy_config = SimpleNamespace(train_global_batch_size=batch_size)
    config = SimpleNamespace(sft=SFTConfig(max_num_steps=steps), policy=policy_config)
    SFT().run(config, Components(models={"policy": policy}, data=SupervisedData(stream, {})), run)
    return policy, run


def test_the_algorithm_is_run_as_configured():
    policy, run = trained(Stream([ROWS]))
    assert [(name, len(batch)) for name, batch in policy.calls] == [("train_step", 3)] * 2
    assert all(set(NLLLoss().columns) <= set(batch) for _, batch in policy.calls)
    assert run.phases == ["data", "training"] * 2
    assert not any(name.endswith("/share") for name in run.metrics[1])


def test_a_step_on_several_datasets_says_what_share_of_its_tokens_each_had():
    named = [[replace(row, dataset=name) for row in ROWS] for name in ("a.jsonl", "b.jsonl")]
    policy, run = trained(Stream(named, [3.0, 1.0], seed=1, shuffle=False), batch_size=4)
    # three of the first dataset, one of the second
    assert [int(row[0]) for row in policy.calls[0][1].ragged("tokens")] == [0, 1, 2, 0]
    assert run.metrics[1]["train/a.jsonl/share"] == pytest.approx(6 / 7)
    assert run.metrics[1]["train/b.jsonl/share"] == pytest.approx(1 / 7)

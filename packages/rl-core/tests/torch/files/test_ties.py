"""Tied weights that files hold apart are compared by all ranks together."""

import pytest
import torch
from safetensors.torch import save_file

from rl_core.errors import WorkerError
from rl_core.torch.files import model_files

ROWS = torch.arange(21.0).reshape(7, 3)


def changed(place, value=0.5):
    rows = ROWS.clone()
    rows[place] = value
    return rows


@pytest.mark.parametrize(
    ("head", "is_apart"),
    [
        pytest.param(None, False, id="one name [vllm-project/vllm#53020]"),
        pytest.param(ROWS.clone(), False, id="equal [vllm-project/vllm#3344]"),
        pytest.param(ROWS.bfloat16(), False, id="equal in another dtype"),
        pytest.param(changed((0, 0)), True, id="first value [huggingface/transformers#42612]"),
        pytest.param(changed((6, 2)), True, id="last value"),
        pytest.param(changed((3, 1), torch.nan), True, id="not a number"),
        pytest.param(ROWS[:-1].clone(), True, id="fewer rows"),
        pytest.param(torch.cat([ROWS, ROWS[:1]]), True, id="more rows"),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_unties_if_any_sees_a_difference(pool, tmp_path, head, is_apart, num_ranks):
    tensors = {"embedding": ROWS} if head is None else {"embedding": ROWS, "head": head}
    save_file(tensors, tmp_path / "model.safetensors")
    assert pool.run("tie_cases:untie", [(tmp_path,)] * num_ranks) == [(is_apart, not is_apart)] * num_ranks


def test_a_family_that_ties_whatever_its_config_says_is_refused(pool, tmp_path):
    save_file({"embedding": ROWS, "head": ROWS + 1}, tmp_path / "model.safetensors")
    with pytest.raises(WorkerError, match="embedding and head as one weight"):
        pool.run("tie_cases:untie", [(tmp_path, False)])


def test_a_rank_compares_its_share_in_parts(monkeypatch):
    read = []
    monkeypatch.setattr(model_files, "READ_BYTES", 2 * 3 * 4)

    class Opened:
        def shape(self, name):
            return (7, 3)

        def read(self, name, slices):
            read.append((slices[0].start, slices[0].stop))
            return ROWS[slices]

    assert not model_files.weights_differ(Opened(), "embedding", "head", 1, 2)
    assert read == [(3, 5), (3, 5), (5, 7), (5, 7)]

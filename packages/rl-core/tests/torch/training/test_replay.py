import numpy as np
import pytest
import torch

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.torch.loss import Rows
from rl_core.torch.rows import to_rows
from rl_core.torch.training.replay import RoutingShape, chosen_experts

KEY = "model_cfg.replay"
SHAPE = RoutingShape(num_layers=3, num_chosen=2, num_experts=4)
TOKENS = Ragged.from_rows([[5, 6], [7]], np.int32)
EXPERTS = np.arange(18, dtype=np.int16).reshape(3, 3, 2) % 4


def test_the_column_is_taken_if_it_is_one_of_this_model():
    batch = Batch({"tokens": TOKENS, "routed_experts": TOKENS.like(EXPERTS)})
    assert SHAPE.column_of(batch, is_needed=True, key=KEY)["routed_experts"].equals(TOKENS.like(EXPERTS))
    for shape, message in (
        (RoutingShape(2, 2, 4), r"\(3, 2\), the model \(2, 2\)"),
        (RoutingShape(3, 2, 3), "expert 3, but the model has 3"),
    ):
        with pytest.raises(ValueError, match=message):
            shape.column_of(batch, is_needed=True, key=KEY)
    with pytest.raises(ValueError, match=r"model_cfg\.replay needs the column 'routed_experts' .* has tokens"):
        SHAPE.column_of(batch.only(["tokens"]), is_needed=True, key=KEY)
    assert SHAPE.column_of(batch.only(["tokens"]), is_needed=False, key=KEY) == {}


def test_positions_get_the_experts_of_their_tokens_and_padding_none():
    rows = to_rows(Batch({"tokens": TOKENS, "routed_experts": TOKENS.like(EXPERTS)}), torch.device("cpu"))
    found = SHAPE.at_places(rows, torch.tensor([2, -1, 0]))
    assert found[0].tolist() == EXPERTS[2].tolist()
    assert (found[1] == -1).all()
    assert found[2].tolist() == EXPERTS[0].tolist()
    company = Rows(rows.offsets, {"tokens": rows["tokens"]})
    assert SHAPE.at_places(company, torch.tensor([0, -1])).tolist() == [[[-1, -1]] * 3] * 2


def test_the_router_chooses_where_nothing_is_given():
    own = torch.tensor([[0, 1], [2, 3]])
    given = torch.tensor([[3, 2], [-1, -1]], dtype=torch.int16)
    assert chosen_experts(own, given).tolist() == [[3, 2], [2, 3]]

import numpy as np
import pytest

from rl_algos.dpo.algorithm import mismatched, others_of, with_reference_point
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.images import DIGEST_BYTES, IMAGES


def batch():
    """Prompts of 2, 1 and 3 tokens, responses of 1, 3 and 2."""
    return Batch(
        {
            "tokens": Ragged.from_rows([[10, 11, 1], [20, 2, 3, 4], [30, 31, 32, 5, 6]], np.int32),
            "loss_mask": Ragged.from_rows([[0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 1, 1]], np.uint8),
        }
    )


class Policy:
    """Logprobs from the tokens; those of the reference are less by what it is given."""

    def __init__(self, distance):
        self.distance = distance

    def infer(self, batch, reads, *, reference=False, temperature=1.0):
        tokens = batch.ragged("tokens")
        values = -tokens.values.astype(np.float32) - (self.distance if reference else 0.0)
        values[tokens.values >= 10] = np.nan  # prompts must not count
        return Batch({"logprobs": tokens.like(values)})


def rows_of(*rows):
    """Rows of a prompt of one token and responses of one token."""
    tokens = Ragged.from_rows([list(row) for row in rows], np.int32)
    return Batch({"tokens": tokens, "loss_mask": Ragged.from_rows([[0, 1]] * len(rows), np.uint8)})


def test_every_prompt_gets_the_response_of_the_next_row():
    others = others_of(batch())
    assert others == [1, 2, 0]
    found = mismatched(batch(), others, 10)
    assert [row.tolist() for row in found.ragged("tokens")] == [[10, 11, 2, 3, 4], [20, 5, 6], [30, 31, 32, 1]]
    assert [row.tolist() for row in found.ragged("loss_mask")] == [[0, 0, 1, 0, 1], [0, 1, 1], [0, 0, 0, 1]]
    assert [len(row) for row in mismatched(batch(), others, 4).ragged("tokens")] == [4, 3, 4]


@pytest.mark.parametrize(
    ("prompts", "others"),
    [
        pytest.param([10, 10, 20, 20, 30, 30], [2, 3, 4, 5, 0, 1], id="pairs of responses"),
        pytest.param([10, 20, 10, 20], [1, 0, 3, 2], id="prompts in turns"),
        pytest.param([10, 20, 10], [1, 2, 1], id="the last row has the prompt of the first"),
        pytest.param([20, 10, 10], [2, 0, 0], id="the last rows have one prompt"),
        pytest.param([10, 10, 10], [None] * 3, id="one prompt"),
        pytest.param([10], [None], id="one row"),
    ],
)
def test_the_other_response_belongs_to_another_prompt(prompts, others):
    assert others_of(rows_of(*((prompt, 1) for prompt in prompts))) == others


def test_equal_texts_with_other_images_are_other_prompts():
    rows = [np.full((1, DIGEST_BYTES), number, np.uint8) for number in (1, 1, 2)]
    images = Ragged.from_rows(rows, np.uint8, (DIGEST_BYTES,))
    assert others_of(rows_of((10, 1), (10, 2), (10, 3)).with_columns({IMAGES: images})) == [2, 2, 1]


def test_a_batch_with_one_prompt_has_the_reference_point_0_and_says_so(caplog):
    assert with_reference_point(rows_of((10, 1), (10, 2)), Policy(0.25), max_tokens=10).array("kl").tolist() == [0, 0]
    assert "all 2 responses of a batch answer one prompt" in caplog.text


def test_prompts_keep_their_images():
    rows = [np.full((count, DIGEST_BYTES), count, np.uint8) for count in (1, 0, 2)]
    images = Ragged.from_rows(rows, np.uint8, (DIGEST_BYTES,))
    found = mismatched(batch().with_columns({IMAGES: images}), [1, 2, 0], 10)
    assert found.ragged(IMAGES).equals(images)


def test_the_reference_point_is_the_mean_over_the_whole_batch():
    # a distance of 0.25 at each of the 2, 2 and 1 tokens of the mismatched responses
    found = with_reference_point(batch(), Policy(0.25), max_tokens=10)
    assert found.array("kl") == pytest.approx(np.full(3, 0.25 * (2 + 2 + 1) / 3))
    assert found.array("kl").dtype == np.float32


def test_the_reference_point_is_never_negative():
    assert with_reference_point(batch(), Policy(-0.25), max_tokens=10).array("kl").tolist() == [0.0] * 3

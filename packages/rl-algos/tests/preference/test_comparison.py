import pytest

from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows.example import Example, Response
from rl_algos.data.rows.preference import preference
from rl_algos.preference.comparison import WeighedScores, comparisons, verdicts
from rl_core.errors import DataError

USER = {"role": "user", "content": "1+1="}


def said(text, **verdict):
    return Response(({"role": "assistant", "content": text},), **verdict)


def example(*responses, margin=None):
    return Example((USER,), responses=responses, margin=margin)


def texts(found):
    return [(pair.better.messages[0]["content"], pair.worse.messages[0]["content"], pair.margin) for pair in found]


def test_ranked_responses_are_paired_best_with_worst_or_all():
    ranked = example(said("b", rank=1), said("c", rank=2), said("a", rank=0), said("also b", rank=1))
    assert texts(comparisons(ranked, "best-worst")) == [("a", "c", None)]
    everyone = [("a", "b", None), ("a", "also b", None), ("a", "c", None), ("b", "c", None), ("also b", "c", None)]
    assert sorted(texts(comparisons(ranked, "all"))) == sorted(everyone)


def test_scores_rank_and_give_margins():
    scored = example(said("low", score=1.0), said("high", score=4.5), said("middle", score=2.0))
    assert texts(comparisons(scored, "best-worst")) == [("high", "low", 3.5)]
    assert len(comparisons(scored, "all")) == 3


def test_a_given_margin_is_that_of_the_pair():
    assert texts(comparisons(example(said("a", rank=0), said("b", rank=1), margin=2.0), "all")) == [("a", "b", 2.0)]


def test_ties_and_equal_responses_give_no_pair():
    assert comparisons(example(said("a", rank=0), said("b", rank=0)), "best-worst") == []
    assert comparisons(example(said("a", rank=0), said("a", rank=1)), "best-worst") == []


def test_labels_and_scores_are_verdicts():
    labelled = example(said("a", is_desirable=True), said("b", is_desirable=False))
    assert [verdict for _, verdict in verdicts(labelled, "label")] == [1.0, 0.0]
    assert [verdict for _, verdict in verdicts(example(said("a", score=2.5)), "score")] == [2.5]


def test_a_pair_is_a_good_and_a_bad_response():
    found = verdicts(example(said("b", rank=1), said("a", rank=0)), "label")
    assert [(response.messages[0]["content"], verdict) for response, verdict in found] == [("a", 1.0), ("b", 0.0)]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: comparisons(example(), "all"), "needs two responses, but the row has 0. Add `chosen`"),
        (lambda: comparisons(example(said("a", rank=0), said("b")), "all"), "the responses have no order"),
        (lambda: verdicts(example(), "label"), "the row has no responses"),
        (lambda: verdicts(example(said("a", score=1.0)), "label"), "the row has no `label`"),
        (lambda: verdicts(example(said("a", is_desirable=True)), "score"), "a response has no `score`"),
    ],
)
def test_what_nobody_judged_is_refused(ask, says):
    with pytest.raises(DataError, match=says):
        ask()


def test_scores_of_several_objectives_are_weighed():
    row = {"prompt": "1+1=", "completion": "2", "helpfulness": 4, "verbosity": 1.5, "id": "a"}
    example = preference(row, DatasetConfig(data_path="a.jsonl"))
    [(response, score)] = verdicts(example, WeighedScores({"helpfulness": 0.5, "verbosity": -2.0}))
    assert response.scores == {"helpfulness": 4.0, "verbosity": 1.5}
    assert score == -1.0
    with pytest.raises(DataError, match=r"no score 'coherence', .*its scores are helpfulness, verbosity"):
        verdicts(example, WeighedScores({"coherence": 1.0}))

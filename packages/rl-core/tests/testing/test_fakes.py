import numpy as np
import pytest

from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.model import ENTROPY, LOGPROBS, SCORES, logprobs_at, topk
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Prompt
from rl_core.testing.fakes import FakeModel, FakeRolloutSource, FakeRun, FakeWeights
from rl_core.weights import WeightUpdate


class CountRows:
    columns = ("weights",)
    reads = (LOGPROBS,)
    temperature = 1.0
    implementation = "nowhere:compute"

    def totals(self, batch):
        return {"rows": float(len(batch))}


def batch(*rows):
    tokens = Ragged.from_rows(rows, dtype=np.int32)
    ids = tokens.like(np.stack([tokens.values, np.full_like(tokens.values, -1)], 1))
    return Batch({"tokens": tokens, "weights": np.ones(len(rows)), "ids": ids})


def test_reads_have_the_promised_shapes_and_follow_from_the_row_alone():
    model = FakeModel()
    both, one = batch([5, 6, 7], [8, 9]), batch([8, 9])
    reads = [LOGPROBS, ENTROPY, SCORES, topk(2), logprobs_at("ids")]
    result = model.infer(both, reads)
    assert set(result) == {"logprobs", "entropy", "scores", "topk_ids", "topk_logprobs", "logprobs_at"}
    assert result.ragged("logprobs").lengths.tolist() == [3, 2]
    assert result.ragged("topk_logprobs").values.shape == (5, 2)
    assert [row[0] for row in result.ragged("logprobs")] == [0, 0]
    assert (result.ragged("logprobs_at").values[:, 1] == 0).all()
    alone = model.infer(one, reads)
    last = result.select([1])
    np.testing.assert_array_equal(last.array("scores"), alone.array("scores"))
    for name in set(result) - {"scores"}:
        assert last.ragged(name).equals(alone.ragged(name))


def test_a_step_changes_the_policy_and_not_the_reference():
    model = FakeModel()
    before = model.infer(batch([1, 2, 3]), [LOGPROBS]).ragged("logprobs")
    assert model.train_step(batch([1, 2, 3]), CountRows())["loss"].result() == 2.0
    assert model.evaluate(batch([1, 2, 3]), CountRows())["loss"].result() == 1.0
    assert not model.infer(batch([1, 2, 3]), [LOGPROBS]).ragged("logprobs").equals(before)
    assert model.infer(batch([1, 2, 3]), [LOGPROBS], reference=True).ragged("logprobs").equals(before)
    assert [name for name, _ in model.calls] == ["infer", "train_step", "evaluate", "infer", "infer_reference"]


def test_a_reference_that_was_updated_is_saved(tmp_path):
    model, other = FakeModel(), FakeModel()
    for _ in range(2):
        model.train_step(batch([1, 2, 3]), CountRows())
    model.update_reference()
    model.train_step(batch([1, 2, 3]), CountRows())
    model.save(str(tmp_path))
    other.load(str(tmp_path))
    expected = model.infer(batch([1, 2, 3]), [LOGPROBS], reference=True).ragged("logprobs")
    assert other.infer(batch([1, 2, 3]), [LOGPROBS], reference=True).ragged("logprobs").equals(expected)
    assert not FakeModel().infer(batch([1, 2, 3]), [LOGPROBS]).ragged("logprobs").equals(expected)


def test_a_batch_without_what_the_loss_needs_is_refused():
    with pytest.raises(ValueError, match="weights"):
        FakeModel().train_step(batch([1]).only(["tokens"]), CountRows())


def test_a_run_saves_when_due_and_another_on_its_folder_goes_on(tmp_path):
    model = FakeModel()
    first = FakeRun(tmp_path, save_period=2)
    steps = first.steps(9, models={"policy": model}, state={"weights": FakeWeights(model)})
    for step in steps:
        model.train_step(batch([1]), CountRows())
        if step == 3:  # a crash: what came after step 2 is lost
            break
    resumed, weights = FakeModel(), FakeWeights(model)
    second = FakeRun(tmp_path)
    left = second.steps(9, models={"policy": resumed}, state={"weights": weights})
    assert resumed.num_steps == 2
    assert list(left) == [3, 4, 5, 6, 7, 8, 9]


def test_a_run_ends_when_stopped_or_told_to():
    def run_to_the_end(run, stop_at=None):
        done = []
        for step in run.steps(5, models={}, state={}):
            done.append(step)
            if step == stop_at:
                run.stop("enough")
        return done

    assert run_to_the_end(FakeRun()) == [1, 2, 3, 4, 5]
    assert run_to_the_end(FakeRun(end_after=2)) == [1, 2]
    assert run_to_the_end(FakeRun(), stop_at=3) == [1, 2, 3]


def test_a_metric_recorded_twice_is_refused():
    run = FakeRun()
    run.record(1, {"a": 1.0})
    run.record(1, {"b": 2.0})
    assert run.metrics == {1: {"a": 1.0, "b": 2.0}}
    with pytest.raises(ValueError, match="recorded twice"):
        run.record(1, {"a": 1.0})


def test_rollouts_are_the_same_for_the_same_position_and_stamped_with_the_version():
    prompts = [Prompt(f"p{i}", (), np.array([1, 2], dtype=np.int32), "math") for i in range(3)]

    def source():
        made = FakeRolloutSource(prompts, lambda prompt, tokens: float(tokens.sum()), num_generations=2)
        made.adopt(WeightUpdate(4))
        return made

    one, other = source(), source()
    groups = one.collect(2)
    assert one.state() == other.state(), "what has trained nothing comes again"
    one.adopt(WeightUpdate(4))
    other.restore(one.state())
    assert [group.prompt.id for group in groups] == ["p0", "p1"]
    (left,), (also_left,) = one.collect(5), other.collect(5)
    assert left.prompt.id == "p2"
    tokens = left.columns.ragged("tokens")
    assert tokens.equals(also_left.columns.ragged("tokens"))
    assert tokens[0].tolist() != tokens[1].tolist()
    assert {tuple(mask) for mask in left.columns.ragged("loss_mask")} == {(0, 0, 1, 1, 1)}
    for rollout, row in zip(left.rollouts, tokens, strict=True):
        assert rollout.reward == row[2:].sum()
        assert [span.version for span in rollout.spans] == [4]
    assert one.evaluate(prompts, SamplingParams(max_new_tokens=3)).rewards.shape == (3,)


def test_rollouts_need_weights():
    with pytest.raises(RuntimeError, match="before any weights"):
        FakeRolloutSource([Prompt("p", (), np.zeros(1, np.int32), "math")], lambda prompt, tokens: 0.0).collect(1)

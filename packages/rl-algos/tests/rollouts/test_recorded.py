import numpy as np

from rl_algos.rollouts.recorded import RecordedTurns, TurnsRecorder, key_of
from rl_core.errors import RunDirectoryError
from rl_core.rollouts.environment import StepResult
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.pool import AnsweredTurns, RolloutTask, RolloutTurns
from rl_core.rollouts.rollout import Completion, Prompt, WeightSpan

PROMPT = Prompt("a", ({"role": "user", "content": "?"},), np.array([1, 2], dtype=np.int32), "math")


def task(*seeds, is_urgent=False):
    return RolloutTask(PROMPT, SamplingParams(4), seeds, is_urgent)


def turns(*tokens):
    ids = np.array(tokens, dtype=np.int32)
    completion = Completion(ids, np.full(len(ids), -0.5, dtype=np.float32), "stop", (WeightSpan(3, len(ids)),))
    return RolloutTurns({"digest": completion}, (AnsweredTurns(("digest",), (StepResult(1.0),)),))


def sampled(found):
    return [[each.token_ids.tolist() for each in rollout.completions.values()] for rollout in found]


def test_turns_come_back_without_the_answers_of_the_environment(tmp_path):
    TurnsRecorder(tmp_path).write("group", [turns(5, 6), turns(7)])
    found = RecordedTurns(tmp_path).read("group")
    assert sampled(found) == [[[5, 6]], [[7]]]
    (completion,) = found[0].completions.values()
    assert completion.spans == (WeightSpan(3, 2),)
    np.testing.assert_array_equal(completion.logprobs, np.full(2, -0.5, dtype=np.float32))
    assert all(each.conversations == () for each in found)


def test_the_newest_turns_of_a_group_count_and_a_broken_end_is_left_out(tmp_path):
    recorder = TurnsRecorder(tmp_path)
    recorder.write("group", [turns(5)])
    recorder.write("group", [turns(6)])
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    recorder.write("other", [turns(7)])
    longer = path.read_bytes()
    for length in range(len(whole), len(longer)):
        path.write_bytes(longer[:length])
        recorded = RecordedTurns(tmp_path)
        assert recorded.keys == ["group"]
        assert sampled(recorded.read("group")) == [[[6]]]


def test_damaged_turns_are_read_as_they_were_or_named_with_the_remedy(tmp_path):
    TurnsRecorder(tmp_path).write("group", [turns(5, 6)])
    (path,) = tmp_path.iterdir()
    whole, beginning, messages = path.read_bytes(), 16 + len("group"), []
    for place in range(beginning, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            assert sampled(RecordedTurns(tmp_path).read("group")) == [[[5, 6]]]
        except RunDirectoryError as error:
            messages.append(str(error))
    assert all(f"{path} is damaged from byte {beginning} on" in each for each in messages)
    assert len(messages) > 0.5 * (len(whole) - beginning)


def test_a_training_group_has_one_key_and_an_evaluation_one_for_each_version():
    assert key_of(task(1, 2), 3) == key_of(task(1, 2), 4) != key_of(task(1, 3), 3)
    assert key_of(task(1, is_urgent=True), 3) != key_of(task(1, is_urgent=True), 4)


def test_groups_take_their_recorded_turns(tmp_path):
    first, second, evaluated = task(1), task(2), task(1, is_urgent=True)
    recorder = TurnsRecorder(tmp_path)
    recorder.write(key_of(first, 0), (turns(5),))
    recorder.write(key_of(evaluated, 7), (turns(8),))
    recorded = RecordedTurns(tmp_path)
    asked = [(first, 0), (second, 0), (evaluated, 0), (evaluated, 7)]
    assert [sampled(recorded(*each).turns) for each in asked] == [[[[5]]], [], [], [[[8]]]]
    assert recorded.missing == ["a", "a"]

import pytest

from rl_algos.data.config import DatasetConfig
from rl_algos.data.processors import processor
from rl_algos.data.rows.example import Example, Response
from rl_algos.data.rows.preference import helpsteer3, preference, ultrafeedback
from rl_core.errors import DataError

USER = {"role": "user", "content": "1+1="}
GOOD = {"role": "assistant", "content": "2"}
BAD = {"role": "assistant", "content": "3"}


def settings(**keys):
    return DatasetConfig(data_path="a.jsonl", **keys)


def read(row, **keys):
    return preference(row, settings(**keys))


PAIR = Example((USER,), responses=(Response((GOOD,), rank=0), Response((BAD,), rank=1)))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"messages": [USER], "chosen": GOOD, "rejected": BAD},
        {"context": [USER], "chosen": "2", "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        # as HuggingFaceH4/ultrafeedback_binarized and allenai/llama-3.1-tulu-3-8b-preference-mixture have it
        {"id": "a", "source": "s", "prompt": "1+1=", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_pairs_come_as_text_messages_or_whole_conversations(row):
    assert read(row) == PAIR


def test_the_column_of_the_prompt_can_be_named():
    assert read({"question": "1+1=", "chosen": "2", "rejected": "3"}, input_key="question") == PAIR


def test_conversations_split_where_what_the_assistant_says_differs():
    begin = [USER, GOOD, {"role": "user", "content": "and 2+2="}]
    example = read({"chosen": [*begin, GOOD], "rejected": [*begin, BAD, USER, GOOD]})
    assert example.messages == tuple(begin)
    assert [response.messages for response in example.responses] == [(GOOD,), (BAD, USER, GOOD)]
    alike = read({"chosen": [USER, GOOD], "rejected": [USER, GOOD]})
    assert [response.messages for response in alike.responses] == [(GOOD,), (GOOD,)]


HUMAN = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Yes?"}


def marked(*turns):
    """A conversation as hh-rlhf has it, from the user's first turn on."""
    return "".join(f"\n\n{('Human', 'Assistant')[number % 2]}: {turn}" for number, turn in enumerate(turns))


def test_a_text_with_marked_turns_is_a_whole_conversation():
    # the answers begin alike, and the prompt ends with the user's turn all the same
    row = {"chosen": marked("Hi", "Yes?", "1+1=", "It is 2"), "rejected": marked("Hi", "Yes?", "1+1=", "It is 3\n\nx")}
    example = read(row)
    assert example.messages == (HUMAN, ASSISTANT, USER)
    said = [[message["content"] for message in response.messages] for response in example.responses]
    assert said == [["It is 2"], ["It is 3\n\nx"]]


def test_marked_conversations_part_where_what_the_assistant_says_differs():
    longer = marked("Hi", "Yes?", "1+1=", "2")
    shorter = marked("Hi", "No.")
    example = read({"chosen": longer, "rejected": shorter})
    assert example.messages == (HUMAN,)
    assert [len(response.messages) for response in example.responses] == [3, 1]
    alike = read({"chosen": shorter, "rejected": shorter})
    assert alike.responses[0].messages == alike.responses[1].messages


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "responses"),
    [
        ("What is 2+2? 4", "What is 2+2? It is 5.", "What is 2+2?", ["4", "It is 5."]),
        ("Say yes\nyellow", "Say yes\nyes", "Say yes", ["yellow", "yes"]),
        ("The sky is", "The sky is blue.", "The sky", ["is", "is blue."]),
    ],
)
def test_words_that_two_strings_begin_with_are_the_prompt(chosen, rejected, prompt, responses):
    example = read({"chosen": chosen, "rejected": rejected, "margin": 1})
    assert example.messages == ({"role": "user", "content": prompt},)
    assert [response.messages[0]["content"] for response in example.responses] == responses


def test_margins_and_scores_of_a_pair_are_kept():
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    assert read({**row, "margin": 2}).margin == 2.0
    scored = read({**row, "score_chosen": 8.5, "score_rejected": 3.0, "margin": None})
    assert [response.score for response in scored.responses] == [8.5, 3.0]
    assert scored.margin is None


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({"score_chosen": 2, "score_rejected": 5}, "their scores are 2 and 5"),
        ({"margin": -0.5}, r"the margin is -0\.5"),
        ({"margin": 0, "score_chosen": 5, "score_rejected": 5}, None),
    ],
)
def test_a_pair_whose_numbers_contradict_its_columns_is_refused(numbers, says):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", **numbers}
    if says is None:
        assert read(row).margin == 0.0
        return
    with pytest.raises(DataError, match=f"`chosen` is worse than `rejected` by their numbers: {says}"):
        read(row)


def test_several_completions_have_ranks_or_scores():
    completions = [{"rank": 1, "completion": [BAD]}, {"rank": 0, "completion": "2"}]
    example = read({"context": [USER], "completions": completions})
    assert example.responses == (Response((BAD,), rank=1), Response((GOOD,), rank=0))
    scored = [{"response": "2", "score": 0.9}, {"response": "3", "score": 0.1}]
    assert [response.score for response in read({"prompt": "1+1=", "completions": scored}).responses] == [0.9, 0.1]


@pytest.mark.parametrize(
    ("label", "expected"), [(True, True), (False, False), (1, True), (0, False), ("True", True), ("false", False)]
)
def test_single_completions_have_a_label(label, expected):
    example = read({"prompt": [USER], "completion": [GOOD], "label": label})
    assert example == Example((USER,), responses=(Response((GOOD,), is_desirable=expected),))


def test_single_completions_have_a_score():
    example = read({"prompt": "1+1=", "completion": "2", "score": 4})
    assert example.responses == (Response((GOOD,), score=4.0),)


@pytest.mark.parametrize(("preferred", "ranks", "margin"), [(-3, [0, 1], 3), (2, [1, 0], 2), (0, [0, 0], 0)])
def test_helpsteer3_ranks_by_the_overall_preference(preferred, ranks, margin):
    row = {
        "domain": "general",
        "language": "english",
        "context": [USER],
        "response1": "2",
        "response2": "3",
        "overall_preference": preferred,
        "individual_preference": [{"score": preferred, "reasoning": "r", "feedback1": "f", "feedback2": "g"}],
    }
    example = helpsteer3(row, settings())
    assert [response.rank for response in example.responses] == ranks
    assert [response.messages for response in example.responses] == [(GOOD,), (BAD,)]
    assert (example.messages, example.margin) == ((USER,), margin)


def test_ultrafeedback_scores_every_completion():
    row = {"instruction": "1+1=", "completions": [{"response": "2", "overall_score": 8.0, "model": "m"}]}
    assert ultrafeedback(row, settings()) == Example((USER,), responses=(Response((GOOD,), score=8.0),))


def test_processors_are_named_and_a_default_can_be_given():
    assert processor(settings(), preference) is preference
    for name, found in (("preference", preference), ("helpsteer3", helpsteer3), ("ultrafeedback", ultrafeedback)):
        assert processor(settings(processor=name)) is found


PROMPTED = {"prompt": "1+1="}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "good": "b", "bad": "c"}, r"expected the columns `chosen` and `rejected`.*`columns`, such as"),
        ({"prompt": "a", "chosen": "b", "rejectd": "c"}, r"no column 'rejected'; did you mean rejectd\?"),
        ({"chosen": "2", "rejected": "3"}, "no prompt: .* prompt, messages, context"),
        ({"chosen": "2", "rejected": "3"}, "no prompt: `chosen` and `rejected`"),
        ({"chosen": "It is 2", "rejected": "It is 2"}, "no prompt: `chosen` and `rejected` are the same string"),
        # a column of text may be the prompt
        ({"q": "1+1=", "chosen": "It is 2", "rejected": "It is 3"}, "no prompt: .* columns are chosen, q, rejected"),
        ({"chosen": marked("1+1=", "2"), "rejected": "3"}, "one of `chosen` and `rejected` is a whole"),
        (
            {"chosen": marked("1+1=", "2"), "rejected": marked("1+2=", "3")},
            "must answer the same conversation, but their messages 0",
        ),
        ({"chosen": [USER], "rejected": [USER]}, "`chosen` has no response"),
        ({**PROMPTED, "chosen": 2, "rejected": "3"}, "`chosen`: expected .* messages, got 2"),
        ({**PROMPTED, "chosen": [], "rejected": "3"}, "`chosen`: expected .* messages"),
        ({**PROMPTED, "chosen": [USER, GOOD], "rejected": "3"}, "one of `chosen` and `rejected` is a whole"),
        (
            {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "other"}, BAD]},
            "must answer the same conversation, but their messages 0",
        ),
        ({**PROMPTED, "chosen": "2", "rejected": "3", "margin": "big"}, '`margin` must be a number, got "big"'),
        ({**PROMPTED, "completions": []}, "`completions` must be a list of objects"),
        ({**PROMPTED, "completions": ["2"]}, r"completions\[0\] must be an object with a `completion`"),
        ({**PROMPTED, "completions": [{"completion": "2"}]}, r"completions\[0\] has neither a `rank`"),
        ({**PROMPTED, "completions": [{"completion": "2", "rank": True}]}, "`rank` must be a number, got true"),
        ({**PROMPTED, "completions": [{"completion": [USER], "rank": 1}]}, "begins with a user message"),
        ({**PROMPTED, "completion": "2", "label": "yes"}, "`label` must be true for a good completion"),
        ({**PROMPTED, "completion": "2", "score": "high"}, "`score` must be a number"),
        ({"prompt": [USER, GOOD], "chosen": "2", "rejected": "3"}, "`prompt` ends with an assistant message"),
    ],
)
def test_rows_of_another_shape_are_refused_with_the_remedy(row, says):
    with pytest.raises(DataError, match=says):
        read(row)


def test_a_preference_that_is_not_a_number_is_refused():
    row = {"context": [USER], "response1": "2", "response2": "3", "overall_preference": "first"}
    with pytest.raises(DataError, match="`overall_preference` must be a number from -3 to 3, got 'first'"):
        helpsteer3(row, settings())

from dataclasses import replace

import pytest

from rl_algos.data.config import DatasetConfig
from rl_algos.data.rows.example import Example
from rl_algos.data.rows.template import PromptTemplate, Surround
from rl_core.errors import ConfigError, DataError

EXAMPLE = Example(({"role": "user", "content": "1+1="},), "2")


def surround(tmp_path, **texts):
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return Surround.of(DatasetConfig(data_path="a", **{name: str(tmp_path / name) for name in texts}))


def test_the_input_and_columns_are_filled_in(tmp_path):
    template = surround(tmp_path, prompt_file="{hint}: {input} in \\boxed{}, {{so}}")
    (message,) = template.apply(EXAMPLE, {"hint": "think"}).messages
    assert message == {"role": "user", "content": "think: 1+1= in \\boxed{}, {so}"}


def test_what_is_filled_in_is_not_a_template_itself():
    assert PromptTemplate("{input}", "file").fill("{hint} {{", {"hint": 1}) == "{hint} {{"


def test_the_last_user_message_is_the_one_filled_in(tmp_path):
    turns = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    filled = surround(tmp_path, prompt_file="<{input}>").apply(Example(turns), {}).messages
    assert [message["content"] for message in filled] == ["a", "b", "<c>"]


def test_a_system_message_comes_first(tmp_path):
    put = surround(tmp_path, system_prompt_file="Be brief.\n")
    assert put.apply(EXAMPLE, {}).messages[0] == {"role": "system", "content": "Be brief."}
    # with a system message a prompt of plain text is a conversation
    assert not put.apply(replace(EXAMPLE, is_text=True), {}).is_text
    with pytest.raises(DataError, match=r"system message; .*system_prompt_file"):
        put.apply(put.apply(EXAMPLE, {}), {})


def test_a_template_that_cannot_be_right_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"prompt_file .*\{input\}"):
        surround(tmp_path, prompt_file="Solve: {}")
    with pytest.raises(DataError, match=r"prompt_file .*no column 'hnt'; did you mean hint\?.*write {{ and }}"):
        surround(tmp_path, prompt_file="{hnt} {input}").apply(EXAMPLE, {"hint": 1})
    with pytest.raises(ConfigError, match=r"prompt_file 'nowhere\.txt' cannot be read"):
        Surround.of(DatasetConfig(data_path="a", prompt_file="nowhere.txt"))

import json
from datetime import date

import numpy as np
import pytest
from jinja2 import TemplateError

from rl_algos.tokenizer import encode_prompt, load_tokenizer, render
from rl_core.errors import ConfigError, DataError
from rl_core.model_config import TokenizerConfig

MESSAGES = [{"role": "user", "content": "1+2="}]


@pytest.fixture
def folder(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder, **keys):
    return load_tokenizer(TokenizerConfig(**keys), str(folder))


def test_a_prompt_is_rendered_and_tokenised_as_transformers_does(folder):
    loaded = load(folder)
    expected = loaded.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    ids = encode_prompt(loaded, MESSAGES)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected
    assert loaded.decode(ids) == render(loaded, MESSAGES, add_generation_prompt=True)


def test_another_tokenizer_may_be_named(tmp_path, folder):
    assert load(tmp_path / "weights-only", name=str(folder)).eos_token == "<|end|>"


def test_the_configured_template_replaces_the_tokenizers(tmp_path, folder):
    inline = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "chat.jinja").write_text(inline)
    for template in (inline, str(tmp_path / "chat.jinja")):
        assert render(load(folder, chat_template=template), MESSAGES, add_generation_prompt=False) == "[1+2=]"


def test_template_variables_reach_whoever_applies_the_template(folder):
    template = (
        "{{ messages[0].content }}|{{ style }}|{{ options.depth }}|{% if not thinking %}quick{% endif %}|{{ none }}"
    )
    variables = {"style": 'a "b"\n', "options": {"depth": 2}, "thinking": False}
    loaded = load(folder, chat_template=template, chat_template_kwargs=variables)
    expected = '1+2=|a "b"\n|2|quick|'
    assert render(loaded, MESSAGES, add_generation_prompt=True).startswith(expected)
    assert loaded.apply_chat_template(MESSAGES, tokenize=False).startswith(expected)
    with pytest.raises(ValueError, match="'not a name' is not a valid variable name"):
        load(folder, chat_template_kwargs={"not a name": 1})


def test_a_template_that_asks_for_the_date_writes_the_configured_one(folder):
    asks = "{% macro day() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ day() }}, {{ strftime_now('%Y-%m-%d') }}"
    texts = {
        render(load_tokenizer(config, str(folder)), [{"role": "user", "content": "x"}], add_generation_prompt=True)
        for config in (
            TokenizerConfig(chat_template=asks),
            TokenizerConfig.model_validate({"chat_template": asks, "template_date": date(2026, 3, 9)}),
        )
    }
    assert texts == {"01 Jan 2025, 2025-01-01", "09 Mar 2026, 2026-03-09"}
    with pytest.raises(ValueError, match="a date such as"):
        TokenizerConfig(template_date="today")


def test_a_tokenizer_without_a_template_is_loaded_but_renders_nothing(folder):
    (folder / "chat_template.jinja").unlink()
    loaded = load(folder)
    with pytest.raises(ConfigError, match=r"has no chat template; set policy\.tokenizer\.chat_template"):
        render(loaded, MESSAGES, add_generation_prompt=True)
    with pytest.raises(ConfigError, match="has no chat template"):
        load(folder, chat_template_kwargs={"a": 1})


def test_a_template_that_refuses_says_so(folder):
    with pytest.raises(TemplateError, match="unknown role judge"):
        render(load(folder), [{"role": "judge", "content": ""}], add_generation_prompt=True)


def test_no_tokenizer_is_an_error_that_says_where_and_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"policy\.model_name: folder .* does not exist"):
        load(tmp_path / "missing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(
        ConfigError, match=r"has no tokenizer\.json.*\(it holds config\.json\).*policy\.tokenizer\.name"
    ):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"policy\.tokenizer\.name: the folder"):
        load("anything", name=str(tmp_path))


def test_a_hub_name_that_cannot_be_had_says_what_to_do(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        ConfigError, match=r"policy\.model_name: 'no-such/model' is not a local folder, .*OFFLINE is set"
    ):
        load("no-such/model")


def test_no_end_of_sequence_is_refused(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": None}))
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        load(folder)


def test_a_template_path_that_is_not_there_is_refused(folder):
    with pytest.raises(ConfigError, match=r"'chat\.jinja' is neither a Jinja template .* nor a file that can be read"):
        load(folder, chat_template="chat.jinja")


SYSTEM, ASKED = {"role": "system", "content": " Be  kind.\n"}, {"role": "user", "content": "1+2="}


@pytest.mark.parametrize(
    ("template", "messages", "left_out"),
    [
        pytest.param("{{ messages[-1].content }}", [SYSTEM, ASKED], "message 0", id="only the last message is shown"),
        pytest.param("{{ messages[0].content }}", [SYSTEM, ASKED], "message 1", id="only the first message is shown"),
        pytest.param("{{ messages[0].content | trim }} {{ messages[1].content }}", [SYSTEM, ASKED], "", id="trimmed"),
        pytest.param("{{ messages[1].content ~ messages[0].content }}", [SYSTEM, ASKED], "", id="another order"),
        pytest.param(
            "{{ messages[-1].content }}", [{"role": "assistant", "content": "x"}, ASKED], "", id="said before"
        ),
    ],
)
def test_a_prompt_shows_what_system_and_user_say(folder, template, messages, left_out):
    loaded = load(folder, chat_template=template)
    if left_out:
        with pytest.raises(DataError, match=rf"does not show {left_out} .*policy.tokenizer.chat_template"):
            encode_prompt(loaded, messages)
    else:
        assert len(encode_prompt(loaded, messages))


@pytest.mark.parametrize(
    "content", ["x", "[]", "[" * 100_000, '{"version": ' + "9" * 5000 + "}", '{"model": {"type": "?"}}']
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_hostile_file_of_a_tokenizer_is_one_error(tmp_path, tokenizer, name, content):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_text(content)
    if name == "tokenizer_config.json" and content.startswith("{") and "version" not in content:
        content = '{"chat_template": 5}'
        (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(
        ConfigError, match=r"policy\.model_name: .*(no tokenizer\.json that can be read|is not a string)"
    ):
        load_tokenizer(TokenizerConfig(), str(tmp_path))

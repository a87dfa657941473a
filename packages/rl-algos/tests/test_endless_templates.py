"""Chat templates whose rendering does not end are refused when the tokenizer is loaded."""

import subprocess
import sys

import pytest
from chat_tokenizers import tokenizer_of

from rl_algos import tokenizer as tokenizers
from rl_core.errors import ConfigError
from rl_core.model_config import TokenizerConfig

LOAD = """
import sys
from rl_algos import tokenizer
from rl_core.errors import ConfigError
from rl_core.model_config import TokenizerConfig

tokenizer._RENDERING_S = 1.0
try:
    tokenizer.load_tokenizer(TokenizerConfig(chat_template=sys.argv[2]), sys.argv[1])
except ConfigError as error:
    sys.exit(str(error))
"""
LOOPS = "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer_of("qwen3").save_pretrained(path)
    return str(path)


def test_a_template_of_loops_in_loops_is_refused_and_the_process_ends(folder):
    """In a process of its own, as the rendering takes its processor until it ends."""
    done = subprocess.run([sys.executable, "-c", LOAD, folder, LOOPS], capture_output=True, text=True, timeout=120)
    assert "rendering a short conversation does not end within 1 s; check the chat template of " in done.stderr


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{% for a in range(1000000000) %}{% endfor %}", id="a range that the sandbox refuses"),
        pytest.param("{% set a = namespace(x=1, **{'y': 2}) %}{{ dict(**{'**': a.y}) }}", id="keyword arguments"),
        pytest.param("{{ raise_exception('no') }}", id="an exception"),
        pytest.param("{{ messages[7].content }}", id="a message that is not there"),
    ],
)
def test_a_template_that_fails_at_once_is_loaded(folder, template):
    assert tokenizers.load_tokenizer(TokenizerConfig(chat_template=template), folder).chat_template == template


def test_a_template_that_needs_more_memory_than_there_is_is_refused(folder, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(tokenizers.PreTrainedTokenizerFast, "apply_chat_template", fail)
    with pytest.raises(ConfigError, match="rendering a short conversation needs more memory than there is"):
        tokenizers.load_tokenizer(TokenizerConfig(), folder)


@pytest.mark.parametrize("template", ["{{ 9**9**9 }}", "{% set a = 10 %}{{ (a) ** a }}", "{{ messages[0]**2 }}"])
def test_a_template_with_powers_is_refused_before_it_is_rendered(folder, template):
    """Python computes them without a look at anything else, so that nothing could end them."""
    with pytest.raises(ConfigError, match=r"chat template of .* computes powers"):
        tokenizers.load_tokenizer(TokenizerConfig(chat_template=template), folder)

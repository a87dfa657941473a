import pytest

from rl_core.model_config import ModelConfig, OptimizerConfig, SchedulerConfig, TokenizerConfig, local_hf_config


def test_a_class_is_named_with_its_module():
    assert OptimizerConfig(name="torch.optim.SGD").name == "torch.optim.SGD"
    assert SchedulerConfig().name is None
    for wrong in ("AdamW", "torch.optim.", "torch optim.AdamW"):
        with pytest.raises(ValueError, match=r"dotted name of a class, such as torch\.optim\.AdamW"):
            OptimizerConfig(name=wrong)
    with pytest.raises(ValueError, match=r"such as torch\.optim\.lr_scheduler\.LinearLR"):
        SchedulerConfig(name="cosine")


def test_a_template_is_written_out_or_read_from_its_file(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert TokenizerConfig().template_text() is None
    assert TokenizerConfig(chat_template="{{ x }}").template_text() == "{{ x }}"
    assert TokenizerConfig(chat_template=str(tmp_path / "chat.jinja")).template_text() == "{{ messages }}"
    with pytest.raises(ValueError, match=r"neither a Jinja template .* nor a file that can be read"):
        TokenizerConfig(chat_template="none.jinja").template_text()


def test_a_models_config_is_read_with_its_overrides_where_it_is_on_this_machine(tmp_path):
    model = ModelConfig(model_name=str(tmp_path), hf_config_overrides={"num_hidden_layers": 2})
    assert local_hf_config(model) == {}
    (tmp_path / "config.json").write_text("{")
    assert local_hf_config(model) == {}
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4, "hidden_size": 8}')
    assert local_hf_config(model) == {"num_hidden_layers": 2, "hidden_size": 8}

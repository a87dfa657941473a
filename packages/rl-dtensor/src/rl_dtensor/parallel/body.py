"""A model without its head, which is the base model of `transformers`."""

from __future__ import annotations

from transformers import PreTrainedModel


def is_composite(hf: PreTrainedModel) -> bool:
    """Return whether a model has a language model within, next to a vision tower."""
    return hf.config.get_text_config() is not hf.config


def body_of(hf: PreTrainedModel) -> PreTrainedModel:
    """Return a model without its head, which some families keep under another name than they declare. For a composite
    model it is the language model."""
    body = hf.get_submodule(body_name(hf))
    assert isinstance(body, PreTrainedModel)
    return body


def body_name(hf: PreTrainedModel) -> str:
    """Return the name of that module; empty if the model has no head."""
    if is_composite(hf):
        decoder = hf.get_decoder()
        # The decoder of Llama 4 has the head.
        language = next((child for child in decoder.children() if isinstance(child, PreTrainedModel)), decoder)
        return next(name for name, module in hf.named_modules() if module is language)
    if hf.base_model is not hf:
        return hf.base_model_prefix
    return next((name for name, child in hf.named_children() if isinstance(child, PreTrainedModel)), "")

"""A model without its head: what `transformers` calls its base model."""

from __future__ import annotations

from transformers import PreTrainedModel


def body_of(hf: PreTrainedModel) -> PreTrainedModel:
    """Return a model without its head, which some families keep under another name than they declare."""
    body = hf.get_submodule(body_name(hf))
    assert isinstance(body, PreTrainedModel)
    return body


def body_name(hf: PreTrainedModel) -> str:
    """Return the name of that module; empty if the model has no head."""
    if hf.base_model is not hf:
        return hf.base_model_prefix
    return next((name for name, child in hf.named_children() if isinstance(child, PreTrainedModel)), "")

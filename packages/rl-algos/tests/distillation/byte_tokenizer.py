"""Byte-level tokenizers that differ in their merges."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rl_algos.tiny_model import CHAT_TEMPLATE

TEXTS = ["twelve plus twelve makes twenty-four", "Grüße, 12+13=25; naïve café", "日本語のテキスト 🙂🙂 and more"]


def byte_level(vocab_size):
    """A tokenizer with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        additional_special_tokens=roles,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )

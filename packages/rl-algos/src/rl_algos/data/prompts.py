"""Prompts for rollouts from configured datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from rl_algos.data.config import DataConfig, Weight
from rl_algos.data.examples import Dataset
from rl_algos.data.flow import FlowStream, flow_stream
from rl_algos.data.row_images import check_placed
from rl_algos.data.rows.example import Example, info_of
from rl_algos.data.stream import Stream
from rl_algos.special_tokens import warn_of_special_tokens
from rl_algos.template_coverage import Coverage
from rl_algos.tokenizer import encode_prompt, render, require_chat_template
from rl_core.errors import ConfigError, DataError
from rl_core.rollouts.rollout import Prompt

Tools = Mapping[str, Sequence[Mapping[str, Any]]]
"""JSON schemas of the tools that the policy may call, by the environment that has them."""

NO_TOOLS: Tools = {}

_NO_RESPONSE = np.zeros(0, dtype=np.int32)


def prompt_stream(
    datasets: list[Dataset],
    config: DataConfig,
    tokenizer: Any,
    *,
    max_tokens: int,
    seed: int,
    max_num_epochs: int | None = None,
    tools: Tools = NO_TOOLS,
    respond: EncodeResponse | None = None,
) -> Stream[Prompt] | FlowStream[Prompt]:
    """Return the training prompts, mixed and shuffled as configured.

    Args:
        datasets: Datasets from `rl_algos.data.examples.load_datasets`.
        config: Config section `data`.
        tokenizer: Tokenizer from `rl_algos.tokenizer.load_tokenizer`.
        max_tokens: Maximum number of tokens of a prompt, in addition to `config.max_input_seq_length`.
        seed: Seed of the order.
        max_num_epochs: Number of epochs; None for an endless stream.
        tools: Tools that the policy may call, by environment.
        respond: Encodes the responses in rows as demonstrations; None for prompts without.

    Raises:
        DataError: With dataset and row, and the remedy.
        ConfigError: If the tokenizer has no chat template, or prompts with tools are streamed.
    """
    if any(dataset.source is not None for dataset in datasets):
        require_chat_template(tokenizer)
        if tools:
            raise ConfigError(
                f"data.train: the environment {next(iter(tools))} has tools, but prompts with tools cannot be "
                "streamed. Turn `streaming` off for its dataset"
            )
        return flow_stream(
            datasets,
            config,
            EncodeRow(EncodePrompt(tokenizer, NO_TOOLS, None), respond),
            partial(_prompt, tools=NO_TOOLS),
            length=lambda encoded: len(encoded[0]),
            limit=_limit(config, max_tokens),
            seed=seed,
            weights=weights_of(datasets),
            max_num_epochs=max_num_epochs,
            needs_answer=True,
        )
    prompts = [_prompts(dataset, config, tokenizer, max_tokens, tools, respond) for dataset in datasets]
    if respond is not None and not any(prompt.demonstration is not None for own in prompts for prompt in own):
        raise DataError(
            "no row of data.train has a response to demonstrate: a column `solution`, or else the answer. Map its "
            "column in `columns`, or sample all rollouts"
        )
    return Stream(
        prompts,
        weights_of(datasets),
        seed=seed,
        shuffle=config.shuffle,
        max_num_epochs=max_num_epochs,
        digests=[dataset.digest for dataset in datasets],
    )


def validation_prompts(
    datasets: list[Dataset], config: DataConfig, tokenizer: Any, *, max_tokens: int, tools: Tools = NO_TOOLS
) -> list[Prompt]:
    """Return all validation prompts, in the order of the datasets and their rows; see `prompt_stream` for errors."""
    return list(chain.from_iterable(_prompts(dataset, config, tokenizer, max_tokens, tools) for dataset in datasets))


def weights_of(datasets: Sequence[Dataset]) -> list[Weight] | None:
    """Return the datasets' weights; None if they have none."""
    weights = [dataset.settings.weight_by_step for dataset in datasets]
    return [weight for weight in weights if weight is not None] or None


@dataclass(frozen=True)
class EncodePrompt:
    """Encodes the prompt of an example.

    Args:
        tokenizer: Tokenizer as `rl_algos.tokenizer.load_tokenizer` returns it.
        tools: Tools that the policy may call, by environment.
        environment: `env_name` of the dataset.
    """

    tokenizer: Any
    tools: Tools
    environment: str | None

    def __call__(self, example: Example) -> np.ndarray:
        """Return the tokens, int32 `[tokens]`; raise a `DataError` for an example that it refuses."""
        if example.has_response:
            problem = "the conversation ends with an assistant message, so there is nothing to sample"
            raise DataError(f"{problem}; end it with a user message")
        check_placed(self.tokenizer, example)
        tools = self.tools_of(example)
        tokens = encode_prompt(self.tokenizer, example.messages, tools)
        text = render(self.tokenizer, example.messages, add_generation_prompt=True, tools=tools)
        coverage = Coverage(self.tokenizer, example.messages, text, tools=tools, prompts=True)
        coverage.check_links()
        coverage.check_pieces()
        if example.tools and np.array_equal(tokens, encode_prompt(self.tokenizer, example.messages)):
            problem = "the row has `tools`, but the chat template does not show them"
            remedy = "set policy.tokenizer.chat_template to a template that does, or remove the column"
            raise DataError(f"{problem}; {remedy}")
        return tokens

    def tools_of(self, example: Example) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the prompt shows; see `tools_for`."""
        return tools_for(example, self.tools.get(self.environment or example.environment, ()))


EncodeResponse = Callable[[Example, np.ndarray, Sequence[Mapping[str, Any]]], np.ndarray]
"""From an example, the tokens of its prompt and the tools that it shows to the response in its row, int32 `[tokens]`;
raises a `DataError` for an example that is refused."""


@dataclass(frozen=True)
class EncodeRow:
    """Encodes the prompt of an example, and the response in its row as a demonstration.

    Args:
        prompt: Encodes the prompt.
        respond: Encodes the response; None for prompts without a demonstration.
    """

    prompt: EncodePrompt
    respond: EncodeResponse | None = None

    def __call__(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        """Return int32 `[tokens]` of the prompt, and of the response with the token that ends its turn; none for a row
        without a response. Raise a `DataError` for an example that is refused."""
        tokens = self.prompt(example)
        if self.respond is None or not example.response:
            return tokens, _NO_RESPONSE
        return tokens, self.respond(example, tokens, self.prompt.tools_of(example))


def tools_for(example: Example, offered: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the tools that a prompt shows: the environment's, or the row's own if the environment has none.

    Raises:
        DataError: If the row has tools that the environment does not have.
    """
    if not offered:
        return example.tools
    names = {tool["function"]["name"] for tool in offered}
    foreign = [name for tool in example.tools if (name := tool["function"]["name"]) not in names]
    if foreign:
        problem = f"the row's `tools` contain {foreign[0]!r}, which the environment cannot call"
        remedy = f"it has {', '.join(sorted(names))}. Remove the column, or choose an environment without tools"
        raise DataError(f"{problem}; {remedy}")
    return offered


def _prompts(
    dataset: Dataset,
    config: DataConfig,
    tokenizer: Any,
    max_tokens: int,
    tools: Tools,
    respond: EncodeResponse | None = None,
) -> Sequence[Prompt]:
    require_chat_template(tokenizer)
    warn_of_special_tokens(dataset.name, dataset.conversations(), tokenizer)
    encode = EncodeRow(EncodePrompt(tokenizer, tools, dataset.settings.env_name), respond)
    encoded = dataset.encode(encode, config.num_workers)
    lengths = (len(tokens) for tokens, _ in encoded.values_in_order)
    kept = dataset.within_limit(encoded, lengths, _limit(config, max_tokens), overlong=config.overlong)
    return kept.rows(lambda row_id, parts: _prompt(dataset, row_id, dataset.examples[row_id], parts, tools=tools))


def _limit(config: DataConfig, max_tokens: int) -> int:
    return min(config.max_input_seq_length or max_tokens, max_tokens)


def _prompt(
    dataset: Dataset, row_id: str, example: Example, encoded: tuple[np.ndarray, np.ndarray], *, tools: Tools
) -> Prompt:
    environment, place = dataset.environment_of(example, row_id), dataset.place(row_id)
    token_ids, response = encoded
    return Prompt(
        row_id,
        example.messages,
        token_ids,
        environment,
        info_of(example),
        dataset.name,
        place,
        tuple(tools_for(example, tools.get(environment, ()))),
        example.is_text,
        response if len(response) else None,
    )

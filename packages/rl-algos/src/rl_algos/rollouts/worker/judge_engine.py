"""Language models that judge in the engines of a rollout worker."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

from jinja2 import TemplateError

from rl_algos.judges.answers import REDRAW_TEMPERATURE, JudgeAnswer, one_line
from rl_algos.rollouts.worker.chat import Chat
from rl_algos.tokenizer import encode_prompt, load_tokenizer
from rl_core.errors import ConfigError, DataError, RequestRefused
from rl_core.model_config import TokenizerConfig
from rl_core.rollouts.generation import GenerationRequest, Generator, SamplingParams
from rl_core.rollouts.interruption import generate_whole
from rl_core.rollouts.judging import Question
from rl_core.rollouts.program import AnswerForm
from rl_core.rollouts.thoughts import PROMPT_END, final_text, opened_by


@dataclass(frozen=True)
class EngineJudgeSpec:
    """A judge in an engine of a rollout worker; sent to its process.

    Args:
        name: Name of the judge.
        engine: Name of its engine next to the policy's; empty for the policy's own.
        tokenizer: Settings of its tokenizer.
        model_name: Folder or hub name of its model.
        max_new_tokens: Maximum number of tokens of an answer.
        temperature: Sampling temperature.
        max_tokens: Maximum number of tokens of a question and its answer.
        awaits_weights: True if weights are sent to its engine before it can be asked.
    """

    name: str
    engine: str
    tokenizer: TokenizerConfig
    model_name: str
    max_new_tokens: int
    temperature: float
    max_tokens: int
    awaits_weights: bool = False


class EngineJudge:
    """Answers questions with an engine. The text of special tokens in a question is ordinary text, so that what a
    policy wrote cannot end the question.

    Args:
        spec: Settings of the judge.
        generator: The engine.

    Attributes:
        engine, awaits_weights: See `EngineJudgeSpec`.
    """

    def __init__(self, spec: EngineJudgeSpec, generator: Generator) -> None:
        self._spec = spec
        self.engine, self.awaits_weights = spec.engine, spec.awaits_weights
        self._generator = generator
        tokenizer = spec.tokenizer.model_copy(update={"split_special_tokens": "all"})
        self._tokenizer = load_tokenizer(tokenizer, spec.model_name)
        self._chat = Chat(self._tokenizer)

    async def answer(self, question: Question) -> JudgeAnswer:
        """Return the answer to a question, after its thoughts, or the reason that there is none.

        Raises:
            GeneratorError: If the engine died.
        """
        spec = self._spec
        try:
            tokens = encode_prompt(self._tokenizer, question.messages)
            grammar = ""
            if question.form is not None:
                form = AnswerForm(json.dumps(question.form))
                grammar = await asyncio.to_thread(self._chat.grammar, form, tokens)
        # Tokenizers raise a TypeError for half of a surrogate pair, which a row may have.
        except (ConfigError, DataError, TemplateError, TypeError, ValueError) as error:
            reason = f"the question cannot be written for {spec.model_name}: {one_line(str(error))}"
            return JudgeAnswer(failure=reason, is_final=True)
        if len(tokens) + spec.max_new_tokens > spec.max_tokens:
            section = f"judges.{spec.name}" if spec.engine else "policy"
            limit = f"{section}.max_total_sequence_length ({spec.max_tokens})"
            return JudgeAnswer(
                failure=f"the question has {len(tokens)} tokens, which leave no room for the {spec.max_new_tokens} of "
                f"judges.{spec.name}.max_new_tokens within {limit}",
                is_final=True,
            )
        temperature = max(spec.temperature, REDRAW_TEMPERATURE) if question.draw else spec.temperature
        sampling = SamplingParams(
            spec.max_new_tokens, temperature=temperature, stop_token_ids=self._chat.ends.sampled, grammar=grammar
        )
        request = GenerationRequest(tokens, sampling, int(question.digest[:8], 16))
        try:
            completion = await generate_whole(self._generator.generate, request)
        except RequestRefused as error:
            return JudgeAnswer(failure=str(error), is_final=True)
        num_tokens = len(tokens) + len(completion.token_ids)
        if completion.stop_reason == "length":
            return JudgeAnswer(
                num_tokens=num_tokens, failure=f"the answer ended at max_new_tokens={spec.max_new_tokens}"
            )
        text = self._chat.read(completion.token_ids).text
        opened = opened_by(self._chat.shown(tokens[-PROMPT_END:]))
        return JudgeAnswer(final_text(text, opened), num_tokens)

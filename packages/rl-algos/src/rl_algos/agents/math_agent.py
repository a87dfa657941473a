"""An agent that solves problems with exact arithmetic, for the recipe `grpo-agent`: a loop around the `openai` client.

The package does not depend on `openai`; the environments of rollout workers with vLLM have it.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import openai

MAX_TURNS = 6
"""Maximum number of turns of the policy."""

MAX_BITS = 4096
"""Maximum number of bits of the numerator or the denominator of a number."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "compute",
            "description": "Compute with exact fractions: + - * / // % ** and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "Such as (3/4 + 2)**3"}},
                "required": ["expression"],
            },
        },
    }
]

INSTRUCTIONS = "Solve the problem step by step. Compute with the tool. Put the final answer in \\boxed{}."

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

# Creating a client takes 60 ms of processor time, so the rollouts of a worker share it.
_CLIENT = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="-")


async def run(base_url: str, api_key: str, prompt: Mapping[str, Any]) -> None:
    """Solve a problem; the environment of the prompt scores the answer.

    Args:
        base_url: Where the policy is, as OpenAI's clients take it.
        api_key: Key of this rollout.
        prompt: Row of the data: `messages` and `info`.
    """
    client = _CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, *prompt["messages"]]
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        turn = answer.choices[0].message
        if not turn.tool_calls:
            return
        messages.append(turn.model_dump(exclude_none=True))
        for call in turn.tool_calls:
            result = _result(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _result(arguments: str) -> str:
    try:
        return str(compute(str(json.loads(arguments)["expression"])))
    except (ValueError, KeyError, TypeError, ArithmeticError, SyntaxError, RecursionError) as error:
        return f"error: {error}"


def compute(expression: str) -> Fraction:
    """Return the value of an expression of numbers.

    Args:
        expression: Numbers with `+ - * / // % **` and parentheses.

    Raises:
        ValueError: If it has anything else, or a number becomes too large.
    """
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return _limited(Fraction(str(node.value)))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp(op=ast.Pow()):
            base = _value(node.left)
            exponent = _value(node.right)
            if exponent.denominator != 1:
                raise ValueError("an exponent must be an integer")
            if _num_bits(base) * abs(exponent.numerator) > MAX_BITS:
                raise ValueError("the number is too large")
            return Fraction(base**exponent.numerator)
        case ast.BinOp() if type(node.op) in _BINARY:
            return _limited(Fraction(_BINARY[type(node.op)](_value(node.left), _value(node.right))))
    raise ValueError(f"{ast.unparse(node)} is not an expression of numbers")


def _limited(number: Fraction) -> Fraction:
    if _num_bits(number) > MAX_BITS:
        raise ValueError("the number is too large")
    return number


def _num_bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())

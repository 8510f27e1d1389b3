"""From a record of chat data, in any of the usual forms, to the messages that transformers' chat templates take.

messages [{role, content, tool_calls, reasoning_content}] with tools; sharegpt conversations [{from, value}]; alpaca
instruction, input, output, system, history; prompt + completion. What can be no conversation is refused with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmtrain import foreign

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
_FORMS = "messages, conversations, instruction + output, or prompt + completion"


class RefusedError(ValueError):
    """Why a record cannot be used."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template renders, and which of its turns are there to be learnt."""

    messages: list[dict[str, Any]]
    """role and content (a string); of an assistant also reasoning_content and tool_calls, with arguments as objects."""
    tools: list[dict[str, Any]] | None
    turns: list[int]
    """Places of the assistant's messages that may count, ascending: not those of a prompt, nor those of weight 0."""


def conversation(text: str, field: str) -> Conversation:
    """The conversation of a record, which is a JSON object. `field` holds the messages, if the record has it.

    Raises: RefusedError.
    """
    try:
        record = foreign.loads(text)
    except ValueError as error:
        raise RefusedError(f"broken JSON ({error})") from None
    raw, prompt = _raw_messages(record, field)
    raw = [_object(message, place) for place, message in enumerate(raw)]
    if isinstance(system := record.get("system"), str) and system.strip() and raw[0].get("role") != "system":
        raw.insert(0, {"role": "system", "content": system})
        prompt += 1
    weights = [message.pop("weight", 1) for message in raw]
    if any(type(weight) is not int or weight not in (0, 1) for weight in weights):
        raise RefusedError(f"weights {weights}: each is 0 or 1")
    messages = [_message(message, place) for place, message in enumerate(raw)]
    _check_order(messages)
    turns = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and place >= prompt and weights[place]
    ]
    if not turns:
        raise RefusedError("it has no message of the assistant to learn from")
    return Conversation(messages=messages, tools=_tools(record.get("tools")), turns=turns)


def strings(value: Any) -> Iterator[str]:
    """Every string in a value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


# --- the forms ------------------------------------------------------------------------------------


def _raw_messages(record: dict[str, Any], field: str) -> tuple[list[Any], int]:
    """(messages with roles as transformers names them, how many of them are a prompt)"""
    for name in (field, "messages", "conversations", "conversation"):
        if record.get(name) is not None:
            messages = record[name]
            if not isinstance(messages, list) or not messages:
                raise RefusedError(f"field {name!r} is not a list of messages")
            return [_from_sharegpt(message) for message in messages], 0
    if record.get("prompt") is not None and record.get("completion") is not None:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            prompt, completion = _pair(prompt, completion)[:1], _pair(prompt, completion)[1:]
        if not (isinstance(prompt, list) and isinstance(completion, list) and prompt):
            raise RefusedError("prompt and completion are not both texts, or both lists of messages")
        return [*prompt, *completion], len(prompt)
    if record.get("instruction") is not None and record.get("output") is not None:
        return _from_alpaca(record), 0
    names = ", ".join(sorted(map(str, record))[:8]) or "none"
    raise RefusedError(f"no conversation in it: {_FORMS} (its fields: {names}); --field names another of messages")


def _from_alpaca(record: dict[str, Any]) -> list[dict[str, Any]]:
    history = record.get("history") or []
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise RefusedError("history is not a list of [question, answer]")
    question, more = record["instruction"], record.get("input")
    if isinstance(question, str) and isinstance(more, str) and more.strip():
        question = f"{question}\n{more}"
    return [message for pair in (*history, (question, record["output"])) for message in _pair(*pair)]


def _pair(question: Any, answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict) or "from" not in message or message.get("role") is not None:
        return message
    speaker, value = message["from"], message.get("value")
    given = {key: part for key, part in message.items() if key not in ("from", "value")}
    if speaker == "function_call":
        calls = _parsed(value, "the value of function_call")
        return {**given, "role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
    return {**given, "role": _SHAREGPT.get(speaker, speaker) if isinstance(speaker, str) else speaker, "content": value}


def _parsed(value: Any, what: str) -> Any:
    """`value`, read as JSON if it is a string."""
    if not isinstance(value, str):
        return value
    try:
        return foreign.loads(value)
    except ValueError:
        raise RefusedError(f"{what} is a string and no JSON: {value[:60]!r}") from None


# --- messages -------------------------------------------------------------------------------------


def _object(message: Any, place: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RefusedError(f"message {place} is {_kind(message)}, not an object with role and content")
    return {key: value for key, value in message.items() if value is not None}


def _message(raw: dict[str, Any], place: int) -> dict[str, Any]:
    role = raw.get("role")
    if role is None:
        raise RefusedError(f"message {place} has no role")
    if role not in _ROLES:
        raise RefusedError(f"message {place} has the role {role!r}; known are {', '.join(_ROLES)}")
    message = {**raw, "content": _content(raw.get("content"), role, place)}
    if (calls := message.pop("tool_calls", None)) not in (None, []):
        if role != "assistant":
            raise RefusedError(f"message {place}: tool_calls of the role {role!r}; only an assistant calls tools")
        if not isinstance(calls, list):
            raise RefusedError(f"message {place}: tool_calls is {_kind(calls)}, not a list")
        message["tool_calls"] = [_call(call, place) for call in calls]
    thoughts = message.get("reasoning_content")
    if thoughts is not None and not isinstance(thoughts, str):
        raise RefusedError(f"message {place}: reasoning_content is {_kind(thoughts)}, not a string")
    if role in ("user", "assistant") and not message["content"].strip() and "tool_calls" not in message:
        raise RefusedError(f"message {place} ({role}) is empty")
    return message


def _content(content: Any, role: str, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        other = next((part for part in content if not isinstance(part, dict) or part.get("type") != "text"), None)
        if other is not None:
            kind = other.get("type") if isinstance(other, dict) else _kind(other)
            raise RefusedError(f"message {place} holds {kind!r} content; only text is learnt")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise RefusedError(f"message {place} ({role}): content is {_kind(content)}, not a string")
    return content


def _call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError(f"message {place}: a tool call without a function's name")
    arguments = _parsed(function.get("arguments") or {}, f"message {place}: arguments of {function['name']}")
    if not isinstance(arguments, dict):
        raise RefusedError(f"message {place}: arguments of {function['name']} are {_kind(arguments)}, not an object")
    own = {"id": call["id"]} if call.get("id") is not None else {}
    if own and not isinstance(own["id"], str):
        raise RefusedError(f"message {place}: the id of a call is {_kind(own['id'])}, not a string")
    return {**own, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _check_order(messages: list[dict[str, Any]]) -> None:
    open_calls: set[Any] | None = None
    for place, message in enumerate(messages):
        role = message["role"]
        if role == "system" and place:
            rule = "a second system message" if messages[0]["role"] == "system" else "a system message after others"
            raise RefusedError(f"message {place} is {rule}; it may only be the first")
        if role == "tool":
            if open_calls is None:
                raise RefusedError(f"message {place} is a tool's result without a call before it")
            answers = message.get("tool_call_id")
            if answers is not None and not isinstance(answers, str):
                raise RefusedError(f"message {place}: its tool_call_id is {_kind(answers)}, not a string")
            if answers is not None and open_calls and answers not in open_calls:
                raise RefusedError(f"message {place}: its tool_call_id {answers!r} is of no call before it")
        elif "tool_calls" in message:
            open_calls = {call["id"] for call in message["tool_calls"] if "id" in call}
        else:
            open_calls = None
    if messages[-1]["role"] != "assistant":
        raise RefusedError(f"its last message is of the role {messages[-1]['role']!r}: an answer must be the last")


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    tools = _parsed(tools, "tools") if tools else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedError("tools is not a list of objects")
    if not all(isinstance(name_of(tool), str) for tool in tools):
        raise RefusedError("a tool in tools has no name")
    return tools


def name_of(tool: dict[str, Any]) -> Any:
    """The name of a tool, which may stand within `function`."""
    function = tool.get("function")
    return (function if isinstance(function, dict) else tool).get("name")


def leaves(arguments: Any) -> Iterator[str]:
    """What of a call's arguments must be found in the text: keys, texts as they are, numbers as JSON writes them."""
    if isinstance(arguments, dict):
        for key, value in arguments.items():
            yield key
            yield from leaves(value)
    elif isinstance(arguments, list):
        for value in arguments:
            yield from leaves(value)
    else:
        yield arguments if isinstance(arguments, str) else json.dumps(arguments)


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__

"""Parses records of chat data, in the usual forms, into the messages that transformers' chat templates take.

messages [{role, content, tool_calls, reasoning_content}] with tools and chat_template_kwargs; sharegpt conversations
[{from, value}]; alpaca instruction, input, output, system, history; prompt + completion. Any other record is refused
with a reason.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from llmtrain.base import untrusted
from llmtrain.data.row import RefusedError

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
_LISTS = ("messages", "conversations", "conversation")
_CONVERSATION = {*_LISTS, "completion", "instruction", "output"}
"""Fields that hold messages."""
_MEDIA = ("images", "image", "videos", "audios")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys of an answer's thoughts. The text under one key is given to templates that read another one, too."""
_READ = frozenset(
    (*_LISTS, *_MEDIA, "tools", "documents", "chat_template_kwargs", "system", "prompt", "completion", "instruction",
     "input", "output", "history", "chosen", "rejected", "label")
)  # fmt: skip
"""Fields that the known forms of a record have."""
RESERVED = frozenset(
    ("messages", "conversation", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
     "continue_final_message", "return_assistant_tokens_mask", "tokenize", "sanitize_control_tokens", "padding",
     "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs", "strftime_now",
     "raise_exception")
)  # fmt: skip
"""Names that chat_template_kwargs may not set, because the rendering uses them."""
_FORMS = "messages, conversations, instruction + output, or prompt + completion"


class RepeatedError(ValueError):
    """A key appears twice in a JSON object."""


def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json's object_pairs_hook: refuse repeated keys, of which Python would keep only the last value.

    Raises: RepeatedError.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice in an object")
    return found


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders, and which of its messages are trained on."""

    messages: list[dict[str, Any]]
    """Messages with role and content (a string). An assistant's may have thoughts (the same text under
    reasoning_content and thinking) and tool_calls, whose arguments are objects."""
    tools: list[dict[str, Any]] | None
    turns: list[int]
    """Numbers of the assistant's messages that may count, ascending: none of the prompt, and none with weight 0."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the template that the record sets: chat_template_kwargs, and documents."""
    unread: frozenset[str] = frozenset()
    """Fields of the record with text that was not used."""
    argument_texts: dict[tuple[int, int], str] = field(default_factory=dict)
    """Arguments that the record gives as text, by (number of the message, number of its tool call)."""

    def with_parts(self) -> Conversation:
        return replace(
            self, messages=[{**m, "content": [{"type": "text", "text": m["content"]}]} for m in self.messages]
        )

    def _argument_text(self, place: int, number: int, call: dict[str, Any]) -> str:
        text = self.argument_texts.get((place, number))
        return text or json.dumps(call["function"]["arguments"], ensure_ascii=False)

    def with_argument_texts(self) -> Conversation:
        """Return the conversation with all arguments as text; those that were text in the record are unchanged."""
        messages = []
        for place, message in enumerate(self.messages):
            calls = [
                {**call, "function": {**call["function"], "arguments": self._argument_text(place, number, call)}}
                for number, call in enumerate(message.get("tool_calls", ()))
            ]
            messages.append({**message, "tool_calls": calls} if calls else message)
        return replace(self, messages=messages)


def record_of(text: str) -> dict[str, Any]:
    """Parse a record, a JSON object. Raises: RefusedError."""
    try:
        record: dict[str, Any] = untrusted.loads(text)
    except ValueError as error:
        raise RefusedError(f"broken JSON ({error})") from None
    return record


def conversation_of(
    record: dict[str, Any], names: Collection[str], raw: list[Any], prompt: int, *, asks: bool = False
) -> Conversation:
    """Check the messages of a record; the first `prompt` messages are not trained on. Raises: RefusedError.

    Args:
        names: fields of the record that the caller has read.
        asks: the record is a prompt without an answer.
    """
    raw = [_object(message, place) for place, message in enumerate(raw)]
    if other := [name for name in _MEDIA if record.get(name)]:
        raise RefusedError(f"it has {other[0]}; only text can be trained on")
    system = record.get("system")
    if system is not None and not isinstance(system, str):
        raise RefusedError(f"system is {_kind(system)}, not a string")
    if system and system.strip() and (raw[0].get("role"), raw[0].get("content")) != ("system", system):
        raw.insert(0, {"role": "system", "content": system})
        prompt += 1
    weights = [message.pop("weight", 1) for message in raw]
    if any(type(weight) is not int or weight not in (0, 1) for weight in weights):
        raise RefusedError(f"weights {weights}: each is 0 or 1")
    messages = [_message(message, place) for place, message in enumerate(raw)]
    _check_order(messages)
    if asks == (messages[-1]["role"] == "assistant"):
        rule = "a prompt must end with the message to answer" if asks else "the last message must be an answer"
        raise RefusedError(f"its last message has the role {messages[-1]['role']!r}: {rule}")
    if messages[-1]["role"] == "system":
        raise RefusedError("it has only a system message, and nothing to answer")
    turns = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and place >= prompt and weights[place]
    ]
    if not turns and not asks:
        raise RefusedError("it has no message of the assistant to learn from")
    return Conversation(
        messages=messages,
        tools=_tools(record.get("tools")),
        turns=turns,
        variables=template_variables(record.get("chat_template_kwargs"), "chat_template_kwargs") | _documents(record),
        unread=frozenset(
            name
            for name, value in record.items()
            if name not in names and name not in _READ and any(text.strip() for text in strings(value))
        ),
        argument_texts=_argument_texts(raw),
    )


def _documents(record: dict[str, Any]) -> dict[str, Any]:
    given = _parsed(record["documents"], "documents") if record.get("documents") else None
    if not given:
        return {}
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise RefusedError("documents is not a list of objects")
    return {"documents": given}


def template_variables(given: Any, what: str) -> dict[str, Any]:
    """Parse chat_template_kwargs, an object or JSON. `what`: where they are from, for messages. Raises RefusedError."""
    given = _parsed(given, what) if given else {}
    if not isinstance(given, dict):
        raise RefusedError(f"{what} is {_kind(given)}, not an object")
    if odd := [name for name in given if name in RESERVED or not name.isidentifier() or name.startswith("_")]:
        raise RefusedError(f"{what} has {odd[0]!r}, a name that is reserved or no variable of a template; remove it")
    return given


def strings(value: Any) -> Iterator[str]:
    """Yield every string in a value, also the keys of its objects."""
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


def answer_of(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the messages of the answer in a field: a text, a message or several. Raises RefusedError."""
    given = record.get(name)
    if isinstance(given, str):
        return [{"role": "assistant", "content": given}]
    messages = [given] if isinstance(given, dict) else given
    if not isinstance(messages, list) or not messages:
        names = ", ".join(sorted(map(str, record))[:8]) or "none"
        talk = given is None and not {"chosen", "rejected"} & record.keys() and bool(record.keys() & _CONVERSATION)
        hint = "; conversations are prepared with --format chat" if talk else ""
        raise RefusedError(f"{name} is {_kind(given)}, neither a text nor messages (its fields: {names}){hint}")
    return [_object(_from_sharegpt(message), place) for place, message in enumerate(messages)]


def prompt_of(record: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """Return the messages before the answers; none if the record has no field for them. Raises RefusedError."""
    given: Any = next((record[name] for name in (field, "prompt", *_LISTS) if record.get(name) is not None), [])
    if not given and record.get("instruction") is not None:
        return _from_alpaca({**record, "output": None})[:-1]
    if isinstance(given, str):
        return _pair(given, None)[:1]
    if not isinstance(given, list):
        raise RefusedError(f"the prompt is {_kind(given)}, neither a text nor messages")
    return [_object(_from_sharegpt(message), place) for place, message in enumerate(given)]


def messages_of(record: dict[str, Any], field: str) -> tuple[list[Any], int]:
    """Return messages with transformers' roles, and how many of them are the prompt. Raises RefusedError."""
    for name in (field, *_LISTS):
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
    if more is not None and not isinstance(more, str):
        raise RefusedError(f"input is {_kind(more)}, not a string")
    if isinstance(question, str) and more and more.strip():
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
    if not isinstance(value, str):
        return value
    try:
        found = untrusted.loads(value, pairs=no_repeats)
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair may be spelt in it
    except ValueError as error:
        why = f" ({error})" if isinstance(error, RepeatedError) else ""
        raise RefusedError(f"{what} is a string and no JSON{why}: {value[:60]!r}") from None
    return found


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
        raise RefusedError(f"message {place} has the role {role!r}; the known roles are {', '.join(_ROLES)}")
    if "function_call" in raw:
        raise RefusedError(f"message {place} has a function_call, which is now written as tool_calls")
    message = {**raw, "content": _content(raw.get("content"), role, place)}
    if (calls := message.pop("tool_calls", None)) not in (None, []):
        if role != "assistant":
            raise RefusedError(f"message {place}: tool_calls of the role {role!r}; only an assistant calls tools")
        if not isinstance(calls, list):
            raise RefusedError(f"message {place}: tool_calls is {_kind(calls)}, not a list")
        message["tool_calls"] = [_call(call, place) for call in calls]
    message |= _thoughts(message, role, place)
    if role in ("user", "assistant") and not message["content"].strip() and "tool_calls" not in message:
        raise RefusedError(f"message {place} ({role}) is empty")
    return message


def _thoughts(message: dict[str, Any], role: str, place: int) -> dict[str, str]:
    given = {key: message[key] for key in THOUGHTS if message.get(key) is not None}
    if wrong := [key for key, thoughts in given.items() if not isinstance(thoughts, str)]:
        raise RefusedError(f"message {place}: {wrong[0]} is {_kind(given[wrong[0]])}, not a string")
    named = {thoughts: key for key, thoughts in given.items() if thoughts.strip()}
    if named and role != "assistant":
        raise RefusedError(
            f"message {place}: {next(iter(named.values()))} of the role {role!r}; only an assistant thinks"
        )
    if len(named) > 1:
        raise RefusedError(f"message {place} has other thoughts under {' than under '.join(named.values())}")
    thoughts = next(iter(named), next(iter(given.values()), None))
    return {} if thoughts is None else dict.fromkeys((*THOUGHTS[:2], *given), thoughts)


def _content(content: Any, role: str, place: int) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        other = next((part for part in content if not isinstance(part, dict) or part.get("type") != "text"), None)
        if other is not None:
            kind = other.get("type") if isinstance(other, dict) else _kind(other)
            raise RefusedError(f"message {place} holds {kind!r} content; only text can be trained on")
        texts = [part.get("text") for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise RefusedError(f"message {place} has a part of the type text without one")
        content = "".join(texts)
    if not isinstance(content, str):
        raise RefusedError(f"message {place} ({role}): content is {_kind(content)}, not a string")
    return content


def _call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise RefusedError(f"message {place}: a tool call without a function's name")
    arguments = function.get("arguments")
    if arguments is None and (other := sorted(function.keys() & {"parameters", "args", "input"})):
        raise RefusedError(f"message {place}: the call of {function['name']} has {other[0]} instead of arguments")
    arguments = (
        {} if arguments in (None, "") else _parsed(arguments, f"message {place}: arguments of {function['name']}")
    )
    if not isinstance(arguments, dict):
        raise RefusedError(f"message {place}: arguments of {function['name']} are {_kind(arguments)}, not an object")
    own = {"id": call["id"]} if call.get("id") is not None else {}
    if own and not isinstance(own["id"], str):
        raise RefusedError(f"message {place}: the id of a call is {_kind(own['id'])}, not a string")
    return {**own, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _argument_texts(raw: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """Map (message, call) to tool-call arguments that the record gives as text; `raw` has passed `_message`."""
    found = {}
    for place, message in enumerate(raw):
        for number, call in enumerate(message.get("tool_calls") or ()):
            arguments = call.get("function", call).get("arguments")
            if isinstance(arguments, str) and arguments.strip():
                found[place, number] = arguments
    return found


def _check_order(messages: list[dict[str, Any]]) -> None:
    open_calls: set[Any] | None = None
    for place, message in enumerate(messages):
        role = message["role"]
        if role == "system" and place:
            rule = "a second system message" if messages[0]["role"] == "system" else "a system message after others"
            raise RefusedError(f"message {place} is {rule}; only the first message may be one")
        if role == "tool":
            if open_calls is None:
                raise RefusedError(f"message {place} is a tool's result without a call before it")
            answers = message.get("tool_call_id")
            if answers is not None and not isinstance(answers, str):
                raise RefusedError(f"message {place}: its tool_call_id is {_kind(answers)}, not a string")
            if answers is not None and open_calls and answers not in open_calls:
                raise RefusedError(f"message {place}: no earlier tool call has its tool_call_id {answers!r}")
        elif "tool_calls" in message:
            open_calls = {call["id"] for call in message["tool_calls"] if "id" in call}
        else:
            open_calls = None


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
    function = tool.get("function")
    return (function if isinstance(function, dict) else tool).get("name")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__

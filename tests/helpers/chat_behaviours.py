"""Templates that behave as those of further families do, and what transformers makes of a record with any of them.

Written for these tests: of the originals they have the control tokens' names, what each writes where, and what each
trims, drops or reads of the clock. The oracle asks transformers alone; it knows nothing of llmtrain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Message = dict[str, Any]


@dataclass(frozen=True)
class Behaviour:
    """A template, and the tokens where generation stops; the first is the tokenizer's eos_token."""

    template: str | dict[str, str]
    stops: tuple[str, ...]
    bos: str | None = None
    ended: Callable[[Message], str] = lambda message: ""
    """The token by which the next message ends an answer."""


_FOR = "{% for m in messages %}"
_END = "{% endfor %}{% if add_generation_prompt %}"
_ASKED = (
    "{% set ns = namespace(asked=-1) %}" + _FOR + "{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}"
    "{% endfor %}"
)
_TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
_SPLIT = (
    "{% set thought = m.reasoning_content or '' %}{% set said = m.content %}{% if not thought and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set said = said.split('</think>')[-1].strip() %}{% endif %}"
)
_XML = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v | tojson if v is mapping or (v is "
    "sequence and v is not string) else v | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
)
_JSON = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"


def _chatml(answer: str, prompt: str, before: str = "") -> str:
    return (
        before + _ASKED + _TOOLS + _FOR + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + _SPLIT + answer
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n" + _END + "<|im_start|>assistant\n" + prompt + "{% endif %}"
    )  # fmt: skip


_THINKS = "{% if loop.index0 > ns.asked %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}"
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + _FOR + "{% if m.role == 'user' %}"
    "<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}<｜Assistant｜>BEGIN{{ CONTENT }}{% for c in "
    "m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + "
    "'<｜tool▁call▁end｜>' }}{% endfor %}<｜end▁of▁sentence｜>{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>"
    "{{ m.content }}<｜tool▁output▁end｜>{% else %}{{ m.content }}{% endif %}"
    + _END
    + "<｜Assistant｜>BEGIN{% endif %}"
)
_GLM = (
    "[gMASK]<sop>" + _ASKED + "{% for t in tools or [] %}<|system|>\n{{ t | tojson }}{% endfor %}" + _FOR
    + "{% if m.role == 'assistant' %}" + _SPLIT + "<|assistant|>\n<think>{{ thought if loop.index0 > ns.asked }}"
    "</think>{% if said.strip() %}\n{{ said.strip() }}{% endif %}{% for c in m.tool_calls or [] %}\n<tool_call>"
    "{{ c.function.name }}{% for k, v in c.function.arguments | items %}\n<arg_key>{{ k }}</arg_key>\n<arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}\n</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>{% else %}"
    "<|{{ m.role }}|>\n{{ m.content }}{% endif %}" + _END + "<|assistant|>{% endif %}"
)  # fmt: skip
_KIMI = (
    "{% if tools %}<|im_system|>tools<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}" + _FOR
    + "<|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.role }}<|im_middle|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}<|tool_call_end|>"
    "{% endfor %}<|im_end|>" + _END + "<|im_assistant|>assistant<|im_middle|>{% endif %}"
)  # fmt: skip
_LFM = _chatml(
    "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{% if m.tool_calls %}<|tool_call_start|>["
    "{% for c in m.tool_calls %}{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}="
    "{{ '\"' ~ v ~ '\"' if v is string else v | string }}{% if not loop.last %}, {% endif %}{% endfor %}){% endfor %}]"
    "<|tool_call_end|>{% endif %}{{ m.content }}", "",
)  # fmt: skip
_LLAMA = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ strftime_now('%d %b %Y') }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}"
    "<|eot_id|>" + _FOR + "<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{% if tools and loop.first %}{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
    '{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>" + _END
    + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)  # fmt: skip
_MISTRAL = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}[SYSTEM_PROMPT]It is {{ strftime_now('%Y-%m-%d') }}."
    "[/SYSTEM_PROMPT]{% endif %}" + _FOR + "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content }}"
    "{{ eos_token }}{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)
_GRANITE = (
    "<|start_of_role|>system<|end_of_role|>{% if messages[0].role == 'system' %}{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% else %}Today's Date: {{ strftime_now('%B %d, %Y') }}.{% endif %}"
    "{% for t in tools or [] %}\n{{ t | tojson }}{% endfor %}<|end_of_text|>\n" + _FOR + "<|start_of_role|>{{ m.role }}"
    "<|end_of_role|>{{ m.content }}" + _JSON + "<|end_of_text|>\n" + _END
    + "<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)  # fmt: skip
_SEED = (
    "{% for t in tools or [] %}<seed:bos>system\n{{ t | tojson }}<seed:eos>{% endfor %}" + _FOR
    + "<seed:bos>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content %}<seed:think>"
    "{{ m.reasoning_content | trim }}</seed:think>{% endif %}{{ m.content }}" + _XML + "{% else %}{{ m.content }}"
    "{% endif %}<seed:eos>" + _END + "<seed:bos>assistant\n{% endif %}"
)  # fmt: skip
_GEMMA4 = (
    "<bos>{% for t in tools or [] %}<|turn>system\n{{ t | tojson }}<turn|>\n{% endfor %}" + _FOR
    + "{% if m.role == 'tool' %}<|tool_response>{{ m.content }}<tool_response|>{% else %}{% if loop.first or "
    "messages[loop.index0 - 1].role != 'tool' %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
    "{% if m.reasoning_content and loop.last %}<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}"
    "{{ m.content | trim }}{% for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ '{' }}"
    "{% for k, v in c.function.arguments | dictsort %}{{ k }}:{{ '<|\"|>' ~ v ~ '<|\"|>' if v is string else v | "
    "tojson }},{% endfor %}{{ '}' }}<tool_call|>{% endfor %}{{ '<turn|>\n' if not m.tool_calls }}{% endif %}" + _END
    + "{% if messages[-1].role != 'tool' %}<|turn>model\n{% endif %}{% endif %}"
)  # fmt: skip
_COHERE = (
    "<BOS_TOKEN>{% for t in tools or [] %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ t | tojson }}<|END_OF_TURN_TOKEN|>"
    "{% endfor %}" + _FOR + "<|START_OF_TURN_TOKEN|>{% if m.role == 'assistant' %}<|CHATBOT_TOKEN|>"
    "{% if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{% endif %}"
    "{% if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}{{ {'tool_name': c.function.name, 'parameters': "
    "c.function.arguments} | tojson }}{% endfor %}]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}"
    "<|END_RESPONSE|>{% endif %}{% else %}<|USER_TOKEN|>{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>" + _END
    + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)  # fmt: skip
_VLM = (
    _FOR + "<|im_start|>{{ m.role | capitalize }}:{% for part in m.content %}{% if part.type == 'text' %} "
    "{{ part.text }}{% endif %}{% endfor %}<end_of_utterance>\n" + _END + "<|im_start|>Assistant:{% endif %}"
)
_ATEM = (
    "{% for t in tools or [] %}<|start|>system<|message|>{{ t | tojson }}<|end|>{% endfor %}" + _FOR
    + "{% if m.role == 'assistant' %}{% if m.reasoning_content %}<|start|>assistant to=self<|message|>"
    "{{ m.reasoning_content }}<|next|>{% endif %}{% for c in m.tool_calls or [] %}<|start|>assistant to="
    "{{ c.function.name }}<|message|>{% for k, v in c.function.arguments | items %}<p name=\"{{ k }}\">"
    "{{ v | string | e }}</p>{% endfor %}<|call|>{% endfor %}{% if not m.tool_calls %}<|start|>assistant"
    " to=user<|message|>{{ m.content }}<|end|>{% endif %}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}" + _END
    + "<|start|>assistant{% endif %}"
)  # fmt: skip
_OSS = (
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}\nReasoning: {{ reasoning_effort | "
    "default('medium') }}<|end|>{% if tools %}<|start|>developer<|message|>{% for t in tools %}// {{ "
    "t.function.description }}\ntype {{ t.function.name }} = (_: {\n{% for k, v in t.function.parameters.properties | "
    "items %}// {{ v.description }}\n{{ k }}: {{ v.enum | join(' | ') if v.enum else v.type }},\n{% endfor %}}) => any;"
    "{% endfor %}<|end|>{% endif %}" + _FOR + "{% if m.role == 'assistant' %}{% if m.tool_calls %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant to=functions."
    "{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | "
    "tojson }}<|call|>{% else %}{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if "
    "loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% else %}<|start|>{{ m.role }}<|message|>"
    "{{ m.content }}<|end|>{% endif %}" + _END + "<|start|>assistant{% endif %}"
)
_PLAIN = _FOR + "<|im_start|>{{ m.role }}\n{{ m.content }}" + _JSON + "<|im_end|>\n" + _END + (
    "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip


def next_begins(message: Message) -> str:
    """GLM: the next message's token ends an answer."""
    return "<|observation|>" if "tool_calls" in message else "<|user|>"


_IM, _EOS = ("<|im_end|>",), ("<｜end▁of▁sentence｜>",)
BEHAVIOURS = {
    "qwen3.5": Behaviour(_chatml(_THINKS + _XML, "<think>\n"), _IM),
    "qwen3.5-nothink": Behaviour(_chatml(_THINKS + _XML, "<think>\n\n</think>\n\n"), _IM),
    "qwen3-thinking": Behaviour(
        _chatml(_THINKS.replace("> ns.asked", "> ns.asked and thought") + _JSON, "<think>\n"), _IM
    ),
    "nemotron3": Behaviour(
        _chatml("{{ '<think>\n' + thought + '\n</think>\n' if thought else '<think></think>' }}{{ said }}" + _XML,
                "<think>\n"), _IM),
    "glm4.5": Behaviour(_GLM, ("<|endoftext|>", "<|user|>", "<|observation|>"), ended=next_begins),
    "deepseek3.1": Behaviour(_DEEPSEEK.replace("BEGIN", "</think>").replace(
        "CONTENT", "m.content.split('</think>')[-1]"), _EOS, "<｜begin▁of▁sentence｜>"),
    "deepseek3-0324": Behaviour(
        _DEEPSEEK.replace("BEGIN", "").replace("CONTENT", "m.content"), _EOS, "<｜begin▁of▁sentence｜>"),
    "kimi-k2": Behaviour(_KIMI, _IM),
    "lfm2.5": Behaviour(_LFM, _IM),
    "llama3.2": Behaviour(_LLAMA, ("<|eot_id|>",), "<|begin_of_text|>"),
    "mistral-small": Behaviour(_MISTRAL, ("</s>",), "<s>"),
    "granite4": Behaviour(_GRANITE, ("<|end_of_text|>",)),
    "seed-oss": Behaviour(_SEED, ("<seed:eos>",)),
    "gemma4": Behaviour(_GEMMA4, ("<turn|>", "<|tool_response>"), "<bos>", lambda m: "<|tool_response>"),
    "command-a": Behaviour(_COHERE, ("<|END_OF_TURN_TOKEN|>",), "<BOS_TOKEN>"),
    "smolvlm": Behaviour(_VLM, ("<end_of_utterance>",)),
    "muse": Behaviour(_ATEM, ("<|end|>", "<|call|>")),
    "gpt-oss with tools": Behaviour(_OSS, ("<|return|>", "<|call|>")),
    "hermes": Behaviour({"default": _PLAIN, "tool_use": _TOOLS + _PLAIN}, _IM),
}  # fmt: skip
_CONTROL = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<[^|<>\s]{1,40}\|>|<｜[^｜<>]{1,40}｜>|</?(?:think|tool_call|tool_response|start_of_turn"
    r"|end_of_turn|end_of_utterance|seed:\w+)>|\[/?(?:INST|gMASK|SYSTEM_PROMPT)\]|<sop>|</?s>|<[be]os>"
)


def write_behaviour(folder: Path, one: Behaviour) -> Path:
    """A tokenizer folder in which a byte is a token, as is each control token that the template names."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    named = json.dumps(one.template, ensure_ascii=False)
    found = dict.fromkeys([*one.stops, *([one.bos] if one.bos else []), *_CONTROL.findall(named)])
    text = [token for token in found if re.fullmatch(r"</?(think|tool_call|tool_response)>", token)]
    special = [token for token in found if token not in text]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in text])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = one.template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]  # type: ignore[assignment]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": one.stops[0], "chat_template": template}
    settings |= {"bos_token": one.bos} if one.bos else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


# --- the oracle -----------------------------------------------------------------------------------

_WORD = re.compile(r"w\d\w+")
"""Words of the records, of which no template has one, and each record has each once; in any spelling they are there."""


def words(value: Any) -> set[str]:
    return set(_WORD.findall(json.dumps(value)))


@dataclass(frozen=True)
class Told:
    """The prompt that a server feeds for an answer, and the text that the model must generate."""

    prompt: str
    answer: str


def by_transformers(tokenizer: Any, one: Behaviour, record: dict[str, Any]) -> list[Told] | str:
    """The answers of a record; or why there are none: fails, prompt (not the answer's beginning), stop, lost."""
    why = "fails"
    for parts in (False, True):
        for texts in (False, True):
            found = _told(tokenizer, one, record, parts=parts, texts=texts)
            if not isinstance(found, str):
                return found
            why = found if found != "fails" else why
            if found not in ("fails", "lost"):
                return found
    return why


def _told(tokenizer: Any, one: Behaviour, record: dict[str, Any], *, parts: bool, texts: bool) -> list[Told] | str:
    messages = [_as_taken(message, parts, texts) for message in record["messages"]]
    more = {"tools": record.get("tools"), **record.get("chat_template_kwargs", {})}
    told = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            header, prompt, whole = (
                tokenizer.apply_chat_template(messages[:until], tokenize=False, add_generation_prompt=asks, **more)
                for until, asks in ((at, False), (at, True), (at + 1, False))
            )
        except Exception:
            return "fails"
        if not whole.startswith(prompt):
            return "prompt"
        rest = whole[len(prompt) :]
        rest += "" if any(stop in rest for stop in one.stops) else one.ended(message)
        ends = [rest.index(stop) + len(stop) for stop in one.stops if stop in rest]
        if not ends:
            return "stop"
        others = [each for each in messages[:at] if each["role"] != "assistant"]
        own = {key: value for key, value in message.items() if key != "id"}
        if not words([others, record.get("tools")]) <= words(prompt) or not words(own) <= words(whole[len(header) :]):
            return "lost"
        told.append(Told(prompt, rest[: min(ends)]))
    return told


def _as_taken(message: Message, parts: bool, texts: bool) -> Message:
    taken = dict(message)
    if parts:
        taken["content"] = [{"type": "text", "text": message["content"]}]
    if "tool_calls" in message:
        taken["tool_calls"] = []
        for call in message["tool_calls"]:
            given = call["function"]["arguments"]
            value = given if isinstance(given, dict) else json.loads(given)
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            taken["tool_calls"].append(
                {**call, "function": {**call["function"], "arguments": text if texts else value}}
            )
    return taken


# --- records --------------------------------------------------------------------------------------


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def _call(arguments: Any, said: str = "", **more: Any) -> Message:
    function = {"name": "w0look", "arguments": arguments}
    return _said(said, tool_calls=[{"id": "functions.w0look:0", "type": "function", "function": function}], **more)


_ARGUMENTS = {"w1city": 'w2Zug "w3x"', "w4n": 3, "w5on": True, "w6at": None, "w7in": ["w8a", {"w9k": "w10v"}]}
_RESULT = {"role": "tool", "content": "w20dry", "tool_call_id": "functions.w0look:0", "name": "w0look"}
_SCHEMA = {"type": "object", "properties": {
    "w1city": {"type": "string", "description": "w31of what", "enum": ["w32Bern", "w33Zug"]}}}  # fmt: skip
_TOOL = [{"type": "function", "function": {"name": "w0look", "description": "w30tells", "parameters": _SCHEMA}}]
_ASK = [_user("w40asks?")]
RECORDS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [*_ASK, _said("w41says")]},
    "turns": {"messages": [{"role": "system", "content": "w42be"}, *_ASK, _said("w41says"), _user("w43and?"),
                           _said("w44so\nw45too ")]},
    "thought": {"messages": [*_ASK, _said("w41says", reasoning_content="w46since")]},
    "thinking": {"messages": [*_ASK, _said("w41says", thinking="w46since")]},
    "thoughts": {"messages": [*_ASK, _said("w41says", reasoning_content="w46since"), _user("w43and?"),
                              _said("w44so", reasoning_content="w47then")]},
    "inline": {"messages": [*_ASK, _said("<think>\nw46since\n</think>\n\nw41says")]},
    "call": {"messages": [*_ASK, _call(_ARGUMENTS), _RESULT, _said("w41says")], "tools": _TOOL},
    "call as text": {"messages": [*_ASK, _call(json.dumps(_ARGUMENTS)), _RESULT, _said("w41says")], "tools": _TOOL},
    "call without tools": {"messages": [*_ASK, _call({"w1city": "w2Zug"}), _RESULT, _said("w41says")]},
    "call with thoughts": {"messages": [*_ASK, _call({"w1city": "w2Zug"}, reasoning_content="w46since"), _RESULT,
                                        _said("w41says", reasoning_content="w47then")], "tools": _TOOL},
    "call said": {"messages": [*_ASK, _call({"w1city": "w2Zug"}, "w48I look."), _RESULT, _said("w41says")]},
    "tools alone": {"messages": [*_ASK, _said("w41says")], "tools": _TOOL},
}  # fmt: skip

"""Chat templates that behave as those of known families do, and what each writes of an answer, by hand.

They are written for these tests: of the originals they have the control tokens' names, what each writes where, and what
each trims, drops or refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A kind of chat model. `answer` tells what its template writes of an answer, the token that stops it included."""

    template: str
    special: tuple[str, ...]
    stops: tuple[str, ...]
    answer: Callable[[Message], str]
    tokens: str = "bytes"
    """Which of TOKENIZERS."""
    bos: str | None = None
    added: tuple[str, ...] = ()
    """Tokens that are added, but not special."""
    rstrip: bool = False
    """The control tokens take the white space after them for theirs."""
    tools: bool = False
    bare_calls: bool = False
    """What is said beside a call is left out."""
    thoughts: bool = False
    usable: bool = True
    """Whether any conversation can be learnt with it."""


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _function(call: Message) -> Message:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


# --- templates ------------------------------------------------------------------------------------

_FOR = "{% for m in messages %}"
_END = "{% endfor %}{% if add_generation_prompt %}"
_SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
)
_ALTERNATE = (
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}"
)
_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_QWEN_HEAD = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
)
_QWEN_TOOL = (
    "{% elif m.role == 'tool' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
    "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}"
)
_QWEN25 = (
    _QWEN_HEAD + "{% else %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + _FOR
    + "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}" + _CALLS + "<|im_end|>\n"
    + _QWEN_TOOL + _END + "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
_QWEN3 = (
    _QWEN_HEAD + "{% endif %}{% set ns = namespace(asked=0) %}" + _FOR + "{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}" + _FOR + "{% if m.role == 'user' %}<|im_start|>user\n"
    "{{ m.content }}<|im_end|>\n{% elif m.role == 'assistant' %}{% set said = m.content %}"
    "{% set thought = m.reasoning_content | default('') %}{% if not thought and '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.asked and (loop.last or thought) %}<think>\n{{ thought.strip('\\n') }}\n</think>\n\n"
    "{{ said.lstrip('\\n') }}{% else %}{{ said }}{% endif %}{% set m = {'content': said, 'tool_calls': m.tool_calls} %}"
    + _CALLS + "<|im_end|>\n" + _QWEN_TOOL + _END + "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
_LLAMA2 = (
    _SYSTEM_FIRST + _ALTERNATE + "{% set text = ('<<SYS>>\n' + sys + '\n<</SYS>>\n\n' + m.content) "
    "if loop.first and sys else m.content %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + text.strip() + "
    "' [/INST]' }}{% else %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
_LLAMA3 = (
    "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}<|eot_id|>{% endif %}" + _FOR + "<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>" + _END
    + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)  # fmt: skip
_MISTRAL1 = (
    "{{ bos_token }}" + _SYSTEM_FIRST + _ALTERNATE + "{% if m.role == 'user' %}[INST] {{ sys + '\n\n' if loop.first "
    "and sys else '' }}{{ m.content }} [/INST]{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
_MISTRAL3 = (
    "{{ bos_token }}" + _SYSTEM_FIRST + "{% set ns = namespace(asked=0) %}{% for m in rest %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in rest %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.asked %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {{ sys + '\n\n' if loop.index0 == ns.asked and sys else '' }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': "
    "c.function.arguments} | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}}[/TOOL_RESULTS]{% endif %}{% endfor %}'
)
_GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + _FOR
    + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    + _END + "<start_of_turn>model\n{% endif %}"
)  # fmt: skip
_GEMMA3 = (
    "{{ bos_token }}" + _SYSTEM_FIRST + _ALTERNATE + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}"
    "\n{{ sys + '\n\n' if loop.first and sys else '' }}{{ m.content | trim }}<end_of_turn>\n" + _END
    + "<start_of_turn>model\n{% endif %}"
)  # fmt: skip
_PHI3 = (
    _FOR + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + _END + "<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
_PHI4 = _FOR + "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>" + _END + (
    "<|im_start|>assistant<|im_sep|>{% endif %}"
)  # fmt: skip
_DEEPSEEK2 = (
    "{{ bos_token }}" + _FOR + "{% if m.role == 'user' %}User: {{ m.content }}\n\n{% elif m.role == 'assistant' %}"
    "Assistant: {{ m.content }}{{ eos_token }}{% else %}{{ m.content }}\n\n{% endif %}" + _END + "Assistant:{% endif %}"
)
_DEEPSEEK3 = (
    "{{ bos_token }}{% set ns = namespace(sys='') %}" + _FOR + "{% if m.role == 'system' %}{% set ns.sys = m.content %}"
    "{% endif %}{% endfor %}{{ ns.sys }}" + _FOR + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ CONTENT }}<｜end▁of▁sentence｜>{% endif %}" + _END
    + "<｜Assistant｜>PROMPT{% endif %}"
)  # fmt: skip
_GLM4 = (
    "[gMASK]<sop>{% if tools %}<|system|>\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}" + _FOR
    + "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% elif m.tool_calls %}{% for c in m.tool_calls %}"
    "<|assistant|>{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}" + _END + "<|assistant|>{% endif %}"
)  # fmt: skip
_COMMAND_R = (
    "{{ bos_token }}" + _FOR + "<|START_OF_TURN_TOKEN|>{{ {'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>', "
    "'system': '<|SYSTEM_TOKEN|>'}[m.role] }}{{ m.content.strip() }}<|END_OF_TURN_TOKEN|>" + _END
    + "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)  # fmt: skip
_GRANITE = (
    "{% if messages[0].role != 'system' %}<|start_of_role|>system<|end_of_role|>You help.<|end_of_text|>\n{% endif %}"
    "{% if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>\n{% endif %}"
    + _FOR + "<|start_of_role|>{{ 'tool_response' if m.role == 'tool' else m.role }}<|end_of_role|>"
    "{% if m.tool_calls %}<|tool_call|>{{ m.tool_calls | map(attribute='function') | list | tojson }}{% endif %}"
    "{{ m.content }}<|end_of_text|>\n" + _END + "<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)  # fmt: skip
_OLMO2 = (
    "{{ bos_token }}" + _FOR + "<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
    "{% if not loop.last %}\n{% endif %}{% else %}\n{% endif %}" + _END + "<|assistant|>\n{% endif %}"
)
_SMOLLM3 = (
    _SYSTEM_FIRST + "<|im_start|>system\n## Metadata\n{{ sys.rstrip() }}\n\n<|im_end|>\n{% for m in rest %}"
    "{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m.content.lstrip('\\n') }}<|im_end|>\n"
    "{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}" + _END
    + "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
_TAGGED = (
    _FOR + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}" + _END
    + "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
_ZEPHYR = _FOR + "<|{{ m.role }}|>\n{{ m.content + eos_token }}\n" + _END + "<|assistant|>\n{% endif %}"
_FALCON3 = (
    _FOR + "<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% if not loop.last or m.role != 'assistant' %}\n{% endif %}" + _END + "<|assistant|>\n{% endif %}"
)
_ERNIE = (
    "<|begin_of_sentence|>" + _FOR + "{% if m.role == 'user' %}User: {{ m.content }}\n{% elif m.role == 'assistant' %}"
    "Assistant: {{ m.content }}<|end_of_sentence|>{% else %}{{ m.content }}\n{% endif %}" + _END
    + "Assistant: {% endif %}"
)  # fmt: skip
_HUNYUAN = (
    "<｜hy_begin▁of▁sentence｜>" + _FOR + "{% if m.role == 'user' %}<｜hy_User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜hy_Assistant｜>{{ m.content }}<｜hy_place▁holder▁no▁2｜>"
    "{% else %}{{ m.content }}<｜hy_place▁holder▁no▁3｜>{% endif %}" + _END + "<｜hy_Assistant｜>{% endif %}"
)
_YI = _FOR + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}" + _END + (
    "<|im_start|>assistant\n{% endif %}"
)  # fmt: skip
_MINICPM = (
    _FOR + "{% if m.role == 'user' %}<用户>{% endif %}{{ m.content.strip() }}{% if m.role == 'user' %}<AI>{% endif %}"
    "{% endfor %}"
)
_HARMONY = (
    "<|start|>system<|message|>Valid channels: analysis, final.<|end|>" + _FOR + "{% if m.role == 'assistant' %}"
    "{% if loop.last and m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.reasoning_content }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}<|start|>"
    "{{ 'developer' if m.role == 'system' else m.role }}<|message|>{{ m.content }}<|end|>{% endif %}" + _END
    + "<|start|>assistant{% endif %}"
)  # fmt: skip


# --- what each writes of an answer, by hand ------------------------------------------------------------


def _plain(end: str, strip: Callable[[str], str] = str, before: str = "") -> Callable[[Message], str]:
    return lambda m: before + strip(m["content"]) + end


def _qwen_calls(m: Message) -> str:
    calls = [f"<tool_call>\n{dumps(_function(c))}\n</tool_call>" for c in m.get("tool_calls", ())]
    return "\n".join(([m["content"]] if m["content"] else []) + calls) if calls else m["content"]


def _qwen3(m: Message) -> str:
    said, thought = m["content"], m.get("reasoning_content", "")
    if not thought and "</think>" in said:
        thought = said.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
        said = said.split("</think>")[-1].lstrip("\n")
    calls = _qwen_calls({**m, "content": said})
    calls = calls.lstrip("\n") if said or not m.get("tool_calls") else calls
    return "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + calls + "<|im_end|>"


def _llama3(m: Message) -> str:
    call = _function(m["tool_calls"][0]) if m.get("tool_calls") else None
    text = dumps({"name": call["name"], "parameters": call["arguments"]}) if call else m["content"].strip()
    return text + "<|eot_id|>"


def _mistral3(m: Message) -> str:
    calls = [_function(c) for c in m.get("tool_calls", ())]
    return (f"[TOOL_CALLS] {dumps(calls)}" if calls else " " + m["content"].strip()) + "</s>"


def _glm4(m: Message) -> str:
    calls = [f"{c['function']['name']}\n{dumps(c['function']['arguments'])}" for c in m.get("tool_calls", ())]
    return "<|assistant|>".join(calls) + "<|observation|>" if calls else "\n" + m["content"] + "<|user|>"


def _granite(m: Message) -> str:
    calls = [_function(c) for c in m.get("tool_calls", ())]
    return ("<|tool_call|>" + dumps(calls) if calls else "") + m["content"] + "<|end_of_text|>"


def _harmony(m: Message) -> str:
    thought = m.get("reasoning_content", "")
    first = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    return f"{first}<|channel|>final<|message|>{m['content']}<|return|>"


_IM = ("<|im_start|>", "<|im_end|>")
_TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_DS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

FAMILIES = {
    "qwen2.5": Family(_QWEN25, (*_IM, "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>"),
                      lambda m: _qwen_calls(m) + "<|im_end|>", "nfc", added=_TOOL_TOKENS, tools=True),
    "qwen3": Family(_QWEN3, (*_IM, "<|endoftext|>"), ("<|im_end|>", "<|endoftext|>"), _qwen3, "nfc",
                    added=(*_TOOL_TOKENS, "<think>", "</think>"), tools=True, thoughts=True),
    "llama2": Family(_LLAMA2, ("<s>", "</s>"), ("</s>",), _plain(" </s>", str.strip, " "), "spm", bos="<s>"),
    "llama3": Family(_LLAMA3, ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                               "<|eot_id|>"), ("<|eot_id|>", "<|end_of_text|>"), _llama3, bos="<|begin_of_text|>",
                     tools=True, bare_calls=True),
    "mistral0.1": Family(_MISTRAL1, ("<s>", "</s>"), ("</s>",), _plain("</s>"), "spm", bos="<s>"),
    "mistral0.3": Family(_MISTRAL3, ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
                                     "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), ("</s>",), _mistral3,
                         "first", bos="<s>", tools=True, bare_calls=True),
    "gemma2": Family(_GEMMA, _GEMMA_TOKENS, ("<eos>", "<end_of_turn>"), _plain("<end_of_turn>", str.strip), "gemma",
                     bos="<bos>"),
    "gemma3": Family(_GEMMA3, _GEMMA_TOKENS, ("<eos>", "<end_of_turn>"), _plain("<end_of_turn>", str.strip), "gemma",
                     bos="<bos>"),
    "phi3": Family(_PHI3, ("<s>", "<|endoftext|>", "<|end|>", *_ROLES), ("<|endoftext|>", "<|end|>", "<|assistant|>"),
                   _plain("<|end|>"), "spm", bos="<s>", rstrip=True),
    "phi4": Family(_PHI4, (*_IM, "<|im_sep|>", "<|endoftext|>"), ("<|im_end|>",), _plain("<|im_end|>"), "joining"),
    "deepseek2": Family(_DEEPSEEK2, _DS[:2], _DS[1:2], _plain(_DS[1], before=" "), bos=_DS[0]),
    "deepseek3": Family(_DEEPSEEK3.replace("CONTENT", "m.content").replace("PROMPT", ""), _DS, _DS[1:2], _plain(_DS[1]),
                        bos=_DS[0]),
    "r1": Family(_DEEPSEEK3.replace("CONTENT", "m.content.split('</think>')[-1]").replace("PROMPT", "<think>\n"), _DS,
                 _DS[1:2], _plain(_DS[1]), bos=_DS[0], added=("<think>", "</think>"), usable=False),
    "glm4": Family(_GLM4, ("<|endoftext|>", "[gMASK]", "<sop>", *_ROLES, "<|observation|>"),
                   ("<|endoftext|>", "<|user|>", "<|observation|>"), _glm4, tools=True, bare_calls=True),
    "command-r": Family(_COMMAND_R, ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
                                     "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
                        ("<|END_OF_TURN_TOKEN|>",),
                        _plain("<|END_OF_TURN_TOKEN|>", str.strip), bos="<BOS_TOKEN>"),
    "granite3": Family(_GRANITE, ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
                       ("<|end_of_text|>",), _granite, bos="<|end_of_text|>", tools=True),
    "olmo2": Family(_OLMO2, ("<|endoftext|>",), ("<|endoftext|>",), _plain("<|endoftext|>"), "joining",
                    bos="<|endoftext|>"),
    "smollm3": Family(_SMOLLM3, (*_IM,), ("<|im_end|>",), _plain("<|im_end|>", lambda s: s.lstrip("\n")),
                      added=("<think>", "</think>")),
    "tagged": Family(_TAGGED, (*_IM,), ("<|im_end|>",), _plain("<|im_end|>"), "joining"),
    "zephyr": Family(_ZEPHYR, ("<s>", "</s>"), ("</s>",), _plain("</s>"), "spm", bos="<s>"),
    "falcon3": Family(_FALCON3, ("<|endoftext|>", *_ROLES), ("<|endoftext|>",), _plain("<|endoftext|>")),
    "ernie": Family(_ERNIE, ("<|begin_of_sentence|>", "<|end_of_sentence|>"), ("<|end_of_sentence|>",),
                    _plain("<|end_of_sentence|>"), "unigram", bos="<|begin_of_sentence|>"),
    "hunyuan": Family(_HUNYUAN, ("<｜hy_begin▁of▁sentence｜>", "<｜hy_User｜>", "<｜hy_Assistant｜>",
                                 "<｜hy_place▁holder▁no▁2｜>", "<｜hy_place▁holder▁no▁3｜>"),
                      ("<｜hy_place▁holder▁no▁2｜>",),
                      _plain("<｜hy_place▁holder▁no▁2｜>"), bos="<｜hy_begin▁of▁sentence｜>"),
    "yi": Family(_YI, (*_IM, "<|endoftext|>"), ("<|im_end|>",), _plain("<|im_end|>"), "spm"),
    "minicpm": Family(_MINICPM, ("<s>", "</s>"), ("</s>",), _plain("", str.strip), "spm", bos="<s>", usable=False),
    "gpt-oss": Family(_HARMONY, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
                      ("<|return|>", "<|call|>"), _harmony, thoughts=True),
}  # fmt: skip

"""Chat templates that a configuration names, where they are short enough to be written down."""

from __future__ import annotations

from llmtrain.features.migrate.draft import Draft

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_FAMILIES = {
    "llama3": "llama-3",
    "llama3_2_vision": "llama-3",
    "llama4": "llama-4",
    "mistral": "mistral",
    "gemma": "gemma",
    "gemma2": "gemma-2",
    "gemma3": "gemma-3",
    "phi": "phi",
    "phi_3": "phi-3",
    "phi_35": "phi-3.5",
    "qwen": "qwen",
    "qwen_25": "qwen2.5",
    "qwen3": "qwen3",
    "qwen3_nothink": "qwen3",
    "qwen3_5": "qwen3.5",
    "deepseek": "deepseek",
    "deepseek_v2": "deepseek-v2",
    "deepseek_v3": "deepseek-v3",
    "deepseek3": "deepseek",
    "cohere": "command",
    "glm4": "glm-4",
    "jamba": "jamba",
    "falcon_h1": "falcon-h1",
    "exaone": "exaone",
    "intern2": "internlm2",
}
"""Name of a template -> what the name of a model has whose tokenizer brings that template."""


def named(option: str, name: str, model: str, draft: Draft) -> None:
    """Answer a template's name for a model."""
    if name == "tokenizer_default" or name.startswith("tokenizer_default_fallback"):
        return
    if name == "chatml":
        draft.files["chatml.jinja"] = CHATML
        draft.flag("--chat-template", "chatml.jinja")
        draft.flag("--stop-token", "<|im_end|>")
        return
    family = next((part for start, part in sorted(_FAMILIES.items(), reverse=True) if name.startswith(start)), None)
    if family and _plain(family) in _plain(model):
        draft.remark(option, name, f"the tokenizer of {model} brings this template; `llmtrain data show` prints it")
    else:
        draft.change(
            option,
            name,
            f"is it the template of {model}'s tokenizer? If so remove this line, if not give "
            "`llmtrain prepare` a --chat-template FILE",
        )


def _plain(text: str) -> str:
    return text.lower().replace("-", "").replace("_", "").replace(".", "")

"""`llmtrain chat RUN_OR_FOLDER`: a conversation with a trained model, by its tokenizer's own chat template.

Each line of standard input is a turn; Ctrl-D ends.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.base import untrusted
from llmtrain.base.errors import ModelError, UserError
from llmtrain.checkpoint.hf.inference import Answerer, Sampling, streamer
from llmtrain.checkpoint.hf.usable import usable_folder
from llmtrain.commands import completion
from llmtrain.commands.arguments import Parser, add_options
from llmtrain.data.chat.conversation import Conversation as TemplateInput
from llmtrain.data.chat.conversation import template_variables
from llmtrain.data.chat.rendering import RenderError, Template
from llmtrain.data.row import RefusedError

_USUAL = Sampling(max_tokens=1024)


@dataclass
class Conversation:
    """Messages so far, and the model that answers them."""

    loaded: Answerer
    sampling: Sampling
    system: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    """chat_template_kwargs."""
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises ModelError: there is no chat template, or it takes no system message."""
        if not self.loaded.tokenizer.chat_template:
            raise ModelError(
                f"{self.loaded.folder}: its tokenizer has no chat template, which says how a conversation is written. "
                "Give one with --chat-template FILE, or continue a text with `llmtrain generate`."
            )
        self.template = Template(self.loaded.tokenizer, variables=self.variables)
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._prompt([*self.messages, {"role": "user", "content": "x"}])

    def ask(self, text: str) -> None:
        """Print the answer to `text` as it is generated, and keep both. Raises ModelError."""
        self.messages.append({"role": "user", "content": text})
        self.messages.append({"role": "assistant", "content": self._answer(self._prompt(self.messages))})

    def _prompt(self, talk: list[dict[str, str]]) -> list[int]:
        """Return the ids of the messages and the generation prompt, like a server. Raises ModelError."""
        conversation = TemplateInput(messages=list(talk), tools=None, turns=[])
        try:
            return self.template.ids(self.template.fitted(conversation), len(talk), prompt=True)
        except RenderError as error:
            raise ModelError(f"{self.loaded.folder}: its chat template fails: {error}") from error

    def _answer(self, prompt: list[int]) -> str:
        """Return the answer's text without special tokens."""
        import torch

        loaded = self.loaded
        room = loaded.room(len(prompt), self.sampling.max_tokens)
        ids = torch.tensor([prompt], device=loaded.model.device)
        out = loaded.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=room,
            eos_token_id=list(loaded.ends) or None,
            # One sequence needs no padding; without an id transformers warns that it takes an end.
            pad_token_id=next(iter(loaded.ends), None) if (pad := loaded.tokenizer.pad_token_id) is None else pad,
            streamer=streamer(loaded.tokenizer, skip_prompt=True),
            **self.sampling.arguments(),
        )
        new = out[0, len(prompt) :].tolist()
        if not new or new[-1] not in loaded.ends:
            limit = f"--max-tokens {room}" if room == self.sampling.max_tokens else "the model has no more positions"
            print(f"[cut after {len(new)} tokens: {limit}]", file=sys.stderr, flush=True)
        return str(loaded.tokenizer.decode(new, skip_special_tokens=True))


def _template(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text()
    except (OSError, ValueError) as error:
        raise UserError(f"--chat-template {file}: cannot be read ({error})") from error


def _variables(text: str | None) -> dict[str, Any]:
    try:
        return {} if text is None else template_variables(untrusted.loads(text), "it")
    except (ValueError, RefusedError) as error:
        raise UserError(f"--chat-template-kwargs {text}: {error}; write a JSON object") from error


def main(argv: list[str]) -> int:
    """Raises CheckpointError, ModelError."""
    parser = Parser(
        prog="llmtrain chat",
        description="Talk with a trained model: each line is a turn. Of a run, its newest state is used.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, _USUAL)
    option = parser.add_argument
    option("--system", default=argparse.SUPPRESS, metavar="TEXT", help="the system message")
    option("--no-adapter", action="store_true", help="answer without the adapter")
    meaning = "a Jinja template instead of the tokenizer's own"
    option("--chat-template", type=Path, default=argparse.SUPPRESS, metavar="FILE", help=meaning)
    help_text = "variables of the template, an object of JSON, as for `llmtrain prepare`"
    option("--chat-template-kwargs", default=argparse.SUPPRESS, metavar="JSON", help=help_text)
    completion.offer(parser)
    args = vars(parser.parse_args(argv))
    path, system, off = args.pop("folder"), args.pop("system", None), args.pop("no_adapter")
    template = _template(args.pop("chat_template", None))
    variables = _variables(args.pop("chat_template_kwargs", None))
    import torch

    with usable_folder(path, "chat") as folder:
        loaded = Answerer.load(folder)
        if off and not loaded.adapted:
            raise ModelError(f"--no-adapter: {path} has no adapter, it is a complete model. Leave it out.")
        if template is not None:
            loaded.tokenizer.chat_template = template
        talk = Conversation(loaded, Sampling(**args), system, variables)
        if off:
            loaded.model.disable_adapters()
        torch.manual_seed(args["seed"])
        if sys.stdin.isatty():
            import readline  # noqa: F401  # input() edits lines by it
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "")
            except EOFError:
                return 0
            if line.strip():
                talk.ask(line)

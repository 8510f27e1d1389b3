"""`llmtrain chat RUN_OR_FOLDER`: a conversation with a trained model, by its tokenizer's own chat template.

In a terminal, Ctrl-C stops an answer and Ctrl-D ends; in a pipe, each line is a turn.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmtrain.base import log, untrusted
from llmtrain.base.errors import ModelError, UserError
from llmtrain.checkpoint.hf.inference import Answerer, Sampling, add_options, usable_folder
from llmtrain.commands import completion
from llmtrain.data.chat.conversation import Conversation as TemplateInput
from llmtrain.data.chat.conversation import RefusedError, template_variables
from llmtrain.data.chat.rendering import RenderError, Template

_USUAL = Sampling(max_tokens=1024)
_COMMANDS = {
    "clear": "forget the conversation; the system message stays",
    "adapter": "answer with the adapter, or without it: switches",
    "help": "these commands",
    "exit": "end; Ctrl-D too",
}
_COMMAND = re.compile(r"/([a-z]+)\s*")


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
        self.clear()
        self._prompt([*self.messages, {"role": "user", "content": "x"}])

    def clear(self) -> None:
        """Forget the conversation except the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, text: str) -> None:
        """Print the answer to `text` as it is generated, and keep both. Raises ModelError, keeping neither."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = self._answer(self._prompt(asked))
        self.messages = [*asked, {"role": "assistant", "content": answer}] if answer else self.messages

    def _prompt(self, talk: list[dict[str, str]]) -> list[int]:
        """Return the ids of the messages and the generation prompt, like a server. Raises ModelError."""
        conversation = TemplateInput(messages=list(talk), tools=None, turns=[])
        try:
            return self.template.ids(self.template.fitted(conversation), len(talk), prompt=True)
        except RenderError as error:
            raise ModelError(f"{self.loaded.folder}: its chat template fails: {error}") from error

    def _answer(self, prompt: list[int]) -> str:
        """Return the answer's text without special tokens, incomplete if it was stopped."""
        import torch
        from transformers import StoppingCriteriaList

        loaded = self.loaded
        room = loaded.room(len(prompt), self.sampling.max_tokens)
        ids = torch.tensor([prompt], device=loaded.model.device)
        with _stoppable() as stopped:
            out = loaded.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=room,
                eos_token_id=list(loaded.ends) or None,
                # One sequence needs no padding; without an id transformers warns that it takes an end.
                pad_token_id=next(iter(loaded.ends), None) if (pad := loaded.tokenizer.pad_token_id) is None else pad,
                streamer=_streamer(loaded.tokenizer),
                stopping_criteria=StoppingCriteriaList([lambda ids, _: stopped.reached(ids)]),
                **self.sampling.arguments(),
            )
        new = out[0, len(prompt) :].tolist()
        if not new or new[-1] not in loaded.ends:
            limit = f"--max-tokens {room}" if room == self.sampling.max_tokens else "the model has no more positions"
            _note("stopped" if stopped.asked else f"cut after {len(new)} tokens: {limit}")
        return str(loaded.tokenizer.decode(new, skip_special_tokens=True))


class _Stopped:
    """Records a Ctrl-C during an answer."""

    asked = False

    def __call__(self, signum: int, frame: object) -> None:
        if self.asked:  # a token may take long
            raise KeyboardInterrupt
        self.asked = True

    def reached(self, ids: Any) -> Any:
        """Answer transformers: bool [batch]."""
        return ids.new_full((len(ids),), self.asked).bool()


@contextmanager
def _stoppable() -> Iterator[_Stopped]:
    stopped = _Stopped()
    before = signal.signal(signal.SIGINT, stopped)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _streamer(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    class Printer(TextStreamer):
        """Prints an answer's text without control characters for a terminal."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(untrusted.shown(text, lines=True), end="\n" if stream_end else "", flush=True)

    return Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _note(text: str) -> None:
    print(f"[{text}]", file=sys.stderr, flush=True)


# --- the terminal ---------------------------------------------------------------------------------


def _turns(interactive: bool) -> Iterator[str]:
    if not interactive:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  # input() edits lines by it

    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            _note("/exit or Ctrl-D ends")


def _command(name: str, talk: Conversation, adapter: bool) -> bool:
    """Returns True if the adapter is on."""
    if name == "clear":
        talk.clear()
        _note("cleared")
    elif name == "adapter" and talk.loaded.adapted:
        adapter = not adapter
        talk.loaded.switch(adapter)
        _note(f"adapter {'on' if adapter else 'off'}")
    elif name == "adapter":
        _note(f"{talk.loaded.folder} has no adapter: it is a complete model")
    else:
        if name != "help":
            _note(f"there is no command /{name}")
        for known, what in _COMMANDS.items():
            print(f"/{known:<8} {what}", file=sys.stderr)
    return adapter


def converse(talk: Conversation, *, adapter: bool, interactive: bool) -> None:
    """Answer line by line until the input ends or says /exit. Raises ModelError in a pipe; a terminal shows the error
    and the conversation continues."""
    for line in _turns(interactive):
        if (command := _COMMAND.fullmatch(line)) is not None:
            if command[1] == "exit":
                return
            adapter = _command(command[1], talk, adapter)
        elif line.strip():
            try:
                talk.ask(line)
            except KeyboardInterrupt:
                print()
                _note("stopped; neither the question nor the answer is kept")
            except ModelError as error:
                if not interactive:
                    raise
                log.warn(f"{error} /clear forgets the conversation.")


def _template(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text()
    except (OSError, ValueError) as error:
        raise UserError(f"--chat-template {file}: cannot be read ({error})") from error


def _variables(given: str | None) -> dict[str, Any]:
    try:
        return {} if given is None else template_variables(untrusted.loads(given), "it")
    except (ValueError, RefusedError) as error:
        raise UserError(f"--chat-template-kwargs {given}: {error}; write an object of JSON") from error


def main(argv: list[str]) -> int:
    """Raises CheckpointError, ModelError."""
    parser = argparse.ArgumentParser(
        prog="llmtrain chat",
        description="Talk with a trained model. Of a run, its newest state is used. In a pipe, each line is a turn.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, _USUAL)
    option = parser.add_argument
    option("--system", default=argparse.SUPPRESS, metavar="TEXT", help="the system message")
    option("--no-adapter", action="store_true", help="begin without the adapter; /adapter switches")
    own = "a Jinja template instead of the tokenizer's own"
    option("--chat-template", type=Path, default=argparse.SUPPRESS, metavar="FILE", help=own)
    help_text = "variables of the template, an object of JSON, as for `llmtrain prepare`"
    option("--chat-template-kwargs", default=argparse.SUPPRESS, metavar="JSON", help=help_text)
    completion.offer(parser)
    args = vars(parser.parse_args(argv))
    path, system, off = args.pop("folder"), args.pop("system", None), args.pop("no_adapter")
    template, interactive = _template(args.pop("chat_template", None)), sys.stdin.isatty()
    variables = _variables(args.pop("chat_template_kwargs", None))
    import torch

    with usable_folder(path, "chat") as folder:
        loaded = Answerer.load(folder)
        if off and not loaded.adapted:
            raise ModelError(f"--no-adapter: {path} has no adapter, it is a complete model. Leave it out.")
        if template is not None:
            loaded.tokenizer.chat_template = template
        talk = Conversation(loaded, Sampling(**args), system, variables)
        if loaded.adapted:
            loaded.switch(not off)
            _note(f"adapter {'off' if off else 'on'}")
        if interactive:
            _note("/help lists the commands")
        torch.manual_seed(args["seed"])
        converse(talk, adapter=loaded.adapted and not off, interactive=interactive)
    return 0

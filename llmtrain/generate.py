"""`llmtrain generate RUN_OR_FOLDER --prompt ...`: a continuation by the trained model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from llmtrain import completion
from llmtrain.errors import ModelError
from llmtrain.inference import Answerer, Sampling, add_options, usable_folder


def generate(folder: Path, prompt: str, sampling: Sampling, *, device: Any = "auto", stream: bool = False) -> str:
    """The prompt and its continuation, without special tokens.

    Args:
        folder: a Hugging Face folder with a tokenizer.
        device: where the model lies. `auto` spreads it over all accelerators, and to the host what does not fit.
        stream: print the text as it is generated.

    Raises:
        ModelError: the folder has no usable tokenizer, or the prompt fills the model's positions.
    """
    import torch
    from transformers import TextStreamer

    loaded = Answerer.load(folder, device)
    model, tokenizer = loaded.model, loaded.tokenizer
    begin = prompt or tokenizer.bos_token or tokenizer.eos_token
    if not begin:
        raise ModelError(f"{folder}: its tokenizer names no token that begins a text. Give a --prompt.")
    tokens = tokenizer(begin, return_tensors="pt").to(model.device)
    torch.manual_seed(sampling.seed)
    out = model.generate(
        input_ids=tokens["input_ids"],
        attention_mask=tokens["attention_mask"],
        max_new_tokens=loaded.room(tokens["input_ids"].shape[1], sampling.max_tokens),
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if stream else None,
        **sampling.arguments(),
    )
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def main(argv: list[str]) -> int:
    """Returns the exit code; raises CheckpointError, ModelError."""
    parser = argparse.ArgumentParser(
        prog="llmtrain generate",
        description="Continue a prompt with a trained model. Of a run, its newest state is used.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, Sampling())
    parser.add_argument(
        "--prompt", default=argparse.SUPPRESS, help="text to continue (default: none, the model begins)"
    )
    completion.offer(parser)
    args = vars(parser.parse_args(argv))
    path, prompt = args.pop("folder"), args.pop("prompt", "")
    with usable_folder(path, "generate") as folder:
        generate(folder, prompt, Sampling(**args), stream=True)
    return 0

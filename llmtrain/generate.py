"""`llmtrain generate RUN_OR_FOLDER --prompt ...`: a continuation by the trained model."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from llmtrain.checkpoint.format import complete_checkpoints
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.errors import CheckpointError


def generate(folder: Path, prompt: str, *, max_tokens: int, temperature: float, seed: int) -> str:
    """The prompt and at most `max_tokens` more tokens. `folder`: a Hugging Face folder; temperature 0 is greedy."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).eval()
    tokens = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt").to(device)
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 50} if temperature > 0 else {"do_sample": False}
    out = model.generate(
        input_ids=tokens["input_ids"],
        attention_mask=tokens["attention_mask"],
        max_new_tokens=max_tokens,
        **sampling,
    )
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def _hf_folder(path: Path, scratch: Path) -> Path:
    """The Hugging Face folder of a run, a checkpoint or a folder that is one already."""
    if (path / "config.json").is_file():
        return path
    if (path / "export" / "config.json").is_file():
        return path / "export"
    found = complete_checkpoints(path / "checkpoints") or complete_checkpoints(path.parent)
    checkpoint = path if path in found else next(iter(found), None)
    if checkpoint is None:
        raise CheckpointError(
            f"{path} is neither a run with a checkpoint nor a Hugging Face folder. Give one of the two."
        )
    export_hf(checkpoint, scratch / "export", check="none")
    return scratch / "export"


def main(argv: list[str]) -> int:
    """Returns the exit code; raises CheckpointError."""
    parser = argparse.ArgumentParser(prog="llmtrain generate", description="Continue a prompt with a trained model.")
    parser.add_argument(
        "folder", type=Path, metavar="RUN_OR_FOLDER", help="run folder, checkpoint or Hugging Face folder"
    )
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate at most")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as scratch:
        folder = _hf_folder(args.folder, Path(scratch))
        print(generate(folder, args.prompt, max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed))
    return 0

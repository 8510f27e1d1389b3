"""`llmtrain generate RUN_OR_FOLDER --prompt ...`: a continuation by the trained model."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain import completion, foreign, log
from llmtrain.checkpoint.format import MANIFEST, complete_checkpoints, hash_file
from llmtrain.checkpoint.hf.beside import MARK
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.checkpoint.listing import find_checkpoints
from llmtrain.config.run import ModelConfig
from llmtrain.data.tokenize import refuse_code
from llmtrain.errors import CheckpointError, ModelError
from llmtrain.hub.model import model_folder
from llmtrain.models.adapter import CONFIG, PREFIX, WEIGHTS, need_peft
from llmtrain.models.build import load_config


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    max_tokens: int = 128
    """Tokens to generate at most."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int = 50
    """Choose among so many of the likeliest tokens; 0: among all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that have this probability together; 1: among all."""
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Those of transformers' `generate`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


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
    from transformers import AutoModelForCausalLM, TextStreamer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    base = _base(folder)
    load_config(ModelConfig(pretrained=str(base)))  # refuses a folder that would have code loaded
    tokenizer = _tokenizer(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False, device_map=device)
    if base != folder:  # transformers by itself would take the base's newest commit, not the adapter's
        if rows := _rows(folder, model):
            model.resize_token_embeddings(rows, mean_resizing=False)  # the adapter has all of them
        model.load_adapter(str(folder))
    begin = prompt or tokenizer.bos_token or tokenizer.eos_token
    if not begin:
        raise ModelError(f"{folder}: its tokenizer names no token that begins a text. Give a --prompt.")
    tokens = tokenizer(begin, return_tensors="pt").to(model.device)
    torch.manual_seed(sampling.seed)
    out = model.eval().generate(
        input_ids=tokens["input_ids"],
        attention_mask=tokens["attention_mask"],
        max_new_tokens=_room(model, tokens["input_ids"].shape[1], sampling.max_tokens),
        streamer=TextStreamer(tokenizer, skip_special_tokens=True) if stream else None,
        **sampling.arguments(),
    )
    return str(tokenizer.decode(out[0], skip_special_tokens=True))


def _base(folder: Path) -> Path:
    """The folder of the model itself, which an adapter's names. Raises ModelError, or ConfigError: no peft."""
    if not (folder / CONFIG).is_file():
        return folder
    need_peft(str(folder))
    try:
        config = foreign.loads((folder / CONFIG).read_bytes())
        return model_folder(config["base_model_name_or_path"], config.get("revision"), asked_by=str(folder / CONFIG))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG} names no model that the adapter belongs to ({error!r}).") from error


def _rows(folder: Path, model: Any) -> int:
    """How many tokens the embedding or the head has that an adapter's folder holds; 0: it holds none."""
    from safetensors import safe_open

    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [f"{PREFIX}{path}.weight" for path, module in model.named_modules() if module in ends]
    with safe_open(folder / WEIGHTS, "pt") as file:
        held = [name for name in names if name in set(file.keys())]
        return int(file.get_slice(held[0]).get_shape()[0]) if held else 0


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", CONFIG))


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    refuse_code(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, TypeError: whatever the files of a folder make of it
        raise ModelError(
            f"{folder}: no tokenizer that transformers can load ({str(error).splitlines()[0]}). Put the files of the "
            "tokenizer beside config.json; a run's is in the folder of its data, tokenizer/."
        ) from error


def _room(model: Any, prompt_tokens: int, wanted: int) -> int:
    """How many tokens to generate: no more than the model has positions for. Raises ModelError when there are none."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or prompt_tokens + wanted <= positions:
        return wanted
    if prompt_tokens >= positions:
        raise ModelError(f"the prompt has {prompt_tokens} tokens, the model {positions} positions. Shorten the prompt.")
    log.warn(f"at most {positions - prompt_tokens} tokens follow: the model has {positions} positions")
    return positions - prompt_tokens


def _hf_folder(path: Path, scratch: Path) -> Path:
    """The Hugging Face folder to use: `path` itself, or the newest state of a run, exported if need be."""
    if _is_model(path):
        return path
    export = path / "export"
    found = complete_checkpoints(path / "checkpoints")
    exported = _mark(export)
    # By its manifest, not its step: a run that was started over reaches the same step with other weights.
    if exported is not None and (not found or exported.get("manifest") == hash_file(found[0] / MANIFEST)):
        print(f"model: {export}, of step {exported.get('step')}", file=sys.stderr)
        return export
    try:
        newest = find_checkpoints(path)[0]
    except CheckpointError as error:
        raise CheckpointError(f"{error} A Hugging Face folder, with a config.json, is right too.") from error
    older = "" if exported is None else f"; {export} is of step {exported.get('step')}"
    print(f"model: {newest}{older}", file=sys.stderr)
    export_hf(newest, scratch / "export", check="none")
    return scratch / "export"


def _mark(export: Path) -> dict[str, Any] | None:
    """What an export says of its checkpoint; None when there is no export."""
    if not _is_model(export):
        return None
    try:
        mark = foreign.loads((export / MARK).read_bytes())
    except (OSError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}


def _number(kind: Callable[[str], Any], rule: str, right: Callable[[Any], bool]) -> Callable[[str], Any]:
    """An argparse type: a number for which `right` holds, which `rule` says in words."""

    def read(text: str) -> Any:
        value = kind(text)
        if not right(value):
            raise argparse.ArgumentTypeError(f"{text}: must be {rule}")
        return value

    read.__name__ = kind.__name__  # argparse names it when `text` is no number
    return read


def main(argv: list[str]) -> int:
    """Returns the exit code; raises CheckpointError, ModelError."""
    usual = Sampling()
    parser = argparse.ArgumentParser(
        prog="llmtrain generate",
        description="Continue a prompt with a trained model. Of a run, its newest state is used.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="RUN_OR_FOLDER",
        help="run folder, checkpoint, Hugging Face folder, or ORG/NAME on the Hub",
    )
    option = parser.add_argument
    option("--prompt", default=argparse.SUPPRESS, help="text to continue (default: none, the model begins)")
    option(
        "--max-tokens",
        type=_number(int, "at least 1", lambda n: n >= 1),
        default=usual.max_tokens,
        help="tokens to generate at most",
    )
    option(
        "--temperature",
        type=_number(float, "at least 0", lambda t: 0 <= t < math.inf),
        default=usual.temperature,
        help="0: the likeliest token each time",
    )
    option(
        "--top-k",
        type=_number(int, "at least 0", lambda n: n >= 0),
        default=usual.top_k,
        help="among so many of the likeliest tokens; 0: all",
    )
    option(
        "--top-p",
        type=_number(float, "above 0 and at most 1", lambda p: 0 < p <= 1),
        default=usual.top_p,
        help="among the likeliest tokens that have this probability together",
    )
    option("--seed", type=int, default=usual.seed, help="seed of the sampling")
    completion.offer(parser)
    args = vars(parser.parse_args(argv))
    path, prompt = args.pop("folder"), args.pop("prompt", "")
    with tempfile.TemporaryDirectory(prefix="llmtrain-") as scratch:
        path = model_folder(str(path), asked_by="generate")
        generate(_hf_folder(path, Path(scratch)), prompt, Sampling(**args), stream=True)
    return 0

"""Loads a trained model with its tokenizer from a folder, and generates text."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.base import log, untrusted
from llmtrain.base.errors import ModelError, UserError
from llmtrain.checkpoint.hf.exporting import layout_of
from llmtrain.checkpoint.hf.folder_files import MARK
from llmtrain.config.run import ModelConfig
from llmtrain.data.tokenizer_folder import refuse_unsafe
from llmtrain.models.parameters import CONFIG, MAGNITUDE, PREFIX, WEIGHTS
from llmtrain.models.score import gives_scores
from llmtrain.models.skeleton import TooLargeError, load_config, quietly
from llmtrain.models.source import SafetensorsSource, refuse_escape, refuse_other_shapes
from llmtrain.storage.tensorfile import TensorFile, TensorFileError

_ENDS = ("generation_config.json", "config.json")
"""Files that may name the tokens at which generation stops."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    max_tokens: int = 128
    """Largest number of tokens to generate."""
    temperature: float = 0.8
    """0 takes the likeliest token each time."""
    top_k: int = 50
    """Number of likeliest tokens to choose from; 0: all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens up to this total probability; 1: all."""
    seed: int = 0

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for transformers' `generate`."""
        chosen: dict[str, Any] = {"do_sample": self.temperature > 0, "logits_processor": [_refuse_nan]}
        if self.temperature > 0:
            chosen |= {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        return chosen


def _refuse_nan(ids: Any, scores: Any) -> Any:
    """Return the scores [batch, vocabulary]; raise ModelError if one is NaN."""
    if scores.isnan().any():
        raise ModelError(
            "the model's scores are NaN: its weights are damaged (see `llmtrain checkpoint verify`), or training has "
            "diverged. Name another checkpoint."
        )
    return scores


@dataclass(frozen=True)
class Answerer:
    model: Any
    """A transformers model in evaluation mode."""
    tokenizer: Any
    folder: Path
    adapted: bool
    """True if an adapter is active on the model's own weights."""
    ends: tuple[int, ...]
    """Ids at which generation stops: the tokenizer's eos_token, and those that the folder's files name."""

    @classmethod
    def load(cls, folder: Path, device: Any = "auto") -> Answerer:
        """`folder`: a Hugging Face or PEFT folder. `device`: as for `load` in usable.py. Raises ModelError if there is
        no usable tokenizer or base, or the model is a reward model; ConfigError if peft is not installed."""
        base = _base(folder)
        config = load_config(ModelConfig(pretrained=str(base)))  # refuses a folder that would run code
        peft = untrusted.loads((folder / CONFIG).read_bytes()) if (folder / CONFIG).is_file() else {}
        if gives_scores(config) or peft.get("task_type") == "SEQ_CLS":
            raise ModelError(f"{folder}: a reward model gives scores and no text. Name the folder of a language model.")
        if base != folder:
            from llmtrain.checkpoint.meaning import refuse_other_base

            refuse_other_base(folder / MARK, config)
        # peft's own save_pretrained writes none: the base has it
        tokenizer = _tokenizer(folder if base == folder or any(folder.glob("tokenizer*.json")) else base)
        _check_weights(base, config)
        with _loading(base):
            model = _model(base, device)
        if base != folder:  # transformers by itself would take the base's newest commit, not the adapter's
            rows = _rows(folder, model)
            with _loading(folder), quietly():
                if rows:
                    model.resize_token_embeddings(rows, mean_resizing=False)  # the adapter's folder has all rows
                loaded = model.load_adapter(str(folder))
            _load_magnitudes(folder, model)
            _refuse_lost(folder, model, loaded.unexpected_keys | loaded.missing_keys)
        return cls(model.eval(), tokenizer, folder, base != folder, _ends(base, folder, tokenizer))

    def room(self, prompt_tokens: int, wanted: int) -> int:
        """Return how many tokens, at most `wanted`, fit the model's context. Raises ModelError if none does."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(positions, int) or prompt_tokens + wanted <= positions:
            return wanted
        if prompt_tokens >= positions:
            raise ModelError(
                f"the prompt has {prompt_tokens} tokens, and the model only {positions} positions. Shorten the prompt."
            )
        log.warn(f"generating at most {positions - prompt_tokens} tokens: the model has {positions} positions")
        return positions - prompt_tokens


def _base(folder: Path) -> Path:
    """Return `folder`, or the base's folder if it holds an adapter. Raises ModelError; ConfigError without peft."""
    if not (folder / CONFIG).is_file():
        return folder
    from llmtrain.models.adapter import need_peft
    from llmtrain.storage.hub import model_folder

    need_peft(str(folder))
    try:
        config = untrusted.loads((folder / CONFIG).read_bytes())
        return model_folder(config["base_model_name_or_path"], config.get("revision"), asked_by=str(folder / CONFIG))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG} does not name the adapter's base model ({error!r}).") from error


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """A context that turns an error of transformers or peft about a folder's files into a ModelError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        from llmtrain.base.rank.device_faults import device_fault

        if device_fault(str(error)) is not None:  # not a fault of the folder
            raise
        raise ModelError(f"{folder}: transformers cannot load it: {untrusted.first_line(error)}") from error


def _check_weights(folder: Path, config: Any) -> None:
    """Check the weights as training does: transformers would unpickle them, follow an index out of the folder, and draw
    missing tensors at random. Raises ModelError."""
    plain = not getattr(config, "quantization_config", None)  # quantized tensors have other names and shapes
    layout = None
    if plain:
        try:
            layout = layout_of(ModelConfig(pretrained=str(folder), attention="eager"), trust_remote_code=False)
        except TooLargeError:
            raise
        except ModelError:  # an unsupported class (docs/developers/families.md) loads without the check
            pass
    with closing(SafetensorsSource(folder, layout, asked_by=str(folder))) as source:
        if layout is not None:
            refuse_other_shapes(source, layout.shapes, surplus_too=True)


def _model(folder: Path, device: Any) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, use_safetensors=True, device_map=device
    )


def _rows(folder: Path, model: Any) -> int:
    """Return the rows of the embedding or head in an adapter's folder; 0: it holds neither. Raises ModelError."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [f"{PREFIX}{path}.weight" for path, module in model.named_modules() if module in ends]
    try:
        with TensorFile(refuse_escape(folder, folder / WEIGHTS)) as file:
            present = [name for name in names if name in file.entries]
            return file.entries[present[0]].shape[0] if present else 0
    except TensorFileError as error:
        raise ModelError(f"{folder}: {error} Only safetensors are read.") from error


def _load_magnitudes(folder: Path, model: Any) -> None:
    """Load DoRA's magnitudes, which have another name in transformers 5 than in peft."""
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  (not a map)
            path = name.removeprefix(PREFIX).removesuffix(".weight")
            if path.endswith(MAGNITUDE):
                length = model.get_submodule(f"{path}.default").weight
                length.data.copy_(file.get_tensor(name).view_as(length))


def _refuse_lost(folder: Path, model: Any, reported: Collection[str]) -> None:
    """Raise ModelError if a tensor in the adapter's folder has no place in the model, or a place has got no tensor.
    `reported`: names that transformers did not match. Some of these are right after all: peft may write a tensor under
    two names, and `_load_magnitudes` loads others. They are recognised by the values in the model."""
    from safetensors.torch import load_file

    from llmtrain.models.adapter import plain_name
    from llmtrain.models.wrapped_names import strange_part

    if not reported:
        return
    saved: dict[str, list[Any]] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        if ".original_module." not in name:
            saved.setdefault(plain_name(name.removeprefix(PREFIX)), []).append(tensor)
    state = model.state_dict()
    places: dict[str, list[Any]] = {}
    for name, tensor in state.items():
        places.setdefault(plain_name(name), []).append(tensor)
    # Tied places share one tensor, which peft saves once; peft never saves AdaLoRA's ranknum.
    filled = {tensor.data_ptr() for name, tensor in state.items() if plain_name(name) in saved} - {0}
    loaded = {name for name in state if state[name].data_ptr() in filled or name.endswith(".ranknum")}
    reported = [name for name in reported if name not in loaded]

    def there(tensor: Any, place: Any) -> bool:
        return place.shape == tensor.shape and bool((place.cpu() == tensor.to(place.dtype)).all())

    lost = set()
    for name in map(plain_name, reported):
        tensors = saved.get(name, [])
        if not tensors or not all(any(there(tensor, place) for place in places.get(name, ())) for tensor in tensors):
            lost.add(name)
    unset, odd = sorted(lost & places.keys()), sorted(lost - places.keys())
    if lost:
        groups = {"of its tensors have no place in the model": odd, "places of the adapter get no tensor": unset}
        faults = [f"{len(names)} {what}, first {', '.join(names[:2])}" for what, names in groups.items() if names]
        hint = strange_part(odd, unset) or f" Does {CONFIG} name the base that the adapter was made for?"
        raise ModelError(f"{folder / WEIGHTS} does not fit: {'; '.join(faults)}.{hint}")


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    refuse_unsafe(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # OSError, ValueError, TypeError: any error about a folder's files
        raise ModelError(
            f"{folder}: transformers finds no tokenizer there ({untrusted.first_line(error)}). Put the files of the "
            "tokenizer next to config.json; a run's is in the folder of its data, tokenizer/."
        ) from error


def _ends(base: Path, folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids at which generation stops. Unreadable files are skipped: transformers has read what it needs."""
    ids = [tokenizer.eos_token_id]
    for path in (place / name for place in dict.fromkeys((folder, base)) for name in _ENDS):
        try:
            named = untrusted.loads(path.read_bytes(), infinite=True).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        ids += named if isinstance(named, list) else [named]
    return tuple(dict.fromkeys(number for number in ids if type(number) is int))


# --- the options ----------------------------------------------------------------------------------


def streamer(tokenizer: Any, *, skip_prompt: bool = False) -> Any:
    """Return a TextStreamer that prints text while it is generated, without special tokens and control characters."""
    from transformers import TextStreamer

    class Printer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(untrusted.shown(text, lines=True), end="\n" if stream_end else "", flush=True)

    return Printer(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)


def generate(folder: Path, prompt: str, sampling: Sampling, *, device: Any = "auto", stream: bool = False) -> str:
    """Return the prompt and its continuation, without special tokens. `stream`: print the text while it is generated.
    Raises ModelError: when the folder has no usable tokenizer, or the prompt fills the model's context."""
    import torch

    loaded = Answerer.load(folder, device)
    model, tokenizer = loaded.model, loaded.tokenizer
    if not (begin := prompt or tokenizer.bos_token or tokenizer.eos_token):
        raise ModelError(f"{folder}: its tokenizer names no token that begins a text. Give a --prompt.")
    # Without a prompt the text begins with the tokenizer's first token, which must not be added twice.
    tokens = tokenizer(begin, return_tensors="pt", add_special_tokens=bool(prompt)).to(model.device)
    torch.manual_seed(sampling.seed)
    out = model.generate(
        input_ids=tokens["input_ids"],
        attention_mask=tokens["attention_mask"],
        max_new_tokens=loaded.room(tokens["input_ids"].shape[1], sampling.max_tokens),
        streamer=streamer(tokenizer) if stream else None,
        **sampling.arguments(),
    )
    return str(tokenizer.decode(out[0], skip_special_tokens=True))

"""Makes a small copy of a model.

The copy has a transformers config with the same structure and tiny sizes. It keeps ties, biases, norms, activation,
kinds of layers, kind and share of rotary positions, heads per key/value head, whether heads fill the hidden size,
expert layers, caps and scales. It has fewer layers, heads, experts, tokens and positions, and smaller widths.
"""

from __future__ import annotations

import copy
import itertools
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.base.errors import ModelError
from llmtrain.models.parameters import freeze
from llmtrain.models.transformers_private import build_with

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_WIDTH = re.compile(r"(_size|_dim|_inner|_width|_rank|^d_ff)$")
_NO_WIDTH = re.compile(r"vocab|window|chunk|kernel|group|head_dim|position|batch|patch|image|state")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_WINDOWS = ("sliding_window", "window_size")
_STATE_HEADS = (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim"))
"""Fields for number and size of a state-space layer's heads, whose product is mamba_expand times the hidden size."""
_VOCABULARY_UNIT = 64


def shrunk_config(
    config: PreTrainedConfig,
    *,
    layers: int = 4,
    kv_heads: int = 4,
    experts: int = 4,
    vocabulary: int = 512,
    positions: int = 64,
) -> PreTrainedConfig:
    """Return a config of the same family and structure with about these sizes, or the model's if smaller. One layer of
    each kind stays; `kv_heads` and `experts` divide the model's numbers; the vocabulary keeps its remainder modulo 64.
    Raises ModelError if transformers refuses the small config."""
    fields = copy.deepcopy(config.to_dict())
    size_of = _Sizes(config, fields)
    rotary_dim = _shrink_heads(size_of, fields, kv_heads)
    _shrink_layers(size_of, fields, layers)
    _shrink_experts(size_of, fields, experts)
    _shrink_vocabulary(size_of, fields, vocabulary)
    _shrink_positions(size_of, fields, positions, rotary_dim)
    try:
        return type(config).from_dict(fields)
    except Exception as error:  # any error of the config's own checks
        reason = " ".join(str(error).split())  # transformers' validators write several lines
        raise ModelError(f"model: no small copy of a {config.model_type} model can be made: {reason}") from error


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    calm = copy.deepcopy(config)
    for key, value in config.to_dict().items():
        if isinstance(value, float) and re.search(r"drop", key):
            setattr(calm, key, 0.0)
    return calm


def check_same_structure(hf: nn.Module, small: nn.Module) -> None:
    """Raise ModelError if model and copy differ in parameters, apart from sizes and from numbers in names."""
    of_model, of_copy = structure(hf), structure(small)
    if different := sorted(of_model ^ of_copy):
        name, dimensions = different[0]
        holder = "the model itself" if (name, dimensions) in of_model else "its small copy"
        raise ModelError(
            f"model: a small copy of {type(hf).__name__} has another structure: only {holder} has {name} "
            f"({dimensions} dimensions), so a proof on the copy does not hold for the model. Train another family."
        )


def structure(module: nn.Module) -> frozenset[tuple[str, int]]:
    """Return (name, dimensions) of a module's parameters, with "*" for numbers in names."""
    return frozenset((re.sub(r"\d+", "*", name), parameter.dim()) for name, parameter in module.named_parameters())


class _Sizes:
    """Access to fields by transformers' common names ("hidden_size" is n_embd in GPT-2)."""

    def __init__(self, config: PreTrainedConfig, fields: dict[str, Any]) -> None:
        self._own = {"num_key_value_heads": "num_kv_heads"} if "num_kv_heads" in fields else {}  # Falcon
        if "num_layers" in fields:  # LongCat-Flash
            self._own["num_hidden_layers"] = "num_layers"
        self._own |= config.attribute_map
        self._fields = fields

    def name(self, common: str) -> str:
        return common if common in self._fields else self._own.get(common, common)

    def get(self, common: str) -> Any:
        return self._fields.get(self.name(common))

    def put(self, common: str, value: Any) -> None:
        self._fields[self.name(common)] = value


def _shrink_heads(size_of: _Sizes, fields: dict[str, Any], kv_heads: int) -> int:
    """Shrink heads and widths. Returns the number of rotary features of a head (0: none are rotated)."""
    hidden, heads = size_of.get("hidden_size"), size_of.get("num_attention_heads")
    kind = fields.get("model_type")
    if fields.get("text_config"):
        text = fields["text_config"].get("model_type")
        raise ModelError(f"model: {kind} is a text model together with others: use its text model by itself ({text}).")
    differing_keys = {key for layer in fields.get("per_layer_config", {}).values() for key in layer}
    if differing_keys - {"head_dim"}:
        differing = ", ".join(sorted(differing_keys - {"head_dim"}))
        raise ModelError(f"model: no small copy of a {kind} model can be made: its layers differ in {differing}.")
    if not isinstance(hidden, int) or not isinstance(heads, int):
        raise ModelError(
            f"model: no small copy of a {kind} model can be made: its configuration has no hidden_size or no "
            "num_attention_heads (recurrent and state-space models do without heads)."
        )
    kv = size_of.get("num_key_value_heads") or heads
    if heads % kv:
        raise ModelError(f"model: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv}.")
    fewer_kv = _divisor(kv, kv_heads)
    fewer = fewer_kv * (heads // kv) if kv > 1 else _divisor(heads, kv_heads)
    head_dim = fields.get("head_dim")
    factors = [rope["partial_rotary_factor"] for rope in _ropes(fields) if rope.get("partial_rotary_factor")]
    factor = min(factors) if factors else fields.get("partial_rotary_factor") or 1.0
    full = head_dim or hidden // heads
    sizes = (8, 16, 32) if fewer >= 16 else (16, 32)
    size = next((s for s in sizes if s < full and int(s * factor) >= 2 and int(s * factor) % 2 == 0), full)
    small = fewer * size
    if head_dim and head_dim * heads != hidden:  # heads that do not fill the hidden size must not do so in the copy
        small = min(hidden, fewer * size * 2 if head_dim * heads < hidden else fewer * size // 2)
    for key, value in fields.items():
        if type(value) is int and value > 1 and _WIDTH.search(key) and not _NO_WIDTH.search(key):
            fields[key] = _width(value, hidden, small)
    size_of.put("hidden_size", small)
    size_of.put("num_attention_heads", fewer)
    if size_of.get("num_key_value_heads") is not None:
        size_of.put("num_key_value_heads", fewer_kv)
    if head_dim:
        for key, value in fields.items():  # low-rank attention has heads of several sizes
            if key.endswith("head_dim") and type(value) is int:
                fields[key] = value * size // head_dim
        for layer in fields.get("per_layer_config", {}).values():
            layer.update({k: v * size // head_dim for k, v in layer.items() if k == "head_dim"})
    if fields.get("query_pre_attn_scalar"):
        fields["query_pre_attn_scalar"] = size
    _shrink_state_heads(fields, small)
    return int(size * factor)


def _shrink_state_heads(fields: dict[str, Any], hidden: int) -> None:
    for count, size in _STATE_HEADS:
        if type(fields.get(count)) is int and type(fields.get(size)) is int and fields.get("mamba_expand"):
            inner = fields["mamba_expand"] * hidden
            if fields.get("mamba_d_ssm"):  # Falcon-H1 has a field for the product
                fields["mamba_d_ssm"] = inner
            fields[count] = _divisor(inner, min(fields[count], max(1, inner // 16)))
            fields[size] = inner // fields[count]


def _width(value: int, hidden: int, small: int) -> int:
    """Return a width for the small model: scaled like the hidden size (`hidden` to `small`) to a multiple of 8, and
    equal to `small` only if `value` was equal to `hidden`."""
    if value == hidden:
        return small
    width = max(8, round(value * small / hidden / 8) * 8)
    return width + 8 if width == small or 2 * width == small else width


def _divisor(count: int, least: int) -> int:
    """Return the smallest divisor of `count` that is at least `least`; `count` itself if that is smaller."""
    return next((d for d in range(min(least, count), count + 1) if count % d == 0), count)


def _shrink_layers(size_of: _Sizes, fields: dict[str, Any], layers: int) -> None:
    """Keep the first layer of each kind, then the first of the others, in their order."""
    lists = {key: value for key, value in fields.items() if isinstance(value, list)}
    count = size_of.get("num_hidden_layers") or len(lists.get(size_of.name("layer_types"), []))  # Nemotron-H
    if not isinstance(count, int) or not count:
        raise ModelError(f"model: a {fields.get('model_type')} config has no num_hidden_layers.")
    indices = {key: value for key, value in lists.items() if "layer" in key and _ascending(value, count)}
    lists = {key: value for key, value in lists.items() if key not in indices and len(value) == count}
    by_layer = {int(layer): values for layer, values in fields.get("per_layer_config", {}).items()}  # Gemma 4
    dense = fields.get("first_k_dense_replace")
    # (step, place): layer i is of another kind if i % step == place.
    sparse = fields.get("decoder_sparse_step") or 1
    repeats = [(sparse, place) for place in range(sparse)] if sparse > 1 else []
    periods = [key.removesuffix("_period") for key in fields if key.endswith("_layer_period")]  # Jamba
    repeats += [(fields[f"{key}_period"], fields.get(f"{key}_offset", 0)) for key in periods]
    kinds: dict[str, int] = {}
    for layer in range(count):
        kind = [value[layer] for value in lists.values()] + [layer in value for value in indices.values()]
        kind += [layer % step == place for step, place in repeats]
        kinds.setdefault(repr((kind, by_layer.get(layer), layer < (dense or 0))), layer)
    first = sorted(kinds.values())
    others = [layer for layer in range(count) if layer not in first]
    stay = sorted(first + others[: max(0, min(layers, count) - len(first))])
    if repeats:  # the model computes a layer's kind from its number, so keep the numbers
        stay = list(range(max(stay) + 1))
    for key, value in lists.items():
        fields[key] = [value[layer] for layer in stay]
    for key, value in indices.items():
        fields[key] = [new for new, layer in enumerate(stay) if layer in value]
    if by_layer:
        fields["per_layer_config"] = {new: by_layer[layer] for new, layer in enumerate(stay) if layer in by_layer}
    if isinstance(dense, int):
        fields["first_k_dense_replace"] = sum(layer < dense for layer in stay)
    if "attention_types" in fields:  # GPT-Neo has the list a second time, as repeated patterns
        fields["attention_types"] = [[fields["attention_layers"], 1]]
    if size_of.get("num_hidden_layers") is not None:
        size_of.put("num_hidden_layers", len(stay))


def _ascending(value: list[Any], count: int) -> bool:
    """Return True for a list of layer numbers, False for a list with one number for each layer."""
    if not all(type(item) is int and item < count for item in value):
        return False
    return all(one < other for one, other in itertools.pairwise(value))


def _shrink_experts(size_of: _Sizes, fields: dict[str, Any], experts: int) -> None:
    for key in {size_of.name(common) for common in _EXPERTS}:
        if type(fields.get(key)) is int and fields[key] > 1:
            fewer = _divisor(fields[key], experts)
            for chosen in {size_of.name(common) for common in _CHOSEN}:
                if fields.get(chosen):
                    fields[chosen] = max(1, min(fields[chosen], fewer // 2))
            if groups := size_of.get("n_group"):  # DeepSeek chooses groups of experts first
                size_of.put("n_group", min(groups, max(1, fewer // 2)))
                size_of.put("topk_group", min(size_of.get("topk_group"), size_of.get("n_group")))
            fields[key] = fewer


def _shrink_vocabulary(size_of: _Sizes, fields: dict[str, Any], vocabulary: int) -> None:
    size = size_of.get("vocab_size")
    small = min(size, vocabulary + size % _VOCABULARY_UNIT)
    size_of.put("vocab_size", small)
    for key, value in fields.items():
        if key.startswith("vocab_size_") and value == size:  # Gemma's embeddings of single layers
            fields[key] = small
        if key.endswith("token_id") and value is not None:
            last = small - 1
            fields[key] = [min(item, last) for item in value] if isinstance(value, list) else min(value, last)


def _ropes(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rope parameters: one dict, or one for each kind of layer."""
    rope = fields.get("rope_parameters") or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or ([rope] if rope else [])


def _shrink_positions(size_of: _Sizes, fields: dict[str, Any], positions: int, rotary_dim: int) -> None:
    longest = size_of.get("max_position_embeddings")
    small = min(longest, positions) if isinstance(longest, int) else positions
    if isinstance(longest, int):
        size_of.put("max_position_embeddings", small)
    for key in _WINDOWS:
        if type(fields.get(key)) is int:
            fields[key] = max(2, min(fields[key], small // 4))
    for place in [fields, *_ropes(fields)]:
        original = place.get("original_max_position_embeddings")
        if type(original) is int and isinstance(longest, int):
            place["original_max_position_embeddings"] = max(1, original * small // longest)
        for key in ("short_factor", "long_factor"):
            if isinstance(place.get(key), list):
                factors, count = place[key], rotary_dim // 2
                place[key] = [factors[index * len(factors) // count] for index in range(count)]


_MOST = 100_000_000  # parameters of a small copy: 0.4 GB, nothing written yet


def probe_copy(hf: PreTrainedModel) -> PreTrainedModel:
    """Return a small real copy on the CPU in fp32, of the model's own class, with random parameters and no dropout.
    Raises ModelError."""
    config = without_dropout(shrunk_config(hf.config))
    if getattr(config, "output_router_logits", False):  # needs the routers of all layers, which parts of a model lack
        config.output_router_logits = False
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            small = build_with(type(hf), copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
    except Exception as error:  # any error of transformers or torch about a configuration with other numbers
        raise ModelError(f"model: no small copy of {type(hf).__name__} can be built: {error}") from error
    freeze(small)
    if (size := sum(p.numel() for p in small.parameters())) > _MOST:
        raise ModelError(
            f"model: llmtrain cannot make {type(hf).__name__} small: its small copy has {size:,} parameters. Train "
            "another family."
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in small.parameters():
            spread = 0.5 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return small.eval()


def run_copy(small: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the copy's logits. Raises ModelError if the copy does not run."""
    return _run(small, small, ids).logits


def run_decoder(small: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the hidden state that the head would get, [B, T, H]. Raises ModelError if the copy does not run."""
    return _run(small, small.base_model, ids).last_hidden_state


def _run(small: PreTrainedModel, part: nn.Module, ids: Tensor) -> Any:
    try:
        return part(input_ids=ids, use_cache=False)
    except Exception as error:  # any error of transformers' code about small sizes or missing parts
        raise ModelError(
            f"model: a small copy of {type(small).__name__} does not run: {type(error).__name__}: {error}"
        ) from error

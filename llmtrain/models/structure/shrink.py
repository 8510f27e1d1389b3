"""A small copy of a model: a transformers config with the structure of another and tiny sizes.

Kept: ties, biases, norms, activation, kinds of layers, rotary kind and share, heads per key/value head, whether the
heads fill the hidden size, expert layers, caps and scales. Made small: layers, heads, widths, experts, vocabulary,
positions.
"""

from __future__ import annotations

import copy
import itertools
import re
from typing import TYPE_CHECKING, Any

from torch import nn

from llmtrain.base.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_WIDTH = re.compile(r"(_size|_dim|_inner|_width|_rank|^d_ff)$")
_NO_WIDTH = re.compile(r"vocab|window|chunk|kernel|group|head_dim|position|batch|patch|image|state")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_WINDOWS = ("sliding_window", "window_size")
_STATE_HEADS = (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim"))
"""Number and size of a state-space layer's heads, which together are mamba_expand times the hidden size."""
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
    """A config of the same family and structure with about these sizes; nothing becomes larger than it is.

    Args:
        config: of a text decoder.
        layers: of each kind of layer (sliding, full, dense, experts) at least one is kept, so there may be more.
        kv_heads: at least so many, where the model has them; always a divisor of the model's own number.
        experts: likewise.
        vocabulary: tokens; more by the model's vocabulary modulo 64, so that what divides one (up to 64) divides both.
        positions: longest sequence.

    Raises:
        ModelError: transformers refuses the small config.
    """
    fields = copy.deepcopy(config.to_dict())
    size_of = _Sizes(config, fields)
    rotary_dim = _shrink_heads(size_of, fields, kv_heads)
    _shrink_layers(size_of, fields, layers)
    _shrink_experts(size_of, fields, experts)
    _shrink_vocabulary(size_of, fields, vocabulary)
    _shrink_positions(size_of, fields, positions, rotary_dim)
    try:
        return type(config).from_dict(fields)
    except Exception as error:  # whatever the config's own checks raise
        reason = " ".join(str(error).split())  # transformers' validators write several lines
        raise ModelError(f"model: no small copy of a {config.model_type} model can be made: {reason}") from error


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of the config with every dropout at 0: what can be compared between runs."""
    calm = copy.deepcopy(config)
    for key, value in config.to_dict().items():
        if isinstance(value, float) and re.search(r"drop", key):
            setattr(calm, key, 0.0)
    return calm


def check_same_structure(hf: nn.Module, small: nn.Module) -> None:
    """Both have the same parameters, but for numbers in names and for sizes. Raises ModelError naming one."""
    there, here = _structure(hf), _structure(small)
    if different := sorted(there ^ here):
        name, dimensions = different[0]
        holder = "the model itself" if (name, dimensions) in there else "its small copy"
        raise ModelError(
            f"model: a small copy of {type(hf).__name__} has another structure: only {holder} has {name} "
            f"({dimensions} dimensions), so what is found in the copy does not hold for the model."
        )


def _structure(hf: nn.Module) -> set[tuple[str, int]]:
    return {(re.sub(r"\d+", "*", name), parameter.dim()) for name, parameter in hf.named_parameters()}


class _Sizes:
    """Fields by transformers' common names ("hidden_size" is n_embd in GPT-2)."""

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
    """Heads and all widths. Returns the number of rotary features of a head (0: none are rotated)."""
    hidden, heads = size_of.get("hidden_size"), size_of.get("num_attention_heads")
    kind = fields.get("model_type")
    if fields.get("text_config"):
        text = fields["text_config"].get("model_type")
        raise ModelError(f"model: {kind} is a text model together with others: use its text model by itself ({text}).")
    own = {key for layer in fields.get("per_layer_config", {}).values() for key in layer}
    if own - {"head_dim"}:
        differing = ", ".join(sorted(own - {"head_dim"}))
        raise ModelError(f"model: no small copy of a {kind} model can be made: its layers differ in {differing}.")
    if not isinstance(hidden, int) or not isinstance(heads, int):
        raise ModelError(
            f"model: no small copy of a {kind} model can be made: its configuration has no hidden_size or no "
            "num_attention_heads (recurrent and state-space models do without heads)."
        )
    kv = size_of.get("num_key_value_heads") or heads
    if heads % kv:
        raise ModelError(f"model: num_attention_heads {heads} is no multiple of num_key_value_heads {kv}.")
    fewer_kv = _divisor(kv, kv_heads)
    fewer = fewer_kv * (heads // kv) if kv > 1 else _divisor(heads, kv_heads)
    given = fields.get("head_dim")
    factor = _rotary_factor(fields)
    whole = given or hidden // heads
    sizes = (8, 16, 32) if fewer >= 16 else (16, 32)
    size = next((s for s in sizes if s < whole and int(s * factor) >= 2 and int(s * factor) % 2 == 0), whole)
    small = fewer * size
    if given and given * heads != hidden:  # heads that do not fill the hidden size must not do so in the copy
        small = min(hidden, fewer * size * 2 if given * heads < hidden else fewer * size // 2)
    for key, value in fields.items():
        if type(value) is int and value > 1 and _WIDTH.search(key) and not _NO_WIDTH.search(key):
            fields[key] = _width(value, hidden, small)
    size_of.put("hidden_size", small)
    size_of.put("num_attention_heads", fewer)
    if size_of.get("num_key_value_heads") is not None:
        size_of.put("num_key_value_heads", fewer_kv)
    if given:
        for key, value in fields.items():  # low-rank attention has heads of several sizes
            if key.endswith("head_dim") and type(value) is int:
                fields[key] = value * size // given
        for layer in fields.get("per_layer_config", {}).values():
            layer.update({k: v * size // given for k, v in layer.items() if k == "head_dim"})
    if fields.get("query_pre_attn_scalar"):
        fields["query_pre_attn_scalar"] = size
    _shrink_state_heads(fields, small)
    return int(size * factor)


def _shrink_state_heads(fields: dict[str, Any], hidden: int) -> None:
    for count, size in _STATE_HEADS:
        if type(fields.get(count)) is int and type(fields.get(size)) is int and fields.get("mamba_expand"):
            inner = fields["mamba_expand"] * hidden
            if fields.get("mamba_d_ssm"):  # Falcon-H1 gives the product by itself
                fields["mamba_d_ssm"] = inner
            fields[count] = _divisor(inner, min(fields[count], max(1, inner // 16)))
            fields[size] = inner // fields[count]


def _width(value: int, hidden: int, small: int) -> int:
    """A width in the small model: in proportion, a multiple of 8, equal to the hidden size only if it was before."""
    if value == hidden:
        return small
    width = max(8, round(value * small / hidden / 8) * 8)
    return width + 8 if width == small or 2 * width == small else width


def _divisor(count: int, least: int) -> int:
    """The smallest divisor of `count` that is at least `least`; `count` where it is smaller already."""
    return next((d for d in range(min(least, count), count + 1) if count % d == 0), count)


def _shrink_layers(size_of: _Sizes, fields: dict[str, Any], layers: int) -> None:
    """The first layer of each kind, then the first others, in their order."""
    lists = {key: value for key, value in fields.items() if isinstance(value, list)}
    count = size_of.get("num_hidden_layers") or len(lists.get(size_of.name("layer_types"), []))  # Nemotron-H
    if not isinstance(count, int) or not count:
        raise ModelError(f"model: a {fields.get('model_type')} config has no num_hidden_layers.")
    indices = {key: value for key, value in lists.items() if "layer" in key and _ascending(value, count)}
    lists = {key: value for key, value in lists.items() if key not in indices and len(value) == count}
    own = {int(layer): values for layer, values in fields.get("per_layer_config", {}).items()}  # Gemma 4
    dense = fields.get("first_k_dense_replace")
    repeats = _repeats(fields)
    kinds: dict[str, int] = {}
    for layer in range(count):
        kind = [value[layer] for value in lists.values()] + [layer in value for value in indices.values()]
        kind += [layer % step == place for step, place in repeats]
        kinds.setdefault(repr((kind, own.get(layer), layer < (dense or 0))), layer)
    first = sorted(kinds.values())
    others = [layer for layer in range(count) if layer not in first]
    kept = sorted(first + others[: max(0, min(layers, count) - len(first))])
    if repeats:  # the model computes the kinds of layers from their numbers: keep the numbers
        kept = list(range(max(kept) + 1))
    for key, value in lists.items():
        fields[key] = [value[layer] for layer in kept]
    for key, value in indices.items():
        fields[key] = [new for new, layer in enumerate(kept) if layer in value]
    if own:
        fields["per_layer_config"] = {new: own[layer] for new, layer in enumerate(kept) if layer in own}
    if isinstance(dense, int):
        fields["first_k_dense_replace"] = sum(layer < dense for layer in kept)
    if "attention_types" in fields:  # GPT-Neo: the list again, as patterns and how often each is repeated
        fields["attention_types"] = [[fields["attention_layers"], 1]]
    if size_of.get("num_hidden_layers") is not None:
        size_of.put("num_hidden_layers", len(kept))


def _repeats(fields: dict[str, Any]) -> list[tuple[int, int]]:
    """(step, place): layer i is special if i % step == place."""
    step = fields.get("decoder_sparse_step") or 1
    places = [(step, place) for place in range(step)] if step > 1 else []
    periods = [key.removesuffix("_period") for key in fields if key.endswith("_layer_period")]  # Jamba
    return places + [(fields[f"{key}_period"], fields.get(f"{key}_offset", 0)) for key in periods]


def _ascending(value: list[Any], count: int) -> bool:
    """Numbers of layers, rather than a number for each layer."""
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
    """The rotary settings: one, or one for each kind of layer."""
    given = fields.get("rope_parameters") or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    return nested or ([given] if given else [])


def _rotary_factor(fields: dict[str, Any]) -> float:
    factors = [rope["partial_rotary_factor"] for rope in _ropes(fields) if rope.get("partial_rotary_factor")]
    return min(factors) if factors else fields.get("partial_rotary_factor") or 1.0


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
                given, count = place[key], rotary_dim // 2
                place[key] = [given[index * len(given) // count] for index in range(count)]

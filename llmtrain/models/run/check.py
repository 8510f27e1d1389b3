"""Checks of a run's model that need no device and no other ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import importlib.util
import inspect
import math
import re
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import torch
from torch import nn

from llmtrain import features
from llmtrain.base.errors import ModelError
from llmtrain.base.units import divisors
from llmtrain.config.problems import Places, Problems, closest, show
from llmtrain.config.reader import WRONG, members, read
from llmtrain.config.run import AdapterConfig, ModelConfig, Run
from llmtrain.config.schema import type_name
from llmtrain.config.stages import Stage
from llmtrain.models.experts import check_stages, expert_blocks
from llmtrain.models.language import LanguageModel, compare_losses, documents_in_rows
from llmtrain.models.loss import IGNORE
from llmtrain.models.parameters import frozen_names, tensor_shapes
from llmtrain.models.score import gives_scores
from llmtrain.models.skeleton import decoder_layers, layer_configs, load_config, quietly
from llmtrain.models.source import refuse_other_shapes
from llmtrain.models.spec import ModelSpec
from llmtrain.models.structure.small_copy import probe_copy
from llmtrain.models.transformers_private import (
    OperatorMode,
    attention_is,
    give_memory,
    loads_as_causal_model,
    takes_flash_attention,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
"""transformers' common names of counts that are at least 1. A family's `attribute_map` gives its own names for them."""
_EARLIER = {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # now in rope_parameters
_ANYWHERE = {"model_type", "torch_dtype", "num_labels", "output_attentions"}  # PreTrainedConfig accepts them
_TOKENS = {f"{kind}_token_id" for kind in ("bos", "eos", "pad", "sep", "cls", "mask", "unk")}
"""Fields with ids of text tokens. Ids of tokens for pictures and sounds may lie beyond the text's vocabulary."""
_DIVISORS = ("eps", "epsilon", "rope_theta", "logits_scaling", "softcapping", "soft_cap", "softcap")
"""Ends of names of fields by which a model divides, or whose root it takes."""
_FAMILY = "model.config.model_type"


def check_fields(values: dict[str, Any], problems: Problems) -> None:
    """Report every key that the family does not know, every value of a wrong type, and impossible sizes. `values`:
    `model.config`, with a model_type."""
    family = _family(values["model_type"], problems)
    if family is not None:
        _Section(family, "model.config", problems).check(values)


def _family(model_type: str, problems: Problems) -> Any:
    """Return the configuration class of a family. If it is no causal language model, add a problem and return None."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if model_type in CAUSAL and model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    is_config = model_type in CONFIG_MAPPING
    rule = "transformers has no causal language model of this type" if is_config else "transformers knows no such type"
    text = f"{model_type}_text"
    near = text if text in CAUSAL else None if is_config else closest(model_type, CAUSAL)
    remedy = f"did you mean {near}?" if near else "name a decoder, such as llama, qwen3 or gpt2"
    problems.add(_FAMILY, model_type, rule, remedy)
    return None


class _Section:
    """Checks one dict of a configuration: the model's, or a nested one."""

    def __init__(self, family: Any, prefix: str, problems: Problems) -> None:
        self._family, self._prefix = family, prefix
        self._problems = problems
        self._fields = {item.name: item for item in dataclasses.fields(family)}

    def check(self, values: dict[str, Any]) -> None:
        names = {*self._fields, *self._family.attribute_map, *_ANYWHERE, *_read_by(self._family)}
        names |= _EARLIER if "rope_parameters" in self._fields else set()
        for key, value in values.items():
            if key not in names:
                self._refuse_unknown(key, value, names)
            elif key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
                self._check_rope(value, f"{self._prefix}.{key}")
            elif isinstance(value, dict) and (inner := self._inner(key, value)) is not None:
                _Section(inner, f"{self._prefix}.{key}", self._problems).check(value)
            elif key in _TOKENS and (rule := _outside(value, self._vocabulary(values), self._fields.get(key))):
                self._add_problem(key, value, rule, "write a token of the model's vocabulary, or null for none")
            else:
                self._check_value(key, value)

    def _vocabulary(self, values: dict[str, Any]) -> int | None:
        """Return the section's vocab_size (the given value, or the family's default); None if this section has none, as
        in a model around several models."""
        name = self._family.attribute_map.get("vocab_size", "vocab_size")
        default = self._fields[name].default if name in self._fields else None
        size = values.get("vocab_size", values.get(name, default))
        return size if type(size) is int else None

    def _refuse_unknown(self, key: str, value: Any, names: set[str]) -> None:
        from transformers import GenerationConfig

        near = closest(key, names)
        rule = f"{self._family.__name__} of transformers has no such field, and nothing would read it"
        remedy = f"did you mean {near}?" if near else "remove it"
        if key in GenerationConfig().to_dict():
            rule, remedy = "it is a setting of generation, which training does not read", "remove it"
        self._add_problem(key, value, rule, remedy)

    def _inner(self, key: str, value: dict[str, Any]) -> Any:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        within = self._family.sub_configs.get(key)
        if within is None or hasattr(within, "attribute_map"):
            return within
        # For AutoConfig the section's model_type decides, else the family's default (transformers 5.17 has none).
        default = getattr(self._family, "sub_configs_defaults", {}).get(key)
        kind = str(value.get("model_type", getattr(default, "model_type", None)))
        return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401  # a mapping without get

    def _check_value(self, key: str, value: Any) -> None:
        """Check a value's type, by the validators of transformers' class too, and refuse impossible numbers and
        counts."""
        name = self._family.attribute_map.get(key, key)
        field = self._fields.get(name)
        default = getattr(self._family, "default_theta", None) if field is None else field.default
        if rule := _impossible(name, value, default):
            has_default = isinstance(default, (int, float))
            remedy = f"{default} is the family's default" if has_default else "correct the number"
            self._add_problem(key, value, rule, remedy)
            return
        if field is None:
            return
        if rule_and_remedy := self._wrong_type(name, value, field):
            self._add_problem(key, value, *rule_and_remedy)
            return
        # A few families use a bool for a dropout.
        share = isinstance(value, bool) or (isinstance(value, (int, float)) and 0 <= value <= 1)
        if "drop" in name and isinstance(field.default, (int, float)) and not share:
            remedy = f"{field.default} is the family's default"
            self._add_problem(key, value, "a dropout is a number from 0 to 1", remedy)
            return
        common = {self._family.attribute_map.get(count, count) for count in _COUNTS}
        if type(value) in (int, float):
            least = field.default if isinstance(field.default, (int, float)) else 0
            if name in common and value < 1:
                self._add_problem(key, value, "must be at least 1", "correct the number")
            elif value < min(0, least) and not name.endswith("token_id"):
                self._add_problem(key, value, "must be 0 or greater", "correct the number")
        elif isinstance(value, str):
            from transformers.activations import ACT2FN

            if isinstance(field.default, str) and field.default in ACT2FN and value not in ACT2FN:
                near = closest(value, ACT2FN)
                remedy = f"did you mean {near}?" if near else f"{field.default} is the family's default"
                self._add_problem(key, value, "transformers has no activation function of this name", remedy)

    def _wrong_type(self, name: str, value: Any, field: Any) -> tuple[str, str] | None:
        """Return (rule, remedy) for a value that the field's type hint or a validator of the class refuses, else
        None."""
        # Only types of numbers, strings, words, and lists of these are checked by our own reader.
        kinds = [get_args(hint) if get_origin(hint) in (list, tuple) else (hint,) for hint in members(field.type)]
        if all(kind in _PLAIN or kind is ... or get_origin(kind) is Literal for several in kinds for kind in several):
            made, words = read(field.type, value, name, Problems()), type_name(field.type)
            if made is WRONG:
                usual = "" if field.default is None else f", such as the family's default, {show(field.default)}"
                return f"must be {words}", f"write {words}{usual}"
            if isinstance(value, str) and not isinstance(made, str):
                return f"must be {words}", f"remove the quotes: {show(made)}"
            if type(made) is not type(value) and not isinstance(made, (list, tuple)):  # transformers refuses 1 for 1.0
                point = " with a decimal point" if isinstance(made, float) else ""
                return f"must be {words}{point}", f"write {show(made)}"
        for validator in getattr(self._family, "__validators__", {}).get(name, ()):
            try:
                validator(value)
            except (TypeError, ValueError) as error:
                if bounds := re.search(r"must be (.*), got", str(error)):
                    return f"must be {bounds[1]}", f"{field.default} is the family's default"
                message = str(error).strip().splitlines()[0]
                return f"{self._family.__name__} of transformers says: {message}", "correct the value"
        return None

    def _check_rope(self, rope: dict[str, Any], prefix: str) -> None:
        """Check rotary parameters: one dict, or one dict for each type of layer."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

        numbers = {key for key, kind in RopeParameters.__annotations__.items() if {int, float} & set(get_args(kind))}
        # All strings in the family's code, among them kinds of layers and keys that the family adds.
        words = {word for text in _sources(self._family) for word in re.findall(r"""["'](\w+)["']""", text)}
        names = {*RopeParameters.__annotations__, "type", *words}
        for key, value in rope.items():
            dotted = f"{prefix}.{key}"
            place = self._problems.places.get(dotted, self._problems.places.get(prefix))
            if key not in names:
                near = closest(key, names)
                remedy = f"did you mean {near}?" if near else "remove it"
                self._problems.add(dotted, value, "rotary positions have no such parameter", remedy, place)
            elif isinstance(value, dict):
                self._check_rope(value, dotted)
            elif key in ("rope_type", "type") and value not in {*ROPE_INIT_FUNCTIONS, "default", *words}:
                kinds = ["default", *ROPE_INIT_FUNCTIONS]
                near = closest(str(value), kinds)
                remedy = f"did you mean {near}?" if near else f"one of {', '.join(kinds)}"
                self._problems.add(dotted, value, "transformers has no rotary positions of this type", remedy, place)
            elif key in numbers and (isinstance(value, bool) or not isinstance(value, (int, float, type(None)))):
                self._problems.add(dotted, value, "must be a number", "write a number", place)
            elif rule := _impossible(key, value, None) or _not_positive(key, value):
                theta = getattr(self._family, "default_theta", 10_000.0)
                remedy = f"{theta} is the family's default" if key == "rope_theta" else "correct the number"
                self._problems.add(dotted, value, rule, remedy, place)

    def _add_problem(self, key: str, value: Any, rule: str, remedy: str) -> None:
        dotted = f"{self._prefix}.{key}"
        self._problems.add(
            dotted, value, rule, remedy, self._problems.places.get(dotted, self._problems.places.get(self._prefix))
        )


def _impossible(name: str, value: Any, default: Any) -> str | None:
    """Return the rule that a number, or one in a list, breaks, else None. (mamba's default has an infinite limit.)"""
    numbers = [n for n in (value if isinstance(value, (list, tuple)) else [value]) if type(n) in (int, float)]
    divides = name.endswith(_DIVISORS) and default != 0
    if divides and any(not 0 < number < math.inf for number in numbers):
        return "must be greater than 0 and finite"
    limitless = isinstance(default, tuple) and math.inf in default
    if any(math.isnan(number) or (math.isinf(number) and not limitless) for number in numbers):
        return "must be finite"
    return None


def _not_positive(name: str, value: Any) -> str | None:
    """Return the rule that a number of rotary positions breaks, else None. These are factors, but a scale of 0 means no
    scale."""
    if type(value) not in (int, float):
        return None
    if name.startswith("mscale"):
        return "must be 0 or greater" if value < 0 else None
    return None if value > 0 else "must be greater than 0"


def _outside(value: Any, vocabulary: int | None, field: Any) -> str | None:
    """Return the rule that a token id, or one of several, breaks. None: all are in the vocabulary, or the value is the
    family's default, which configurations without the field also have."""
    if vocabulary is None or (field is not None and value == field.default):
        return None
    tokens = [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
    wrong = [token for token in tokens if not 0 <= token < vocabulary]
    return f"token {wrong[0]} is not in the vocabulary, which has the tokens 0 to {vocabulary - 1}" if wrong else None


_PLAIN = {int, float, str, bool, type(None)}


def _sources(family: Any) -> list[str]:
    """Return the source text of the family's configuration classes, and of the model's module that reads them."""
    from transformers import PreTrainedConfig

    classes = [kind for kind in family.__mro__ if issubclass(kind, PreTrainedConfig) and kind is not PreTrainedConfig]
    texts = [inspect.getsource(kind) for kind in classes]
    module = family.__module__
    reader = module.replace(".configuration_", ".modeling_")
    if reader != module:
        try:
            texts.append(inspect.getsource(importlib.import_module(reader)))
        except (ImportError, OSError):
            return texts
    return texts


def _read_by(family: Any) -> set[str]:
    """Return the fields that a family uses without declaring them: it writes, accepts or reads them."""
    names: set[str] = set()
    with contextlib.suppress(Exception):  # a few families have no defaults for all fields
        names |= set(family().to_dict())
    within = f"|{family.base_config_key}" if family.base_config_key else ""  # DBRX reads attn_config.rope_theta
    for text in _sources(family):
        names |= set(re.findall(r"""\bkwargs(?:\.(?:pop|get)\(\s*|\[)["'](\w+)""", text))
        names |= set(re.findall(r"""["'](\w+)["'] in kwargs""", text))
        names |= set(re.findall(rf"\b(?:config{within})\.(\w+)", text))
        names |= set(re.findall(r"""(?:get|has)attr\(\s*(?:self\.)?\w*config,\s*["'](\w+)""", text))
    return names


_FLASH_PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_REHEARSED_TOKENS = 16  # for the rehearsal: wrong sizes show at any length
_SHAPES = re.compile(
    r"must match|cannot be multiplied|is invalid for input of size|[Ss]izes of tensors|expected size"
    r"|k (not in|out of) range"
)
"""Parts of torch's errors about wrong sizes. Other errors of a rehearsal say nothing about the model."""


@quietly()
def check_model(run: Run) -> tuple[ModelSpec, tuple[str, ...]]:
    """Build the run's ModelSpec on the meta device, and run tokens through the model. Returns the spec and notes for
    the user. Raises ConfigError: a field of `model.config` is wrong, or a value of the run does not fit the model.
    Raises ModelError: transformers cannot build the model, or the run's form of parallelism does not support it."""
    config, model, places = run.config, run.config.model, run.places
    problems = Problems(places)
    if isinstance(model.config, dict):
        check_fields(model.config, problems)
        problems.raise_if_any()
    key = "model.pretrained" if model.pretrained else "model.config"
    _load_config(model, key, problems)
    spec = ModelSpec.of(model, config.adapter, scores=config.objective.scores)
    hf = spec.skeleton
    if model.attention in _FLASH_PACKAGES:
        _check_flash(hf, model.attention, problems)
    _check_heads(hf.config.get_text_config(decoder=True), key, problems)
    problems.raise_if_any()
    frozen_names(hf, model, places)
    notes: tuple[str, ...] = ()
    if config.adapter.r is not None:
        notes = _check_adapter(hf, config.adapter, places)
    if model.fp8 is not None:
        from llmtrain.models.fp8 import check_maps

        check_maps(hf, model.fp8, places)
    if run.config.optim.has_own_settings:
        from llmtrain.models.own_settings import own_settings

        own_settings(spec, run.config.optim, places)
    if model.vocabulary is not None:
        from llmtrain.models.vocabulary import check_growth

        frozen_by = next((key for key in ("train_only", "freeze") if getattr(model, key)), "")
        check_growth(hf, model, spec.frozen, f"model.{frozen_by}" if frozen_by else "adapter.modules_to_save", places)
    before = None
    for number, stage in enumerate(run.stages):
        if stage.rope and (before is None or before.rope != stage.rope):
            new_fields = config.data.stages[number - 1].rope or {}
            _check_rope(hf, f"data.stages[{number - 1}].rope", stage, new_fields, problems)
        elif before is None or (stage.data.sequence_length > before.data.sequence_length and not stage.rope):
            later = before is not None
            notes += _check_length(hf, stage.data.sequence_length, key, problems, later=later)
        before = stage
    problems.raise_if_any()
    if run.mix.degrees.pipeline > 1:
        _check_stages(hf, run.pipeline_partition, run.mix.degrees.pipeline)
    layers, recomputed = len(decoder_layers(hf)), model.recompute.layers
    if isinstance(recomputed, int) and recomputed > layers:
        problems.add("model.recompute.layers", recomputed, f"the model has {layers} decoder layers", "write all")
    problems.raise_if_any()
    _check_experts(hf, run, problems)
    for feature in features.asked(config):
        feature.check_model(config, hf, problems)
    problems.raise_if_any()
    _check_copy(hf, key, model.loss_chunk_tokens)
    _rehearse(copy.deepcopy(hf), key, min(_REHEARSED_TOKENS, config.data.sequence_length))
    if config.train.export:
        _check_export(spec)
    return spec, notes


def _check_adapter(hf: PreTrainedModel, adapter: AdapterConfig, places: Places) -> tuple[str, ...]:
    """Check the adapter's section against the model. Returns a note on modules that cannot have an adapter. Raises
    ConfigError."""
    from llmtrain.models.adapter import lora_config, other_maps, saved_paths, target_paths  # most runs have none

    lora_config(hf, adapter, target_paths(hf, adapter, places), saved_paths(hf, adapter, places), places)
    others = other_maps(hf)
    return tuple(
        f"adapter: no adapter for {len(others)} modules, such as {path} ({what})"
        for path, what in [*others.items()][:1]
    )


def _load_config(model: ModelConfig, key: str, problems: Problems) -> None:
    """Let the family's own class check the fields together, and report the last line of its error as a problem."""
    try:
        load_config(model)
    except ModelError as error:
        if error.__cause__ is None:
            raise
        reason = str(error.__cause__).strip().splitlines()[-1].strip()
        reason = re.sub(r"^\w*(Error|Exception): ", "", reason)
        rule, named_config = f"transformers says: {reason}", model.pretrained or model.config
        fields = named_config if isinstance(named_config, dict) else {}
        lowered = reason.lower()
        named = [name for name in fields if name.removeprefix("num_").replace("_", " ") in lowered]
        if named:
            values = " with ".join(f"{key}.{name} = {fields[name]}" for name in named)
            place = problems.places.get(f"{key}.{named[-1]}")
            problems.add_text(f"{key}.{named[-1]}", values, rule, "change one of them", place)
        else:
            problems.add(key, fields.get("model_type", named_config), rule, "correct what the message names")
        raise problems.error() from error


def check_weights(spec: ModelSpec) -> None:
    """Check that the folder of a run's first weights, and that of its adapter, hold every tensor in its shape. Raises
    ModelError or ConfigError."""
    if spec.model.folder is not None:
        with contextlib.closing(spec.folder_source(spec.model.folder)) as source:
            refuse_other_shapes(source, tensor_shapes(spec.skeleton))
    if spec.adapter.r is not None and spec.adapter.start:
        spec.given_adapter()


def _check_heads(text: Any, key: str, problems: Problems) -> None:
    """Check in every layer that the number of attention heads is a multiple of that of key/value heads."""
    for config in layer_configs(text):
        heads, kv_heads = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
        if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
            name = text.attribute_map.get("num_key_value_heads", "num_key_value_heads")
            rule = f"must divide the number of attention heads, {heads}"
            place = problems.places.get(f"{key}.{name}", problems.places.get(key))
            problems.add(f"{key}.{name}", kv_heads, rule, f"set it to one of {divisors(heads)}", place)
            return


def _check_flash(hf: PreTrainedModel, attention: str, problems: Problems) -> None:
    package = _FLASH_PACKAGES[attention]
    remedy = "set model.attention to sdpa, which picks the fastest kernel of the device"
    if not takes_flash_attention(hf):
        problems.add("model.attention", attention, f"{type(hf).__name__} does not support it", remedy)
    elif not any(importlib.util.find_spec(name) for name in (package, "kernels")):
        rule = f"its package {package} is not installed here"
        problems.add("model.attention", attention, rule, f"install it, or {remedy}")


def _check_length(
    hf: PreTrainedModel, length: int, key: str, problems: Problems, *, later: bool = False
) -> tuple[str, ...]:
    """Refuse sequences longer than the model's table of positions. Returns a note if a rotary model was made for
    shorter ones. `later`: this is the length of a stage after the first."""
    config = hf.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        return ()
    name = f"{key}.{config.attribute_map.get('max_position_embeddings', 'max_position_embeddings')}"
    if length <= longest:
        return ()
    # OPT's and XGLM's tables of positions, learned or computed once, have two more rows.
    words = hf.get_input_embeddings()
    tables: list[torch.Tensor] = [m.weight for m in hf.modules() if isinstance(m, nn.Embedding) and m is not words]
    tables += [buffer for buffer in hf.buffers() if buffer.dim() == 2]
    if any(longest <= table.shape[0] <= longest + 8 for table in tables):
        remedy = f"set it to {longest} or less" + (f", or raise {name}" if key == "model.config" else "")
        rule = f"the model has a table of {longest} positions ({name})"
        problems.add("data.sequence_length", length, rule, remedy)
        return ()
    more = f"; set {name} to {length} if that is meant" if key == "model.config" else ""
    more = "; give the stage rope, such as another rope_theta, which raises that number" if later else more
    return (
        f"data.sequence_length {length} is more than the {longest} positions that the model is made for ({name}): it "
        f"trains, but servers read that number, and rotary positions beyond it are new to pretrained weights{more}",
    )


def _check_rope(hf: PreTrainedModel, key: str, stage: Stage, new_fields: dict[str, Any], problems: Problems) -> None:
    """Check a stage's `rope`. `new_fields`: the fields that no earlier stage has."""
    from llmtrain.models import rope  # most runs have none

    if why := rope.refuse(hf, stage.rope, stage.data.sequence_length, new_fields):
        remedy = "write fields of rope_parameters that transformers has for this family, or remove them"
        problems.add(key, stage.rope, why, remedy)


def _check_experts(hf: PreTrainedModel, run: Run, problems: Problems) -> None:
    """Check that the model has the experts that the run shards. Raises ConfigError if it has none, ModelError if
    DeepSpeed cannot shard them."""
    section = run.expert_parallel
    if (section.get("enabled") or run.mix.degrees.expert > 1) and not expert_blocks(hf):
        key = "autoep_size" if "autoep_size" in section else "enabled"
        rule = f"the ranks would share the experts of a layer, but a {hf.config.model_type} model has none"
        problems.add(f"expert_parallel.{key}", section[key], rule, "remove the section", run.config.deepspeed)
        problems.raise_if_any()
    if blocks := expert_blocks(hf):
        from llmtrain.models.parallel.expert_parallel import check_gradients, find_experts

        check_gradients(blocks, run.mix)
        if run.mix.degrees.expert > 1:
            find_experts(hf, run.mix, section)


def _check_stages(hf: PreTrainedModel, asked: str | tuple[int, ...], stages: int) -> None:
    """Check the layer counts of the pipeline stages. Raises ModelError."""
    from llmtrain.models.parallel import pipeline  # imported here, as it loads much

    check_stages(hf.config)
    layers = len(decoder_layers(hf))
    if isinstance(asked, tuple):
        pipeline.given(asked, layers, stages)
    else:
        pipeline.uniform(layers, stages)


def _check_copy(hf: PreTrainedModel, key: str, chunk: int) -> None:
    """Check on a small copy that no token sees the one that it has to predict, and that our loss is the model's own.
    For `config check` this is the only proof of the loss; a run proves it again in its layout (training/setup.py),
    after loading the weights. Raises ModelError. If no small copy of the model works, nothing is checked."""
    try:
        small = probe_copy(hf)
    except ModelError:
        return
    language = LanguageModel(small, chunk)  # refuses a head that is no linear layer, as a run does
    try:
        ids = torch.arange(12).unsqueeze(0) + 3
        other, labels = ids.clone(), ids.roll(-1, dims=1)
        other[0, -1] += 1
        with torch.no_grad():
            if gives_scores(hf.config):
                scores, after = (language(tokens, lambda head, hidden: head.scores(hidden)) for tokens in (ids, other))
                _refuse_both_directions(hf, scores[:, :-1], after[:, :-1], key)
                compare_losses(small, float(scores[0, -1]), float(language.logits(ids)))
                return
            logits, changed = (language.logits(tokens)[:, :-1] for tokens in (ids, other))
            counted = labels.masked_fill(labels == ids[0, 0], IGNORE)
            our_loss = float(language(ids, lambda head, hidden: head.nll_sum(hidden, counted))) / (ids.shape[1] - 1)
    except ModelError:
        raise
    except Exception:  # the copy's sizes do not fit together, or it needs more than tokens
        return
    if not logits.isfinite().all():
        raise ModelError(
            f"{key}: a small {type(hf).__name__} with these settings and random weights gives logits that are not "
            "finite numbers, so every step would be skipped. Compare its factors, scales and rotary positions with "
            "those of a published model."
        )
    _refuse_both_directions(hf, logits, changed, key)
    own_loss = float(nn.functional.cross_entropy(logits.float().flatten(0, 1), labels[:, :-1].flatten()))
    compare_losses(hf, our_loss, own_loss)


def _refuse_both_directions(hf: PreTrainedModel, before: torch.Tensor, after: torch.Tensor, key: str) -> None:
    if not torch.allclose(before, after, atol=1e-5):
        raise ModelError(
            f"{key}: {type(hf).__name__} reads in both directions, so it sees the token that it should predict. "
            "Take a decoder, such as llama or qwen3."
        )


def _check_export(spec: ModelSpec) -> None:
    """Check that the run's final folder can be written and loaded. Raises ModelError."""
    try:
        hf, _ = spec.skeleton, spec.layout
        if not spec.scores and not loads_as_causal_model(hf.config):
            raise ModelError(
                f"model: transformers makes a {type(hf).__name__} from a part of its configuration, but loads no "
                f"causal language model from a folder with that part ({type(hf.config).__name__})."
            )
    except ModelError as error:
        raise ModelError(f"{error} Set train.export to false: training and its checkpoints need no folder.") from error


class _Attended(OperatorMode):
    """Counts the calls of models/varlen.py's operator, and keeps their largest head size."""

    calls = widest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ == "within_documents":
            self.calls, self.widest = self.calls + 1, max(self.widest, args[0].shape[-1])
        return function(*args, **(kwargs or {}))


_WIDEST_HEAD = 256  # features, in FlashAttention


@quietly()
def why_not_varlen(spec: ModelSpec) -> str:
    """Return why a model that was built for attention within documents cannot train with it; "" if it can."""
    hf: Any = copy.deepcopy(spec.skeleton)
    hf.to("meta", torch.bfloat16).train()  # the grouped product of experts needs bf16
    ids = torch.zeros(1, _REHEARSED_TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), documents_in_rows(None), _Attended() as seen:
            hf(input_ids=ids, use_cache=False)
    except Exception as error:  # the model changes scores, or has heads of several sizes
        return f"{type(hf).__name__} does not go with varlen ({str(error).partition('. Set ')[0].splitlines()[0]})"
    if seen.calls < spec.facts.layers:
        return f"only {seen.calls} of the {spec.facts.layers} layers of {type(hf).__name__} would go through varlen"
    return f"varlen has heads of at most {_WIDEST_HEAD} features" if seen.widest > _WIDEST_HEAD else ""


def _rehearse(hf: PreTrainedModel, key: str, tokens: int) -> None:
    """Run tokens through the model, zeros or on the meta device, to find sizes that do not fit. Raises ModelError."""
    small = sum(weight.numel() for weight in hf.parameters()) <= 1 << 24  # torch's meta device imports sympy, 0.9 s
    model: Any = give_memory(hf, torch.zeros, torch.device("cpu" if small else "meta"))
    ids = torch.zeros(1, tokens, dtype=torch.long, device=model.device)
    rng = torch.random.fork_rng(devices=[])
    try:
        with torch.no_grad(), rng, documents_in_rows(None), attention_is(hf.config, "eager"):
            model(input_ids=ids, use_cache=False)
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and _SHAPES.search(text := str(error).splitlines()[0]):
            raise ModelError(
                f"{key}: the sizes of this {type(hf).__name__} do not go together: a forward pass ends with: {text}. "
                "Compare heads, widths and other sizes in its configuration with those of a published model."
            ) from error
    except Exception:  # the model needs more than the meta device, or zeros, can do: no answer
        return

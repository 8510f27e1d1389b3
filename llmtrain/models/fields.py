"""The fields of an inline `model.config`, held against the family's own configuration class in transformers.

transformers keeps a field that it does not know as an attribute that nothing reads: a misspelt key would train
another model in silence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import math
import re
from typing import Any, get_args

from llmtrain.config.problems import Places, Problems, closest
from llmtrain.config.reference import type_name

_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
"""transformers' common names of what a model has at least one of; a family's `attribute_map` gives its own names."""
_EARLIER = {"rope_theta", "rope_scaling", "partial_rotary_factor"}  # now within rope_parameters
_ANYWHERE = {"model_type", "torch_dtype", "num_labels", "output_attentions"}  # PreTrainedConfig takes them
_TOKENS = {f"{kind}_token_id" for kind in ("bos", "eos", "pad", "sep", "cls", "mask", "unk")}
"""Fields that name tokens of a text; those of pictures and sounds may lie beyond its vocabulary."""
_DIVISORS = ("eps", "epsilon", "rope_theta", "logits_scaling", "softcapping", "soft_cap", "softcap")
"""Ends of the names of what a model divides by, or takes the root of."""
_FAMILY = "model.config.model_type"


def check_fields(given: dict[str, Any], places: Places, problems: Problems) -> None:
    """Report every key that the family does not know, every value of the wrong type, and impossible sizes.

    `given`: `model.config`, with a model_type.
    """
    family = _family(given["model_type"], places, problems)
    if family is not None:
        _Section(family, "model.config", places, problems).check(given)


def _family(model_type: str, places: Places, problems: Problems) -> Any:
    """The configuration class of a causal language model, or None with a problem added."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if model_type in CAUSAL and model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    known = model_type in CONFIG_MAPPING
    rule = "transformers has no causal language model of this type" if known else "transformers knows no such type"
    text = f"{model_type}_text"
    near = text if text in CAUSAL else None if known else closest(model_type, CAUSAL)
    remedy = f"did you mean {near}?" if near else "name a decoder, such as llama, qwen3 or gpt2"
    problems.add(_FAMILY, model_type, rule, remedy, places.get(_FAMILY))
    return None


class _Section:
    """One configuration: the model's, or one within it."""

    def __init__(self, family: Any, prefix: str, places: Places, problems: Problems) -> None:
        self._family, self._prefix = family, prefix
        self._places, self._problems = places, problems
        self._fields = {item.name: item for item in dataclasses.fields(family)}

    def check(self, given: dict[str, Any]) -> None:
        known = self._known()
        for key, value in given.items():
            if key not in known:
                self._unknown(key, value, known)
            elif key in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
                self._check_rope(value, f"{self._prefix}.{key}")
            elif isinstance(value, dict) and (inner := self._inner(key, value)) is not None:
                _Section(inner, f"{self._prefix}.{key}", self._places, self._problems).check(value)
            elif key in _TOKENS and (rule := _outside(value, self._vocabulary(given), self._fields.get(key))):
                self._add(key, value, rule, "write a token of the model's vocabulary, or null for none")
            else:
                self._check_value(key, value)

    def _vocabulary(self, given: dict[str, Any]) -> int | None:
        """Tokens of the vocabulary; None: another section has it."""
        name = self._family.attribute_map.get("vocab_size", "vocab_size")
        default = self._fields[name].default if name in self._fields else None
        found = given.get("vocab_size", given.get(name, default))
        return found if type(found) is int else None

    def _known(self) -> set[str]:
        known = {*self._fields, *self._family.attribute_map, *_ANYWHERE, *_read_by(self._family)}
        return known | _EARLIER if "rope_parameters" in self._fields else known

    def _unknown(self, key: str, value: Any, known: set[str]) -> None:
        from transformers import GenerationConfig

        near = closest(key, known)
        rule = f"{self._family.__name__} of transformers has no such field, and nothing would read it"
        remedy = f"did you mean {near}?" if near else "remove it"
        if key in GenerationConfig().to_dict():
            rule, remedy = "it is a setting of generation, which training does not read", "remove it"
        self._add(key, value, rule, remedy)

    def _inner(self, key: str, value: dict[str, Any]) -> Any:
        """The class of a configuration within this one, such as text_config."""
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        within = self._family.sub_configs.get(key)
        if within is None or hasattr(within, "attribute_map"):
            return within
        # AutoConfig: the section tells the kind, else the family does (transformers 5.17 cannot say which).
        default = getattr(self._family, "sub_configs_defaults", {}).get(key)
        kind = str(value.get("model_type", getattr(default, "model_type", None)))
        return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401  # a mapping without get

    def _check_value(self, key: str, value: Any) -> None:
        """The type, by the validators of transformers' own class, and what no number and no count can be."""
        name = self._family.attribute_map.get(key, key)
        field = self._fields.get(name)
        default = getattr(self._family, "default_theta", None) if field is None else field.default
        if rule := _impossible(name, value, default):
            known = isinstance(default, (int, float))
            self._add(key, value, rule, f"{default} is the family's default" if known else "correct the number")
            return
        if field is None:
            return
        errors: list[Exception] = []
        for validator in getattr(self._family, "__validators__", {}).get(name, ()):
            try:
                validator(value)
            except (TypeError, ValueError) as error:
                errors.append(error)
        if errors:
            self._wrong_type(key, value, field, next((e for e in errors if isinstance(e, ValueError)), errors[0]))
            return
        if "drop" in name and isinstance(field.default, (int, float)) and not _is_share(value):
            self._add(key, value, "a dropout is a number from 0 to 1", f"{field.default} is the family's default")
            return
        common = {self._family.attribute_map.get(count, count) for count in _COUNTS}
        if type(value) in (int, float):
            least = field.default if isinstance(field.default, (int, float)) else 0
            if name in common and value < 1:
                self._add(key, value, "must be at least 1", "correct the number")
            elif value < min(0, least) and not name.endswith("token_id"):
                self._add(key, value, "must be 0 or greater", "correct the number")
        elif isinstance(value, str):
            self._check_activation(key, value, field)

    def _wrong_type(self, key: str, value: Any, field: Any, error: Exception) -> None:
        kinds = (field.type, *get_args(field.type))
        if isinstance(error, ValueError) and (bounds := re.search(r"must be (.*), got", str(error))):
            self._add(key, value, f"must be {bounds[1]}", f"{field.default} is the family's default")
            return
        plain = set(kinds[1:] or kinds) <= {int, float, str, bool, type(None)}
        words = type_name(field.type) if plain else str(error).strip().splitlines()[0]
        remedy = f"write {words}" if plain else "correct the value"
        if isinstance(value, float) and value.is_integer() and int in kinds:
            remedy = f"write {int(value)}"
        elif type(value) is int and float in kinds:
            words, remedy = "a number with a decimal point", f"write {float(value)}"
        elif isinstance(value, str) and _is_number(value):
            remedy = f"remove the quotes: {value}"
        elif isinstance(value, str) and plain and str not in kinds:
            remedy = f"write {words}, such as the family's default, {field.default!r}"
        rule = f"must be {words}" if plain else f"{self._family.__name__} of transformers says: {words}"
        self._add(key, value, rule, remedy)

    def _check_activation(self, key: str, value: str, field: Any) -> None:
        from transformers.activations import ACT2FN

        if isinstance(field.default, str) and field.default in ACT2FN and value not in ACT2FN:
            near = closest(value, ACT2FN)
            remedy = f"did you mean {near}?" if near else f"{field.default} is the family's default"
            self._add(key, value, "transformers has no activation function of this name", remedy)

    def _check_rope(self, rope: dict[str, Any], prefix: str) -> None:
        """One dict, or one for each kind of layer."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

        numbers = {key for key, kind in RopeParameters.__annotations__.items() if {int, float} & set(get_args(kind))}
        words = _words_in(self._family)  # kinds of layers, and what the family adds
        known = {*RopeParameters.__annotations__, "type", *words}
        for key, value in rope.items():
            dotted = f"{prefix}.{key}"
            place = self._places.get(dotted, self._places.get(prefix))
            if key not in known:
                near = closest(key, known)
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

    def _add(self, key: str, value: Any, rule: str, remedy: str) -> None:
        dotted = f"{self._prefix}.{key}"
        self._problems.add(dotted, value, rule, remedy, self._places.get(dotted, self._places.get(self._prefix)))


def _impossible(name: str, value: Any, default: Any) -> str | None:
    """The rule that a number breaks, or one of a list; None: it breaks none. mamba's default limit is infinite."""
    numbers = [n for n in (value if isinstance(value, (list, tuple)) else [value]) if type(n) in (int, float)]
    divides = name.endswith(_DIVISORS) and default != 0
    if divides and any(not 0 < number < math.inf for number in numbers):
        return "must be greater than 0 and finite"
    limitless = isinstance(default, tuple) and math.inf in default
    if any(math.isnan(number) or (math.isinf(number) and not limitless) for number in numbers):
        return "must be finite"
    return None


def _not_positive(name: str, value: Any) -> str | None:
    """The rule that a number of rotary positions breaks: each is a factor, but for scales of which 0 means none."""
    if type(value) not in (int, float):
        return None
    if name.startswith("mscale"):
        return "must be 0 or greater" if value < 0 else None
    return None if value > 0 else "must be greater than 0"


def _outside(value: Any, vocabulary: int | None, field: Any) -> str | None:
    """The rule that a token, or one of several, breaks; None: each is in the vocabulary, or the family's default,
    which is there in a configuration without the field as well."""
    if vocabulary is None or (field is not None and value == field.default):
        return None
    tokens = [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
    wrong = [token for token in tokens if not 0 <= token < vocabulary]
    return f"token {wrong[0]} is not in the vocabulary, which has the tokens 0 to {vocabulary - 1}" if wrong else None


def _is_share(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, (int, float)) and 0 <= value <= 1)  # some drop, or do not


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _sources(family: Any) -> list[str]:
    """The Python text of the family's classes above PreTrainedConfig, and of the modules beside them that read it."""
    from transformers import PreTrainedConfig

    own = [kind for kind in family.__mro__ if issubclass(kind, PreTrainedConfig) and kind is not PreTrainedConfig]
    texts = [inspect.getsource(kind) for kind in own]
    module = family.__module__
    reader = module.replace(".configuration_", ".modeling_")
    if reader != module:
        try:
            texts.append(inspect.getsource(importlib.import_module(reader)))
        except (ImportError, OSError):
            return texts
    return texts


def _read_by(family: Any) -> set[str]:
    """Fields that a family has without declaring them: it writes them to a file, takes them, or asks for them."""
    found: set[str] = set()
    with contextlib.suppress(Exception):  # a few families have no defaults for all fields
        found |= set(family().to_dict())
    within = f"|{family.base_config_key}" if family.base_config_key else ""  # DBRX reads attn_config.rope_theta
    for text in _sources(family):
        found |= set(re.findall(r"""\bkwargs(?:\.(?:pop|get)\(\s*|\[)["'](\w+)""", text))
        found |= set(re.findall(r"""["'](\w+)["'] in kwargs""", text))
        found |= set(re.findall(rf"\b(?:config{within})\.(\w+)", text))
        found |= set(re.findall(r"""(?:get|has)attr\(\s*(?:self\.)?\w*config,\s*["'](\w+)""", text))
    return found


def _words_in(family: Any) -> set[str]:
    """Every name in quotes of the family's code: keys of its dictionaries and kinds of its layers."""
    return {word for text in _sources(family) for word in re.findall(r"""["'](\w+)["']""", text)}

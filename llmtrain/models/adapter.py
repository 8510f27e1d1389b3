"""Adapters: low-rank matrices on linear layers inside the decoder layers, computed by the peft library.

peft makes its layers on the meta device and does not read the wrapped layer's values, which may be partitioned. An
adapter's tensors have the names of a PEFT file without its `base_model.model.`: X.lora_A.weight, X.lora_B.weight and,
for DoRA, X.lora_magnitude_vector, where X is the wrapped linear layer. X's own weight keeps its Hugging Face name.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmtrain.base import untrusted
from llmtrain.base.errors import ConfigError
from llmtrain.config.problems import Places, nearest, stop
from llmtrain.config.run import AdapterConfig
from llmtrain.models.parameters import CONFIG, MAGNITUDE, PREFIX, WEIGHTS, A, B, Shard, local_parameter, set_shard
from llmtrain.models.quantized import PackedLinear, need_bitsandbytes
from llmtrain.models.score import SCORE, WEIGHT, gives_scores
from llmtrain.models.skeleton import decoder_layers, materialise
from llmtrain.models.source import ParameterSource
from llmtrain.models.transformers_private import with_values
from llmtrain.models.wrapped_names import strange_part
from llmtrain.storage.pieces import pick
from llmtrain.storage.region import Region
from llmtrain.storage.tensorfile import TensorFile, TensorFileError, numel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL = "all-linear"
_OTHERS = ("bias", "rank_pattern", "alpha_pattern", "trainable_token_indices")
"""Settings of peft that the section adapter does not have."""


def scale(adapter: AdapterConfig) -> float:
    assert adapter.r is not None
    return adapter.alpha / (math.sqrt(adapter.r) if adapter.rslora else adapter.r)


def target_paths(hf: PreTrainedModel, adapter: AdapterConfig, places: Places | None = None) -> list[str]:
    """Return the paths of the linear layers that get an adapter, in the model's order. `places`: lines of the user's
    settings, for messages. Raises ConfigError if a pattern matches none."""
    layers = decoder_layers(hf)
    inside = {id(module) for module in layers.modules() if type(module) is nn.Linear}
    linear = [path for path, module in hf.named_modules() if id(module) in inside]
    for pattern in adapter.targets:
        if pattern != ALL and not any(fnmatchcase(path, pattern) for path in linear):
            for path, what in other_maps(hf).items():
                if fnmatchcase(path, pattern) or pattern.startswith(f"{path}."):
                    rule = f"names {path}, {what}: only torch.nn.Linear can have an adapter"
                    remedy = f"name other maps, or train {path} completely by adapter.modules_to_save"
                    raise stop("adapter.targets", pattern, rule, remedy, (places or {}).get("adapter.targets"))
            near = nearest(pattern, linear)
            rule = "matches no linear map (torch.nn.Linear) of the decoder layers"
            remedy = f"correct it; one of them is {near or linear[0]}" if linear else "take a family that has some"
            raise stop("adapter.targets", pattern, rule, remedy, (places or {}).get("adapter.targets"))
    if not linear:
        others = other_maps(hf)
        rule = f"the decoder layers of {type(hf).__name__} have no linear maps (torch.nn.Linear)"
        rule += f": {next(iter(others))} is {next(iter(others.values()))}" if others else ""
        raise stop("adapter.targets", adapter.targets, rule, "train without the section adapter")
    return [path for path in linear if any(p == ALL or fnmatchcase(path, p) for p in adapter.targets)]


def other_maps(hf: PreTrainedModel) -> dict[str, str]:
    """Return the modules in the decoder layers that multiply but cannot have an adapter: path -> description."""
    inside = {id(module) for module in decoder_layers(hf).modules()}
    others = {}
    for path, module in hf.named_modules():
        if id(module) not in inside:
            continue
        if type(module).__name__ == "Conv1D":
            others[path] = "a Conv1D, which keeps its weight transposed"
        elif any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)) and "expert" in path:
            others[path] = "the experts' weights in one tensor"
    return others


def saved_paths(hf: PreTrainedModel, adapter: AdapterConfig, places: Places | None = None) -> list[str]:
    """Return the paths of the modules that train completely, in the model's order; of modules that share a tensor only
    the first. A reward model's score head is always among them. Raises ConfigError if a pattern matches no module with
    own parameters, or matches a target of the adapter or a module that contains others."""
    key, place = "adapter.modules_to_save", (places or {}).get("adapter.modules_to_save")
    modules = {path: module for path, module in hf.named_modules() if dict(module.named_parameters(recurse=False))}
    patterns = [*adapter.modules_to_save, *([SCORE] if gives_scores(hf.config) else [])]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in modules):
            near = nearest(pattern, list(modules)) or next(iter(modules))
            raise stop(key, pattern, "matches no module with parameters", f"correct it; one of them is {near}", place)
    chosen = [path for path in modules if any(fnmatchcase(path, pattern) for pattern in patterns)]
    targets = target_paths(hf, adapter, places) if chosen else []
    for path in chosen:
        if within := [name for name, _ in modules[path].named_parameters() if "." in name]:
            rule = f"it names {path}, which has own parameters and contains modules with parameters ({within[0]})"
            raise stop(key, adapter.modules_to_save, rule, f"name modules within it, such as {path}.*", place)
        if both := [target for target in targets if f"{target}.".startswith(f"{path}.")]:
            rule = f"it names {path}, and adapter.targets names {both[0]}: a layer can have only one of the two"
            raise stop(key, adapter.modules_to_save, rule, "list it in only one of the two", place)
        if others := [other for other in modules if other.endswith(path) and other not in chosen]:
            rule = f"peft compares only the ends of names, and would train {others[0]} as well as {path}"
            remedy = f"name {others[0]} and all other modules with this end, or leave {path} out"
            raise stop(key, adapter.modules_to_save, rule, remedy, place)
    first: dict[int, str] = {}
    for path, module in modules.items():
        for parameter in module.parameters(recurse=False):
            first.setdefault(id(parameter), path)
    return list(dict.fromkeys(first[id(p)] for path in chosen for p in modules[path].parameters()))


def saved_names(hf: PreTrainedModel, adapter: AdapterConfig) -> set[str]:
    """Return the parameters that train completely beside the adapter, tied ones by their first name. Raises
    ConfigError."""
    paths = saved_paths(hf, adapter)
    chosen = {id(parameter) for path in paths for parameter in hf.get_submodule(path).parameters()}
    return {name for name, parameter in hf.named_parameters() if id(parameter) in chosen}


def aliases(hf: PreTrainedModel) -> dict[str, str]:
    """Return each other name of a tied parameter -> its first name."""
    first = {id(parameter): name for name, parameter in hf.named_parameters()}
    every = hf.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if name != first[id(parameter)]}


def need_peft(what: str) -> None:
    """Check that peft is installed. `what`: the key and value, or the folder, that needs it. Raises ConfigError."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{what}: adapters are computed by the peft library, which is not installed here ({error}). Install it: "
            "pip install 'llmtrain[adapters]'."
        ) from error


def lora_config(
    hf: PreTrainedModel,
    adapter: AdapterConfig,
    paths: Iterable[str],
    saved: Collection[str] = (),
    places: Places | None = None,
) -> Any:
    """Return peft's LoraConfig for the linear layers at `paths`. It names them by the last parts of their paths if
    these select no others, which vLLM requires; or in `target_parameters` (without dropout) if peft would take a name
    for the experts'. `saved`: modules that train completely. Raises ConfigError: peft is not installed, or cannot load
    DoRA for these layers."""
    need_peft(f"adapter.r = {adapter.r}")
    from peft import LoraConfig

    assert adapter.r is not None
    wanted = set(paths)
    taken = _taken_for_experts(hf, {path.rpartition(".")[2] for path in wanted})
    weights = sorted(path for path in wanted if path.rpartition(".")[2] in taken)
    if weights and adapter.dora:
        rule = f"peft cannot load a DoRA adapter of {weights[0]}: by the name it expects experts in one tensor"
        remedy = f"set it to false, or leave {', '.join(sorted(taken))} out of adapter.targets"
        raise stop("adapter.dora", True, rule, remedy, (places or {}).get("adapter.dora"))
    maps = wanted - set(weights)
    short = {path.rpartition(".")[2] for path in maps}
    alike = {path for path, _ in hf.named_modules() if path.rpartition(".")[2] in short}
    return LoraConfig(
        r=adapter.r,
        lora_alpha=int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,  # type: ignore[arg-type]
        lora_dropout=0.0 if weights else adapter.dropout,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        target_modules=sorted(short if alike == maps else maps),
        target_parameters=[f"{path}.weight" for path in weights] or None,
        init_lora_weights=False,
        modules_to_save=sorted(saved) or None,
        ensure_weight_tying=any(name.rpartition(".")[0] in saved for name in aliases(hf).values()),
        task_type="CAUSAL_LM",
    )


def _taken_for_experts(hf: PreTrainedModel, short: Iterable[str]) -> set[str]:
    """Return the last parts of names that peft 0.21 takes for experts' layers of transformers 4, which are one tensor
    now: peft would adapt that tensor, but no dense or shared layer of that name."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    taken = set()
    for name in short:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, hf, None)
        except ValueError:  # the name of one of two tensors that became one
            taken.add(name)
        if name not in (config.target_modules or ()):
            taken.add(name)
    return taken


@with_values()
def adapted(skeleton: PreTrainedModel, adapter: AdapterConfig) -> PreTrainedModel:
    """Return a copy of the skeleton with the adapter's layers, on the meta device. Raises ConfigError."""
    if adapter.quantize is not None:
        need_bitsandbytes()
    config = lora_config(skeleton, adapter, paths := target_paths(skeleton, adapter))
    from peft import inject_adapter_in_model

    config.target_modules, config.target_parameters = set(paths), None
    config.lora_dropout = adapter.dropout
    # peft does not recognise the family inside a plain module, and therefore adapts exactly the given layers.
    holder: Any = nn.ModuleDict({"hf": copy.deepcopy(skeleton)})
    inject_adapter_in_model(config, holder, low_cpu_mem_usage=True)
    hf: Any = holder["hf"]
    for path in paths:
        _name(path, hf.get_submodule(path))
    return hf


def put_around(
    hf: PreTrainedModel,
    like: PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    share: Callable[[str, Any], None] | None = None,
    *,
    packed: bool = False,
    shares_inputs: bool = False,
) -> list[nn.Module]:
    """Wrap linear layers of `hf` (or of a pipeline stage) in the adapter layers of `like`, with uninitialised values.
    Returns the new layers.

    Args:
        share: called with each path and new layer, to cut it to a tensor-parallel shard.
        packed: the wrapped layers get memory for 4 bits an element.
        shares_inputs: layers with the same input multiply by their A in one product, which rounds differently.
    """
    from peft.tuners.lora import LoraLayer

    from llmtrain.models.lora import scaled_first, share_inputs

    made: dict[str, nn.Module] = {}
    maps = dict(hf.named_modules())
    for path, module in list(like.named_modules()):
        if not isinstance(module, LoraLayer) or path not in maps:
            continue
        layer: Any = scaled_first(copy.deepcopy(module))
        inner = maps[path]
        layer.base_layer = PackedLinear(inner, device, dtype) if packed and isinstance(inner, nn.Linear) else inner
        if share is not None:
            share(path, layer)
        materialise(layer, device, dtype)
        _name(path, layer)
        parent, _, name = path.rpartition(".")
        setattr(hf.get_submodule(parent), name, layer)
        made[path] = layer
    if shares_inputs:
        share_inputs(made)
    return list(made.values())


@contextlib.contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """A context in which PEFT layers return exactly their base layer's output."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _name(path: str, layer: nn.Module) -> None:
    """Record for each parameter of an adapter's layer, and of the layer in it, the name that it has outside of peft."""
    for name, parameter in layer.named_parameters():
        local = local_parameter("", parameter)
        shard = Shard(shape=local.shape, region=local.region, copy=local.copy)
        set_shard(parameter, replace(shard, name=plain_name(f"{path}.{name}")))


def plain_name(name: str) -> str:
    """Convert a tensor's name in a model with peft's layers to its name in files and in the engine."""
    plain = name.replace(".base_layer.", ".").replace(".original_module.", ".").replace(".modules_to_save.", ".")
    plain = plain.replace(".default.", ".").removesuffix(".default")
    return plain.removesuffix(".weight") if plain.endswith(f"{MAGNITUDE}.weight") else plain


def read_peft(
    adapter: AdapterConfig, shapes: dict[str, tuple[int, ...]], tied: dict[str, str] | None = None
) -> dict[str, Tensor]:
    """Read the PEFT folder `adapter.start`: name -> flat fp32 tensor. `shapes`: shapes of the run's adapter tensors and
    of the modules that train completely. `tied`: see `aliases`. Raises ConfigError if the folder is no PEFT adapter, or
    does not match the run's."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    def refuse(rule: str, remedy: str) -> ConfigError:
        return stop("adapter.start", adapter.start, rule, remedy)

    folder = Path(adapter.start or "")
    required = {"peft_type": "LORA", "r": adapter.r, "lora_alpha": adapter.alpha}
    required |= {"use_rslora": adapter.rslora, "use_dora": adapter.dora}
    try:
        config = untrusted.loads((folder / CONFIG).read_bytes())
        with TensorFile(folder / WEIGHTS):  # its errors say more than safetensors'
            files = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        parameters = [str(name) for name in config.get("target_parameters") or []]
        settings = {
            key: config.get(key) for key in ("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", *_OTHERS)
        }
    except (OSError, ValueError, AttributeError, TypeError, SafetensorError, TensorFileError) as error:
        raise refuse(f"is not a PEFT folder ({error})", f"name one with {CONFIG} and {WEIGHTS}") from error
    for key, value in required.items():
        if (settings[key] or False) != value:
            raise refuse(
                f"its {key} is {settings[key]!r}, but the section adapter has {value!r}", "write the same value"
            )
    for key in _OTHERS:
        if settings[key] not in (None, "none", {}, []):
            raise refuse(
                f"its {key} is {settings[key]!r}, which llmtrain's adapters do not support", "merge it with peft first"
            )
    weights = {f"{name.removesuffix(A)}.weight" for name in shapes if name.endswith(A)}
    if others := sorted(set(parameters) - weights):  # see lora_config
        rule = f"its target_parameters name {others[0]}, where the run has no adapter"
        raise refuse(rule, "merge it with peft first")
    tensors: dict[str, Tensor] = {}
    for other, tensor in files.items():
        # For a module that trains completely peft also writes the first values, and some tensors under two names.
        if ".original_module." not in other and not torch.equal(tensors.setdefault(plain_name(other), tensor), tensor):
            rule = f"its {other} and {plain_name(other)} are one tensor, but have different values"
            raise refuse(rule, "save it with peft again")
    for other, name in (tied or {}).items():
        if other in tensors and name in tensors and not torch.equal(tensors.pop(other), tensors[name]):
            rule = f"its {other} and {name} differ, but the run's model ties them to one tensor"
            raise refuse(
                rule, "set tie_word_embeddings to false in the model's config.json, so that they are two tensors"
            )
    of_file = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shapes = {name: shape for name, shape in shapes.items() if name in of_file or name != WEIGHT}  # drawn if missing
    if odd := sorted(name for name in of_file.keys() | shapes.keys() if of_file.get(name) != shapes.get(name)):
        rule = f"its {odd[0]} is {of_file.get(odd[0], 'missing')}, but {shapes.get(odd[0], 'missing')} in the run"
        remedy = (
            "name its maps in adapter.targets, its other modules in adapter.modules_to_save, and in model.pretrained "
            "the model that it was made for"
        )
        raise refuse(rule, strange_part(of_file, shapes).strip(" .") or remedy)
    return {name: tensor.float().view(-1) for name, tensor in tensors.items()}


class AdaptedSource:
    """The values of a base source, and an adapter's first values as in peft: A is uniform within 1 / sqrt(inputs),
    drawn from the run's seed and A's name; B is zero; each magnitude is the norm of its row of W."""

    def __init__(
        self,
        base: ParameterSource,
        shapes: dict[str, tuple[int, ...]],
        seed: int,
        first_values: dict[str, Tensor] | None = None,
    ) -> None:
        """`shapes`: shapes of the adapter's tensors. `first_values`: flat tensors to use instead of those and the
        base's."""
        self.base, self.origin, self._first_values = base, base.origin, first_values or {}
        self._shapes, self._seed = shapes, seed

    def order(self) -> list[str]:
        return [*self.base.order(), *self._shapes]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._shapes else self.base.shape(name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._first(name)[start:stop] if self._own(name) else self.base.read(name, start, stop)

    def read_region(self, name: str, region: Region) -> Tensor:
        return pick(self._first(name), region) if self._own(name) else self.base.read_region(name, region)

    def _own(self, name: str) -> bool:
        return name in self._shapes or name in self._first_values

    def _first(self, name: str) -> Tensor:
        if name in self._first_values:
            return self._first_values[name]
        shape = self._shapes[name]
        if name.endswith(MAGNITUDE):
            weight = f"{name.removesuffix(MAGNITUDE)}.weight"
            values = self.base.read(weight, 0, numel(self.base.shape(weight)))
            return torch.linalg.vector_norm(values.float().view(self.base.shape(weight)), dim=1)
        if name.endswith(B):
            return torch.zeros(numel(shape))
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        draw = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.empty(numel(shape)).uniform_(-(bound := 1 / math.sqrt(shape[1])), bound, generator=draw)

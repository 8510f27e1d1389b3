"""A model without its values: what a launch finds out once about a run's model, and then uses everywhere."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmtrain.base.errors import ModelError
from llmtrain.config.run import AdapterConfig, ModelConfig
from llmtrain.models.experts import idle_parameters
from llmtrain.models.layout import FolderLayout
from llmtrain.models.parameters import frozen_names, local_parameter, named_tensors, tensor_shapes
from llmtrain.models.score import gives_scores, with_score
from llmtrain.models.skeleton import decoder_layers, language_model, layer_configs, load_config, skeleton
from llmtrain.models.source import ParameterSource, RandomSource, SafetensorsSource
from llmtrain.models.transformers_private import with_values
from llmtrain.tracking.metrics import TokenFlops

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from llmtrain.models.source import ScoredSource
    from llmtrain.models.structure.decoder_parts import Anatomy
    from llmtrain.models.structure.projections import Projections


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    parameters: int
    matmul_parameters: int
    """Number of weights that are multiplied with a token's activations: all matrices but the embedding (a tied head
    counts once), and only the experts that a token uses."""
    frozen_matmul_parameters: int
    """Number of frozen weights among `matmul_parameters`."""
    forward_matmul_parameters: int
    """Number of those frozen weights that are in layers below all trained ones, through which no gradient goes."""
    trained: int
    """Number of parameters (elements) that train."""
    layers: int
    forward_layers: int
    """Number of layers below everything that trains."""
    attention_width: int
    """heads x head size, averaged over all layers."""
    vocab_size: int

    def flops(self, sequence_length: int) -> TokenFlops:
        """Return the training FLOPs per token.

        A weight costs 2 FLOPs per token in the forward pass and 4 in the backward pass: 6 N (Kaplan et al. 2020,
        section 2.1). Attention scores and weighted values are two products of width * T each: 4 W T per layer in the
        forward pass, 12 W T with the backward pass (PaLM, Chowdhery et al. 2022, appendix B; so in torchtitan and
        Megatron-LM), and half with a causal mask. Recomputation is not counted: these are model FLOPs, not hardware
        FLOPs. A frozen weight needs no gradient (2 FLOPs less), and one below everything that trains is not in the
        backward pass at all.
        """
        square = (12.0 * self.layers - 8.0 * self.forward_layers) * self.attention_width * sequence_length
        weights = 6.0 * self.matmul_parameters - 2.0 * self.frozen_matmul_parameters
        weights -= 2.0 * self.forward_matmul_parameters
        return TokenFlops(causal=weights + square / 2, noncausal=weights + square)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelSpec:
    """The model of a run without values: its class, its shapes, and what trains. Do not change its members."""

    model: ModelConfig
    """The run's section, with the attention chosen; whether to compile may still be open."""
    config: PreTrainedConfig
    """The given configuration. Copy it before building a model, which changes it."""
    skeleton: PreTrainedModel
    """The model with parameters on the meta device, with ties, and real buffers in fp32; without the adapter."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """The run's section."""

    @classmethod
    def of(cls, model: ModelConfig, adapter: AdapterConfig | None = None, *, scores: bool = False) -> ModelSpec:
        """`scores`: build a model that gives a score for a text, for objective.name reward. Raises ModelError if
        transformers cannot build the model, or not with `model.attention`; or if it is a reward model although `scores`
        is False."""
        config = load_config(model)
        if scores:
            config = with_score(config)
        elif gives_scores(config):
            raise ModelError(
                f"model: the architecture {config.architectures} is that of a reward model, which has no likelihoods. "
                "Set objective.name to reward, or name the folder of a language model."
            )
        if model.attention == "auto":  # the start of a run may choose another: with_attention in training/setup.py
            model = replace(model, attention="sdpa")
        hf = skeleton(config, attention=_unless_flash(model.attention))
        return cls(model=model, config=config, skeleton=hf, adapter=adapter or AdapterConfig())

    @with_values()
    def own_skeleton(self) -> PreTrainedModel:
        """Return a new skeleton, which the caller may change."""
        attention = self.model.attention
        if attention != _unless_flash(attention):
            return skeleton(self.config, attention=attention)
        return copy.deepcopy(self.skeleton)

    @property
    def scores(self) -> bool:
        return gives_scores(self.config)

    @cached_property
    def adapted(self) -> PreTrainedModel:
        """The skeleton with the run's adapter, if it has one. Raises ConfigError as in `models/adapter.py`."""
        if self.adapter.r is None:
            return self.skeleton
        from llmtrain.models.adapter import adapted

        return adapted(self.skeleton, self.adapter)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its Hugging Face name, frozen ones included; a tied tensor appears once."""
        return {local.name: local.shape for local in (local_parameter(*item) for item in named_tensors(self.adapted))}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that the run does not train; with an adapter, the model's except for `saved`. Raises
        ConfigError as `frozen_names` and `saved_paths`."""
        if self.adapter.r is not None:
            return frozenset(name for name, _ in self.skeleton.named_parameters()) - self.saved
        return frozen_names(self.skeleton, self.model)

    @cached_property
    def saved(self) -> frozenset[str]:
        """Names of the model's own parameters that train beside its adapter. Raises ConfigError as `saved_paths`."""
        if self.adapter.r is None:
            return frozenset()
        from llmtrain.models.adapter import saved_names

        return frozenset(saved_names(self.skeleton, self.adapter))

    @cached_property
    def layout(self) -> FolderLayout:
        """The tensors in folders of this model. Raises ModelError if these cannot be read or written."""
        return FolderLayout(self.skeleton)

    @cached_property
    def facts(self) -> ModelFacts:
        """Sizes of the model. Raises ModelError if the configuration lacks one."""
        try:
            return self._facts()
        except AttributeError as error:  # BLT: several models without a common width
            raise ModelError(
                f"model: the configuration of {type(self.skeleton).__name__} has no {error.name}, so llmtrain does not "
                "know the sizes of the model. Take another family."
            ) from error

    def _facts(self) -> ModelFacts:
        hf, text = self.adapted, self.config.get_text_config()
        embedding: Any = hf.get_input_embeddings().weight
        every = set(hf.parameters())
        head = hf.get_output_embeddings()
        looked_up = set() if head is not None and head.weight is embedding else {embedding}
        frozen = {p for name, p in hf.named_parameters() if local_parameter(name, p).name in self.frozen}
        # The first decoder layers, if nothing up to their end trains: the backward pass does not reach them.
        layers = decoder_layers(hf)
        inside = set(layers.parameters())
        before = takewhile(lambda parameter: parameter not in inside, hf.parameters())
        below = list(takewhile(lambda layer: frozen.issuperset(layer.parameters()), layers))
        below = below if frozen.issuperset(before) else []
        forward = {parameter for layer in below for parameter in layer.parameters()}

        def multiplied(some: set[Any]) -> int:
            matrices = sum(p.numel() for p in some - looked_up if p.dim() >= 2)
            return matrices - idle_parameters(hf, self.config, some)

        widths = []
        for layer in layer_configs(text):  # features of all heads; a state-space model has none
            heads = getattr(layer, "num_attention_heads", None) or 0
            widths.append(heads * (getattr(layer, "head_dim", None) or layer.hidden_size // max(1, heads)))
        return ModelFacts(
            parameters=sum(p.numel() for p in every),
            matmul_parameters=multiplied(every),
            frozen_matmul_parameters=multiplied(frozen),
            forward_matmul_parameters=multiplied(forward),
            trained=sum(p.numel() for p in every - frozen),
            layers=text.num_hidden_layers,
            forward_layers=len(below),
            attention_width=sum(widths) // len(widths),
            vocab_size=text.vocab_size,
        )

    def initial_weights(self, seed: int, device: torch.device) -> ParameterSource:
        """Return the source of the run's first weights. Raises ModelError if the folder's files are incomplete;
        ConfigError if `adapter.start` does not match the run's adapter."""
        source: ParameterSource
        if self.model.folder is not None:
            source = self.folder_source(self.model.folder, seed, device)
        else:
            source = RandomSource(self.skeleton, seed, device)
        if self.adapter.r is None:
            return source
        from llmtrain.models.adapter import AdaptedSource

        adapter_values = self.given_adapter() if self.adapter.start else None
        return AdaptedSource(source, self.adapter_shapes, seed, adapter_values)

    def folder_source(
        self, folder: Path, seed: int = 0, device: torch.device | None = None
    ) -> SafetensorsSource | ScoredSource:
        """Open a folder's weights. `seed`, `device`: for a missing score head. Raises ModelError if the files are
        bad."""
        kind: type[SafetensorsSource] = SafetensorsSource
        if self.model.vocabulary is not None:
            from llmtrain.models.vocabulary import GrownSource

            kind = GrownSource
        source = kind(folder, self.layout)
        if not self.scores:
            return source
        from llmtrain.models.source import ScoredSource

        return ScoredSource(source, self.layout, seed, device or torch.device("cpu"))

    def given_adapter(self) -> dict[str, Tensor]:
        """Return the values in `adapter.start`, as `read_peft`. Raises ConfigError if they do not match the run's
        adapter."""
        from llmtrain.models.adapter import aliases, read_peft

        saved = {name: self.shapes[name] for name in self.saved}
        return read_peft(self.adapter, self.adapter_shapes | saved, aliases(self.skeleton))

    @cached_property
    def anatomy(self) -> Anatomy:
        """The parts of the decoder. Raises ModelError if it cannot be divided into layers."""
        from llmtrain.models.structure.decoder_parts import anatomy_of

        return anatomy_of(self._with_logits)

    @cached_property
    def projections(self) -> Projections:
        """The parts that tensor-parallel ranks shard. Raises ModelError if there are none, TooSlow if the search takes
        too long."""
        from llmtrain.models.structure.projections import projections

        return projections(self._with_logits, self.anatomy)

    @property
    def _with_logits(self) -> PreTrainedModel:
        """The model with a language-model head, as the parts of the decoder are proved by its logits."""
        return language_model(self.skeleton) if self.scores else self.skeleton

    @property
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        names = self.shapes.keys() - tensor_shapes(self.skeleton).keys()
        return {name: shape for name, shape in self.shapes.items() if name in names}


def _unless_flash(attention: str) -> str:
    """Replace flash attention by eager, because it cannot be constructed without a GPU but `config check` runs on any
    host."""
    return "eager" if attention.startswith("flash") else attention

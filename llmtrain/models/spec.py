"""A model without its values: facts that a launch finds once and shares."""

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
    """Weights that are multiplied with a token's activations: all matrices but the embedding, with a tied head counted
    once, and only the experts that a token uses."""
    frozen_matmul_parameters: int
    """Multiplied weights of frozen parameters."""
    forward_matmul_parameters: int
    """Multiplied weights of frozen parameters in layers below everything that trains: no gradient goes through them."""
    trained: int
    """Number of parameters that train."""
    layers: int
    forward_layers: int
    """Layers below everything that trains."""
    attention_width: int
    """heads x head size, the mean of all layers."""
    vocab_size: int

    def flops(self, sequence_length: int) -> TokenFlops:
        """Training FLOPs per token.

        A weight costs 2 FLOPs per token forward and 4 backward: 6 N (Kaplan et al. 2020, section 2.1). Scores and
        weighted values are two products of width * T each: 4 W T per layer forward, 12 W T with the backward pass
        (PaLM, Chowdhery et al. 2022, appendix B; so in torchtitan and Megatron-LM). A causal mask needs half of them.
        Recomputed activations are not counted: this is model FLOPs, not hardware FLOPs. A frozen weight gets no
        gradient (2 FLOPs less), and one below everything that trains is not in the backward pass at all.
        """
        square = (12.0 * self.layers - 8.0 * self.forward_layers) * self.attention_width * sequence_length
        weights = 6.0 * self.matmul_parameters - 2.0 * self.frozen_matmul_parameters
        weights -= 2.0 * self.forward_matmul_parameters
        return TokenFlops(causal=weights + square / 2, noncausal=weights + square)


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelSpec:
    """The model of a run: its class, shapes and what trains, without values. Do not change its members."""

    model: ModelConfig
    """The run's section with a chosen attention; the choice of compilation may still be open."""
    config: PreTrainedConfig
    """The given configuration. A build changes its configuration: take a copy."""
    skeleton: PreTrainedModel
    """Has parameters on the meta device, with ties, and real buffers in fp32. Has no adapter."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """The run's section."""

    @classmethod
    def of(cls, model: ModelConfig, adapter: AdapterConfig | None = None, *, scores: bool = False) -> ModelSpec:
        """`scores`: build a score for a text, for objective.name reward.

        Raises ModelError: transformers cannot build the model, or not with `model.attention`; it gives scores unasked.
        """
        config = load_config(model)
        if scores:
            config = with_score(config)
        elif gives_scores(config):
            raise ModelError(
                f"model: the architecture {config.architectures} is of a reward model, which has no likelihoods. Set "
                "objective.name to reward, or name the folder of a language model."
            )
        if model.attention == "auto":  # a run's start may choose another: training/setup.py with_attention
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
        """The skeleton with the run's adapter, if there is one. Raises ConfigError: see `models/adapter.py`."""
        if self.adapter.r is None:
            return self.skeleton
        from llmtrain.models.adapter import adapted

        return adapted(self.skeleton, self.adapter)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by its Hugging Face name, frozen ones included; a tied one once."""
        return {local.name: local.shape for local in (local_parameter(*item) for item in named_tensors(self.adapted))}

    @cached_property
    def frozen(self) -> frozenset[str]:
        """The parameters that the run does not train; with an adapter the model's, except modules that train
        completely.

        Raises ConfigError: see `frozen_names` and `saved_paths`.
        """
        if self.adapter.r is not None:
            return frozenset(name for name, _ in self.skeleton.named_parameters()) - self.saved
        return frozen_names(self.skeleton, self.model)

    @cached_property
    def saved(self) -> frozenset[str]:
        """The model's own parameters that train with its adapter. Raises ConfigError: see `saved_paths`."""
        if self.adapter.r is None:
            return frozenset()
        from llmtrain.models.adapter import saved_names

        return frozenset(saved_names(self.skeleton, self.adapter))

    @cached_property
    def layout(self) -> FolderLayout:
        """Raises ModelError: folders of this model cannot be read or written."""
        return FolderLayout(self.skeleton)

    @cached_property
    def facts(self) -> ModelFacts:
        """Raises ModelError: the configuration lacks them."""
        try:
            return self._facts()
        except AttributeError as error:  # BLT: several models without a common width
            raise ModelError(
                f"model: the configuration of {type(self.skeleton).__name__} has no {error.name}, so the sizes of the "
                "model are not known here. Take another family."
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
        """Raises ModelError: the folder's files are incomplete; ConfigError: the adapter to begin with is another."""
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
        """Open a folder's weights; `seed`, `device`: for a score that it lacks. Raises ModelError: bad files."""
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
        """Values from `adapter.start`: see `read_peft`. Raises ConfigError: another adapter's."""
        from llmtrain.models.adapter import aliases, read_peft

        saved = {name: self.shapes[name] for name in self.saved}
        return read_peft(self.adapter, self.adapter_shapes | saved, aliases(self.skeleton))

    @cached_property
    def anatomy(self) -> Anatomy:
        """The parts of the decoder. Raises ModelError."""
        from llmtrain.models.structure.decoder_parts import anatomy_of

        return anatomy_of(self._with_logits)

    @cached_property
    def projections(self) -> Projections:
        """The parts that tensor-parallel ranks share. Raises ModelError: there are none; TooSlow."""
        from llmtrain.models.structure.projections import projections

        return projections(self._with_logits, self.anatomy)

    @property
    def _with_logits(self) -> PreTrainedModel:
        """The logits prove the parts of the decoder."""
        return language_model(self.skeleton) if self.scores else self.skeleton

    @property
    def adapter_shapes(self) -> dict[str, tuple[int, ...]]:
        names = self.shapes.keys() - tensor_shapes(self.skeleton).keys()
        return {name: shape for name, shape in self.shapes.items() if name in names}


def _unless_flash(attention: str) -> str:
    """Replace flash attention by eager: it cannot be constructed without a GPU, and `config check` runs on any host."""
    return "eager" if attention.startswith("flash") else attention

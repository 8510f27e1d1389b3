"""A small teacher for a comparison, and distillation as a few lines of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.config.objective import options
from llmtrain.config.problems import stop
from llmtrain.config.run import ModelConfig, ObjectiveConfig, RunConfig
from llmtrain.models.build import load_config
from llmtrain.models.spec import ModelSpec
from llmtrain.models.teacher import KEY, teacher_model
from llmtrain.parity.small import small_model
from llmtrain.parity.start import LoudSource
from llmtrain.topology import Degrees

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEED = 7_919
"""Not the student's: a teacher that is its student teaches nothing."""


def with_small_teacher(run: RunConfig, student: dict[str, Any], where: Path) -> ObjectiveConfig:
    """The run's objective with a small copy of its teacher, whose words are computed at each step and not read from a
    column: see `small_teacher`. Raises ConfigError or ModelError."""
    folder, objective = teacher_model(run.objective, run.model).folder, run.objective
    if folder is None:
        raise stop(KEY, None, "the comparison makes a small copy of the teacher", "name it, beside objective.top_k")
    if objective.top_k is not None:
        words = load_config(ModelConfig(config=student)).get_text_config().vocab_size
        objective = replace(objective, top_k=min(objective.top_k, words // 2))  # else no word is left out
    return replace(objective, teacher=small_teacher(str(folder), student, where), teacher_revision=None)


def small_teacher(folder: str, student: dict[str, Any], where: Path) -> str:
    """A small copy of the teacher in `folder`, with random weights, as a Hugging Face folder in `where`.

    `student`: fields of the small student's config.json. Raises ConfigError or ModelError.
    """
    from transformers import AutoModelForCausalLM

    if not (Path(folder) / "config.json").is_file():
        raise stop(KEY, folder, "no such folder with a config.json", "give a local Hugging Face folder")
    fields, _ = small_model(ModelConfig(pretrained=folder), Degrees())
    words = load_config(ModelConfig(config=student)).get_text_config().vocab_size
    if "vocab_size" in fields:
        fields["vocab_size"] = words  # one of the two may be small already, and so as it is
    model = ModelConfig(config=fields, attention="eager")
    spec = ModelSpec.of(model)
    if spec.facts.vocab_size != words:
        raise stop(KEY, folder, f"gives logits of other words than the student ({spec.facts.vocab_size:,}, {words:,})",
                   "choose a teacher and a student of the same vocabulary")  # fmt: skip
    source = LoudSource(spec, _SEED, torch.device("cpu"))
    hf = AutoModelForCausalLM.from_config(load_config(model), attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        state = hf.state_dict(keep_vars=True)
        for name, shape in spec.shapes.items():
            state[name].copy_(source.read(name, 0, torch.Size(shape).numel()).view(shape))
    hf.save_pretrained(where)
    return str(where)


class PlainTeacher:
    """transformers' own model of a folder, and the loss that a student has beside it."""

    def __init__(self, config: ObjectiveConfig, attention: str, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            str(config.teacher), attn_implementation=attention, dtype=dtype
        )
        self._model: Any = model.to(device).eval()  # type: ignore[arg-type]
        self._options, self._top_k = options(config), config.top_k

    @classmethod
    def of(
        cls, config: ObjectiveConfig, attention: str, dtype: torch.dtype, device: torch.device
    ) -> PlainTeacher | None:
        """None: the run has no teacher."""
        return None if config.teacher is None else cls(config, attention, dtype, device)

    def loss_sum(self, logits: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        """Summed over the counted tokens. logits: the student's, fp32 [B, T, V]."""
        with torch.no_grad():
            theirs = self._model(input_ids=inputs, use_cache=False).logits.float()
        beta, t, alpha = (self._options[key] for key in ("beta", "temperature", "alpha"))
        counted = labels >= 0
        own, theirs, words = logits[counted], theirs[counted], labels[counted]
        log_p, log_q = F.log_softmax(theirs / t, -1), F.log_softmax(own / t, -1)
        if self._top_k is not None:  # its likeliest words, and any other as one
            likeliest = log_p.topk(self._top_k).indices
            words_left = log_p.shape[-1] - self._top_k
            left = torch.ones_like(log_p).scatter(-1, likeliest, 0.0).bool()
            log_p, log_q = (
                torch.cat(
                    [each.gather(-1, likeliest), each[left].view(len(each), words_left).logsumexp(-1, keepdim=True)], -1
                )
                for each in (log_p, log_q)
            )
        if beta in (0.0, 1.0):
            one, other = (log_p, log_q) if beta == 0.0 else (log_q, log_p)
            apart = (one.exp() * (one - other)).sum()
        else:
            log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
            apart = beta * (log_p.exp() * (log_p - log_m)).sum() + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum()
        return (1 - alpha) * t**2 * apart + alpha * F.cross_entropy(own, words, reduction="sum")

"""Objectives in plain PyTorch: those over answers, and distillation, with a small teacher for the comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.config.problems import stop
from llmtrain.config.run import ModelConfig, RunConfig
from llmtrain.config.topology import Degrees
from llmtrain.models.skeleton import load_config
from llmtrain.models.spec import ModelSpec
from llmtrain.models.teacher import KEY, teacher_model
from llmtrain.objectives.by_token import Distill
from llmtrain.objectives.objective import Objective
from llmtrain.objectives.preferences import Answers as OfRecords
from llmtrain.objectives.preferences import OverAnswers
from llmtrain.parity.small import LoudSource, small_model
from llmtrain.parity.tokens import Answers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PLAIN = ("dpo", "robust", "ipo", "dpo_norm", "rpo", "simpo", "orpo", "kto", "reward")
"""The objectives over answers that this module defines."""
_SEED = 7_919
"""Differs from the student's seed: a teacher equal to its student teaches nothing."""


def plain_loss(
    model: Any, config: Objective, answers: Answers, sequences: list[int], z: float, base: Any = None
) -> Tensor:
    """Return the sum of the loss over the records of some sequences; each row goes through the model alone. `base`: the
    initial model, if it is the reference."""
    o = vars(config)
    if config.name == "reward":
        rows = [torch.from_numpy(ids) for sequence in sequences for ids, _, _ in answers.rows(sequence)]
        each = [model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, 0].float() for ids in rows]
        rw, rl = torch.stack(each).view(-1, 2).T  # for a single row transformers reads the last token
        return (torch.log1p((rl - rw).exp()) + o["centering"] * (rw + rl) ** 2).sum()
    s, d, n = _scored(model, answers, sequences, base)
    facts = _facts(answers, sequences, s.device)
    if isinstance(config, OverAnswers) and config.name not in PLAIN:  # a plugin's formula defines itself
        shape = (-1, answers.kind.together) if answers.kind.together > 1 else (-1,)
        scores = {name: each.view(shape) for name, each in (("log_prob", s), ("tokens", n), ("reference", s - d))}
        by_record = {name: each.view(shape) for name, each in facts.items()}
        return config.terms(OfRecords(**scores, facts=by_record, kl=z, log_sigmoid=F.logsigmoid))[0].sum()
    beta = o["beta"]
    if config.name == "kto":
        desired = facts["desirable"]
        wanted = o["desirable_weight"] * (1 - torch.sigmoid(beta * (d - z)))
        return torch.where(desired, wanted, o["undesirable_weight"] * (1 - torch.sigmoid(beta * (z - d)))).sum()
    (sw, sl), (dw, dl), (nw, nl) = ((each[::2], each[1::2]) for each in (s, d, n))
    right, wrong = F.logsigmoid(beta * (dw - dl)), F.logsigmoid(beta * (dl - dw))
    losses = {
        "dpo": lambda: -(1 - o["smoothing"]) * right - o["smoothing"] * wrong,
        "robust": lambda: (o["smoothing"] * wrong - (1 - o["smoothing"]) * right) / (1 - 2 * o["smoothing"]),
        "ipo": lambda: (dw / nw - dl / nl - 1 / (2 * beta)) ** 2,
        "dpo_norm": lambda: -F.logsigmoid(beta * (dw / nw - dl / nl)),
        "rpo": lambda: -right - o["alpha"] * sw / nw,
        "simpo": lambda: -F.logsigmoid(beta * (sw / nw - sl / nl) - o["gamma"]),
        "orpo": lambda: -sw / nw - beta * F.logsigmoid(torch.logit((sw / nw).exp()) - torch.logit((sl / nl).exp())),
    }
    return losses[config.name]().sum()


def divergence(model: Any, answers: Answers, sequences: list[int], base: Any = None) -> float:
    """Return kto's z for a global batch."""
    with torch.no_grad():
        return max(0.0, float(_scored(model, answers, sequences, base, mismatched=True)[1].mean()))


def _log_prob(model: Any, tokens: Tensor, begin: int) -> Tensor:
    logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0].float()
    return -F.cross_entropy(logits[begin - 1 :], tokens[begin:], reduction="sum")


def _scored(
    model: Any, answers: Answers, sequences: list[int], base: Any, *, mismatched: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-probability, difference from the reference's, number of counted tokens) of each row, [rows] each."""
    scored = []
    for sequence in sequences:
        for ids, begin, reference in answers.rows(sequence, mismatched=mismatched):
            tokens = torch.from_numpy(ids).to(model.device)
            s, r = _log_prob(model, tokens, begin), float(np.float32(reference))
            if base is not None:
                with torch.no_grad():
                    r = float(_log_prob(base, tokens, begin))
            scored.append((s, s - r, s.new_tensor(len(ids) - begin)))
    s, d, n = (torch.stack(column) for column in zip(*scored, strict=True))
    return s, d, n


def _facts(answers: Answers, sequences: list[int], device: torch.device) -> dict[str, Tensor]:
    """Return what the format of the data records about each row."""
    each = [answers.facts(sequence) for sequence in sequences]
    return {name: torch.from_numpy(np.concatenate([facts[name] for facts in each])).to(device) for name in each[0]}


def with_small_teacher(config: RunConfig, student: dict[str, Any], where: Path) -> Distill:
    """Return the run's objective with a `small_teacher`; with objective.top_k it has no teacher, because tokens.py
    makes the column. Raises ConfigError or ModelError."""
    objective = config.objective
    assert isinstance(objective, Distill)
    if objective.top_k is not None:
        words = load_config(ModelConfig(config=student)).get_text_config().vocab_size
        top_k = min(objective.top_k, words // 2)  # so that some tokens are left out
        return replace(objective, teacher=None, teacher_revision=None, top_k=top_k)
    folder = str(teacher_model(objective, config.model).folder)
    return replace(objective, teacher=small_teacher(folder, student, where), teacher_revision=None)


def small_teacher(folder: str, student: dict[str, Any], where: Path) -> str:
    """Write a small copy of the teacher in `folder`, with random weights, as a Hugging Face folder, and return its
    path. `student`: fields of the small student's config.json. Raises ConfigError or ModelError."""
    from transformers import AutoModelForCausalLM

    if not (Path(folder) / "config.json").is_file():
        raise stop(KEY, folder, "no such folder with a config.json", "give a local Hugging Face folder")
    fields, _ = small_model(ModelConfig(pretrained=folder), Degrees())
    words = load_config(ModelConfig(config=student)).get_text_config().vocab_size
    if "vocab_size" in fields:
        fields["vocab_size"] = words  # if one of the two was small already, it was not changed
    model = ModelConfig(config=fields, attention="eager")
    spec = ModelSpec.of(model)
    if spec.facts.vocab_size != words:
        reason = f"gives logits for {spec.facts.vocab_size:,} tokens, but the student for {words:,}"
        raise stop(KEY, folder, reason, "choose a teacher and a student of the same vocabulary")
    source = LoudSource(spec, _SEED, torch.device("cpu"))
    hf = AutoModelForCausalLM.from_config(load_config(model), attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        state = hf.state_dict(keep_vars=True)
        for name, shape in spec.shapes.items():
            state[name].copy_(source.read(name, 0, torch.Size(shape).numel()).view(shape))
    hf.save_pretrained(where)
    return str(where)


class PlainTeacher:
    """Computes a student's loss against transformers' own model of a folder, or against a teacher's column."""

    def __init__(self, config: Distill, attention: str, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self._options = config
        self._model: Any = None
        if config.top_k is None:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                str(config.teacher), attn_implementation=attention, dtype=dtype
            )
            self._model = model.to(device).eval()  # type: ignore[arg-type]

    @classmethod
    def of(cls, config: Objective, attention: str, dtype: torch.dtype, device: torch.device) -> PlainTeacher | None:
        return cls(config, attention, dtype, device) if isinstance(config, Distill) else None

    def loss_sum(self, logits: Tensor, inputs: Tensor, labels: Tensor, *column: Tensor) -> Tensor:
        """Return the sum of the loss over the counted tokens. logits: the student's, fp32 [B, T, V]. column, if there
        is one: token ids [B, T, k], log-probabilities [B, T, k + 1]."""
        beta, t, alpha = self._options.beta, self._options.temperature, self._options.alpha
        counted = labels >= 0
        own, words = logits[counted], labels[counted]
        log_q = F.log_softmax(own / t, -1)
        if column:  # its tokens, and all others as one event
            likeliest, log_p = (each[counted] for each in column)
            left = torch.ones_like(log_q).scatter(-1, likeliest, 0.0).bool()
            others = log_q[left].view(len(log_q), log_q.shape[-1] - likeliest.shape[-1]).logsumexp(-1, keepdim=True)
            log_q = torch.cat([log_q.gather(-1, likeliest), others], -1)
        else:
            with torch.no_grad():
                theirs = self._model(input_ids=inputs, use_cache=False).logits.float()
            log_p = F.log_softmax(theirs[counted] / t, -1)
        if beta in (0.0, 1.0):
            one, other = (log_p, log_q) if beta == 0.0 else (log_q, log_p)
            apart = (one.exp() * (one - other)).sum()
        else:
            log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
            apart = beta * (log_p.exp() * (log_p - log_m)).sum() + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum()
        return (1 - alpha) * t**2 * apart + alpha * F.cross_entropy(own, words, reduction="sum")

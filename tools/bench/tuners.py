"""The training loops of posttraining.py, each in a process of its own: llmtrain, plain PyTorch, transformers, TRL.

All start from the same folder, take the same rows in each optimizer step, use AdamW and clip to the same norm. Peers
get rows of ids with a mask, padded at their ends to the longest of a micro-batch; ours reads the prepared folder.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import yaml
from contestants import BETAS, CLIP_NORM, EPS, WEIGHT_DECAY, Clock, Round, enter, timed_run
from torch import Tensor, nn

LR = 1e-4
BETA = 0.1
R, ALPHA = 8, 16
ADAPTER = {"r": R, "alpha": ALPHA}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """What every contestant trains; plain values, as it travels to a subprocess."""

    folder: str
    """Holds model/ (weights and tokenizer), data/ (prepared) and deepspeed.json."""
    sequence: int
    global_batch: int
    """Sequences of a step: one micro-batch."""
    contestants: tuple[str, ...]
    threads: int
    steps_per_round: int
    rounds: int
    """The first one warms up and is not counted."""
    bf16: bool = False
    at_once: int = 0
    """Rows (of preferences: pairs) of a peer's micro-batch, padded to the longest of them; 0: all of a step."""
    recompute: bool = False
    """The activations of layers, as TRL does where nothing is said."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def total_steps(self) -> int:
        return self.rounds * (self.steps_per_round + 1)


Row = tuple[list[int], list[bool]]
"""ids, and which of them are counted."""


def rows_of(folder: str, split: Literal["train", "validation"]) -> list[Row]:
    """All rows of a split: of pairs, the chosen and the rejected one in turn."""
    import numpy as np

    from llmtrain.data.shards import PreparedSet

    stream = PreparedSet(str(Path(folder) / "data")).split(split)
    counted = stream.counted(0, stream.tokens)
    assert counted is not None
    ends = np.cumsum(stream.row_lengths())[:-1]
    ids = np.split(stream.read(0, stream.tokens).astype(np.int64), ends)
    return [(a.tolist(), b.tolist()) for a, b in zip(ids, np.split(counted, ends), strict=True)]


def steps_of(task: Tuning) -> Iterator[list[Row]]:
    """The rows of each optimizer step: of pairs, the chosen and the rejected one in turn."""
    import numpy as np

    from llmtrain.config.run import DataConfig
    from llmtrain.data.sequences import AnswerSequence
    from llmtrain.data.stream.train_data import TrainData

    path, rows = str(Path(task.folder) / "data"), rows_of(task.folder, "train")
    data = TrainData(DataConfig(path=path, sequence_length=task.sequence, isolate_documents=True))
    known = {tuple(row[0]): row for row in rows}
    for step in range(task.total_steps):
        found: list[Row] = []
        for at in range(task.global_batch):
            window = data.sequence_at(step * task.global_batch + at)
            if isinstance(window, AnswerSequence):
                found += [rows[int(row)] for row in window.rows]
            else:  # what is packed is told by its positions; what fills the sequence is no row
                assert window.positions is not None
                parts = np.split(window.inputs, np.flatnonzero(window.positions == 0)[1:])
                found += [known[key] for part in parts if (key := tuple(part.tolist())) in known]
        yield found


def padded(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """(ids, counted) [rows, longest]"""
    longest = max(len(ids) for ids, _ in rows)
    ids, counted = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest)
    for at, (row, mask) in enumerate(rows):
        ids[at, : len(row)] = torch.tensor(row)
        counted[at, : len(mask)] = torch.tensor(mask, dtype=torch.float32)
    return ids, counted


def micro_batches(task: Tuning, steps: list[list[Row]], group: int, *, grouped: bool = False) -> list[list[list[int]]]:
    """Of each step, of each of its micro-batches: which examples (a row, or a pair: a `group` of 2) it has, counted
    over all steps. Steps have equally many micro-batches, as transformers accumulates, of about `at_once` examples.

    grouped: examples of about one length together.
    """
    found, before = [], 0
    examples = [len(rows) // group for rows in steps]
    usual = max(1, round(statistics.mean(examples) / task.at_once)) if task.at_once else 1
    accumulated = min(usual, *examples)  # each has one at least
    for rows in steps:
        lengths = [max(len(ids) for ids, _ in rows[at : at + group]) for at in range(0, len(rows), group)]
        order = sorted(range(len(lengths)), key=lengths.__getitem__) if grouped else list(range(len(lengths)))
        cuts = [len(order) * micro // accumulated for micro in range(accumulated + 1)]
        found.append([[before + each for each in order[a:b]] for a, b in itertools.pairwise(cuts)])
        before += len(order)
    return found


def padding_share(task: Tuning, group: int) -> float:
    """Of the padded micro-batches of all steps: tokens that are padding."""
    steps = list(steps_of(task))
    lengths = [len(ids) for rows in steps for ids, _ in rows]
    micros = [
        [length for each in micro for length in lengths[group * each : group * (each + 1)]]
        for step in micro_batches(task, steps, group)
        for micro in step
    ]
    return 1 - sum(map(sum, micros)) / sum(len(micro) * max(micro) for micro in micros)


def serve_tuning(name: str, pipe: Connection, task: Tuning) -> None:
    """Entry of a contestant's process."""
    enter(task.threads)
    kind, _, how = name.partition(" ")
    clock = _Counting(pipe, task, Path(task.folder, f"{name}.bytes"))
    loops = {"llmtrain": run_ours, "plain": run_plain, "peft": run_plain, "trainer": run_trainer, "trl": run_trl}
    loops[kind](clock, task, how)
    pipe.send("end")


class _Counting(Clock):
    """Writes how much is held between two steps, after the first round."""

    def __init__(self, pipe: Connection, task: Tuning, path: Path) -> None:
        super().__init__(pipe, task)
        self._path = path

    def _wait(self, done: Round | None) -> None:
        if done is not None and not self._path.exists():
            self._path.write_text(str(_held_bytes()))
        super()._wait(done)


def _held_bytes() -> int:
    """Of all tensors that are alive: parameters, gradients, masters, moments, the engine's buffers."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    found = {}
    for thing in gc.get_objects():
        kind = type(thing)  # isinstance asks a lazy module for its class, and that imports or warns
        if issubclass(kind, Tensor) and thing.device.type == "cpu" and "Fake" not in kind.__name__:
            for each in (thing, thing.grad if thing.is_leaf else None):
                if each is not None:
                    found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


def write_adapter(folder: Path) -> None:
    """adapter/: what the contestants with LoRA begin with. Names and shapes are those of a model without memory."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    config = LoraConfig(r=R, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    made = get_peft_model_state_dict(get_peft_model(model, config))
    values = {name: torch.zeros(each.shape) for name, each in made.items()}
    torch.manual_seed(0)
    for name, each in values.items():
        if "lora_A" in name:
            nn.init.kaiming_uniform_(each, a=5**0.5)
    (folder / "adapter").mkdir()
    save_file(values, folder / "adapter/adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder / "adapter"))


def run_ours(clock: Clock, task: Tuning, how: str) -> None:
    """The loop of `llmtrain train`. how: full, lora, dpo."""
    keep = (lambda engine: _keep_ours(task, engine, f"llmtrain {how}")) if task.at_once else None
    timed_run(clock, write_yaml(task, how), keep)


def write_yaml(task: Tuning, how: str) -> Path:
    """The run of ours. Its attention is the usual one, which on a GPU stays within documents."""
    folder = Path(task.folder)
    fields: dict[str, Any] = {
        "deepspeed": str(folder / "deepspeed.json"),
        "model": {"pretrained": str(folder / "model")},
        "data": {"path": str(folder / "data"), "sequence_length": task.sequence, "isolate_documents": True},
        "optim": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY, "clip_norm": CLIP_NORM},
        "schedule": {"name": "constant"},
        "train": {
            "run_dir": str(folder / f"run-{how}"),
            "global_batch": task.global_batch,
            "micro_batch": task.global_batch,
            "max_steps": task.total_steps,
            "eval": how == "dpo",
        },
    }
    if how == "lora":
        fields["adapter"] = {**ADAPTER, "start": str(folder / "adapter")}
    if how == "dpo":
        fields["objective"] = {"name": "dpo", "beta": BETA}
    if task.at_once:  # rows of skewed lengths, on a CPU too
        fields["model"]["attention"] = "varlen"
    path = folder / f"{how}.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def trained_of(folder: str, name: str) -> Path:
    """Where a contestant leaves what it has trained, as a Hugging Face folder."""
    return Path(folder) / f"trained-{name.replace(' ', '-')}"


def _keep_ours(task: Tuning, engine: Any, name: str) -> None:
    from llmtrain.optim.optimizers import PARAM

    model = _model(task, torch.bfloat16 if task.bf16 else torch.float32)  # as peers' trainers write theirs
    flat = {name: each.data.view(-1) for name, each in model.named_parameters()}
    for piece in engine.state():
        if piece.kind == PARAM:
            with piece.open() as live:
                for at, begin, size in piece.region.spans():
                    flat[piece.name][at : at + size] = live[begin : begin + size].to("cpu")
    model.save_pretrained(trained_of(task.folder, name))


def held_out(folder: str, name: str, *, pairs: bool) -> float:
    """Loss of what a contestant has trained, by plain transformers in fp32, each row alone: nats per token that counts
    of the validation rows; of pairs the mean of DPO's loss, with model/ for the reference."""
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def log_probs_of(path: Path) -> Tensor:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, use_cache=False)
        model.to(device).eval()
        with torch.no_grad():
            return torch.cat([_log_probs(model, [row]).cpu() for row in rows]).double()

    rows = rows_of(folder, "validation")
    s = log_probs_of(trained_of(folder, name))
    if not pairs:
        return -float(s.sum()) / sum(sum(mask[1:]) for _, mask in rows)
    d = s - log_probs_of(Path(folder) / "model")
    return float(-F.logsigmoid(BETA * (d[::2] - d[1::2])).mean())


def _model(task: Tuning, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        Path(task.folder) / "model", dtype=dtype, attn_implementation="sdpa", use_cache=False
    )


def _with_adapter(task: Tuning, model: Any) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, Path(task.folder) / "adapter", is_trainable=True)


def _log_probs(model: nn.Module, rows: list[Row]) -> Tensor:
    """Log-probability of each row's counted tokens, summed, [rows]."""
    device = next(model.parameters()).device
    ids, counted = (each.to(device) for each in padded(rows))
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(input_ids=ids).logits[:, :-1]
    each = -F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:], reduction="none")
    return (each * counted[:, 1:]).sum(1)


def run_plain(clock: Clock, task: Tuning, how: str) -> None:
    """A loop as one writes it. how: full, lora (by peft), online (DPO with a second model)."""
    model = _model(task).to(task.device).train()
    if how == "lora":
        model = _with_adapter(task, model)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
    steps, group = list(steps_of(task)), 2 if how == "online" else 1
    reference = _model(task).to(task.device).eval() if how == "online" else None
    all_rows = [row for rows in steps for row in rows]
    clock.ready()
    for rows, micros in zip(steps, micro_batches(task, steps, group), strict=True):
        total = torch.zeros((), device=task.device)
        for micro in micros:
            some = [row for each in micro for row in all_rows[group * each : group * (each + 1)]]
            s = _log_probs(model, some)
            if reference is None:
                loss = -s.sum() / sum(sum(mask[1:]) for _, mask in rows)
            else:
                with torch.no_grad():
                    d = _log_probs(reference, some)
                d = s - d
                loss = -F.logsigmoid(BETA * (d[::2] - d[1::2])).sum() / (len(rows) / 2)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done(total)
    if task.at_once:
        model.save_pretrained(trained_of(task.folder, f"plain {how}"))


def run_trainer(clock: Clock, task: Tuning, how: str) -> None:
    """transformers.Trainer over padded rows; TRL and LLaMA-Factory extend it. how: full, lora (by peft)."""
    from transformers import Trainer, TrainingArguments

    rows, options, batches = _batches_of(task, f"trainer-{how}", 1)
    model = _model(task, torch.bfloat16 if task.bf16 else torch.float32)
    trainer = Trainer(
        model=_with_adapter(task, model) if how == "lora" else model,
        args=TrainingArguments(remove_unused_columns=False, **options),
        train_dataset=[{"row": row} for row in rows],
        data_collator=_batch,
    )
    _take_time(trainer, clock, batches)
    _keep_theirs(task, trainer, f"trainer {how}")


def _batch(examples: list[dict[str, Row]]) -> dict[str, Tensor]:
    rows = [each["row"] for each in examples]
    ids, counted = padded(rows)
    lengths = torch.tensor([[len(ids)] for ids, _ in rows])
    mask = torch.arange(ids.shape[1]).unsqueeze(0) < lengths
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(counted == 0, -100)}


def run_trl(clock: Clock, task: Tuning, how: str) -> None:
    """TRL's trainer. how: sft, grouped (a micro-batch has rows of about one length), flat (its padding-free batches),
    lora (sft with an adapter, by peft), online (DPO with a second model), prepared (DPO with the reference's
    log-probabilities as columns)."""
    from transformers import AutoTokenizer

    pairs = how in ("online", "prepared")
    rows, options, batches = _batches_of(task, f"trl-{how}", 2 if pairs else 1, grouped=how == "grouped")
    options["max_length"] = None if how == "flat" else task.sequence  # no row is longer
    tokenizer = AutoTokenizer.from_pretrained(Path(task.folder) / "model")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = (_trl_dpo if pairs else _trl_sft)(task, how, rows, options, tokenizer)
    _take_time(trainer, clock, batches, pairs=pairs)
    _keep_theirs(task, trainer, f"trl {how}")


def _keep_theirs(task: Tuning, trainer: Any, name: str) -> None:
    if task.at_once:
        trainer.save_model(str(trained_of(task.folder, name)))


def _batches_of(
    task: Tuning, name: str, group: int, *, grouped: bool = False
) -> tuple[list[Row], dict[str, Any], list[list[int]]]:
    """(rows in the order of the steps, arguments of transformers' trainers, the examples of each micro-batch): the same
    DeepSpeed JSON, but for its batch, which they count in rows (or pairs: a `group` of 2) where ours counts sequences;
    otherwise their defaults, but for recomputation."""
    import deepspeed

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    on_cpu = task.device.type == "cpu"
    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    steps = list(steps_of(task))
    micros = micro_batches(task, steps, group, grouped=grouped)
    share = task.at_once or len(steps[0]) // group
    options = {
        "output_dir": str(Path(task.folder) / name),
        "deepspeed": json.loads((Path(task.folder) / "deepspeed.json").read_text())
        | {
            "train_batch_size": share * len(micros[0]),
            "train_micro_batch_size_per_gpu": share,
            "gradient_accumulation_steps": len(micros[0]),
        },
        "per_device_train_batch_size": share,
        "gradient_accumulation_steps": len(micros[0]),
        "max_steps": task.total_steps,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": CLIP_NORM,
        "bf16": task.bf16,
        "gradient_checkpointing": task.recompute,
        "train_sampling_strategy": "sequential",
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": on_cpu,
    }
    return [row for step in steps for row in step], options, [micro for step in micros for micro in step]


def _take_time(trainer: Any, clock: Clock, batches: list[list[int]], *, pairs: bool = False) -> None:
    """Train on these micro-batches, and tell the clock of each step's loss.

    pairs: the trainer takes the mean of each micro-batch's pairs, and the mean of those. Here a micro-batch counts by
    its pairs, as it does by its tokens in SFT.
    """
    from contestants import after_each_step

    accumulated, seen, plain = trainer.args.gradient_accumulation_steps, [0], trainer.compute_loss

    def by_pairs(*given: Any, **named: Any) -> Tensor:
        step = seen[0] // accumulated * accumulated
        share = len(batches[seen[0]]) * accumulated / sum(map(len, batches[step : step + accumulated]))
        seen[0] += 1
        return plain(*given, **named) * share

    if pairs:
        trainer.compute_loss = by_pairs

    def loader() -> Any:
        given = torch.utils.data.DataLoader(
            trainer.train_dataset, batch_sampler=batches, collate_fn=trainer.data_collator
        )
        return trainer.accelerator.prepare(given)

    trainer.get_train_dataloader = loader
    losses: list[Tensor] = []
    step = trainer.training_step

    def training_step(*given: Any, **named: Any) -> Tensor:
        losses.append(step(*given, **named).detach())
        return losses[-1]

    trainer.training_step = training_step
    trainer.add_callback(after_each_step(clock, losses))
    trainer.train()


def _trl_sft(task: Tuning, how: str, rows: list[Row], options: dict[str, Any], tokenizer: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model = _model(task, torch.bfloat16 if task.bf16 else torch.float32)
    given = [{"input_ids": ids, "completion_mask": [int(bit) for bit in mask]} for ids, mask in rows]
    return SFTTrainer(
        model=_with_adapter(task, model) if how == "lora" else model,
        processing_class=tokenizer,
        args=SFTConfig(completion_only_loss=True, padding_free=how == "flat", **options),
        train_dataset=Dataset.from_list(given),
    )


def _trl_dpo(task: Tuning, how: str, rows: list[Row], options: dict[str, Any], tokenizer: Any) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    prepared = how == "prepared"
    given = []
    policy = _model(task)
    with torch.no_grad():
        reference = [_log_probs(policy, rows[at : at + 8]) for at in range(0, len(rows), 8)] if prepared else []
    known = torch.cat(reference).tolist() if prepared else []
    for at in range(0, len(rows), 2):
        (chosen, mask), (rejected, _) = rows[at], rows[at + 1]
        begin = mask.index(True)
        one: dict[str, Any] = {"prompt_ids": chosen[:begin], "chosen_ids": chosen[begin:]}
        one["rejected_ids"] = rejected[begin:]
        if prepared:
            one |= {"ref_chosen_logps": known[at], "ref_rejected_logps": known[at + 1]}
        given.append(one)
    text = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2)  # it renders text, and takes no ids
    trainer = DPOTrainer(
        model=policy,
        ref_model=None if prepared else _model(task),
        processing_class=tokenizer,
        train_dataset=text,
        args=DPOConfig(beta=BETA, precompute_ref_log_probs=prepared, remove_unused_columns=False, **options),
    )
    trainer.train_dataset = Dataset.from_list(given)
    return trainer

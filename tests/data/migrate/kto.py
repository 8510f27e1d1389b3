"""A usual script, as a user of TRL has it. It is read, never run."""

from datasets import load_dataset
from trl import KTOConfig, KTOTrainer

config = KTOConfig(
    output_dir="runs/judged",
    beta=0.1,
    desirable_weight=1.0,
    undesirable_weight=1.33,
    loss_type="kto",
    max_length=1024,
    learning_rate=1e-6,
    num_train_epochs=1,
    per_device_train_batch_size=8,
    gradient_checkpointing=False,
    precompute_ref_log_probs=False,
    logging_first_step=True,
    full_determinism=True,
    resume_from_checkpoint="runs/judged/checkpoint-100",
)
KTOTrainer(
    model="runs/talks/final",
    args=config,
    train_dataset=load_dataset("json", data_files="judged.jsonl", split="train"),
    compute_metrics=None,
).train()

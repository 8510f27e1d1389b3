"""A usual script, as a user of TRL has it. It is read, never run."""

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

trainer = DPOTrainer(
    model="runs/talks/final",
    ref_model=None,
    args=DPOConfig(
        output_dir="runs/pairs",
        beta=0.1,
        loss_type=["sigmoid", "sft"],
        loss_weights=[1.0, 0.2],
        label_smoothing=0.1,
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=8,
        max_length=2048,
        truncation_mode="keep_start",
        learning_rate=5e-7,
        warmup_steps=50,
        max_steps=1000,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        fp16=False,
        bf16=True,
        logging_steps=10,
        save_steps=250,
        dataset_num_proc=4,
        remove_unused_columns=False,
        sync_ref_model=False,
        disable_dropout=True,
        f_divergence_type="reverse_kl",
    ),
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
)
trainer.train()

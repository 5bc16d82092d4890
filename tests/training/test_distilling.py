"""abc-attn distill at toy size: it learns, resumes bit for bit, and leaves a model that loads and streams."""

from __future__ import annotations

import json
import random

import pytest
import torch
from command_line import refused_in_one_line
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import abc_attn.hf  # noqa: F401 (makes the Auto classes know bounded models)
from abc_attn.cli import main
from abc_attn.data.blocks import learn_tokenizer
from abc_attn.data.segments import TextSegments
from abc_attn.evaluation import token_nll
from abc_attn.hf import convert
from abc_attn.models.transfer import Comparison
from abc_attn.training import distilling
from abc_attn.training.trainer import read_metrics

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 280}
HOW = ["--control", "global:2+keep:6", "--tokens", "384", "--segment", "48", "--queries", "24", "--save-steps", "3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with text.txt and the model `tiny`, whose queries all look for one token in seven."""
    folder = tmp_path_factory.mktemp("distill")
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(1, 5))) for _ in range(60)]
    text = " ".join(chance.choices(words, k=4000))
    (folder / "text.txt").write_text(text)
    (folder / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    learn_tokenizer(iter([text]), SIZES["vocab_size"]).save_pretrained(folder / "tiny")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=0, eos_token_id=2))
    with torch.no_grad():
        sought = model.model.embed_tokens.weight
        sought[:, 0], sought[::7, 1] = 0.1, 0.2
        for layer in model.model.layers:
            for proj, column in ((layer.self_attn.q_proj, 0), (layer.self_attn.k_proj, 1)):
                proj.weight[3::8, column] = 2.0  # of each head the number that rotates least
    model.save_pretrained(folder / "tiny")
    return folder


def distill(place, target, *more):
    return main(["distill", str(place / "tiny"), str(target), "--file", str(place / "text.txt"), *HOW, *more])


def test_the_error_falls_and_nothing_else_moves(place, tmp_path, capsys):
    assert distill(place, tmp_path / "m", "--tokens", "1440", "--learning-rate", "0.05") in (0, None)
    assert "weights learned from 1,440 tokens" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    original = LlamaForCausalLM.from_pretrained(place / "tiny").eval()
    for name, weight in original.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name
    records = read_metrics(tmp_path / "m" / "metrics.jsonl")
    assert [record["tokens"] for record in records] == [*range(48, 1441, 48)]
    assert all(len(record["layers"]) == 2 for record in records)
    # On other text, beside the window that it starts from.
    teacher = convert(LlamaForCausalLM.from_pretrained(place / "tiny").eval(), "softmax")
    window = convert(original, "global:2+window:6")
    ids = torch.randint(3, 280, (4, 48), generator=torch.Generator().manual_seed(5))
    query = torch.arange(48)

    def off(student):
        return sum(float(each.error(query)) for each in Comparison(student, teacher)(input_ids=ids, use_cache=False))

    with torch.no_grad():
        assert off(model) < 0.7 * off(window)
    # It streams: as one pass, and in the state of generate().
    nll = token_nll(model, ids[0])
    logits = model(torch.cat([ids.new_zeros(1, 1), ids[:1, :-1]], 1)).logits[0].double()
    assert torch.allclose(nll, torch.nn.functional.cross_entropy(logits, ids[0], reduction="none"), atol=1e-4)
    assert model.generate(ids[:1], max_new_tokens=4, do_sample=False).shape == (1, 52)


def test_a_run_that_was_interrupted_ends_bit_for_bit_as_one_that_was_not(place, tmp_path, monkeypatch, capsys):
    distill(place, tmp_path / "whole")
    step = distilling._Run._step

    def interrupted(run, number):
        if number == 5:  # after the checkpoint at 3
            raise KeyboardInterrupt
        return step(run, number)

    with monkeypatch.context() as patched:
        patched.setattr(distilling._Run, "_step", interrupted)
        with pytest.raises(SystemExit):
            distill(place, tmp_path / "cut")
    capsys.readouterr()
    refused_in_one_line(
        ["distill", str(place / "tiny"), str(tmp_path / "cut"), "--file", str(place / "text.txt"), *HOW],
        "--resume",
        capsys,
    )
    distill(place, tmp_path / "cut", "--resume")
    whole, cut = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(weight, cut[name]) for name, weight in whole.items())
    losses = [[r["layers"] for r in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "cut")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8
    capsys.readouterr()
    distill(place, tmp_path / "cut")
    assert "nothing to do" in capsys.readouterr().out


def test_controls_that_mix_tokens_learn_by_the_same_command(place, tmp_path, capsys):
    how = ["--control", "global:2+window:4+slots:4", "--set", "half_life=16", "--file"]
    more = ["--tokens", "96", "--segment", "48", "--bfloat16"]
    main(["distill", str(place / "tiny"), str(tmp_path / "m"), *how, str(place / "text.jsonl"), *more])
    records = read_metrics(tmp_path / "m" / "metrics.jsonl")
    assert len(records) == 2
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["control_options"] == {"half_life": 16}
    assert not config["tie_control"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["--control", "global:2+window:6"], "no weights to learn"),
        (["--control", "keep:64"], "give a longer segment"),
        (["--control", "kept:6"], "unknown control 'kept'"),
        (["--set", "longest=-1"], "longest must be a number from 1"),
        (["--set", "shortest=1"], "no option 'shortest'"),
        (["--file", "nowhere.txt"], "no text file at nowhere.txt"),
        (["--learning-rate", "-1"], "a number from 0"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(place, tmp_path, capsys, changes, said):
    given = ["distill", str(place / "tiny"), str(tmp_path / "m"), "--file", str(place / "text.txt"), *HOW, *changes]
    refused_in_one_line(given, said, capsys)
    assert not (tmp_path / "m").exists()


def test_another_run_or_another_folder_is_not_written_over(place, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    given = ["distill", str(place / "tiny"), str(tmp_path / "full"), "--file", str(place / "text.txt"), *HOW]
    refused_in_one_line(given, "not a run of abc-attn distill", capsys)
    short = ["distill", str(place / "tiny"), str(tmp_path / "m"), "--file", str(place / "text.txt"), *HOW]
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "run.json").write_text(json.dumps({"distillation": {"control": "mlp"}}))
    refused_in_one_line(short, "holds another run", capsys)


def test_segments_are_a_function_of_seed_and_number(place):
    tokenizer = learn_tokenizer(iter(["a b c d e f g h"] * 9), 280)
    text = " ".join(f"{i % 97}" for i in range(500))
    one, two, other = (TextSegments(text, tokenizer, 0, 20, seed) for seed in (0, 0, 1))
    assert torch.equal(one[3], two[3])
    assert not torch.equal(one[3], one[4])
    assert not torch.equal(one[3], other[3])
    assert one[3].shape == (20,)
    assert int(one[3][0]) == 0
    with pytest.raises(ValueError, match="fewer than a segment"):
        TextSegments("a b c", tokenizer, 0, 20, 0)

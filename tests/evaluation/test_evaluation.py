"""Perplexity against a computation that scores one token at a time."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from abc_attn.evaluation import perplexity, token_nll
from abc_attn.hf import AdaptiveLM, AdaptiveLMConfig, convert

WORDS = 60


def adaptive(control="mlp:8"):
    return AdaptiveLM(
        AdaptiveLMConfig(
            vocab_size=WORDS, cutoffs=(20,), div_val=2, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=64, control=control,
        )
    ).double()  # fmt: skip


def llama():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, bos_token_id=1, eos_token_id=2, **sizes)).double()


def gpt2():
    """A converted one, whose table of positions ends after 20 tokens."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 20}
    return convert(GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=1, eos_token_id=2, **sizes)), "mlp:4")


def brute_force(model, tokens, context, window):
    """Each token from all that its window holds before it, the whole softmax each time."""
    start = model.config.bos_token_id if model.config.bos_token_id is not None else model.config.eos_token_id
    text = [start, *tokens.tolist()]
    step, nll = window - context, []
    for target in range(1, len(text)):
        block = (target - 1) // step * step  # the first target of its window is number block + 1
        read = text[max(0, block - context) : target]
        assert len(read) <= window
        assert len(read) > context or read[0] == start
        logits = model.eval()(torch.tensor([read])).logits[0, -1]
        nll.append(-logits.log_softmax(-1)[text[target]].item())
    return torch.tensor(nll, dtype=torch.float64)


@pytest.mark.parametrize("make", [adaptive, lambda: adaptive("softmax"), lambda: adaptive("linformer:4"), llama])
@pytest.mark.parametrize("context", [0, 8, 11, 15])
def test_perplexity_is_that_of_brute_force(make, context):
    model = make()
    tokens = np.random.default_rng(0).integers(WORDS, size=71, dtype=np.uint16)
    expected = brute_force(model, tokens, context, window=16)
    for batch_size in (3, None):
        found = token_nll(model, tokens, context=context, window=16, batch_size=batch_size)
        assert torch.allclose(found, expected, rtol=1e-6 if make is llama else 1e-12, atol=0)
    assert math.isclose(perplexity(found, 50), math.exp(found.sum() / 50))
    assert math.isclose(perplexity(found), math.exp(found.mean()))
    assert model.training is False  # brute_force left it so


@pytest.mark.parametrize(
    "make",
    [adaptive, *(partial(adaptive, control) for control in ("window:4+mlp:4", "random:8", "rfa:8")),
     lambda: convert(llama(), "window:80").double()],
)  # fmt: skip
def test_streaming_is_one_long_sequence(make, monkeypatch):
    monkeypatch.setattr("abc_attn.evaluation.scoring.CHUNK", 16)
    model = make().train()
    tokens = np.random.default_rng(0).integers(WORDS, size=71, dtype=np.uint16)
    assert torch.allclose(token_nll(model, tokens), token_nll(model, tokens, window=100), rtol=1e-12, atol=0)
    assert model.training


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: token_nll(adaptive(), np.arange(9), context=16, window=16), "from 0 to window - 1 = 15"),
        (lambda: token_nll(adaptive(), np.arange(0)), "at least one token"),
        (lambda: token_nll(adaptive(), torch.zeros(1, 9)), r"got shape \(1, 9\)"),
        (lambda: token_nll(adaptive("softmax"), np.arange(9)), "cannot be streamed"),
        (lambda: token_nll(llama(), np.arange(9)), "cannot be streamed"),
        (lambda: token_nll(gpt2(), np.arange(21)), "end after 20 tokens, and 21 would"),
        (lambda: token_nll(gpt2(), np.arange(40), window=30), "give a window of at most 20"),
        (lambda: token_nll(convert(llama(), "softmax"), np.arange(9)), "cannot be streamed"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_an_error(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_a_table_of_positions_is_read_to_its_end():
    model, tokens = gpt2(), np.arange(20)
    assert torch.allclose(token_nll(model, tokens), token_nll(model, tokens, window=20))


def test_a_perplexity_beyond_all_numbers_is_infinite():
    assert perplexity(torch.full((3,), 300.0), words=1) == math.inf
    assert math.isclose(perplexity(torch.full((3,), 2.0), words=2), math.exp(3))

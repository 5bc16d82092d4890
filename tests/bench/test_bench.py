"""The benchmarks: no figure without its check, ratios that follow from the times, files with their provenance."""

import gc
import importlib.util
import json
import multiprocessing
import multiprocessing.forkserver
import platform
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from abc_attn import bench, mlp_attention
from abc_attn.bench import measure
from abc_attn.bench.measure import Times, Work, check, error, interleave, peak_memory, runner
from abc_attn.cli import main

RUNS = {
    "op": ["--tokens", "32", "64", "--slots", "4", "--width", "8", "--heads", "1"],
    "decode": ["--contexts", "2", "16", "1500", "--slots", "4", "--width", "8", "--heads", "2", "--batch", "2"],
    "encode": ["--tokens", "32", "--slots", "4", "--width", "8", "--heads", "2", "--batch", "2"],
    "scaling": ["--tokens", "256", "64", "--slots", "4", "--width", "8", "--heads", "1"],
}
OURS = {"native", "torch", "mlp", "linformer"}
FIGURES = ("seconds", "quartiles", "ratio_sdpa", "ratio_eager", "gflops", "sgemm_share", "peak_bytes", "growth")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """One thread, small matrices, no process of its own for each figure of memory (one test has them), the malloc of
    the tests as it is, and nothing for the garbage collector to walk through but what a benchmark makes itself."""
    threads = torch.get_num_threads()
    gc.freeze()
    monkeypatch.setattr(measure, "SGEMM_SIZE", 64)
    monkeypatch.setattr(bench, "ALONE", 2)
    monkeypatch.setattr(bench, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(bench, "peak_memory", lambda work: 1000 * work.tokens * (2 if work.ours else 3))
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture
def no_plot(monkeypatch):
    """A plot takes most of a second, and test_a_run_from_end_to_end has one of each."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def forkserver():
    """Started with transformers, if it has not been started: else every process would import it anew."""
    pytest.importorskip("transformers")
    multiprocessing.get_context("forkserver").set_forkserver_preload(["abc_attn.bench.models"])
    multiprocessing.forkserver.ensure_running()


def run(name, folder, *more):
    """The exit code of a tiny run, and the JSON it wrote."""
    words = ["bench", name, *RUNS[name], "--repetitions", "2", "--threads", "1", "--output", str(folder), *more]
    try:
        code = main(words)
    except SystemExit as exit:
        code = exit.code
    return code, json.loads((folder / f"{name}.json").read_text())


FAULTS = """
import resource, torch
from abc_attn.allocator import keep_freed_memory

def faults():
    for _ in range(20):  # until malloc has found a place that fits the next as well
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

left_alone = faults()
keep_freed_memory()
print(left_alone, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be told")
def test_freed_memory_is_kept_while_times_are_taken():
    """64 MB, freed and asked for again, cost no page faults, of huge pages or small, once the process keeps them."""
    shown = subprocess.run([sys.executable, "-c", FAULTS], check=True, capture_output=True).stdout
    left_alone, kept = map(int, shown.split())
    assert left_alone >= 32
    assert kept < 32


@pytest.mark.parametrize("name", RUNS)
def test_a_run_from_end_to_end(name, tmp_path, capsys):
    folder = tmp_path / "new" / "results"
    code, found = run(name, folder)
    shown = capsys.readouterr()
    assert code == 0
    assert found["benchmark"] == name
    facts = found["provenance"]
    assert facts["command"].startswith(f"abc-attn bench {name} --")
    assert f"{RUNS[name][0]} {RUNS[name][1]}" in facts["command"]
    assert facts["threads"] == 1
    assert facts["cpu"]
    assert facts["date"].endswith("UTC")
    assert facts["versions"].keys() >= {"abc-attn", "torch", "python"}
    assert len(facts["load_average_start"]) == len(facts["load_average_end"]) == 3
    assert "commit" in facts

    rows = found["rows"]
    assert {row["gate"] for row in rows} == ({"", "head", "slot", "slots"} if name == "op" else {""})
    by_key = {(row["method"], row["phase"], row["tokens"], row["slots"], row["gate"]): row for row in rows}
    assert len(by_key) == len(rows)
    for row in rows:
        assert row["note"] == ""
        first, third = row["quartiles"]
        assert 0 < first <= row["seconds"] <= third
        assert row["repetitions"] == 2
        for baseline in ("sdpa", "eager"):
            other = by_key[baseline, row["phase"], row["tokens"], None, ""]
            assert row[f"ratio_{baseline}"] == pytest.approx(other["seconds"] / row["seconds"])
            if name != "decode":
                assert row[f"peak_ratio_{baseline}"] == (1.5 if row["method"] in OURS else 1)
        if row["gate"]:
            plain = by_key[row["method"], row["phase"], row["tokens"], row["slots"], ""]
            assert row["gate_cost"] == pytest.approx(row["seconds"] / plain["seconds"])
        assert (row["gate_error"] is not None) == (row["method"] in OURS)
        if row["method"] in OURS:
            assert row["gate_error"] < 1e-4
            if row["phase"] == "forward":
                tokens = 1 if name == "decode" else row["tokens"]
                flops = 8 * row["slots"] * row["width"] * row["batch"] * row["heads"] * tokens
                assert row["gflops"] == pytest.approx(flops / row["seconds"] / 1e9)
                assert row["sgemm_share"] == pytest.approx(row["gflops"] / row["sgemm_gflops"])

    assert shown.out.splitlines()[0].split()[:1] == [{"decode": "context", "scaling": "tokens"}.get(name, "pass")]
    assert f"bench {name}: " in shown.err  # plain lines: this is no terminal
    assert "\r" not in shown.err
    table = (folder / f"{name}.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in table) == len(rows) + 2
    assert facts["command"] in table[-1]
    kinds = ["json", "md", "png"] if importlib.util.find_spec("matplotlib") else ["json", "md"]
    assert sorted(path.name for path in folder.iterdir()) == [f"{name}.{kind}" for kind in kinds]


def test_decoding_compares_the_state_with_the_cache(tmp_path, no_plot):
    _, found = run("decode", tmp_path)
    ours = [row for row in found["rows"] if row["method"] == "mlp"]
    assert len({row["state_bytes"] for row in ours}) == 1  # whatever the context
    for row in found["rows"]:
        assert row["seconds_per_token"] == pytest.approx(row["seconds"] / 2)
        if row["method"] not in OURS:
            assert row["state_bytes"] == 2 * row["tokens"] * 2 * 2 * 8 * 4
    seconds = [row["seconds_alone"] for row in ours]
    assert list(found["summary"].values()) == [pytest.approx(max(seconds) / min(seconds))]


def test_growth_is_that_over_a_quarter_of_the_tokens(tmp_path, no_plot):
    _, found = run("scaling", tmp_path)
    for method in {row["method"] for row in found["rows"]}:
        short, long = (row for row in found["rows"] if row["method"] == method)
        assert (short["tokens"], long["tokens"]) == (64, 256)
        assert long["growth"] == pytest.approx(long["seconds"] / short["seconds"])
        assert long["peak_growth"] == 4
        assert short["growth"] is None


def wrong(*inputs, **options):
    """mlp_attention, off by a part in a thousand; the fp64 oracle is spared."""
    out, state = mlp_attention(*inputs, **options)
    return out if out.dtype == torch.float64 else out * 1.001, state


@pytest.mark.parametrize("name", RUNS)
def test_no_figure_where_the_check_fails(name, tmp_path, monkeypatch, capsys, no_plot):
    monkeypatch.setattr(bench, "mlp_attention", wrong)
    monkeypatch.setattr(measure, "mlp_attention", wrong)
    code, found = run(name, tmp_path)
    assert code == 1
    assert "no figures for the rows whose check failed" in capsys.readouterr().out
    failed = [row for row in found["rows"] if row["method"] in OURS - {"linformer"}]
    assert failed
    for row in found["rows"]:
        if row in failed:
            assert "CHECK FAILED: error 1" in row["note"]
            assert row["gate_error"] == pytest.approx(1e-3, rel=0.1)
            assert [row[figure] for figure in FIGURES] == [None] * len(FIGURES)
        else:
            assert row["seconds"] > 0


def test_nan_does_not_pass_the_check(tmp_path, monkeypatch, no_plot):
    right = measure.METHODS["linformer"]
    monkeypatch.setitem(measure.METHODS, "linformer", lambda *inputs: right(*inputs) * torch.nan)
    code, found = run("encode", tmp_path)
    assert code == 1
    assert [row["seconds"] for row in found["rows"] if row["method"] == "linformer"] == [None, None]


@pytest.mark.parametrize("wronged", range(5))
def test_the_check_sees_the_output_and_every_gradient(wronged):
    work = Work("torch", batch=2, heads=2, tokens=20, width=8, slots=4, backward=True)
    results = runner(work)()
    assert len(results) == 5
    assert check(work, lambda: results) < 1e-5
    spoilt = [x * 1.01 if i == wronged else x for i, x in enumerate(results)]
    assert check(work, lambda: tuple(spoilt)) == pytest.approx(0.01, rel=0.01)
    spoilt[wronged] = results[wronged] * torch.nan
    assert not check(work, lambda: tuple(spoilt)) < measure.TOLERANCE


@pytest.mark.parametrize("causal", [True, False])
def test_both_baselines_are_softmax_attention(causal):
    found = [runner(Work(method, 2, 2, 33, 8, causal=causal, backward=True))() for method in ("sdpa", "eager")]
    for sdpa, eager in zip(*found, strict=True):
        assert error(eager, sdpa.double()) < 1e-5


def test_what_does_not_fit_is_skipped_and_said(tmp_path, monkeypatch, no_plot):
    monkeypatch.setattr(measure, "available_bytes", lambda: 3_000_000)
    monkeypatch.setattr(bench, "available_bytes", lambda: 100_000)
    _, found = run("op", tmp_path, "--tokens", "1024")
    rows = {row["method"]: row for row in found["rows"] if row["phase"] == "forward"}
    assert rows["eager"]["note"].startswith("skipped: needs 0.0")
    assert rows["eager"]["seconds"] is None
    assert rows["torch"]["ratio_eager"] is None
    assert rows["torch"]["ratio_sdpa"] > 0
    _, found = run("decode", tmp_path)
    assert [row["tokens"] for row in found["rows"] if "does not fit" in row["note"]] == [1500, 1500]


def test_a_slow_baseline_is_followed_only_so_far(tmp_path, monkeypatch, no_plot):
    monkeypatch.setattr(bench, "LONGEST_CALL", 1e-9)
    _, found = run("scaling", tmp_path)
    for row in found["rows"]:
        assert ("one call would take" in row["note"]) == (row["method"] not in OURS and row["tokens"] == 256)


def test_repetitions_are_interleaved():
    order = []

    def note(name):
        order.append(name)
        time.sleep(0.03)  # long enough to be timed alone

    runs = {Work(method, 1, 1, 1, 1): partial(note, method) for method in ("sdpa", "eager", "torch")}
    times, rate = interleave(runs, 3, lambda work: None)
    assert rate > 0
    assert [len(taken.seconds) for taken in times.values()] == [3, 3, 3]
    assert order[:3] == ["sdpa", "eager", "torch"]  # untimed
    warm, timed = order[3::2], order[4::2]
    assert warm == timed  # each finds the caches as it left them itself
    rounds = [timed[i : i + 3] for i in (0, 3, 6)]
    assert [sorted(each) for each in rounds] == [sorted(order[:3])] * 3
    assert len(set(map(tuple, rounds))) > 1  # none always comes after the same other


def test_a_long_call_is_not_made_for_the_caches_alone(monkeypatch):
    monkeypatch.setattr("abc_attn.bench.measure.WARM", 0.02)
    calls = []
    interleave({Work("sdpa", 1, 1, 1, 1): lambda: calls.append(time.sleep(0.03))}, 3, lambda work: None)
    assert len(calls) == 1 + 3


def test_quartiles():
    assert Times([5.0, 1.0, 2.0, 4.0, 3.0]).median == 3
    assert Times([5.0, 1.0, 2.0, 4.0, 3.0]).quartiles == (2, 4)
    assert Times([2.0]).quartiles == (2, 2)


def test_peak_memory_is_that_of_the_scores(forkserver):
    """Eager softmax of 2,048 tokens holds scores and weights, 16.8 MB each; the parent's own memory does not count."""
    ballast = torch.ones(100_000_000 // 4)
    assert 33e6 < peak_memory(Work("eager", 1, 1, 2048, 8)) < 60e6
    assert len(ballast)


@pytest.fixture
def llama(tmp_path):
    """A folder with a tiny Llama."""
    transformers = pytest.importorskip("transformers")
    from hf_sources import source

    source(transformers.LlamaForCausalLM).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def generate(llama, tmp_path, monkeypatch):
    """A tiny run of `bench generate`: its exit code and JSON."""
    monkeypatch.setattr("abc_attn.bench.generation.peak_of_process", lambda *arguments: 1000 * len(arguments))
    monkeypatch.setitem(RUNS, "generate", ["--model", str(llama), "--control", "global:2+window:14", "--tokens", "2"])
    return lambda *sizes: run("generate", tmp_path / "results", *sizes)


def test_generating_is_compared_with_the_original(generate, tmp_path, capsys):
    code, found = generate("--contexts", "40", "8", "--batches", "1", "3")
    assert code == 0
    rows = {(row["method"], row["batch"], row["tokens"]): row for row in found["rows"]}
    assert {key[1:] for key in rows} == {(1, 8), (1, 40), (3, 8), (3, 40)}
    assert len(rows) == 12
    for (method, batch, context), row in rows.items():
        assert row["tokens_per_second"] == pytest.approx(batch / row["seconds"])
        for baseline in ("dynamic", "preallocated"):
            other = rows[baseline, batch, context]
            assert row[f"ratio_{baseline}"] == pytest.approx(other["seconds"] / row["seconds"])
            assert row[f"peak_ratio_{baseline}"] == 1
        kept = 2 * 2 * 2 * 8 * 4 * batch * context  # keys and values of 2 layers and 2 heads of width 8
        assert row["state_bytes"] * row["state_ratio"] == pytest.approx(kept)
        assert (row["gate_error"] is None) == (method != "bounded")
        if method == "bounded":
            assert row["gate_error"] < 1e-4
            assert row["slots"] == 16
            assert row["state_bytes"] == rows["bounded", batch, 8]["state_bytes"]
        else:
            assert row["state_bytes"] == kept
    table = (tmp_path / "results" / "generate.md").read_text()
    assert "| 40 | bounded, n=16, b=3 |" in table
    assert "abc-attn bench generate --" in table
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["check_against_original", "read_and_check"])
def test_no_tokens_per_second_of_a_wrong_model(name, generate, monkeypatch, no_plot):
    from abc_attn.bench import models

    right = getattr(models, name)

    def wrong(*arguments):
        found = right(*arguments)
        if name == "check_against_original":
            return found._replace(found=found.found * 1.001)
        path, check = found[40]
        return found | {40: (path, check._replace(found=check.found * torch.nan))}

    monkeypatch.setattr(models, name, wrong)
    code, found = generate("--contexts", "40", "--batches", "1")
    assert code == 1
    for row in found["rows"]:
        failed = row["method"] == "bounded"
        assert row["note"].startswith("CHECK FAILED") == failed
        assert (row["seconds"] is None) == (row["peak_bytes"] is None) == failed


@torch.no_grad()
def test_a_full_cache_goes_on_as_the_text_would(llama):
    """Whichever the cache, generate() from it gives the tokens that it gives from the text; again, and for a batch."""
    from abc_attn.bench import models
    from abc_attn.hf import BoundedCache, save_state

    text = torch.randint(4, 60, (2, 20))
    text[:, -1] = 3  # what a generation starts from
    for method in ("bounded", "dynamic", "preallocated"):
        model = models.prepare(method, models.load_original(llama), "global:2+window:6")
        expected = model.generate(text[:1], max_new_tokens=5, min_new_tokens=5, pad_token_id=1)[:, -5:]
        state = llama / "state"
        if method == "bounded":
            cache = BoundedCache()
            model(text[:1, :-1], past_key_values=cache)
            save_state(cache, state)
        go_on, cache = models.generation(model, method, 2, 20, 5, state)
        if method != "bounded":
            read = model(text[:1, :-1]).past_key_values
            for own, layer in zip(cache.layers, read.layers, strict=True):
                own.keys[:], own.values[:] = layer.keys, layer.values
        for _ in range(1 if method == "bounded" else 3):
            assert torch.equal(go_on()[:, -5:], expected.expand(2, -1))


def test_peak_memory_of_generating_is_that_of_the_cache(llama, forkserver):
    """Keys and values of 200,000 tokens, 51.2 MB, and a copy of one layer as it grows, if it does."""
    from abc_attn.bench import models

    sizes = {
        method: measure.peak_of_process(models.ready, llama, "window:8", method, 1, 200_000, 1, llama / "state")
        for method in ("dynamic", "preallocated")
    }
    assert 51e6 < sizes["preallocated"] < 60e6 < sizes["dynamic"] < 90e6


def test_without_matplotlib_the_figures_are_still_written(tmp_path, no_plot, capsys):
    code, _ = run("encode", tmp_path)
    assert code == 0
    assert "pip install 'abc-attn[bench]'" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"encode.json", "encode.md"}

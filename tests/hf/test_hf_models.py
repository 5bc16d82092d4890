"""Which attention is replaced, controls tied or not, models from their config, and training with the Trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_sources import CLASSES, TRAINED, batch, inputs, outputs, rows, save, source, specs_of  # noqa: E402

import abc_attn.hf as hf  # noqa: E402
from abc_attn.hf.attention import ConvertedAttention  # noqa: E402
from abc_attn.hf.models import BOUNDED  # noqa: E402

LLAMA, BERT, BART = transformers.LlamaForCausalLM, transformers.BertForMaskedLM, transformers.BartModel
MARIAN, TAGGER = transformers.MarianMTModel, transformers.LlamaForTokenClassification
LLAMA_CONFIG = transformers.LlamaConfig(**hf.BoundedLlamaModel.family.tiny)
T5 = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=8)


def attentions(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, ConvertedAttention)}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_model_from_its_config_is_saved_and_loaded(cls, tmp_path):
    like = source(cls).config
    target = BOUNDED[cls]
    family = {name: value for name, value in like.to_dict().items() if name != "model_type"}
    config = target.config_class(**family, control="mlp", slots=4)
    model = target(config).eval()
    assert config.model_type == f"bounded_{like.model_type}"
    logits = [
        module.weight.std() * 32**0.5
        for name, module in model.named_modules()
        if name.endswith("proj") and "controls" in name
    ]
    assert logits
    assert all(0.7 < deviation < 1.3 for deviation in logits)  # as the control starts itself, not as the family would
    model.save_pretrained(tmp_path)
    loaded = target.from_pretrained(tmp_path).eval()
    assert torch.equal(outputs(loaded, inputs(loaded)), outputs(model, inputs(model)))
    auto = next(auto for kind, auto in hf.models.AUTO.items() if target.__name__.endswith(kind))
    assert type(auto.from_pretrained(tmp_path)) is target
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [target.__name__]


def test_a_checkpoint_of_the_source_loads_too(tmp_path):
    """The parameters keep their names; the control, which the checkpoint lacks, starts as it should."""
    source(LLAMA).save_pretrained(tmp_path)
    found = hf.BoundedLlamaForCausalLM.from_pretrained(tmp_path, control="favor", slots=6, allow_new_controls=True)
    expected = hf.convert(source(LLAMA), "favor", 6)
    assert torch.equal(outputs(found, inputs(found)), outputs(expected, inputs(expected)))
    learned = hf.BoundedLlamaForCausalLM.from_pretrained(tmp_path, control="mlp", slots=64, allow_new_controls=True)
    assert 0.8 < learned.controls["self"].proj.weight.std() * 32**0.5 < 1.2


def test_a_body_loads_from_a_whole_model_and_back(tmp_path):
    whole = hf.convert(source(LLAMA), "mlp", 4)
    whole.save_pretrained(tmp_path / "whole")
    body = hf.BoundedLlamaModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(body.controls["self"].proj.weight, whole.controls["self"].proj.weight)
    body.save_pretrained(tmp_path / "body")
    again = hf.BoundedLlamaForSequenceClassification.from_pretrained(tmp_path / "body", num_labels=3)
    assert torch.equal(again.model.controls["self"].proj.weight, whole.controls["self"].proj.weight)


def test_controls_are_tied_by_site(tmp_path):
    tied = hf.convert(source(BART), "mlp", {"self": 3, "cross": 4, "encoder": 5})
    assert {name: control.slots for name, control in tied.controls.items()} == {"encoder": 5, "self": 3, "cross": 4}
    tied.save_pretrained(tmp_path)
    assert len([name for name in tied.state_dict() if "controls" in name]) == 3
    apart = hf.convert(source(BART), "mlp", 4, tie_control=False)
    assert set(apart.controls) == {f"{site}_{layer}" for site in ("self", "cross", "encoder") for layer in (0, 1)}
    assert len({id(module.control) for module in attentions(apart).values()}) == 6
    apart.save_pretrained(tmp_path / "apart")
    loaded = hf.BoundedBartModel.from_pretrained(tmp_path / "apart").eval()
    assert torch.equal(outputs(loaded, inputs(loaded)), outputs(apart, inputs(apart)))


def test_layers_and_sites_are_chosen():
    model = hf.convert(source(BART), "mlp", 4, where=("cross",), layers=[1])
    chosen = {name: module.control.describe() for name, module in attentions(model).items()}
    assert chosen.pop("decoder.layers.1.encoder_attn") == "mlp:4"
    assert set(chosen.values()) == {"softmax:0"}
    only_self = hf.convert(source(BART), "mlp", {"self": 3}, where=["self"])
    assert {name: control.slots for name, control in only_self.controls.items()} == {"self": 3}


@pytest.mark.parametrize("cls", [transformers.MarianForCausalLM, transformers.BartForCausalLM])
def test_a_decoder_alone_has_no_control_for_an_encoder(cls):
    """Its modules of cross-attention are there, as in the source, exact, and read nothing unless given something."""
    model = hf.convert(source(cls), "mlp", {"self": 4})
    assert set(model.controls) == {"self"}
    assert hf.models.has_bounded_state(model)
    with pytest.raises(ValueError, match="has no 'cross' attention; it has: self"):
        hf.convert(source(cls), "mlp", where=("cross",))


SOME = "reads a memory of fixed size at the sites and layers below, and is exact elsewhere"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"control": "mlp", "slots": 4}, "reads a memory of fixed size instead of every key and value"),
        ({"control": "mlp", "slots": 4, "layers": [1]}, SOME),
        ({"control": "mlp", "slots": 4, "where": ["cross"]}, SOME),
        ({"control": "softmax"}, "is exact and keeps every key and value"),
    ],
)
def test_the_card_says_what_is_bounded(options, said, tmp_path):
    hf.convert(source(MARIAN), **options).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert f"A marian model whose attention {said}" in card
    assert f"| layers | {options.get('layers', ['all'])[0]} |" in card
    assert f"| sites of attention | {options.get('where', ['all'])[0]} |" in card


@pytest.mark.parametrize("cls", [LLAMA, transformers.GPT2Model], ids=lambda cls: cls.__name__)
def test_a_folder_says_where_its_classes_are(cls, tmp_path):
    """In a module with one import, for transformers to run: nothing of ours is copied into a folder."""
    model = hf.convert(source(cls), "mlp:4")
    type(model).register_for_auto_class("AutoModel")  # transformers does so after it has run the module
    type(model.config).register_for_auto_class()
    model.save_pretrained(tmp_path)
    shim = (tmp_path / "abc_attn_model.py").read_text()
    assert [file.name for file in tmp_path.glob("*.py")] == ["abc_attn_model.py"]
    assert len(shim.splitlines()) == 3
    exec(shim, found := {})
    named = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert set(named) >= {"AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"}
    for auto, name in named.items():
        module, _, own = name.partition(".")
        assert module == "abc_attn_model"
        assert found[own] is getattr(hf, own)
        assert auto == "AutoConfig" or type(model.config) in getattr(transformers, auto)._model_mapping
    card = (tmp_path / "README.md").read_text()
    assert "import abc_attn.hf" in card
    assert "trust_remote_code=True" in card


FRESH = """
import sys, transformers
folder = sys.argv[1]
try:
    transformers.AutoModelForCausalLM.from_pretrained(folder)
except ValueError as error:
    assert "trust_remote_code" in str(error), error
else:
    raise AssertionError("loaded without the import, and without trust")
print()  # after transformers' question, which no one answers
assert "abc_attn" not in sys.modules
run = transformers.pipeline("text-generation", model=folder, trust_remote_code=True)
assert type(run.model).__name__ == "BoundedQwen3ForCausalLM"
print(run("w5 w9", max_new_tokens=8, do_sample=False)[0]["generated_text"])
model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
assert type(model).__name__ == "BoundedQwen3ForSequenceClassification"
run.model.save_pretrained(folder + "-again")
"""


@pytest.mark.processes
def test_a_process_that_does_not_know_us_loads_a_model(tmp_path):
    folder = save(hf.convert(source(transformers.Qwen3ForCausalLM), "window:3+mlp:4"), tmp_path / "model")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, folder], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    expected = transformers.pipeline("text-generation", model=str(folder))
    written = expected("w5 w9", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert done.stdout.splitlines()[-1] == written
    assert [file.name for file in Path(f"{folder}-again").glob("*.py")] == ["abc_attn_model.py"]


def test_controls_that_need_the_whole_sequence_serve_encoders():
    for control in ("luna", "workspace", "cluster", "compressive"):
        model = hf.convert(source(BERT), control, 4)
        assert outputs(model, inputs(model)).isfinite().all()
        model = hf.convert(source(MARIAN), control, 4, where=("cross", "encoder"))
        given = batch(left=False)
        assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: hf.convert(source(LLAMA), "luna"), "'luna' cannot be causal"),
        (lambda: hf.convert(source(LLAMA), "mpl"), "unknown control 'mpl'"),
        (lambda: hf.convert(source(LLAMA), "mlp", where=("cross",)), "has no 'cross' attention; it has: self"),
        (lambda: hf.convert(source(LLAMA), "mlp", where=("decoder",)), "unknown site 'decoder'"),
        (lambda: hf.convert(source(LLAMA), "mlp", layers=[2]), "layers are 0 to 1"),
        (lambda: hf.convert(source(LLAMA), "mlp", layers=[]), r"layers=\[\] selects nothing"),
        (lambda: hf.convert(source(LLAMA), "mlp", where=()), r"where=\[\] selects nothing"),
        (lambda: hf.convert(source(BART), "mlp", {"self": 4, "cross": 4}), "these are: encoder, self, cross"),
        (lambda: hf.convert(source(LLAMA), "mlp", {"self": 4, "cross": 4}), "and for no other; .* these are: self"),
        (lambda: hf.convert(source(BART), "mlp", {"self": 4, "cross": 4}, where=["self"]), "these are: self"),
        (lambda: hf.convert(source(LLAMA), "mlp", {}), "these are: self"),
        (lambda: hf.convert(hf.convert(source(LLAMA), "mlp")), "already"),
        (
            lambda: hf.convert(torch.nn.Linear(2, 2)),
            "Linear is not supported; the supported families are Llama, Mistral",
        ),
        (lambda: hf.convert(transformers.T5Model(T5)), "T5Model is not supported.*How to add one: docs/huggingface.md"),
        (
            lambda: hf.convert(TAGGER(LLAMA_CONFIG)),
            "of its family these are: LlamaModel, LlamaForCausalLM",
        ),
    ],
)
def test_mistakes_are_explained(make, said):
    with pytest.raises(ValueError, match=said):
        make()
    with pytest.raises(TypeError, match="no option 'ratoi'"):
        hf.convert(source(LLAMA), "compressive", ratoi=2)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_changes_nothing(checkpointing):
    model = hf.convert(source(LLAMA), "window:3+mlp:4").train()
    given = inputs(model)
    model(**given, labels=given["input_ids"]).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(**given, labels=given["input_ids"]).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)


def test_half_precision_keeps_the_memory_whole():
    model = hf.convert(source(LLAMA).to(torch.bfloat16), "window:3+mlp:4")
    assert model.controls["self"].parts[1].proj.weight.dtype == torch.bfloat16
    cache = model(**batch(left=False)).past_key_values
    assert cache.layers[0].state.memory.k.dtype == torch.float32
    assert model.generate(**batch(left=True)).shape == (3, 20)


# Training. The script is run in one process, and by torchrun in two. With SGD: where only one feature of a query is
# alive, its gradient is zero except for rounding, and Adam would turn that rounding into a step of full size.

SCRIPT = """
import sys, json, torch
sys.path.insert(0, sys.argv[3])
from hf_sources import NO_DROPOUT, TRAINED, rows, source, specs_of
from abc_attn.hf import convert
from transformers import Trainer, TrainerCallback, TrainingArguments

folder, batch_size = sys.argv[1], int(sys.argv[2])
losses = {}
class Watch(TrainerCallback):
    def on_log(self, arguments, state, control, logs=None, **given):
        if "loss" in logs: losses[case].append(logs["loss"])
for cls in TRAINED:
    for control, slots, options in specs_of(cls):
        case = f"{cls.__name__}, {control} {options}"
        losses[case] = []
        model = convert(source(cls, **NO_DROPOUT), control, slots, **options)
        arguments = TrainingArguments(folder, max_steps=3, per_device_train_batch_size=batch_size, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, optim="sgd", learning_rate=0.1, seed=0,
            ddp_find_unused_parameters=control == "keep")  # what it keeps has no gradient (docs/distillation.md)
        trainer = Trainer(model, arguments, train_dataset=rows(model, 16), callbacks=[Watch()])
        trainer.train()
if trainer.is_world_process_zero():
    print(json.dumps(losses))
"""


def run_script(tmp_path, name, batch_size, *launcher):
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = [tmp_path / "train.py", tmp_path / name, str(batch_size), Path(__file__).parents[1]]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    shown = subprocess.run([sys.executable, *launcher, *arguments], env=environment, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout.strip().splitlines()[-1])


def trainer(folder, steps, cls, control, slots, options):
    model = hf.convert(source(cls), control, slots, **options)
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=4, save_steps=1, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, learning_rate=1e-2, lr_scheduler_type="constant",
    )  # fmt: skip
    return hf.Trainer(model, arguments, train_dataset=rows(model, 8))


# All of them would take minutes: beyond this one they are run by `make test-hf`.
QUICK = (LLAMA, ("window:3+mlp:4", None, {"gate": True}))
CASES = [
    pytest.param(
        cls, *spec, marks=() if (cls, spec) == QUICK else pytest.mark.processes, id=f"{cls.__name__}-{spec[0]}"
    )
    for cls in TRAINED
    for spec in specs_of(cls)
]


@pytest.mark.parametrize(("cls", "control", "slots", "options"), CASES)
def test_training_resumes_and_a_finished_run_stays_as_it_is(cls, control, slots, options, tmp_path):
    whole = trainer(tmp_path / "whole", 3, cls, control, slots, options)
    whole.train()
    assert whole.state.global_step == 3
    half = trainer(tmp_path / "half", 2, cls, control, slots, options)
    half.train()
    resumed = trainer(tmp_path / "half", 3, cls, control, slots, options)
    resumed.train(resume_from_checkpoint=True)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    finished = trainer(tmp_path / "half", 3, cls, control, slots, options)
    finished.train(resume_from_checkpoint=True)
    assert finished.state.global_step == 3
    for a, b in zip(resumed.model.parameters(), finished.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.processes
def test_two_processes_train_as_one(tmp_path):
    alone = run_script(tmp_path, "one", 4)
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    together = run_script(tmp_path, "two", 2, *launcher)
    assert len(alone) == sum(len(specs_of(cls)) for cls in TRAINED)
    for case, losses in alone.items():
        assert len(losses) == 3
        assert losses == pytest.approx(together[case], abs=2e-4), case

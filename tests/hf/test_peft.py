"""LoRA by `peft` on converted models: trained, saved, loaded and merged. `make test-hf` installs peft and runs this."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_sources import batch, outputs, rows, source  # noqa: E402

import abc_attn.hf as hf  # noqa: E402

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft", reason="make test-hf installs it")


@pytest.mark.filterwarnings("default")  # peft's own
@pytest.mark.parametrize(
    ("cls", "targets"),
    [
        (transformers.LlamaForCausalLM, ["q_proj", "v_proj"]),
        (transformers.LlamaForCausalLM, ["q_proj", "controls.self.parts.1.proj"]),  # the control learns too
        (transformers.GPT2LMHeadModel, ["c_attn"]),
    ],
)
def test_lora(peft, cls, targets, tmp_path):
    base = hf.convert(source(cls), "window:3+mlp:4")
    base.save_pretrained(tmp_path / "base")
    before = outputs(base, batch(left=False))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    arguments = transformers.TrainingArguments(
        tmp_path / "run", max_steps=4, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True,
        learning_rate=0.1, save_strategy="no",
    )  # fmt: skip
    hf.Trainer(model, arguments, train_dataset=rows(base, 8)).train()
    model.eval()
    trained = outputs(model, batch(left=False))
    assert not torch.allclose(trained, before, atol=1e-3)
    model.save_pretrained(tmp_path / "adapter")

    again = type(base).from_pretrained(tmp_path / "base")
    assert torch.equal(outputs(again, batch(left=False)), before)  # the adapter has left the base as it was
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter").eval()
    assert torch.allclose(outputs(loaded, batch(left=False)), trained, atol=1e-6)
    written = loaded.generate(**batch(left=True))
    assert written.shape == (3, 20)

    merged = loaded.merge_and_unload()
    assert type(merged) is type(base)
    assert torch.allclose(outputs(merged, batch(left=False)), trained, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    final = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(outputs(final, batch(left=False)), outputs(merged, batch(left=False)))

"""transformers' own tests of a model, on bounded models of most families; `make test-hf` fetches and runs them.

The sdist has the common tests and not those of each family, so that the configs and batches are ours.
"""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = os.environ.get("TRANSFORMERS_TESTS")
if not FOLDER:
    pytest.skip("make test-hf sets TRANSFORMERS_TESTS", allow_module_level=True)

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.testing_utils import torch_device  # noqa: E402

import abc_attn.hf as hf  # noqa: E402
from abc_attn.hf.families import FAMILIES  # noqa: E402

# The sdist leaves out two modules that its common tests only inherit from: exporting and generation.
sys.path.insert(0, str(Path(FOLDER).parent))
package = Path(FOLDER).name
for name, mixin in (("exporters.test_export", "ExportTesterMixin"), ("generation.test_utils", "GenerationTesterMixin")):
    parent = ModuleType(f"{package}.{name.split('.')[0]}")
    parent.__path__ = []
    module = ModuleType(f"{package}.{name}")
    setattr(module, mixin, type(mixin, (), {}))
    sys.modules |= {parent.__name__: parent, module.__name__: module}
common = __import__(f"{package}.test_modeling_common", fromlist=["ModelTesterMixin"])

pytestmark = pytest.mark.filterwarnings("default")  # transformers' own code warns in places

# The tests choose labels by tables of class names.
for kind, names in (
    ("Model", modeling_auto.MODEL_MAPPING_NAMES),
    ("ForCausalLM", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ("ForMaskedLM", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ("ForSequenceClassification", modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    ("ForConditionalGeneration", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
):
    for record in FAMILIES:
        config = getattr(hf, f"Bounded{record.name}Config")
        if f"Bounded{record.name}{kind}" in hf.__all__:
            names[config.model_type] = f"Bounded{record.name}{kind}"

# Tests that do not apply, and why. transformers itself skips those for devices, kernels and models that are not here.
SKIPPED = {
    "test_generation_tester_mixin_inheritance": "the sdist has no tests of generation; test_hf_generate.py is ours",
    "test_can_set_attention_dynamically": "a bounded model has one implementation of attention",
    "test_retain_grad_hidden_states_attentions": "asks for attn_implementation='eager', and for weights over tokens",
}


class Tester:
    """What the common tests ask for: a config and a batch."""

    batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads = 3, 7, 32, 2, 4
    is_training = True

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        ids = torch.randint(3, config.vocab_size, (self.batch_size, self.seq_length), device=torch_device)
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder:
            given |= {"decoder_input_ids": ids.clone(), "decoder_attention_mask": torch.ones_like(ids)}
        return config, given


class Common(common.ModelTesterMixin):
    has_attentions = False  # weights over slots are no weights over tokens
    test_can_init_all_missing_weights_before_2023 = True  # a file with no year in it is taken for an old one

    def setUp(self):
        self.model_tester = self.Tester(self)
        reason = SKIPPED.get(self._testMethodName)
        if reason:
            self.skipTest(reason)


class TestLlama(Common, unittest.TestCase):
    all_model_classes = (hf.BoundedLlamaModel, hf.BoundedLlamaForCausalLM, hf.BoundedLlamaForSequenceClassification)

    class Tester(Tester):
        def get_config(self):
            return hf.BoundedLlamaConfig(
                vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, pad_token_id=0, max_position_embeddings=64, control="window:3+mlp:4",
            )  # fmt: skip


class Decoder(Common):
    """A family of decoders, by the sizes of its record."""

    @classmethod
    def of(cls, name: str, **options) -> type:
        """The tests of a family; `options` are of its config."""
        record = next(record for record in FAMILIES if record.name == name)
        kinds = ("Model", "ForCausalLM", "ForSequenceClassification")

        class FamilyTester(Tester):
            def get_config(self):
                sizes = {**record.tiny, "vocab_size": 99, "pad_token_id": 0, "control": "window:3+mlp:4"}
                return getattr(hf, f"Bounded{name}Config")(**sizes | options)

        members = {"all_model_classes": tuple(getattr(hf, f"Bounded{name}{kind}") for kind in kinds)}
        return type(f"Test{name}", (cls, unittest.TestCase), members | {"Tester": FamilyTester, "__module__": __name__})


TestMistral, TestQwen2, TestQwen3 = Decoder.of("Mistral"), Decoder.of("Qwen2"), Decoder.of("Qwen3")
TestPhi3, TestGemma3, TestGPTNeoX = Decoder.of("Phi3"), Decoder.of("Gemma3Text"), Decoder.of("GPTNeoX")
TestOPT = Decoder.of("OPT")


class TestRoberta(Common, unittest.TestCase):
    all_model_classes = (
        hf.BoundedRobertaModel,
        hf.BoundedRobertaForMaskedLM,
        hf.BoundedRobertaForSequenceClassification,
    )

    class Tester(Tester):
        def get_config(self):
            return hf.BoundedRobertaConfig(
                vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=64, control="mlp", slots=4,
            )  # fmt: skip


class TestRobertaDecoder(Common, unittest.TestCase):
    all_model_classes = (hf.BoundedRobertaForCausalLM,)

    class Tester(TestRoberta.Tester):
        def get_config(self):
            config = super().get_config()
            config.is_decoder = True
            return config


class TestMarian(Common, unittest.TestCase):
    all_model_classes = (hf.BoundedMarianModel, hf.BoundedMarianForConditionalGeneration)
    is_encoder_decoder = True

    class Tester(Tester):
        def get_config(self):
            return hf.BoundedMarianConfig(
                vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37, max_position_embeddings=64,
                pad_token_id=0, decoder_start_token_id=0, eos_token_id=2, control="mlp", slots=4,
            )  # fmt: skip


class TestMarianDecoder(Common, unittest.TestCase):
    all_model_classes = (hf.BoundedMarianForCausalLM,)
    test_all_params_have_gradient = False  # in transformers it has the weights of a cross-attention that reads nothing

    def test_causal_lm_loss_honors_shift_labels(self):
        self.skipTest("transformers' MarianForCausalLM has a loss of its own, without shift_labels")

    class Tester(TestMarian.Tester):
        def get_config(self):
            config = super().get_config()
            config.is_decoder, config.is_encoder_decoder = True, False
            return config


assert transformers.__version__ in FOLDER, f"{FOLDER} are the tests of another version than {transformers.__version__}"

"""Train a small Marian-style translator with bounded memory, with Seq2SeqTrainer. The toy language is read backwards.

python examples/train_translator.py [folder to write]
"""

import sys
import tempfile

import torch
from transformers import MarianConfig, Seq2SeqTrainingArguments

from abc_attn.hf import BoundedMarianConfig, BoundedMarianForConditionalGeneration, Seq2SeqTrainer

PAD, END, WORDS = 0, 1, 40


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """A sentence of 4 to 9 words, and its words in reverse."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        words = torch.randint(2, WORDS, (int(torch.randint(4, 10, (), generator=random)),), generator=random)
        end = torch.tensor([END])
        found.append({"input_ids": torch.cat([words, end]), "labels": torch.cat([words.flip(0), end])})
    return found


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def pad(name: str, value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)

    ids = pad("input_ids", PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": pad("labels", -100)}


def main(folder: str | None = None, steps: int = 20) -> list[float]:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
    special = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD, "forced_eos_token_id": None}
    # The paper's setting for translation: bounded cross-attention and causal self-attention, an exact encoder.
    memory = {"control": "mlp", "slots": {"self": 8, "cross": 8}, "where": ["self", "cross"]}
    config = BoundedMarianConfig(vocab_size=WORDS, **sizes, **heads, **special, **memory)
    assert isinstance(config, MarianConfig)
    model = BoundedMarianForConditionalGeneration(config)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = Seq2SeqTrainingArguments(
            folder or scratch,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=2e-3,
            logging_steps=max(1, steps // 4),
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=sentences(512, 0), data_collator=collate)
        trainer.train()
    if folder is not None:
        model.save_pretrained(folder)
    given = collate(sentences(2, 1))
    made = model.eval().generate(
        given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=12, num_beams=4
    )
    for source, target in zip(given["input_ids"].tolist(), made.tolist(), strict=True):
        print(source, "->", target)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main(*sys.argv[1:2])

"""Convert RoBERTa and classify. Without arguments a small random model learns a toy task; give a folder for your own.

python examples/classify_roberta.py [folder of a RobertaForSequenceClassification]
"""

import sys

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from abc_attn.hf import convert


def toy_batch(rows: int = 32, tokens: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens; the class says whether token 7 is among them."""
    ids = torch.randint(8, 50, (rows, tokens))
    labels = torch.randint(0, 2, (rows,))
    ids[labels == 1, torch.randint(0, tokens, (int(labels.sum()),))] = 7
    return ids, labels


def main(folder: str | None = None, steps: int = 60) -> float:
    if folder is not None:
        model = convert(AutoModelForSequenceClassification.from_pretrained(folder), "compressive", slots=32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = "A memory of fixed size is enough for this sentence."
        shares = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)
        print({model.config.id2label[i]: round(float(share), 3) for i, share in enumerate(shares[0])})
        return float(shares.max())
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = RobertaConfig(vocab_size=50, max_position_embeddings=40, hidden_dropout_prob=0.0, **sizes)
    model = convert(RobertaForSequenceClassification(config), "mlp", slots=8)  # 24 tokens are read through 8 slots
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        ids, labels = toy_batch()
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {float(loss.detach()):.3f}")
    model.eval()
    ids, labels = toy_batch(256)
    with torch.no_grad():
        right = float((model(input_ids=ids).logits.argmax(-1) == labels).float().mean())
    print(f"{right:.0%} of new texts are classified correctly")
    return right


if __name__ == "__main__":
    main(*sys.argv[1:2])

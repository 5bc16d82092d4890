"""Rotary keys in learned slots: what attention transfer makes of `global:4+window:124+slots:128` in layers of
SmolLM2-135M, with keys rotated before they are mixed or not at all, beside a window and `keep` with as many rows.

    python benchmarks/rotary_slots.py --data ../shared/data --output results/distill/rotary_slots.json

Each layer is trained alone on the inputs that it has in the exact model, `--updates` times on six segments in turn,
half of them from books and half from WikiText-2. The figure is the squared error of the attention's output as a share
of the output's square, on a segment of a validation book and one of WikiText-2's validation text.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from abc_attn.bench.models import load_original, smollm2
from abc_attn.controls import make_control
from abc_attn.core import group_heads
from abc_attn.files import write_whole
from abc_attn.hf import convert
from abc_attn.hf.positions import Angles, Rotation
from abc_attn.models.transfer import Compared, Comparison
from abc_attn.provenance import commit, cpu, now

SINKS, WINDOW, SLOTS, CHUNK = 4, 124, 128, 64
SIZES: dict[str, Any] = {"embed_dim": 576, "num_heads": 3, "head_dim": 64, "causal": True}


class Scheme(NamedTuple):
    rotated: bool  # keys of the slots, and the queries that read them
    bias: float | None  # of the slots' scores at the start; it is learned for each head. None: no bias, as in `+`
    delayed: bool  # a token enters the slots as it leaves the window; else at once


SCHEMES = {
    "rotated, as `+` does": Scheme(True, None, False),
    "rotated, with a bias": Scheme(True, -3.0, False),
    "not rotated, with a bias": Scheme(False, -3.0, False),
    "rotated, with a bias, after the window": Scheme(True, -3.0, True),
    "not rotated, with a bias, after the window": Scheme(False, -3.0, True),
}


class SlotsBesideWindow(nn.Module):
    """One softmax over the first tokens, a window, and slots; by chunks, with plain operations."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme
        self.slots = make_control(f"slots:{SLOTS}", **SIZES)
        self.bias = nn.Parameter(torch.full((3, 3, 1, 1), scheme.bias or 0.0), requires_grad=scheme.bias is not None)

    def forward(self, compared: Compared) -> Tensor:
        attention, x, rotation = _parts(compared)
        q, k, v, _ = attention.heads(x, x, rotation)
        slot_q, slot_k = (q, k) if self.scheme.rotated else attention.heads(x, x, None)[:2]
        mean: Any = self.slots.mean(x)
        log_keep = mean.log_keep.clamp(min=-1.0)[0]  # so that exp stays finite over a chunk
        q, slot_q = (group_heads(each, 3)[0] / 8 for each in (q, slot_q))  # h g t d
        k, v, slot_k = k[0], v[0], slot_k[0]
        slot_v, t = v, k.shape[1]
        if self.scheme.delayed:
            nothing = torch.arange(t)[:, None] < WINDOW
            slot_k, slot_v, log_keep = (each.roll(WINDOW, 1).masked_fill(nothing, 0) for each in (slot_k, v, log_keep))
        sums_k = sums_v = k.new_zeros(3, SLOTS, 64)
        total, out = k.new_zeros(3, 1, SLOTS), []
        for start in range(0, t, CHUNK):
            now_ = slice(start, start + CHUNK)
            kept = log_keep[:, now_].cumsum(1)
            up, down = kept.exp(), -log_keep[:, now_].expm1() * (-kept).exp()
            mass = up * (down.cumsum(1) + total)
            pairs = (slot_q[:, :, now_] @ slot_k[:, None, now_].mT).tril()
            by_slot = (pairs @ down[:, None] + slot_q[:, :, now_] @ sums_k[:, None].mT) * (up / mass.clamp(min=1e-30))[
                :, None
            ]
            by_slot = (by_slot + self.bias).masked_fill(mass[:, None] <= 0, -torch.inf)
            begin = max(0, start - WINDOW)
            place, own = torch.arange(begin, start + CHUNK), torch.arange(start, start + CHUNK)[:, None]
            near = (place <= own) & (place > own - WINDOW) & (place >= SINKS)
            by_token = (q[:, :, now_] @ k[:, None, begin : start + CHUNK].mT).masked_fill(~near, -torch.inf)
            by_sink = (q[:, :, now_] @ k[:, None, :SINKS].mT).masked_fill(torch.arange(SINKS) > own, -torch.inf)
            p_sink, p_token, p_slot = (
                torch.cat([by_sink, by_token, by_slot], -1).softmax(-1).split([SINKS, len(place), SLOTS], -1)
            )
            read = p_slot * (up / mass.clamp(min=1e-30))[:, None]
            found = p_sink @ v[:, None, :SINKS] + p_token @ v[:, None, begin : start + CHUNK]
            out.append(found + (read @ down[:, None].mT).tril() @ slot_v[:, None, now_] + read @ sums_v[:, None])
            end = up[:, -1, :, None]
            sums_k = (sums_k + down.mT @ slot_k[:, now_]) * end
            sums_v = (sums_v + down.mT @ slot_v[:, now_]) * end
            total = mass[:, -1:]
        merged = torch.cat(out, 2).flatten(0, 1).transpose(0, 1).flatten(1)[None]
        return _error(attention.output(merged), compared.right)


class Chosen(nn.Module):
    """`keep`, or a window, with as many rows; at some positions alone."""

    def __init__(self, control: str) -> None:
        super().__init__()
        self.control = make_control(control, **SIZES)

    def forward(self, compared: Compared) -> Tensor:
        query = torch.arange(int(torch.randint(5, (), generator=RANDOM)), compared.right.shape[1], 5)
        attention: Any = compared.attention
        attention.__dict__["control"] = self.control
        return compared.error(query)


RANDOM = torch.Generator().manual_seed(0)


def _parts(compared: Compared) -> tuple[Any, Tensor, Rotation]:
    x = compared.given["hidden_states"] if "hidden_states" in compared.given else compared.arguments[0]
    return compared.attention, x, Rotation(Angles.of(*compared.given["position_embeddings"]))


def _error(found: Tensor, right: Tensor) -> Tensor:
    return (found - right).square().sum() / right.square().sum()


def inputs(data: Path, tokens: int, layers: list[int]) -> list[list[Compared]]:
    """Of six segments to train on and two to judge by: what the attentions of `layers` read and give."""
    folder, file = smollm2()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    texts = []
    for split, books in (("train", (0, 5, 10)), ("valid", (1,))):
        with lzma.open(data / "books" / f"{split}.jsonl.xz", "rt", encoding="utf-8") as opened:
            of_books = [json.loads(line)["text"] for number, line in enumerate(opened) if number in books]
        with lzma.open(data / "wikitext-2" / f"wiki.{split}.tokens.xz", "rt", encoding="utf-8", newline="\n") as opened:
            wiki = opened.read()
        texts += [text[200_000 : 200_000 + 8 * tokens] for text in of_books]
        texts += [wiki[place : place + 8 * tokens] for place in range(0, 300_000 * len(books), 300_000)]
    exact, model = (convert(load_original(None), "softmax").requires_grad_(False) for _ in range(2))
    comparison, found = Comparison(model, exact, torch.bfloat16), []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[:, : tokens - 1]
        ids = torch.cat([ids.new_tensor([[model.config.bos_token_id]]), ids], 1)
        seen = comparison(input_ids=ids, use_cache=False)
        found.append([seen[layer] for layer in layers])
        print(f"read {len(found)} of {len(texts)} segments", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with books/ and wikitext-2/")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 6, 10, 17, 25])
    parser.add_argument("--tokens", type=int, default=1024, help="of a segment")
    parser.add_argument("--updates", type=int, default=36)
    arguments = parser.parse_args()
    segments = inputs(arguments.data, arguments.tokens, arguments.layers)
    found: dict[str, Any] = {"layers": arguments.layers, "updates": arguments.updates, "tokens": arguments.tokens}
    found["with"] = {"torch": torch.__version__, "commit": commit(), "cpu": cpu(), "measured": now()}
    rows = f"{WINDOW + SLOTS}"
    makers: dict[str, Any] = {f"global:4+keep:{rows}": lambda: Chosen(f"global:4+keep:{rows}")}
    makers |= {name: lambda scheme=scheme: SlotsBesideWindow(scheme) for name, scheme in SCHEMES.items()}
    for name, make in makers.items():
        for place, layer in enumerate(arguments.layers):
            torch.manual_seed(0)
            student = make()

            def judged(student: nn.Module = student, place: int = place) -> list[float]:
                with torch.no_grad():
                    return [float(student(segment[place])) for segment in segments[6:]]

            before = judged()
            optimizer = torch.optim.Adam(student.parameters(), betas=(0.9, 0.98))
            for update in range(arguments.updates):
                optimizer.param_groups[0]["lr"] = 5e-3 * (1 - update / arguments.updates)
                optimizer.zero_grad()
                student(segments[update % 6][place]).backward()
                optimizer.step()
            found.setdefault(name, {})[layer] = {"before": before, "after": judged()}
            write_whole(arguments.output, json.dumps(found, indent=2) + "\n")
            print(f"{name}, layer {layer}: {found[name][layer]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

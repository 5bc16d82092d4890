"""AdaptiveLM: the paper's language model, Baevski & Auli's (2019), with any control.

Words are numbered by falling frequency and cut into frequency bands. Band i has vectors of width
`hidden_size / div_val**i`; the same vectors and projections serve input and output, and a training step never computes
the logits of every word.
Axes: b batch, t tokens, D hidden_size, N = b t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from abc_attn.attention import BoundedAttention
from abc_attn.controls import Control, make_control
from abc_attn.core import memory_dtype
from abc_attn.hf.cache import BoundedCache, bounded_layer
from abc_attn.hf.stateful import Stateful, known_by_name, model_card, use_control

IGNORED = -100  # the label that transformers leaves out of the loss
POSITIONS = ("sinusoids", "rotary", "none")
ATTENTION_OUTPUTS = ("plain", "gate", "norm")


@strict
class AdaptiveLMConfig(PreTrainedConfig):
    """The defaults are the paper's 16-layer setting. Names are transformers' where it has one.

    cutoffs: the first word of each frequency band except the first.
    control, slots, control_options: see BoundedAttention; control may be a list, one per layer, such as
    ["window:16", "window:112"].
    num_key_value_heads: fewer than num_attention_heads share keys and values among heads; or a list, one per layer.
    positions: "sinusoids" are added to the word vectors; "rotary" rotates queries and keys; "none" leaves the order to
    the control, which knows it if it forgets (a gate, `slots`) or keeps the last tokens (`window`).
    position_period: None for plain sinusoids. With a number, every sinusoid's period divides it: positions run in a
    circle of that many tokens, and a long text meets no position that training has not. In training, a text without a
    past starts anywhere in the circle. A multiple of the training length is sensible.
    local_heads: this many heads of the first layer start by looking 1, 2, 3, ... tokens back, and word vectors start as
    long as the sinusoids. Without them, small models spend most of a short training finding the previous word.
    attention_scale: of the queries; None for d^-1/2.
    attention_output: what is added to x. "plain": what attention gives, y; "gate": sigmoid(W x) y; "norm": the layer
    norm of y.
    """

    model_type = "adaptive_lm"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 267735
    cutoffs: list[int] | tuple[int, ...] = (20000, 60000)
    div_val: int = 4
    hidden_size: int = 1024
    num_hidden_layers: int = 16
    num_attention_heads: int = 8
    num_key_value_heads: int | list[int] | None = None
    intermediate_size: int = 4096
    dropout: float = 0.3
    attention_dropout: float = 0.1
    activation_dropout: float = 0.1
    adaptive_dropout: float = 0.2  # on what is projected for the rarer bands of the softmax
    layerdrop: float = 0.0
    control: str | list[str] = "mlp"
    slots: int | None = None
    control_options: dict[str, Any] | None = None
    tie_control: bool = True  # one control for all layers, as in the paper
    positions: str = "sinusoids"
    position_period: int | None = None
    local_heads: int = 0
    attention_scale: float | None = None
    attention_output: str = "plain"
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = 0
    pad_token_id: int | None = None
    tie_word_embeddings: bool = True  # always: input and output share their module

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        edges = [0, *self.cutoffs, self.vocab_size]
        if sorted(set(edges)) != edges:
            raise ValueError(
                f"cutoffs must rise and lie between 0 and vocab_size={self.vocab_size}, got {list(self.cutoffs)}"
            )
        if self.hidden_size < self.div_val ** len(self.cutoffs):
            raise ValueError(
                f"hidden_size={self.hidden_size} leaves no width for the last of {len(edges) - 1} bands, each "
                f"{self.div_val} times narrower than the one before; use fewer cutoffs or a smaller div_val"
            )
        for name in ("dropout", "attention_dropout", "activation_dropout", "adaptive_dropout", "layerdrop"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.hidden_size % 2:
            raise ValueError(f"hidden_size must be even (a sine and a cosine each), got {self.hidden_size}")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {self.positions!r}")
        if self.attention_output not in ATTENTION_OUTPUTS:
            raise ValueError(
                f"attention_output must be one of {', '.join(ATTENTION_OUTPUTS)}, got {self.attention_output!r}"
            )
        if self.positions != "sinusoids" and (self.position_period is not None or self.local_heads):
            raise ValueError(
                f"position_period={self.position_period} and local_heads={self.local_heads} are for "
                f"positions='sinusoids', got positions={self.positions!r}: leave them out"
            )
        if self.positions == "rotary" and self.hidden_size // self.num_attention_heads % 2:
            raise ValueError(
                f"rotary positions need heads of even width, got {self.hidden_size} / {self.num_attention_heads}"
            )
        if self.position_period is not None and self.position_period < 2:
            raise ValueError(f"position_period must be at least 2 tokens, got {self.position_period}")
        if not 0 <= self.local_heads <= self.num_attention_heads:
            raise ValueError(
                f"local_heads must be between 0 and num_attention_heads={self.num_attention_heads}, "
                f"got {self.local_heads}"
            )
        for name in ("control", "num_key_value_heads"):
            if isinstance(given := getattr(self, name), list) and len(given) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} must be one for all layers or a list of one for each of num_hidden_layers="
                    f"{self.num_hidden_layers}, got {len(given)}: {given}"
                )
        given = self.num_key_value_heads
        for heads in given if isinstance(given, list) else [self.key_value_heads(0)]:
            if not 0 < heads <= self.num_attention_heads or self.num_attention_heads % heads:
                raise ValueError(
                    f"num_key_value_heads must divide num_attention_heads={self.num_attention_heads}, got {heads}"
                )
        if not self.tie_word_embeddings:
            raise ValueError("AdaptiveLM ties its input and output vectors: leave out tie_word_embeddings")

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing, as for the model: see Stateful."""

    def key_value_heads(self, layer: int) -> int:
        """How many heads of keys and values a layer has."""
        given = self.num_key_value_heads
        if given is None:
            return self.num_attention_heads
        return given[layer] if isinstance(given, list) else given


class AdaptiveVocabulary(nn.Module):
    """Adaptive input embeddings and the adaptive softmax (Grave et al. 2017), tied."""

    def __init__(self, config: AdaptiveLMConfig) -> None:
        super().__init__()
        self.edges = [0, *config.cutoffs, config.vocab_size]
        self.dropout = config.adaptive_dropout
        widths = [config.hidden_size // config.div_val**band for band in range(len(self.edges) - 1)]
        sizes = [stop - start for start, stop in zip(self.edges, self.edges[1:], strict=False)]
        self.tables: Sequence[nn.Embedding] = nn.ModuleList(  # type: ignore[assignment]
            nn.Embedding(*shape) for shape in zip(sizes, widths, strict=True)
        )
        self.projections: Sequence[nn.Linear] = nn.ModuleList(  # type: ignore[assignment]
            nn.Linear(width, config.hidden_size, bias=False) for width in widths
        )
        # Each rarer band is one more entry of the first softmax.
        self.bands = nn.Linear(config.hidden_size, len(sizes) - 1, bias=False) if len(sizes) > 1 else None

    def _rows(self, words: Tensor) -> list[Tensor]:
        """For each band, where in words `N` its members stand."""
        band = torch.bucketize(words.contiguous(), torch.tensor(self.edges[1:-1], device=words.device), right=True)
        return [(band == i).nonzero()[:, 0] for i in range(len(self.tables))]

    def embed(self, words: Tensor) -> Tensor:
        """Vectors b t D of words b t."""
        if len(self.tables) == 1:
            return self.projections[0](self.tables[0](words))
        flat = words.flatten()
        rows = self._rows(flat)
        parts = [
            projection(table(flat[here] - start))
            for here, table, projection, start in zip(rows, self.tables, self.projections, self.edges, strict=False)
        ]
        order = torch.cat(rows)  # parts stand band by band; put them back where the words were
        return torch.cat(parts)[order.argsort()].view(*words.shape, -1)

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits of the frequent words, then of the bands: N D -> N cutoff+bands."""
        weight = self.tables[0].weight
        logits = F.linear(hidden, weight if self.bands is None else torch.cat([weight, self.bands.weight]))
        return logits.to(memory_dtype(logits))

    def _tail(self, hidden: Tensor, band: int) -> Tensor:
        """Logits of a rarer band's words, among themselves."""
        narrow = F.dropout(hidden @ self.projections[band].weight, self.dropout, self.training)
        logits = F.linear(narrow, self.tables[band].weight)
        return logits.to(memory_dtype(logits))

    def nll(self, hidden: Tensor, words: Tensor) -> Tensor:
        """-log p(words), N, from hidden N D. Each row meets the frequent words and its own band only."""
        if self.bands is None:
            return F.cross_entropy(self._head(hidden), words, reduction="none")
        rows = self._rows(words)
        target = words
        for band in range(1, len(rows)):
            target = target.index_fill(0, rows[band], self.edges[1] + band - 1)
        nll = F.cross_entropy(self._head(hidden), target, reduction="none")
        for band in range(1, len(rows)):
            here = rows[band]
            if len(here):
                tail = F.cross_entropy(self._tail(hidden[here], band), words[here] - self.edges[band], reduction="none")
                nll = nll.index_add(0, here, tail)
        return nll

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """log p of every word: ... D -> ... vocabulary."""
        head = self._head(hidden).log_softmax(-1)
        frequent = self.edges[1]
        parts = [head[..., :frequent]]
        for band in range(1, len(self.tables)):
            parts.append(head[..., frequent + band - 1, None] + self._tail(hidden, band).log_softmax(-1))
        return torch.cat(parts, dim=-1)


class AdaptiveLMLayer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: AdaptiveLMConfig, control: Control, key_value_heads: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.dropout, self.activation_dropout = config.dropout, config.activation_dropout
        self.attention_norm = nn.LayerNorm(width)
        self.attention = BoundedAttention(
            width,
            config.num_attention_heads,
            control,
            num_kv_heads=key_value_heads,
            causal=True,
            dropout=config.attention_dropout,
            scale=config.attention_scale,
        )
        self.output_gate = nn.Linear(width, width) if config.attention_output == "gate" else None
        self.output_norm = nn.LayerNorm(width) if config.attention_output == "norm" else None
        self.feed_forward_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, width)

    def forward(
        self,
        x: Tensor,
        cache: Cache | None,
        index: int,
        padding: Tensor | None,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        past = None if cache is None else bounded_layer(cache, index)
        options = {"key_padding_mask": padding, "state": past and past.state, "rotation": rotation}
        normed = self.attention_norm(x)
        y, state = self.attention(normed, return_state=True, **options)
        if past is not None:
            past.keep(state, x.shape[1])
        if self.output_gate is not None:
            y = y * self.output_gate(normed).sigmoid()
        if self.output_norm is not None:
            y = self.output_norm(y)
        x = x + F.dropout(y, self.dropout, self.training)
        y = F.dropout(F.relu(self.fc1(self.feed_forward_norm(x))), self.activation_dropout, self.training)
        return x + F.dropout(self.fc2(y), self.dropout, self.training)


class AdaptiveLM(Stateful, GenerationMixin):  # type: ignore[misc]
    """A causal language model: `loss` from labels, or `logits` (log-probabilities) without them."""

    config_class = AdaptiveLMConfig
    config: AdaptiveLMConfig
    base_model_prefix = "adaptive_lm"  # no part has that name; transformers reads "" as any first letter of a weight
    main_input_name = "input_ids"
    _no_split_modules = ["AdaptiveLMLayer"]  # noqa: RUF012 (transformers declares it so)
    # Every micro-batch has as many labels, so a mean of means is the mean.
    accepts_loss_kwargs = False

    def __init__(self, config: AdaptiveLMConfig) -> None:
        super().__init__(config)
        # post_init overwrites what the constructors draw. Forked, the draws of post_init do not depend on the control.
        with torch.random.fork_rng(devices=[]):
            self.vocabulary = AdaptiveVocabulary(config)
            layers_differ = isinstance(config.control, list) or isinstance(config.num_key_value_heads, list)
            shared = self._make_control(0) if config.tie_control and not layers_differ else None
            self.layers: Sequence[AdaptiveLMLayer] = nn.ModuleList(  # type: ignore[assignment]
                AdaptiveLMLayer(config, shared or self._make_control(i), config.key_value_heads(i))
                for i in range(config.num_hidden_layers)
            )
        if shared is not None:
            self.control = shared
            for layer in self.layers:
                use_control(layer.attention, shared)
        self.post_init()

    def _make_control(self, layer: int) -> Control:
        config = self.config
        return make_control(
            config.control if isinstance(config.control, str) else config.control[layer],
            config.slots,
            embed_dim=config.hidden_size,
            num_heads=config.key_value_heads(layer),
            head_dim=config.hidden_size // config.num_attention_heads,
            causal=True,
            **(config.control_options or {}),
        )

    def named_controls(self) -> Mapping[str, Control]:
        controls = dict.fromkeys(layer.attention.control for layer in self.layers)  # tied ones once
        return {str(number): control for number, control in enumerate(controls)}

    def new_control(self, name: str) -> Control:
        # Its draws are its own, so that the rest of the model starts alike whatever the control.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(torch.initial_seed() + int(name))
            return self._make_control(int(name))

    def _init_weights(self, module: nn.Module) -> None:
        if self.init_control(module):
            return
        if isinstance(module, nn.Embedding):
            halved = 2 if self.config.local_heads else 1
            init.normal_(module.weight, std=(halved * module.embedding_dim) ** -0.5)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
            first = self.layers[0].attention
            if self.config.local_heads and module in (first.q_proj, first.k_proj):
                self._look_back(module.weight, shifted=module is first.q_proj)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def _look_back(self, weight: Tensor, shifted: bool) -> None:
        """The local heads start as the fastest sinusoids: keys as they are, queries shifted 1, 2, ... tokens back.

        q_i k_j then sums cos(speed (i - 1 - j)), which is highest at the token before, and so on.
        """
        width = self.config.hidden_size // self.config.num_attention_heads
        fastest = torch.arange(width // 2)
        sine, cosine = fastest, fastest + self.config.hidden_size // 2  # where a sinusoid's two numbers stand
        started = weight.detach().clone()
        sharing = self.config.num_attention_heads * width // len(weight)  # heads with the same keys
        for head in range(math.ceil(self.config.local_heads / sharing)):
            angle = self._speeds(weight.device)[fastest] * (head + 1 if shifted else 0)
            rows = started[head * width : head * width + 2 * len(fastest)].zero_()
            rows[fastest, sine] = 2 * angle.cos().to(rows)
            rows[fastest, cosine] = -2 * angle.sin().to(rows)
            rows[fastest + len(fastest), sine] = 2 * angle.sin().to(rows)
            rows[fastest + len(fastest), cosine] = 2 * angle.cos().to(rows)
        init.copy_(weight, started)

    @classmethod
    def auto_classes(cls) -> dict[str, type]:
        return {"AutoConfig": AdaptiveLMConfig, "AutoModelForCausalLM": cls}

    def card(self) -> str:
        return model_card(self, "causal language model with adaptive word vectors", AutoModelForCausalLM.__name__)

    def get_input_embeddings(self) -> nn.Module:
        return self.vocabulary

    def set_input_embeddings(self, value: nn.Module) -> None:
        raise ValueError("AdaptiveLM's vocabulary is cut into bands by frequency and cannot be replaced or resized")

    def get_output_embeddings(self) -> None:
        return None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """input_ids b t. labels b t are those of the same position (shifted here), shift_labels those of the next.

        With labels the result has a loss and no logits: the softmax over every word is what this model avoids.
        attention_mask b t is 0 at padding; it may cover earlier tokens too, as `generate` passes it.
        """
        if labels is not None and shift_labels is not None:
            raise ValueError(
                "give labels, which are shifted here, or shift_labels, which are shifted already; got both"
            )
        use_cache = self.config.use_cache and not self.training if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = BoundedCache()
        hidden = self.hidden_states(input_ids, attention_mask, past_key_values)
        loss = logits = None
        if labels is not None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        if shift_labels is not None:
            scored = shift_labels != IGNORED
            loss = self.vocabulary.nll(hidden[scored], shift_labels[scored]).mean()
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.vocabulary.log_probabilities(hidden[:, kept])
        past = past_key_values if use_cache else None
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)  # type: ignore[arg-type]
        return output if return_dict is None or return_dict else output.to_tuple()

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
        """What the softmax is computed from: b t -> b t D. `cache` is read and brought up to date."""
        padding = None
        if attention_mask is not None and not bool(attention_mask.all()):
            padding = attention_mask[:, -input_ids.shape[1] :] == 0
        x = self.vocabulary.embed(input_ids) * self.config.hidden_size**0.5
        rotation = None
        if self.config.positions != "none":
            position = self._positions(input_ids, padding, cache)
            if self.config.positions == "rotary":
                rotation = self._rotation(position, x.dtype)
            else:
                x = x + self._sinusoids(position).to(x.dtype)
        x = F.dropout(x, self.config.dropout, self.training)
        for index, layer in enumerate(self.layers):
            if self.training and self.config.layerdrop and torch.rand(()) < self.config.layerdrop:
                continue
            x = layer(x, cache, index, padding, rotation)
        return x

    def _positions(self, input_ids: Tensor, padding: Tensor | None, cache: Cache | None) -> Tensor:
        """How many real tokens stand before each: b t, or 1 t where all rows are alike. A circle starts anywhere."""
        position = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        if padding is not None:
            position = ((~padding).cumsum(1) - 1).clamp(min=0)
        if cache is None and self.training and self.config.position_period is not None:
            start = torch.randint(self.config.position_period, (len(input_ids), 1), device=position.device)
            return position + start
        state = None if cache is None else bounded_layer(cache, 0, len(self.layers)).state
        return position if state is None else position + state.length[:, None]

    def _rotation(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles of every head, b 1 t d, as kernels.rotate takes them."""
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        ladder = torch.arange(half, dtype=torch.float64, device=position.device) / half
        angle = position[:, None, :, None] * torch.exp(ladder * -math.log(10000.0))  # in fp64, as in _speeds
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def _sinusoids(self, position: Tensor) -> Tensor:
        """[sin, cos] of D/2 angles of falling speed: b t -> b t D."""
        if self.config.position_period is not None:
            position = position % self.config.position_period
        angle = position[..., None] * self._speeds(position.device)
        return torch.cat([angle.sin(), angle.cos()], dim=-1)

    def _speeds(self, device: torch.device) -> Tensor:
        """The sinusoids' angles per token: D/2."""
        count, period = self.config.hidden_size // 2, self.config.position_period
        # In fp64: at a million tokens an fp32 angle is wrong in its second digit.
        ladder = torch.arange(count, dtype=torch.float64, device=device) / max(1, count - 1)
        if period is None:
            return torch.exp(ladder * -math.log(10000.0))
        # Whole cycles in `period` tokens, from period / 2 pi (the plain sinusoids' fastest) down to one.
        speed = (period / (2 * math.pi)) ** (1 - ladder)
        return speed.round().clamp(min=1) * (2 * math.pi / period)


AutoConfig.register(AdaptiveLMConfig.model_type, AdaptiveLMConfig)
AutoModelForCausalLM.register(AdaptiveLMConfig, AdaptiveLM)
known_by_name(AdaptiveLM)

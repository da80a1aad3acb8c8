"""Trains an embedded model from nothing: `python -m engine.models train tiny|tiny-swa|tiny-hybrid [--out FOLDER] [--steps N]`.

A small model learns the passages by heart: `tiny` with full attention in every layer, `tiny-swa` with a window of 8 tokens in two layers of three,
`tiny-hybrid` with a recurrent state instead of attention in every second layer. Every training row starts at a random token of a random passage (or at its
beginning), runs on to the passage's end, `<eos>`, and further passages in random order, so a prompt from the middle of a passage continues as well. Seeded
and on one thread: the same machine gives the same weights again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models.loader import quiet_reference_implementations
from engine.models.tiny_tokenizer import EOS, TINY_DIR, TINY_HYBRID_DIR, TINY_SWA_DIR, build_tokenizer, read_passages

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 20230912
PEAK_LEARNING_RATE = 4e-3
MAX_MODEL_LEN = 1024
# (tokens per row, rows): short rows teach to start from little context, long ones that earlier passages do not disturb.
ROW_SHAPES = ((32, 64), (64, 32), (160, 14), (400, 6))
ROW_WEIGHTS = (2, 3, 3, 1)


@dataclass(frozen=True)
class Recipe:
    """One model to train. `folder`: where it lies in the repository; `build`: an untrained model from vocabulary size and end token; `steps`: enough for the
    tests. `attention_left_out`: the share of rows for which an attention layer adds nothing while it is trained, each row and layer drawn by itself."""

    folder: Path
    build: Callable[[int, int], PreTrainedModel]
    steps: int
    attention_left_out: float = 0.0


def build_tiny(vocab_size: int, eos_token_id: int) -> PreTrainedModel:
    """Llama: grouped-query attention on purpose (8 query heads share 2 key/value heads), head_dim 32, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            pad_token_id=None,
        )
    )


def build_tiny_swa(vocab_size: int, eos_token_id: int) -> PreTrainedModel:
    """Gemma 3's architecture: two layers with a window of 8 tokens, then one with full attention, twice; by rule R4.2 three groups of two layers."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=8,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            pad_token_id=None,
        )
    )


def build_tiny_hybrid(vocab_size: int, eos_token_id: int) -> PreTrainedModel:
    """Bamba's architecture: attention and Mamba2 in turn, by rule R4.2 two groups of three layers.

    Every query head has keys of its own, and a state is small (4 heads of 32 * 8 numbers, and the last 3 inputs of a convolution over 144 channels), so that
    it fits into a page of 4 tokens. See `make_states_matter` for what it begins with.
    """
    from transformers import BambaConfig, BambaForCausalLM

    model = BambaForCausalLM(
        BambaConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=6,
            attn_layer_indices=[0, 2, 4],
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=32,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_d_state=8,
            mamba_d_conv=4,
            mamba_expand=1,
            mamba_chunk_size=4,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            pad_token_id=None,
        )
    )
    make_states_matter(model)
    return model


def make_states_matter(model: PreTrainedModel) -> None:
    """Weights to begin with under which a Mamba layer says what its state says. With those of the architecture a state is not a ten-thousandth of what goes
    past it and lets go of a word within the next two; in a few hundred steps nothing ever comes to depend on it.

    Time steps from 0.05 to 1 keep half of a state for 14 tokens in the first head and for less than one in the last. What is written into a state and read out
    of it is scaled up, and nothing goes past it. All of this is trained like any other weight."""
    import torch

    for layer in model.model.layers:
        if not hasattr(layer, "mamba"):
            continue
        mixer = layer.mamba
        with torch.no_grad():
            mixer.dt_bias.copy_(torch.logspace(math.log10(0.05), 0, mixer.num_heads).expm1().log())  # the inverse of softplus
            mixer.A_log.zero_()
            mixer.D.zero_()
            mixer.conv1d.weight[..., -1] = 1.0
            width = mixer.intermediate_size
            mixer.in_proj.weight[2 * width : 2 * width + 2 * mixer.n_groups * mixer.ssm_state_size] *= 8
        mixer.chunk_size = 16  # quicker to train with, and no matter for what comes out


def leave_attention_out(model: PreTrainedModel, share: float) -> None:
    """Makes each attention layer of `model` add nothing for a random `share` of the rows while it is trained. Attention finds all that was said, so that a
    model which always has it learns to do without its states."""
    import torch

    def without_some_rows(module: Any, inputs: Any, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any] | None:
        if not module.training:
            return None
        attention, weights = output
        return attention * (torch.rand(attention.shape[0], 1, 1) >= share), weights

    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.register_forward_hook(without_some_rows)


RECIPES = {
    "tiny": Recipe(TINY_DIR, build_tiny, 400),
    "tiny-swa": Recipe(TINY_SWA_DIR, build_tiny_swa, 400),
    "tiny-hybrid": Recipe(TINY_HYBRID_DIR, build_tiny_hybrid, 340, attention_left_out=0.5),
}


def sample_row(passages: list[list[int]], eos_token_id: int, length: int, rng: random.Random) -> list[int]:
    """`length` token ids: a random passage from a random token (its first token in a third of the rows), `<eos>`, then other passages."""
    first = rng.choices(passages, weights=[math.sqrt(len(passage)) for passage in passages])[0]
    start = 0 if rng.random() < 0.34 else rng.randrange(len(first))
    row = [*first[start:], eos_token_id]
    while len(row) < length:
        row += [*rng.choice(passages), eos_token_id]
    return row[:length]


def train(recipe: Recipe, out: Path, steps: int, report: Callable[[str], None] = print) -> None:
    """Writes a complete Hugging Face folder (config, weights in float16, tokenizer) to `out`. Takes minutes on one CPU thread."""
    import torch
    from transformers import PreTrainedTokenizerFast

    quiet_reference_implementations()
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    rng = random.Random(SEED)
    tokenizer = build_tokenizer()
    eos_token_id = tokenizer.encode(EOS).ids[0]  # the special token, the only one for this text
    passages = [tokenizer.encode(text).ids for text in read_passages().values()]
    model: Any = recipe.build(tokenizer.get_vocab_size(), eos_token_id)
    if recipe.attention_left_out:
        leave_attention_out(model, recipe.attention_left_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = max(1, min(100, steps // 10))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / warmup, 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps))))

    model.train()
    began = time.monotonic()
    for step in range(steps):
        length, rows = rng.choices(ROW_SHAPES, weights=ROW_WEIGHTS)[0]
        batch = torch.tensor([sample_row(passages, eos_token_id, length, rng) for _ in range(rows)])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            report(f"step {step:5d} of {steps}  loss {loss.item():.3f}  {time.monotonic() - began:.0f} s")

    out.mkdir(parents=True, exist_ok=True)
    model.eval().half().save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # the library writes it for the owner alone
    # The wrapper's files say "take no special token from a text" and "leave spaces alone" to anyone who loads the folder with transformers.
    wrapper = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False, model_max_length=MAX_MODEL_LEN, split_special_tokens=True
    )
    wrapper.save_pretrained(out)

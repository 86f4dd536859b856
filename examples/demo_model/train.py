"""Train the demo model from text that corpus.py makes up, and save it as a checkpoint.

    python examples/demo_model/train.py --minutes 14

The learning rate follows a cosine over the minutes given, so a slower machine takes fewer steps, not longer.
"""

import argparse
import itertools
import math
import time
from pathlib import Path

import corpus
import torch
from batches import Batch, batches
from tokenizer import MAX_LENGTH, train_tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_NUM_TOKENIZER_TEXTS = 8000
_VOCAB_SIZE = 2048
_PEAK_LR = 4e-3
_WARMUP = 0.03  # share of the time
_TOKENS_PER_BATCH = 2048


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A tokenizer learnt from conversations of their own seed."""
    conversations = itertools.islice(corpus.conversations(seed), _NUM_TOKENIZER_TEXTS)
    return train_tokenizer((message["content"] for c in conversations for message in c), _VOCAB_SIZE)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights: small, but with grouped-query attention and tied embeddings as large ones have."""
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)
    return model


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embeddings and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=_PEAK_LR, weight_decay=0.05, adjust_lr_fn="match_rms_adamw", ns_steps=4),
        torch.optim.AdamW(others, lr=_PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def learning_rate(progress: float) -> float:
    """Linear warm-up, then a cosine to zero; ``progress`` is from 0 to 1."""
    if progress < _WARMUP:
        return _PEAK_LR * progress / _WARMUP
    return _PEAK_LR * 0.5 * (1 + math.cos(math.pi * (progress - _WARMUP) / (1 - _WARMUP)))


def loss_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """The weighted mean loss in nats per token; logits are computed only where a token counts."""
    hidden = model.model(input_ids=batch.ids).last_hidden_state[:, :-1]
    targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
    counts = weights > 0
    losses = functional.cross_entropy(model.lm_head(hidden[counts]), targets[counts], reduction="none")
    return (losses * weights[counts]).sum() / weights.sum()


def train_step(model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], batch: Batch) -> float:
    """One update; returns the loss."""
    loss = loss_of(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, minutes: float) -> None:
    """Train ``model`` in place for ``minutes`` and print how it goes."""
    optimizers = make_optimizers(model)
    start, num_tokens, smooth = time.monotonic(), 0, math.nan
    for step, batch in enumerate(batches(seed, _TOKENS_PER_BATCH, tokenizer)):
        progress = (time.monotonic() - start) / (60 * minutes)
        if progress >= 1:
            break
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = learning_rate(progress)
        loss = train_step(model, optimizers, batch)
        num_tokens += batch.ids.numel()
        smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
        if step % 50 == 0:
            print(f"{progress:4.0%}  step {step}  {num_tokens / 1e6:.2f}M tokens  loss {smooth:.4f}", flush=True)
    print(f"done: {step} steps, {num_tokens / 1e6:.2f}M tokens, loss {smooth:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=14.0, help="training time, wall clock (default 14)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the text (default 0)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "checkpoint")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    tokenizer = make_tokenizer(args.seed + 1)
    model = make_model(tokenizer)
    print(f"{model.num_parameters() / 1e6:.2f}M parameters, {len(tokenizer)} tokens in the vocabulary", flush=True)
    train(model, tokenizer, args.seed, args.minutes)
    model.to(torch.bfloat16).save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()

"""Compiles the kernels of sampling before there are requests to wait for them."""

from __future__ import annotations

import numpy as np
import torch

from engine.request.params import SamplingParams
from engine.sampling.gumbel_argmax import sampled_tokens
from engine.sampling.logprobs import begin_top_tokens
from engine.transfer import read_now


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Sample a token, and read a top token."""
    logits = torch.zeros(1, vocab_size, device=device)
    zero = np.zeros(1, np.int64)
    params = [SamplingParams(temperature=1.0, top_p=0.5, top_k=1)]
    with torch.inference_mode():
        sampled_tokens(logits, zero, zero, params)
        read_now(lambda readback: begin_top_tokens(logits, [0], 1, readback, True))

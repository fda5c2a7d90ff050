"""The distributions that a step's rows are sampled from: what rejection verification needs, and
sample-and-match never does.

A row of :func:`target_probs` is the distribution of what ``choose_tokens`` gives: the same edits of
the logits, the same truncation down to the bit (``truncation.py``), then the
softmax of what is left. Greedy rows are certain of the lowest id among the largest logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.gumbel_argmax import greedy_tokens
from engine.sampling.sampler import edited_logits
from engine.sampling.state import SampledRequest, rows_of
from engine.sampling.truncation import rows_where, truncated
from engine.transfer import upload

_INFINITY = float("inf")


def target_probs(logits: Tensor, requests: Sequence[SampledRequest]) -> Tensor:
    """Float64 ``[num_rows_of_requests, vocab_size]``, the requests' rows one after the other.

    ``logits`` ``[num_rows, vocab_size]``, any float type, any device; left as they are. A row without
    a finite logit is certain of token 0, as in ``choose_tokens``.
    """
    with torch.inference_mode():
        rows = [row for each in requests for row in rows_of(each)]
        values = edited_logits(logits, requests).index_select(0, upload(rows, logits.device))
        params = [each.sampling.params for each in requests for _ in rows_of(each)]
        probs = torch.softmax(truncated(values, params), dim=-1)
        is_empty = ~(values.amax(dim=-1) > -_INFINITY)  # NaN rows too
        probs.masked_fill_(is_empty[:, None], 0.0)
        probs[:, 0].masked_fill_(is_empty, 1.0)
        greedy = rows_where([each.temperature == 0 for each in params], values.device)
        if len(greedy):
            certain = greedy_tokens(values.index_select(0, greedy))
            probs.index_fill_(0, greedy, 0.0)
            probs.index_put_((greedy, certain), probs.new_ones(()))
        return probs

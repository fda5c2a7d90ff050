"""Embeddings: the hidden states of a text's tokens, pooled into one vector of length 1.

The states are the output head's inputs, after the final norm. They come with the steps that compute a
request's rows, in any chunks, and are summed in fp64, so that chunks leave no trace in the 32-bit
result. A preempted request keeps its sum; its rows are computed again, but not added again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.schedule.request import ScheduledRequest
from engine.transfer import Readback


@torch.inference_mode()
def pool(scheduled: ScheduledRequest, states: Tensor) -> None:
    """Take in the states ``[num_rows, hidden_size]`` of a step's rows for one of its requests, which has
    been verified. With its last row the request has its embedding, and ends without a token; on a GPU
    that waits for the step."""
    request, rows = scheduled.request, scheduled.rows
    own = states[rows.first_row : rows.first_row + rows.num_known]
    if request.params.pooling == "last":
        request.pooled = own[-1].double()
    else:
        new = own[max(0, request.num_pooled_tokens - scheduled.base) :]
        total = new.double().sum(dim=0)
        request.pooled = total if request.pooled is None else request.pooled + total
    request.num_pooled_tokens = max(request.num_pooled_tokens, rows.known_end)
    if scheduled.outcome is None:
        return
    # The length takes care of the number of tokens.
    readback = Readback()
    arrival = readback.add(torch.nn.functional.normalize(request.pooled, dim=0).float())
    readback.fetch()
    assert arrival.there is not None
    request.embedding = arrival.there.numpy().astype("<f4").tobytes()
    scheduled.outcome = scheduled.outcome._replace(
        emitted_token_ids=(), finish_reason="stop", stop_token_id=None
    )

"""Whether the token that was just appended is a request's last."""

from __future__ import annotations

from engine.core.request import Request, RequestStatus
from engine.trace.events import Cause, CauseKind


def check_stop(request: Request, max_model_len: int) -> tuple[RequestStatus, Cause] | None:
    """The end and its reason, None to go on: a stop token, then the output's and the sequence's length. Sets `stop_reason` of a stopped request.

    vLLM: check_stop; here: the status is returned, not set."""
    token_id = request.all_token_ids[-1]
    if token_id in request.sampling_params.stop_token_ids:
        request.stop_reason = token_id
        return RequestStatus.FINISHED_STOPPED, Cause(CauseKind.STOP_TOKEN, {"token_id": token_id})
    if request.num_output_tokens >= request.max_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED, Cause(CauseKind.MAX_TOKENS, {"max_tokens": request.max_tokens})
    if request.num_tokens >= max_model_len:
        return RequestStatus.FINISHED_LENGTH_CAPPED, Cause(CauseKind.MAX_MODEL_LEN, {"max_model_len": max_model_len})
    return None

"""From a finished request to its trajectory."""

from __future__ import annotations

from consistency.routing_replay import RoutingTrace
from integrations.trainer.engine.requests import RequestState, RequestTable
from integrations.trainer.trajectory import FinishReason, Trajectory

__all__ = ["build_trajectory"]


def build_trajectory(
    table: RequestTable,
    state: RequestState,
    routing: RoutingTrace | None,
    contract_digest: str,
    reason: FinishReason,
) -> Trajectory:
    """Everything the engine knows about a request whose build log is complete."""
    request, row = state.request, state.row
    prompt, length = len(request.prompt), int(table.length[row])
    return Trajectory(
        request_id=request.request_id,
        prompt_index=request.prompt_index,
        sample_index=request.sample_index,
        token_ids=tuple(table.tokens[row, :length].tolist()),
        prompt_length=prompt,
        logprobs=tuple(table.logprobs[row, prompt:length].tolist()),
        versions=tuple(table.versions[row, prompt:length].tolist()),
        loss_mask=(0,) * prompt + (1,) * (length - prompt),
        temperature=request.temperature,
        contract_digest=contract_digest,
        finish_reason=reason,
        segments=tuple(state.log),
        routing=routing,
    )

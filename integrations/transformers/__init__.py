"""Transformers models on the kernels of the contract, and their routers recorded and replayed."""

from __future__ import annotations

from integrations.transformers.patching import OPERATIONS, patch, unpatch
from integrations.transformers.routing import record_routes, replay_routes
from integrations.transformers.scoring import score_tokens

__all__ = ["OPERATIONS", "patch", "record_routes", "replay_routes", "score_tokens", "unpatch"]

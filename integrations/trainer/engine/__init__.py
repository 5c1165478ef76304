"""The embedded rollout engine."""

from __future__ import annotations

from integrations.trainer.engine.engine import RolloutEngine, SwapPolicy
from integrations.trainer.engine.outputs import StepMetrics, StepOutput

__all__ = ["RolloutEngine", "StepMetrics", "StepOutput", "SwapPolicy"]

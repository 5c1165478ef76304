"""AdamW on fp32 master weights behind bf16 compute weights.

The kernels add every weight gradient, in fp32, to the `main_grad` of the compute weight. The
optimizer steps the fp32 master with it and rounds the master once into the compute weight, which
is therefore exactly the tensor that is published to the rollout engines; with a quantiser, exactly
the values of the codes that are published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from consistency.quant import PackedTensor, unpack
from integrations.errors import LearnerError
from integrations.trainer.model.weights import Weight
from integrations.trainer.quantisation import WeightQuantiser

STATE_GROUPS = ("master", "exp_avg", "exp_avg_sq")


class MasterOptimizer:
    """Owns the gradients, the fp32 master weights and the moments of one model.

    Args:
        weights: compute weights by name, leaf tensors; `requires_grad` and `main_grad` are set.
        betas, weight_decay: of AdamW (arXiv 1711.05101).
        gradient_clip: largest global L2 norm of the gradient; larger gradients are scaled down.
        quantiser: its tensors are packed after every step, and their compute weights are the
            values of the packing; the gradient passes straight through to the master.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        gradient_clip: float,
        quantiser: WeightQuantiser | None = None,
    ) -> None:
        self._weights = dict(weights)
        self._quantiser = quantiser
        self._packed: dict[str, PackedTensor] = {}
        self._gradient_clip = gradient_clip
        self._master: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            weight.requires_grad_(True)
            weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]
            master = weight.detach().to(torch.float32, copy=True)
            master.grad = weight.main_grad  # type: ignore[attr-defined]
            self._master[name] = master
        # Vectors (norm gains) are not decayed, as is usual for AdamW on transformers.
        matrices = [master for master in self._master.values() if master.dim() > 1]
        vectors = [master for master in self._master.values() if master.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=betas,
            fused=True,
        )
        self._steps = 0
        if quantiser is not None:
            self._round_into_weights()

    @property
    def served_weights(self) -> dict[str, Weight]:
        """What rollout engines compute with: the compute weights, quantised ones as packed."""
        return {**self._weights, **self._packed}

    @property
    def steps(self) -> int:
        """Optimizer steps taken, including those before a checkpoint that was loaded."""
        return self._steps

    def zero_gradient(self) -> None:
        for master in self._master.values():
            if master.grad is not None:
                master.grad.zero_()

    def gradient_norm(self) -> float:
        """Global L2 norm of the accumulated gradient, in the fixed order of the names."""
        squares = [
            float(torch.linalg.vector_norm(master.grad, dtype=torch.float64)) ** 2
            for master in self._master.values()
            if master.grad is not None
        ]
        return math.sqrt(math.fsum(squares))

    def step(self, learning_rate: float) -> float:
        """Clip, step the master weights, round them into the compute weights.

        Args:
            learning_rate: of this step; the schedule is the caller's.

        Returns:
            The gradient norm before clipping.

        Raises:
            LearnerError: the gradient is not finite; weights and moments are left untouched.
        """
        norm = self.gradient_norm()
        if not math.isfinite(norm):
            raise LearnerError(
                f"the gradient norm is {norm} at optimizer step {self._steps + 1}; this update was "
                "not applied; lower learner.learning_rate or learner.gradient_clip"
            )
        if norm > self._gradient_clip:
            scale = self._gradient_clip / norm
            for master in self._master.values():
                if master.grad is not None:
                    master.grad.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._steps += 1
        self._round_into_weights()
        return norm

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything a resumed run needs, by group and weight name (no copies)."""
        groups: dict[str, dict[str, Tensor]] = {group: {} for group in STATE_GROUPS}
        for name, master in self._master.items():
            moments = self._adamw.state.get(master, {})
            groups["master"][name] = master.detach()
            for key in STATE_GROUPS[1:]:
                value = moments.get(key)
                groups[key][name] = torch.zeros_like(master) if value is None else value
        return groups

    def load_state(self, groups: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Continue from `state()` of an earlier process; bits are restored exactly."""
        for group in STATE_GROUPS:
            missing = set(self._master) ^ set(groups.get(group, {}))
            if missing:
                raise LearnerError(
                    f"optimizer checkpoint: group {group!r} does not match the model at "
                    f"{sorted(missing)[0]!r}; resume with the recipe that wrote it"
                )
        for name, master in self._master.items():
            master.copy_(groups["master"][name])
            if steps:
                self._adamw.state[master] = {
                    "step": torch.tensor(float(steps), dtype=torch.float32),
                    "exp_avg": groups["exp_avg"][name].clone(),
                    "exp_avg_sq": groups["exp_avg_sq"][name].clone(),
                }
        self._steps = steps
        self._round_into_weights()

    @torch.no_grad()
    def _round_into_weights(self) -> None:
        for name, weight in self._weights.items():
            weight.copy_(self._master[name])
        if self._quantiser is not None:
            for name in self._quantiser.names:
                weight = self._weights[name]
                self._packed[name] = self._quantiser.pack(name, weight.detach())
                weight.copy_(unpack(self._packed[name], dtype=weight.dtype))

"""How a small mismatch compounds: the lower bound of the Ring-1T theorem.

Source: arXiv 2510.18855.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from consistency.errors import InvalidInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftBound:
    """Lower bound on delta = KL(engine || learner) while training goes on with mismatched engines.

    An update theta + step * g with g = g* + b, where the bias b comes from the mismatch, gives

        delta' >= (1 + eta * step) * delta - kappa * step
        eta = coupling      kappa = alignment + smoothness / 2 * max_step * gradient_norm^2

    and from delta >= threshold = 2 kappa / eta on the drift grows geometrically.

    Args:
        coupling: c in <grad delta, b> >= c * delta; > 0.
        alignment: M in |<grad delta, g*>| <= M; >= 0.
        smoothness: L, delta is L-smooth; >= 0.
        gradient_norm: G in ||g|| <= G; >= 0.
        step: learning rate mu of the update; 0 < step <= max_step.
        max_step: the largest step, mu bar.

    Raises:
        InvalidInputError: a constant out of its range.
    """

    coupling: float
    alignment: float
    smoothness: float
    gradient_norm: float
    step: float
    max_step: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coupling) and self.coupling > 0):
            raise InvalidInputError(f"coupling is {self.coupling}: use a number above 0")
        for name in ("alignment", "smoothness", "gradient_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidInputError(f"{name} is {value}: use a number >= 0")
        if not 0 < self.step <= self.max_step < math.inf:
            raise InvalidInputError(
                f"step is {self.step}, max_step is {self.max_step}: use 0 < step <= max_step"
            )

    @property
    def eta(self) -> float:
        """Rate of growth."""
        return self.coupling

    @property
    def kappa(self) -> float:
        """What honest progress can take off the drift per unit of step."""
        return self.alignment + self.smoothness / 2 * self.max_step * self.gradient_norm**2

    @property
    def threshold(self) -> float:
        """From this drift on, growth is geometric."""
        return 2 * self.kappa / self.eta

    def after(self, delta: float, steps: int) -> tuple[float, ...]:
        """The bound on delta after 1, 2, ..., ``steps`` updates, starting from ``delta``."""
        self._require_start(delta, steps)
        values: list[float] = []
        for _ in range(steps):
            delta = (1 + self.eta * self.step) * delta - self.kappa * self.step
            values.append(delta)
        return tuple(values)

    def geometric_after(self, delta: float, steps: int) -> tuple[float, ...]:
        """The simpler bound (1 + eta step / 2)^n * delta; holds from ``threshold`` on only.

        Raises:
            InvalidInputError: ``delta`` is below ``threshold``.
        """
        self._require_start(delta, steps)
        if delta < self.threshold:
            raise InvalidInputError(
                f"delta is {delta}, below the threshold {self.threshold}: growth need not be "
                "geometric there, use after()"
            )
        rate = 1 + self.eta * self.step / 2
        return tuple(delta * rate**count for count in range(1, steps + 1))

    @staticmethod
    def _require_start(delta: float, steps: int) -> None:
        if not (math.isfinite(delta) and delta >= 0) or steps < 0:
            raise InvalidInputError(f"delta is {delta}, steps is {steps}: use numbers >= 0")

"""The picture of `lockstep bench divergence`: per-token differences, largest first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.divergence.measure import Measured

__all__ = ["save_plot"]

_FLOOR = 1e-9  # where a difference of exactly 0 is drawn on the logarithmic axis


def save_plot(path: Path, measured: Sequence[Measured], title: str) -> None:
    """Draws one line per row of the table."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for item in measured:
        stock = item.row.contract == "stock"
        ordered = item.differences.abs().sort(descending=True).values.clamp(min=_FLOOR)
        share = (ordered.new_tensor(range(len(ordered))) + 0.5) / max(len(ordered), 1)
        axes.semilogy(
            share.tolist(),
            ordered.tolist(),
            color="tab:red" if stock else "tab:blue",
            alpha=0.7,
            linewidth=1.2,
            label=("stock" if stock else "lockstep") + f", {item.row.scenario}",
        )
    axes.set_xlabel("share of the tokens, largest difference first")
    axes.set_ylabel("|log p trainer - log p rollout|")
    axes.set_title(f"{title} (a line at {_FLOOR:g} is exactly 0)", fontsize=10)
    axes.legend(fontsize=6, ncols=2)
    figure.savefig(path)

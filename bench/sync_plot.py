"""The plot of `bench.sync`: seconds from publish to committed, by way and number of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def save_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw ``rows`` as horizontal bars, one panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["model"] for row in rows))
    longest = max(sum(row["model"] == model for row in rows) for model in models)
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(6.4 * len(models), 1.2 + 0.28 * longest), squeeze=False
    )
    for axis, model in zip(axes[0], models, strict=True):
        chosen = [row for row in rows if row["model"] == model]
        labels = [
            f"{row['peer'] or row['transport']} {row['mode']} x{row['replicas']}" for row in chosen
        ]
        colours = [
            "#9a9a9a" if row["peer"] else "#2c7fb8" if row["mode"] == "full" else "#41ab5d"
            for row in chosen
        ]
        places = range(len(chosen))
        axis.barh(places, [row["seconds"] for row in chosen], color=colours)
        axis.set_yticks(places, labels, fontsize=7)
        axis.invert_yaxis()
        axis.set_xlabel("seconds, publish to committed everywhere (median)")
        axis.set_title(f"{model}, {chosen[0]['model_bytes'] / 1e6:.0f} MB")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

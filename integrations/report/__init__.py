"""What happened in a run: reading its events, plots, and one self-contained HTML page."""

from __future__ import annotations

from integrations.report.overview import render_overview_png, save_overview_png
from integrations.report.page import save_report, write_report
from integrations.report.record import ReportError, RunRecord, load_run

__all__ = [
    "ReportError",
    "RunRecord",
    "load_run",
    "render_overview_png",
    "save_overview_png",
    "save_report",
    "write_report",
]

"""The style sheet of the page: one column of cards, light or dark as the reader's system asks."""

from __future__ import annotations

from dataclasses import asdict

from integrations.report.theme import DARK, LIGHT, Colours

__all__ = ["style_sheet"]


def style_sheet() -> str:
    """The CSS of a report, colours of both settings included."""
    light = f":root {{ color-scheme: light dark; {_variables(LIGHT)} --page: #f4f6f9; }}"
    dark = f":root {{ {_variables(DARK)} --page: #0f131a; }}"
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{_RULES}"


def _variables(colours: Colours) -> str:
    return " ".join(
        f"--{role.replace('_', '-')}: {value};" for role, value in asdict(colours).items()
    )


_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans",
  sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 2px 0 10px; letter-spacing: -0.01em; }
h2 { font-size: 19px; margin: 44px 0 4px; letter-spacing: -0.005em; }
h3 { font-size: 14.5px; margin: 0 0 2px; }
p { margin: 0; }
code, pre, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; font-size: 0.92em; }
.kicker { color: var(--muted); font-size: 13px; letter-spacing: 0.04em; text-transform: uppercase; }
.status { display: inline-block; vertical-align: 5px; margin-left: 8px; padding: 2px 10px;
  border-radius: 999px; font-size: 13px; font-weight: 600; letter-spacing: 0;
  border: 1px solid currentColor; color: var(--held-out); }
.status.failed { color: var(--alert); } .status.unfinished { color: var(--rollout); }
.headline { font-size: 17px; max-width: 68ch; margin-bottom: 14px; }
.facts { color: var(--muted); font-size: 13.5px; display: flex; flex-wrap: wrap; gap: 2px 20px; }
.facts b { font-weight: 500; color: var(--ink); }
.lead { color: var(--muted); max-width: 76ch; margin-bottom: 14px; }
.note { border-left: 3px solid var(--rollout); background: var(--surface); padding: 9px 14px;
  margin-top: 12px; border-radius: 0 8px 8px 0; }
.note.alert { border-color: var(--alert); }
.tiles { display: grid; grid-template-columns: repeat(5, 1fr); gap: 12px; margin-top: 26px; }
.tile, .card { background: var(--surface); border: 1px solid var(--grid); border-radius: 12px; }
.tile { padding: 13px 16px 12px; }
.tile .label { color: var(--muted); font-size: 13px; }
.tile .value { font-size: 23px; font-weight: 650; line-height: 1.3; letter-spacing: -0.01em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile .value small { font-size: 14px; font-weight: 500; color: var(--muted); letter-spacing: 0; }
.tile.good .value { color: var(--held-out); } .tile.bad .value { color: var(--alert); }
.tile .detail { color: var(--muted); font-size: 12.5px; line-height: 1.4; }
.cards { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.card { margin: 0; padding: 16px 18px 12px; }
.card.wide { grid-column: 1 / -1; }
.card p { color: var(--muted); font-size: 13.5px; margin-bottom: 8px; }
.plot svg { display: block; width: 100%; height: auto; }
.plot svg text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans",
  sans-serif !important; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
th { color: var(--muted); font-weight: 500; white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.text { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace, "SF Mono",
  Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12.5px; }
.card td.number, .card th.number { width: 1%; padding-left: 6px; }
tr:last-child td { border-bottom: none; }
details { background: var(--surface); border: 1px solid var(--grid); border-radius: 12px;
  margin-top: 12px; }
summary { cursor: pointer; padding: 12px 18px; font-weight: 600; }
details > div { padding: 0 18px 16px; overflow-x: auto; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
footer { color: var(--muted); font-size: 13px; margin-top: 36px; }
@media (max-width: 1020px) { .tiles { grid-template-columns: repeat(3, 1fr); } }
@media (max-width: 820px) { .cards { grid-template-columns: minmax(0, 1fr); }
  .card.wide .plot svg { min-width: 720px; } }
@media (max-width: 560px) { .tiles { grid-template-columns: repeat(2, 1fr); }
  main { padding: 20px 14px 40px; } }
@media print { body { background: none; } .card, .tile { break-inside: avoid; } }
"""

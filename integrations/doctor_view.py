"""`lockstep doctor` for people: the diagnosis as tables."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from integrations.doctor import Component, Diagnosis

__all__ = ["show"]

VARIANTS = {"v4": "AVX-512", "v3": "AVX2", "baseline": "baseline instructions"}


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Prints the machine, what is installed, the self-tests, and what can be done here."""
    console.print(_machine(diagnosis))
    console.print(_installed(diagnosis.components))
    console.print(_checks(diagnosis))
    console.print(_routes(diagnosis))


def _machine(diagnosis: Diagnosis) -> Table:
    table = Table("machine", "", box=None, pad_edge=False, header_style="bold")
    table.add_row("lockstep", escape(diagnosis.lockstep))
    table.add_row("python", f"{diagnosis.python} on {escape(diagnosis.system)}")
    cores = f"{diagnosis.cores} usable cores"
    if diagnosis.cpu_quota is not None:
        cores += f", limited to {diagnosis.cpu_quota:g} by the control group"
    table.add_row("cpu", f"{escape(diagnosis.cpu)}, {cores}")
    variant = diagnosis.kernel_variant
    if variant is None:
        table.add_row("kernels", "[red]no library can be loaded[/red]")
    else:
        built = ", ".join(diagnosis.kernel_variants_built)
        table.add_row("kernels", f"{variant} ({VARIANTS.get(variant, variant)}); runnable: {built}")
    table.add_row("/dev/shm", _space(diagnosis))
    gpus = ", ".join(diagnosis.gpus) or "none found"
    table.add_row("gpu", f"{escape(gpus)} [dim]({escape(diagnosis.gpu_note)})[/dim]")
    return table


def _space(diagnosis: Diagnosis) -> str:
    if diagnosis.shared_memory_bytes is None or diagnosis.shared_memory_free is None:
        return "[red]does not exist[/red]"
    if diagnosis.shared_memory_bytes == 0:
        return "no limit of its own"
    size, free = diagnosis.shared_memory_bytes / 1e9, diagnosis.shared_memory_free / 1e9
    return f"{size:.2f} GB, {free:.2f} GB free"


def _installed(components: tuple[Component, ...]) -> Table:
    table = Table("\ninstalled", "\nversion", "\nrange", "\nused for", box=None, pad_edge=False)
    for item in components:
        if item.version is None:
            shown = "[red]not installed[/red]" if item.required else "[dim]not installed[/dim]"
        else:
            shown = (
                escape(item.version) if item.fits else f"[yellow]{escape(item.version)}[/yellow]"
            )
        table.add_row(item.name, shown, escape(item.wanted), f"[dim]{item.purpose}[/dim]")
    return table


def _checks(diagnosis: Diagnosis) -> Table:
    table = Table("\nself-test", "", "", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for check in diagnosis.checks:
        mark = "[green]passed[/green]" if check.passed else "[red]FAILED[/red]"
        fix = f"; {escape(check.fix)}" if check.fix else ""
        table.add_row(check.name, mark, f"[dim]{escape(check.detail)}[/dim]{fix}")
    return table


def _routes(diagnosis: Diagnosis) -> Table:
    table = Table("\nwhat works here", "", "", box=None, pad_edge=False)
    for route in diagnosis.routes:
        if route.enabled:
            table.add_row(route.name, "[green]ready[/green]", f"[dim]{escape(route.command)}[/dim]")
        else:
            table.add_row(route.name, "[yellow]needs[/yellow]", escape("; ".join(route.missing)))
    return table

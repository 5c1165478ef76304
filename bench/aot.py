"""`python -m bench.aot`: compiles every Triton kernel for four GPUs, on a machine without one.

Prints registers, shared memory, spills and the matrix instruction of every kernel. Exits with 1 if
a kernel spills or has another matrix instruction than the best one of its target.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from bench.aot_cases import Case, all_cases
from bench.aot_compile import TARGETS, Compiled, compile_launch, launch_key
from consistency.kernels.triton import interpreted
from consistency.kernels.triton.launch import Launch, record


def launches(cases: Iterable[Case], target: str) -> list[tuple[str, Launch]]:
    """The distinct launches of the cases for one target, each with the case that made it first."""
    found: dict[str, tuple[str, Launch]] = {}
    for case in cases:
        with record(TARGETS[target]) as recording, interpreted():
            case.call()
        for launch in recording.launches:
            found.setdefault(launch_key(launch), (case.name, launch))
    return list(found.values())


def compile_cases(cases: Iterable[Case], target: str) -> Iterable[Compiled]:
    """Compiles the distinct launches of the cases for one target."""
    for name, launch in launches(cases, target):
        yield compile_launch(name, launch, target)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.aot", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here too")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="default: all")
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    options = parser.parse_args(arguments)
    cases = [case for case in all_cases() if options.only in case.name]
    if not cases:
        parser.error(f"--only {options.only!r} matches no case")
    print(f"{'case':<38} {'kernel':<26} {'target':<7} warps regs  shared spill instruction")
    rows = []
    for target in options.target or TARGETS:
        for row in compile_cases(cases, target):
            rows.append(row)
            print(
                f"{row.case:<38} {row.kernel:<26} {row.target:<7} {row.warps:5} {row.registers:4} "
                f"{row.shared_bytes:7} {row.spill_bytes:5} {row.instruction or '-'}"
                + ("" if row.good else f"  FAULT: wanted {row.wanted or 'none'}, no spills"),
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps([row.to_dict() for row in rows], indent=1) + "\n")
    faults = sum(not row.good for row in rows)
    print(f"{len(rows)} kernels compiled, {faults} with a spill or a wrong instruction")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

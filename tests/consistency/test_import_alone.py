import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib.abc, sys

class OnlyTorch(importlib.abc.MetaPathFinder):
    blocked = {"numpy", "msgspec", "xxhash", "pydantic", "safetensors", "typer", "rich", "yaml"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, OnlyTorch())
import torch
import consistency
from consistency.routing_replay import RoutingTrace

ids = torch.tensor([[[1, 300]], [[2, 0]]])
trace = RoutingTrace.of(ids, layers=(3,), experts=512, weight_version=1, origin="generated")
restored = RoutingTrace.from_bytes(trace.to_bytes())
if restored != trace or restored.expert_ids.dtype != torch.uint16:
    sys.exit("the trace did not survive")
lp = torch.tensor([-1.0, -2.0])
if consistency.mismatch_metrics(lp, lp).exact_fraction != 1.0:
    sys.exit("equal logprobs did not compare equal")
if "numpy" in sys.modules:
    sys.exit("numpy was imported")
print(",".join(sorted(n for n in sys.modules if n.startswith("consistency"))))
"""


def test_consistency_works_with_torch_alone_and_does_not_load_the_kernels():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "consistency.metrics" in done.stdout
    assert "consistency.kernels" not in done.stdout

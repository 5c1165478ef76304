"""The state dicts that `bench.sync` moves: real shapes, random values, steps that change them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from weightplane import Layout, TensorSpec

State = dict[str, torch.Tensor]


def dense_specs() -> list[TensorSpec]:
    """The tensors of SmolLM2-135M: 30 layers of width 576, tied embedding; 269 MB in bf16."""
    specs = [TensorSpec("embedding", (49152, 576), "bfloat16")]
    for layer in range(30):
        name = f"layers.{layer:02}"
        shapes = {
            "q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576),
            "gate": (1536, 576), "up": (1536, 576), "down": (576, 1536),
            "input_norm": (576,), "post_norm": (576,),
        }  # fmt: skip
        specs += [TensorSpec(f"{name}.{part}", shape, "bfloat16") for part, shape in shapes.items()]
    specs.append(TensorSpec("norm", (576,), "bfloat16"))
    return specs


def moe_specs() -> list[TensorSpec]:
    """A mixture of experts of about the same size: 8 layers, 32 experts, fp32 routers; 288 MB."""
    specs = [TensorSpec("embedding", (32000, 512), "bfloat16")]
    for layer in range(8):
        name = f"layers.{layer:02}"
        specs += [
            TensorSpec(f"{name}.qkv", (768, 512), "bfloat16"),
            TensorSpec(f"{name}.o", (512, 512), "bfloat16"),
            TensorSpec(f"{name}.router", (32, 512), "float32"),
            TensorSpec(f"{name}.norm", (512,), "bfloat16"),
        ]
        for expert in range(32):
            specs += [
                TensorSpec(f"{name}.experts.{expert:02}.gate_up", (640, 512), "bfloat16"),
                TensorSpec(f"{name}.experts.{expert:02}.down", (512, 320), "bfloat16"),
            ]
    return specs


MODELS = {"dense": dense_specs, "moe": moe_specs}


class Learner:
    """Weights in bf16 over fp32 masters, changed by steps of Adam's size.

    Args:
        specs: the tensors.
        learning_rate: what Adam moves every master weight by, up or down, in one step; 1e-6 is
            usual in reinforcement learning of language models.
    """

    def __init__(self, specs: list[TensorSpec], learning_rate: float) -> None:
        self._rate = learning_rate
        self._generator = torch.Generator().manual_seed(0)
        self.layout = Layout.whole(specs)
        self._masters: State = {}
        for spec in self.layout.tensors:
            width = spec.shape[-1]
            noise = torch.randn(spec.shape, generator=self._generator)
            self._masters[spec.name] = noise / math.sqrt(width)
        self._dtypes = {spec.name: getattr(torch, spec.dtype) for spec in self.layout.tensors}

    def state(self) -> Mapping[str, torch.Tensor]:
        """The weights as they are published."""
        return {name: master.to(self._dtypes[name]) for name, master in self._masters.items()}

    def step(self) -> None:
        """Move every master weight by the learning rate, in a random direction."""
        for master in self._masters.values():
            direction = torch.randint(0, 2, master.shape, generator=self._generator) * 2 - 1
            master.add_(direction, alpha=self._rate)

    def change_everything(self) -> None:
        """A change that no delta can carry."""
        for master in self._masters.values():
            master.mul_(1.1).add_(1e-4)


def changed_bytes(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> tuple[int, float]:
    """Bytes of the elements that differ, and their share of all elements."""
    count = size = total = 0
    for name, old in before.items():
        differs = int((old != after[name]).sum())
        count += differs
        size += differs * old.element_size()
        total += old.numel()
    return size, count / max(total, 1)

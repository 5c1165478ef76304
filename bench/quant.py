"""`python -m bench.quant`: QDQ and packing on the CPU against torchao in eager mode, in one run.

Prints ratios of torchao's time to ours (above 1: ours is faster), medians of interleaved calls.
"""

from __future__ import annotations

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_mx

from bench.kernels import interleaved
from consistency.quant import QuantSettings, ScaleRule, pack, qdq

SHAPES = ((1024, 4096), (8, 768, 2048))


def main() -> None:
    torch.manual_seed(0)
    element, rule = torch.float4_e2m1fn_x2, ScaleCalculationMode.RCEIL
    settings = QuantSettings(scale_rule=ScaleRule.RCEIL)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print("operation                      torchao / ours")
    for shape in SHAPES:
        x = torch.randn(shape).bfloat16()
        name = "x".join(map(str, shape))
        ratio = interleaved(
            lambda x=x: qdq(x, settings),
            lambda x=x: MXTensor.to_mx(x, element, 32, rule).dequantize(torch.bfloat16),
        )
        print(f"qdq  bf16 {name:<20} {ratio:14.1f}")
        ratio = interleaved(lambda x=x: pack(x, settings), lambda x=x: to_mx(x, element, 32, rule))
        print(f"pack bf16 {name:<20} {ratio:14.1f}")


if __name__ == "__main__":
    main()

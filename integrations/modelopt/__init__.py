"""The codec as a quantisation backend of NVIDIA Model Optimizer (``lockstep-rl[modelopt]``).

Model Optimizer's own MXFP4 runs on CUDA alone, and its fake quantisation and its export disagree
about ties. With this backend ``mtq.quantize`` computes with our bits, on any device, forward and
backward::

    import modelopt.torch.quantization as mtq
    from integrations import modelopt as lockstep_modelopt

    lockstep_modelopt.register()
    config = lockstep_modelopt.with_backend(mtq.MXFP4_DEFAULT_CFG, scale_rule="rceil")
    model = mtq.quantize(model, config)
"""

from __future__ import annotations

from integrations.modelopt.backend import BACKEND, register, unregister
from integrations.modelopt.config import settings_of, with_backend

__all__ = ["BACKEND", "register", "settings_of", "unregister", "with_backend"]

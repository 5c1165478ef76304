"""vLLM on the kernels of the contract: a plugin, route recording, and weights from the plane.

Importing this package imports neither vLLM nor the kernels; vLLM itself loads
`integrations.vllm.plugin` through its plugin group.
"""

from __future__ import annotations

__all__: list[str] = []

"""`python -m bench.divergence`, which is what `lockstep bench divergence` starts."""

from __future__ import annotations

import sys

from bench.divergence.command import main

if __name__ == "__main__":
    sys.exit(main())

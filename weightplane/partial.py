"""The beginning of a version whose source was lost before its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from weightplane.digest import Manifest
from weightplane.layout import Layout
from weightplane.memory import StagingBuffer
from weightplane.transfer import Run

logger = logging.getLogger("weightplane")


@dataclass(frozen=True, slots=True)
class Partial:
    """The verified beginning of a version, for another source to finish.

    Attributes:
        manifest: digest of the version's manifest.
        buffer: where it lies.
        verified: bytes from the start that are verified.
    """

    manifest: str
    buffer: StagingBuffer
    verified: int

    @classmethod
    def of(
        cls, manifest: str, buffer: StagingBuffer, runs: Sequence[Run], verified: int, done: int
    ) -> Partial:
        """What is verified of ``done`` bytes: up to the last run at whose end a tensor ends."""
        ends = [run.stop for run in runs if run.parts[-1].last and run.stop <= done]
        return cls(manifest, buffer, max([verified, *ends]))

    def resume(self, manifest: Manifest, layout: Layout) -> tuple[StagingBuffer | None, int]:
        """The buffer and the verified bytes, if ``manifest`` is of the same weights; else the
        buffer goes back.
        """
        if self.manifest != manifest.digest:
            self.buffer.give_back()
            return None, 0
        logger.warning(
            "a version that another source began is finished here: %d of %d bytes are verified",
            self.verified, layout.size,
        )  # fmt: skip
        return self.buffer, self.verified

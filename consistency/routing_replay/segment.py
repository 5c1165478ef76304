"""`Segment`: consecutive tokens that one weight version routed in one way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from consistency.errors import RoutingTraceError

Origin = Literal["generated", "prefilled", "re_prefilled", "cached"]

ORIGINS: Final[tuple[Origin, ...]] = get_args(Origin)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start .. stop - 1 were routed by one weight version, in one way.

    Args:
        start: first token, >= 0.
        stop: one past the last token, > start.
        weight_version: version of the weights whose router chose, >= 0.
        origin: ``generated`` (decoded), ``prefilled`` (prompt), ``re_prefilled`` (computed again
            after its KV was lost or made stale, so the log-probabilities of tokens generated
            before may belong to another routing), or ``cached`` (read back with a prefix-cache
            hit).

    Raises:
        RoutingTraceError: a field out of its range.
    """

    start: int
    stop: int
    weight_version: int
    origin: Origin

    def __post_init__(self) -> None:
        for name in ("start", "stop", "weight_version"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise RoutingTraceError(
                    f"segment {name} is {getattr(self, name)!r}: use an integer >= 0"
                )
        if self.stop <= self.start:
            raise RoutingTraceError(f"segment {self.start}:{self.stop} is empty: leave it out")
        if self.origin not in ORIGINS:
            raise RoutingTraceError(
                f"segment origin is {self.origin!r}: use one of {', '.join(ORIGINS)}"
            )

    def moved(self, offset: int) -> Segment:
        """The same segment ``offset`` tokens later."""
        return replace(self, start=self.start + offset, stop=self.stop + offset)

    def cut(self, start: int, stop: int) -> Segment | None:
        """The part inside start .. stop - 1, or None if there is none."""
        low, high = max(self.start, start), min(self.stop, stop)
        return replace(self, start=low, stop=high) if low < high else None


def append_segment(segments: list[Segment], part: Segment) -> None:
    """Appends, or lengthens the last segment when ``part`` continues it."""
    last = segments[-1] if segments else None
    if (
        last is not None
        and last.stop == part.start
        and (last.weight_version, last.origin) == (part.weight_version, part.origin)
    ):
        segments[-1] = replace(last, stop=part.stop)
    else:
        segments.append(part)

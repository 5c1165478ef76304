"""What a subscriber checks of what a publisher says, before it acts on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from weightplane.digest import DIGEST_BYTES, Manifest
from weightplane.errors import ChannelError, DigestMismatchError
from weightplane.layout import Layout
from weightplane.messages import PROTOCOL, Announce, Welcome
from weightplane.p2p import Offer, Reader


def find_transport(
    welcome: Welcome, layout: Layout, readers: Mapping[str, Callable[[Offer], Reader]]
) -> Callable[[Offer], Reader]:
    """How to open the transport of a publisher that lets this subscriber in.

    Raises:
        ChannelError: it speaks another protocol, has another layout or slots that are too short,
            or offers a transport that is not known here.
    """
    if welcome.protocol != PROTOCOL or welcome.layout != layout.digest:
        raise ChannelError(
            f"the publisher welcomes this subscriber to protocol {welcome.protocol} and layout "
            f"{welcome.layout}; here are protocol {PROTOCOL} and layout {layout.digest}"
        )
    if welcome.slot_bytes < layout.size:
        raise ChannelError(
            f"the publisher offers slots of {welcome.slot_bytes} bytes, "
            f"the layout needs {layout.size}"
        )
    open_reader = readers.get(welcome.transport)
    if open_reader is None:
        raise ChannelError(
            f"the publisher offers transport {welcome.transport!r}; "
            f"this subscriber knows {', '.join(readers)}"
        )
    return open_reader


def announced_manifest(announce: Announce, layout: Layout) -> Manifest:
    """The manifest of an announced version.

    Raises:
        ChannelError: it has digests for another number of tensors.
        DigestMismatchError: the digests are damaged.
    """
    if len(announce.digests) != DIGEST_BYTES * len(layout.tensors):
        raise ChannelError(
            f"weight version {announce.number} comes with {len(announce.digests)} bytes of "
            f"digests for {len(layout.tensors)} tensors"
        )
    manifest = Manifest.unpack(layout, announce.digests)
    if manifest.digest != announce.manifest:
        raise DigestMismatchError(
            f"the manifest of weight version {announce.number} has digest {manifest.digest}, "
            f"announced was {announce.manifest}"
        )
    return manifest


def check_slot(slot: int, offer: Offer | None) -> None:
    """Raise `ChannelError` unless the publisher's offer has such a slot."""
    slots = 0 if offer is None else offer.slots
    if not 0 <= slot < slots:
        raise ChannelError(f"the publisher announces slot {slot} of {slots}")

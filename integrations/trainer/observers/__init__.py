"""Who watches a run. An observer is called with every event, in order, from one thread.

The trainer knows none of them: it calls one function per event. They open what they need at their
first event, so that a run that never begins leaves nothing behind.
"""

from __future__ import annotations

from integrations.trainer.observers.group import ObserverGroup
from integrations.trainer.observers.jsonl import JsonlObserver
from integrations.trainer.observers.live import LiveObserver
from integrations.trainer.observers.log import LogObserver
from integrations.trainer.observers.observer import Event, Observer
from integrations.trainer.observers.tensorboard import TensorBoardObserver

__all__ = [
    "Event",
    "JsonlObserver",
    "LiveObserver",
    "LogObserver",
    "Observer",
    "ObserverGroup",
    "TensorBoardObserver",
]

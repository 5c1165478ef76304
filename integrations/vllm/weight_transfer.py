"""`PlaneWeightTransferEngine`: vLLM's weight transfer over Lockstep's weight plane.

A subscriber copies and verifies new versions in a thread of the worker, while vLLM generates.
`update_weights` then commits one that is staged: parameters point to it, nothing is copied. vLLM
runs such calls between two steps, so the swap is at a step boundary; the plugin's hook in the
engine core preempts what runs, drops the prefix cache, and stamps later tokens, in the same call.
Whatever fails before, the old version goes on serving.
"""

# vLLM is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from integrations.errors import EngineConfigError, SwapError
from integrations.trainer.model.config import ModelConfig
from integrations.trainer.model.weights import EMBEDDING, LM_HEAD, LayerNames, tensor_shapes
from integrations.vllm.attachment import attached
from weightplane import Channel, Layout, Subscriber, TensorSpec, VersionError

__all__ = ["PlaneInit", "PlaneUpdate", "PlaneWeightTransferEngine", "model_layout"]


@dataclass
class PlaneInit(WeightTransferInitInfo):
    """Where the publisher is.

    Args:
        socket: path of a Unix socket that the publisher's process listens on; its folder's
            permissions say who may connect.
        name: how the publisher calls this engine; by default by process id.
        connect_seconds: how long to try.
    """

    socket: str
    name: str | None = None
    connect_seconds: float = 30.0


@dataclass
class PlaneUpdate(WeightTransferUpdateInfo):
    """Which version to commit.

    Args:
        version: its number.
        wait_seconds: how long to wait for it, in which vLLM generates nothing; by default it must
            be staged already.
    """

    version: int
    wait_seconds: float = 0.0


def model_layout(shape: ModelConfig, dtype: torch.dtype) -> Layout:
    """The weights of a model as publisher and engine know them; see `tensor_shapes`."""
    kind = str(dtype).removeprefix("torch.")
    return Layout.whole(TensorSpec(name, size, kind) for name, size in tensor_shapes(shape).items())


class PlaneWeightTransferEngine(WeightTransferEngine[PlaneInit, PlaneUpdate]):
    """Backend `lockstep` of vLLM's factory."""

    init_info_cls = PlaneInit
    update_info_cls = PlaneUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        attachment = attached(model)
        if attachment is None or attachment.contract is None:
            raise EngineConfigError(
                "weight transfer backend 'lockstep' needs the plugin with all its operations, "
                "because vLLM's own kernels keep repacked weights: pass "
                "additional_config={'lockstep': True}"
            )
        self._attachment = attachment
        self._parameters = _parameters(model, attachment.shape)
        self._layout = model_layout(attachment.shape, self.model_config.dtype)
        self._subscriber: Subscriber | None = None

    @property
    def subscriber(self) -> Subscriber:
        """What receives versions.

        Raises:
            SwapError: `init_transfer_engine` was not called, or `shutdown` was.
        """
        if self._subscriber is None:
            raise SwapError("no publisher is connected: call init_weight_transfer_engine first")
        return self._subscriber

    def init_transfer_engine(self, init_info: PlaneInit) -> None:
        """Connects, and starts to stage what is published."""
        if self._subscriber is not None:
            raise SwapError("a publisher is connected already: shut the transfer engine down first")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(init_info.connect_seconds)
        try:
            connection.connect(init_info.socket)
        except OSError as error:
            connection.close()
            raise SwapError(
                f"socket {init_info.socket!r} cannot be connected to: {error.strerror or error}; "
                "start the publisher first"
            ) from error
        connection.settimeout(None)
        name = init_info.name or f"vllm-{os.getpid()}"
        self._subscriber = Subscriber(Channel(connection), self._layout, name=name)

    def start_weight_update(self) -> None:
        """Nothing: staging goes on by itself."""

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` committed."""

    def receive_weights(self, update_info: PlaneUpdate) -> None:
        """Commits a staged version.

        Raises:
            SwapError: it is not staged, or cannot be; the old version goes on serving.
        """
        subscriber = self.subscriber
        if update_info.wait_seconds > 0:
            _wait(subscriber, update_info)
        try:
            swap = subscriber.commit(update_info.version)
        except VersionError as error:
            raise SwapError(f"weight version {update_info.version}: {error}") from error
        self._point_to(swap.tensors)
        if self._attachment.routes is not None:
            self._attachment.routes.version = update_info.version

    def shutdown(self) -> None:
        """Lets the publisher go; the active weights stay."""
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _point_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = tensors[name]


def _wait(subscriber: Subscriber, update: PlaneUpdate) -> None:
    deadline = time.monotonic() + update.wait_seconds
    while all(version.number != update.version for version in subscriber.status().staged):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, 0.002))


def _parameters(model: nn.Module, shape: ModelConfig) -> dict[str, nn.Parameter]:
    """vLLM's parameters by the names of `tensor_shapes`.

    Raises:
        EngineConfigError: a parameter is missing, of another shape, or nobody's.
    """
    held = dict(model.named_parameters())
    renamed = {}
    for layer in shape.moe_layers:
        names = LayerNames.of(layer)
        prefix = f"model.layers.{layer}.mlp.experts.routed_experts"
        renamed[names.expert_gate_up] = f"{prefix}.w13_weight"
        renamed[names.expert_down] = f"{prefix}.w2_weight"
    found: dict[str, nn.Parameter] = {}
    for name, size in tensor_shapes(shape).items():
        parameter = held.pop(renamed.get(name, name), None)
        # vLLM rounds the vocabulary up; the rows beyond it are never read.
        padded = name in (EMBEDDING, LM_HEAD)
        if parameter is None or (
            tuple(parameter.shape[1:] if padded else parameter.shape)
            != (size[1:] if padded else size)
        ):
            have = "missing" if parameter is None else f"of shape {tuple(parameter.shape)}"
            raise EngineConfigError(f"parameter {renamed.get(name, name)} is {have}, not {size}")
        found[name] = parameter
    if held:
        raise EngineConfigError(f"parameter {next(iter(held))} has no place in the layout")
    return found

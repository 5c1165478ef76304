"""New weights reach a vLLM that is generating: whole, at a step boundary, and exactly scored."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


class Plane:
    """A vLLM engine connected to a publisher."""

    def __init__(self, folder, tmp_path) -> None:
        from integrations.trainer.model.checkpoint import load_checkpoint
        from integrations.vllm.offline import OfflineEngine
        from integrations.vllm.options import VllmOptions
        from integrations.vllm.weight_transfer import model_layout
        from weightplane import Channel, Publisher

        self.config, self.weights = load_checkpoint(folder)
        self.engine = OfflineEngine(folder, VllmOptions(), weights=True, max_length=512)
        self.publisher = Publisher(model_layout(self.config, torch.bfloat16))
        self.pauses: list[float] = []
        self.names = 0
        path = str(tmp_path / "weights.sock")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(1)

            def accept() -> None:
                self.publisher.attach(Channel(server.accept()[0]))

            thread = threading.Thread(target=accept)
            thread.start()
            self.call("init_weight_transfer_engine", init_info={"socket": path})
            thread.join()

    def call(self, method: str, **options):
        return self.engine.core.collective_rpc(method, kwargs=options)

    @property
    def subscriber(self):
        worker = self.engine.core.model_executor.driver_worker.worker
        return worker.weight_transfer_engine.subscriber

    def perturbed(self, version: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {
            name: (w.float() * (1 + 0.05 * torch.randn(w.shape, generator=generator))).to(w.dtype)
            for name, w in self.weights.items()
        }

    def publish(self, version: int) -> dict[str, torch.Tensor]:
        state = self.perturbed(version)
        self.publisher.publish(state, version)
        return state

    def staged(self, version: int) -> bool:
        return any(held.number == version for held in self.subscriber.status().staged)

    def commit(self, version: int) -> None:
        self.call("start_weight_update")
        self.call("update_weights", update_info={"version": version})
        self.call("finish_weight_update")

    def requests(self, count: int = 16, answer: int = 48):
        from integrations.vllm.offline import Request

        generator = torch.Generator().manual_seed(self.names)
        self.names += 1
        vocabulary = self.config.vocab_size
        return [
            Request(
                f"{self.names}.{index}",
                tuple(torch.randint(0, vocabulary, (24,), generator=generator).tolist()),
                answer,
                index,
            )
            for index in range(count)
        ]

    def close(self) -> None:
        self.call("shutdown_weight_transfer_engine")
        self.publisher.close()
        self.engine.close()


@pytest.fixture(scope="module")
def plane(checkpoint, tmp_path_factory):
    plane = Plane(checkpoint("moe"), tmp_path_factory.mktemp("plane"))
    yield plane
    plane.close()


def scores(plane: Plane, state, sequence: list[int]) -> torch.Tensor:
    """Log-probabilities of a sequence under one version, by the embedded decoder."""
    from consistency import NumericsContract, kernels
    from integrations.trainer.model.attention import VarlenAttention
    from integrations.trainer.model.decoder import Decoder
    from integrations.trainer.model.weights import lm_head_weight

    rows = len(sequence) - 1
    with torch.no_grad():
        hidden = Decoder(plane.config, NumericsContract()).forward(
            state,
            torch.tensor(sequence[:-1]),
            torch.arange(rows),
            VarlenAttention(torch.tensor([0, rows], dtype=torch.int32)),
        )
        values, _ = kernels.lm_head_logprob(
            hidden, lm_head_weight(state), torch.tensor(sequence[1:]), temperature=1.0
        )
    return values


def test_tokens_on_both_sides_of_a_swap_score_exactly_under_their_own_version(plane):
    states = {"default": plane.weights}
    requests = plane.requests()
    for request in requests:
        plane.engine.submit(request)
    finished, step, version = {}, 0, 0
    while len(finished) < len(requests):
        finished.update(plane.engine.step())
        step += 1
        if step in (12, 28):
            version += 1
            states[str(version)] = plane.publish(version)
            plane.subscriber.wait_staged(60)
            plane.commit(version)
    for request in requests:
        sample = plane.engine.sample(request, finished[request.name])
        assert len(sample.tokens) == request.max_tokens
        assert set(sample.versions) == {"default", "1", "2"}
        for name, state in states.items():
            mine = [index for index, stamp in enumerate(sample.versions) if stamp == name]
            scored = scores(plane, state, sample.sequence)[len(request.prompt) - 1 :]
            assert torch.equal(scored[mine], torch.tensor(sample.logprobs)[mine])
        assert sample.trace is not None
        assert sample.trace.weight_versions() == (0, 1, 2)


def test_a_version_that_is_not_staged_leaves_the_old_one_serving(plane):
    from integrations.errors import SwapError

    before = plane.engine.core.get_weight_version()
    requests = plane.requests(4)
    reference = plane.engine.generate(requests)
    plane.call("start_weight_update")
    with pytest.raises(SwapError, match="weight version 99"):
        plane.call("update_weights", update_info={"version": 99})
    assert plane.engine.core.get_weight_version() == before
    again = plane.engine.generate(
        [type(r)(f"again {r.name}", r.prompt, r.max_tokens, r.seed) for r in requests]
    )
    assert [s.logprobs for s in again] == [s.logprobs for s in reference]


def test_fifty_swaps_take_no_more_buffers_and_lose_no_request(plane):
    waiting = plane.requests(answer=160)
    for request in waiting:
        plane.engine.submit(request)
    finished, first = {}, 100
    buffers = set()
    for version in range(first, first + 50):
        plane.publish(version)
        while not plane.staged(version):
            finished.update(plane.engine.step())
        plane.commit(version)
        finished.update(plane.engine.step())
        if version >= first + 10:
            buffers.add(plane.subscriber.status().buffers)
    while len(finished) < len(waiting):
        finished.update(plane.engine.step())
    assert all(len(finished[r.name].outputs[0].token_ids) == 160 for r in waiting)
    assert len(buffers) == 1
    assert plane.engine.core.get_weight_version() == str(first + 49)


def test_sleep_and_wake_keep_the_swapped_weights(plane):
    requests = plane.requests(2)
    before = plane.engine.generate(requests)
    plane.engine.llm.sleep(1)
    plane.engine.llm.wake_up()
    again = plane.engine.generate(
        [type(r)(f"woken {r.name}", r.prompt, r.max_tokens, r.seed) for r in requests]
    )
    assert [s.logprobs for s in again] == [s.logprobs for s in before]

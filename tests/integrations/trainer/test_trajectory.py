from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from consistency.routing_replay import RoutingTrace, Segment
from integrations.errors import RequestError, TrajectoryError
from integrations.trainer.trajectory import GenerationRequest, Trajectory


def request(**changes: object) -> GenerationRequest:
    good = {
        "request_id": "a",
        "prompt": (1, 2),
        "max_new_tokens": 3,
        "temperature": 1.0,
        "seed": 0,
    }
    return GenerationRequest(**(good | changes))  # type: ignore[arg-type]


def trajectory() -> Trajectory:
    segments = (Segment(0, 2, 4, "prefilled"), Segment(2, 3, 5, "generated"))
    ids = torch.tensor([[[0, 1]], [[2, 1]], [[3, 0]]])
    return Trajectory(
        request_id="a/0",
        prompt_index=7,
        sample_index=1,
        token_ids=(5, 6, 7, 300),
        prompt_length=2,
        logprobs=(-0.5, -1.25),
        versions=(4, 5),
        loss_mask=(0, 0, 1, 1),
        temperature=0.7,
        contract_digest="0123456789abcdef",
        finish_reason="length",
        segments=segments,
        routing=RoutingTrace(
            ids.to(torch.uint8), (1,), 4, torch.ones(3, dtype=torch.bool), segments
        ),
        reward=0.25,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1, -2)}, "negative token id -2"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"seed": 2**63}, "64-bit"),
    ],
)
def test_an_impossible_request_says_what_is_wrong(changes: dict[str, object], message: str):
    with pytest.raises(RequestError, match=message):
        request(**changes)


def test_bytes_carry_the_whole_trajectory():
    original = trajectory()
    assert Trajectory.from_bytes(original.to_bytes()) == original
    bare = replace(original, routing=None, reward=None, segments=())
    assert Trajectory.from_bytes(bare.to_bytes()) == bare


def test_logprobs_survive_as_the_same_fp32_numbers():
    values = tuple((-torch.rand(100, generator=torch.Generator().manual_seed(0))).tolist())
    original = Trajectory(
        request_id="a",
        prompt_index=0,
        sample_index=0,
        token_ids=tuple(range(101)),
        prompt_length=1,
        logprobs=values,
        versions=(0,) * 100,
        loss_mask=(0, *(1,) * 100),
        temperature=1.0,
        contract_digest="",
        finish_reason="stop",
    )
    assert Trajectory.from_bytes(original.to_bytes()).logprobs == values


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_length": 0}, "prompt_length is 0"),
        ({"logprobs": (-0.5,)}, "logprobs has 1 entries for 2 response tokens"),
        ({"versions": (4, 5, 5)}, "versions has 3 entries"),
        ({"logprobs": (-0.5, float("nan"))}, "logprob 1 is nan"),
        ({"logprobs": (0.5, -0.5)}, "logprob 0 is 0.5"),
        ({"loss_mask": (1, 0, 1, 1)}, "loss_mask must be 0 on the prompt"),
        ({"loss_mask": (0, 0, 1)}, "loss_mask has 3 entries"),
        ({"versions": (4, -1)}, "negative weight version"),
        ({"versions": (4, 4)}, "token 1 is tagged with version 4"),
        ({"finish_reason": "eos"}, "finish_reason is 'eos'"),
        ({"segments": (Segment(0, 9, 4, "prefilled"),)}, r"segment \[0, 9\)"),
        ({"segments": (Segment(0, 1, 4, "prefilled"),)}, "first built under None"),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(changes: dict, message: str):
    with pytest.raises(TrajectoryError, match=message):
        replace(trajectory(), **changes)


def test_a_trace_with_another_number_of_rows_is_refused():
    original = trajectory()
    assert original.routing is not None
    with pytest.raises(TrajectoryError, match="routing has 4 rows for 4 tokens"):
        replace(original, routing=original.routing.padded(4))


def test_the_first_version_that_built_a_row_counts():
    rebuilt = (
        Segment(0, 2, 4, "prefilled"),
        Segment(0, 3, 5, "re_prefilled"),
    )
    assert replace(trajectory(), segments=rebuilt).versions == (4, 5)
    with pytest.raises(TrajectoryError, match="token 0 is tagged with version 5"):
        replace(trajectory(), segments=rebuilt, versions=(5, 5))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a trajectory"),
        (b"pickle-ish", "not a trajectory"),
        (b"LSTJ", "schema is missing"),
        (b"LSTJ\x09rest", "schema is 9"),
        (b"LSTJ\x01rest", "damaged"),
    ],
)
def test_foreign_bytes_are_refused(data: bytes, message: str):
    with pytest.raises(TrajectoryError, match=message):
        Trajectory.from_bytes(data)


def test_truncated_bytes_are_refused():
    data = trajectory().to_bytes()
    for stop in range(5, len(data), 7):
        with pytest.raises(TrajectoryError):
            Trajectory.from_bytes(data[:stop])

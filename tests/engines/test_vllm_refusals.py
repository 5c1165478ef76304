"""What cannot keep the contract is refused at start, in one line."""

# vLLM is installed beside the engine tests only.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

import pytest

from integrations.errors import EngineConfigError

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def configure(folder, lockstep: Any = True, **arguments):
    from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]

    config = {} if lockstep is None else {"additional_config": {"lockstep": lockstep}}
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, max_model_len=128, **config, **arguments
    ).create_engine_config()


def test_an_engine_that_does_not_ask_for_lockstep_is_left_alone(checkpoint):
    assert configure(checkpoint("dense"), None).additional_config == {}


def test_a_file_in_the_working_directory_turns_it_on(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint("dense")
    (tmp_path / "lockstep.yaml").write_text("vllm: {tp_invariant: true}\n")
    monkeypatch.chdir(tmp_path)
    config = configure(folder, None)
    assert config.additional_config["lockstep"]["tp_invariant"] is True
    assert config.model_config.enforce_eager


def test_another_version_of_vllm_is_refused():
    from integrations.vllm.compatibility import require_version

    require_version("0.32.0")
    for version in ("0.31.4", "0.33.0", "0.320.1"):
        with pytest.raises(EngineConfigError, match=f"vLLM is {version}.*0.32"):
            require_version(version)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config is set",
        ),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"max_logprobs": -1}, "max_logprobs is -1"),
        ({"quantization": "fp8"}, "quantization is 'fp8'"),
        ({"enable_lora": True}, "enable_lora is on"),
    ],
)
def test_a_setting_without_a_kernel_is_refused(checkpoint, arguments, message):
    with pytest.raises(EngineConfigError, match=message) as caught:
        configure(checkpoint("dense"), **arguments)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_names_the_known_ones(checkpoint):
    with pytest.raises(EngineConfigError, match="'contract': use tp_invariant"):
        configure(checkpoint("dense"), {"contract": 1})
    with pytest.raises(EngineConfigError, match="names 'softmax': use linear"):
        configure(checkpoint("dense"), {"operations": ["softmax"]})


def test_a_model_without_kernels_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=64, vocab_size=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(EngineConfigError, match="GPT2LMHeadModel: lockstep patches LlamaFor"):
        configure(tmp_path)

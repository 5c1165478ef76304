"""``ModelConfig``: the shape of a decoder, read from and written to a ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from integrations.errors import ModelConfigError

__all__ = ["ARCHITECTURES", "ModelConfig"]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and constants of a Llama-family, Qwen3 or Qwen3-MoE decoder.

    Attributes:
        model_type: ``llama``, ``qwen3`` or ``qwen3_moe``.
        moe_layers: indices of the decoder layers whose MLP is a mixture of experts, ascending.
        qk_norm: RMSNorm over each query and key head before the rotary embedding (Qwen3).
        normalise_topk: divide the chosen router probabilities by their sum.
        eos_token_ids: ids that end a sequence; may be empty.
        max_positions: largest number of tokens of a sequence.
    """

    model_type: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    moe_layers: tuple[int, ...] = ()
    normalise_topk: bool = True
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.model_type not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise ModelConfigError(
                f"model_type {self.model_type!r} is not supported; this decoder runs {known}"
            )
        positive = ("hidden_size", "layers", "heads", "kv_heads", "head_dim", "vocab_size")
        for name in (*positive, "intermediate_size", "max_positions"):
            if getattr(self, name) < 1:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads % self.kv_heads:
            raise ModelConfigError(
                f"heads ({self.heads}) is not a multiple of kv_heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelConfigError(
                f"head_dim is {self.head_dim}; the rotary embedding needs an even one"
            )
        for name in ("rope_theta", "rms_norm_eps"):
            if not getattr(self, name) > 0.0:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        self._validate_experts()

    def _validate_experts(self) -> None:
        if not self.moe_layers:
            return
        if list(self.moe_layers) != sorted(set(self.moe_layers)):
            raise ModelConfigError(f"moe_layers {self.moe_layers} must ascend without repeats")
        if not (self.moe_layers[0] >= 0 and self.moe_layers[-1] < self.layers):
            raise ModelConfigError(
                f"moe_layers {self.moe_layers} names a layer outside 0..{self.layers - 1}"
            )
        if not 1 <= self.experts_per_token <= self.experts:
            raise ModelConfigError(
                f"experts_per_token is {self.experts_per_token} with {self.experts} experts"
            )
        if self.moe_intermediate_size < 1:
            raise ModelConfigError(f"moe_intermediate_size is {self.moe_intermediate_size}")

    @property
    def parameters(self) -> int:
        """Number of parameters, tied embeddings counted once."""
        attention = self.hidden_size * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        dense = 3 * self.hidden_size * self.intermediate_size
        sparse = self.experts * self.hidden_size * (3 * self.moe_intermediate_size + 1)
        moe = len(self.moe_layers)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        body = self.layers * (attention + norms) + moe * sparse + (self.layers - moe) * dense
        return body + embeddings + self.hidden_size

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Read ``config.json`` of a checkpoint folder.

        Raises:
            ModelConfigError: folder or file missing, not JSON, or a feature that is not supported.
        """
        path = Path(folder) / "config.json"
        if not Path(folder).is_dir():
            raise ModelConfigError(f"model folder {folder} does not exist")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelConfigError(f"{path} is missing; a checkpoint folder needs it") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ModelConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelConfigError(f"{path} holds {type(values).__name__}, not a JSON object")
        try:
            return cls.from_dict(values)
        except ModelConfigError as error:
            raise ModelConfigError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Build from a transformers ``config.json`` (the layouts of transformers 4 and 5).

        Raises:
            ModelConfigError: a needed key is missing, or the checkpoint uses a feature that would
                change its numbers and that this decoder does not have.
        """
        model_type = values.get("model_type")
        if model_type not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise ModelConfigError(
                f"model_type {model_type!r} is not supported; this decoder runs {known}"
            )
        _refuse_unsupported(values)
        heads = _integer(values, "num_attention_heads")
        hidden = _integer(values, "hidden_size")
        layers = _integer(values, "num_hidden_layers")
        moe = model_type == "qwen3_moe"
        experts = 0
        if moe:
            # transformers 4 wrote num_experts, transformers 5 writes num_local_experts.
            key = "num_experts" if "num_experts" in values else "num_local_experts"
            experts = _integer(values, key)
        eos = values.get("eos_token_id")
        return cls(
            model_type=model_type,
            hidden_size=hidden,
            layers=layers,
            heads=heads,
            kv_heads=_integer(values, "num_key_value_heads", heads),
            head_dim=_integer(values, "head_dim", hidden // heads if heads > 0 else 0),
            intermediate_size=_integer(values, "intermediate_size"),
            vocab_size=_integer(values, "vocab_size"),
            max_positions=_integer(values, "max_position_embeddings", 2048),
            rope_theta=_rope_theta(values),
            rms_norm_eps=_number(values, "rms_norm_eps", 1e-6),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            qk_norm=model_type != "llama",
            experts=experts,
            experts_per_token=_integer(values, "num_experts_per_tok") if moe else 0,
            moe_intermediate_size=_integer(values, "moe_intermediate_size") if moe else 0,
            moe_layers=_moe_layers(values, layers, experts) if moe else (),
            normalise_topk=bool(values.get("norm_topk_prob", False)) if moe else True,
            initializer_range=_number(values, "initializer_range", 0.02),
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        )

    def to_dict(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """A ``config.json`` that transformers, vLLM and SGLang load."""
        eos: int | list[int] | None = None
        if self.eos_token_ids:
            eos = (
                self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids)
            )
        values: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "dtype": dtype,
            "torch_dtype": dtype,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            # Both spellings: transformers 4 reads rope_theta, transformers 5 rope_parameters.
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }
        if self.model_type == "llama":
            values["mlp_bias"] = False
        else:
            values["sliding_window"] = None
            values["use_sliding_window"] = False
        if self.model_type == "qwen3_moe":
            sparse = set(self.moe_layers)
            values |= {
                "decoder_sparse_step": 1,
                "mlp_only_layers": [i for i in range(self.layers) if i not in sparse],
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.normalise_topk,
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "output_router_logits": False,
            }
        return values


def _integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """An integer entry; null counts as absent, as transformers treats it."""
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelConfigError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelConfigError(f"{key} is {value!r}; it must be an integer")
    return value


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelConfigError(f"{key} is {value!r}; it must be a number")
    return float(value)


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A nested object; null and absent are empty."""
    value = values.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelConfigError(f"{key} is {value!r}; it must be an object")
    return value


def _rope_theta(values: Mapping[str, Any]) -> float:
    """transformers 5 nests the base in ``rope_parameters``, transformers 4 keeps it on top."""
    parameters = _table(values, "rope_parameters")
    return _number(parameters if "rope_theta" in parameters else values, "rope_theta", 10000.0)


def _moe_layers(values: Mapping[str, Any], layers: int, experts: int) -> tuple[int, ...]:
    """The rule of transformers: dense if listed, otherwise every ``decoder_sparse_step``-th."""
    dense = set(values.get("mlp_only_layers") or ())
    step = _integer(values, "decoder_sparse_step", 1)
    if step < 1:
        raise ModelConfigError(f"decoder_sparse_step is {step}; it must be at least 1")
    return tuple(i for i in range(layers) if i not in dense and experts > 0 and (i + 1) % step == 0)


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Raise on any feature that would change the numbers of this checkpoint."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = _table(values, key)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind != "default":
            raise ModelConfigError(f"{key} of type {kind!r} is not supported; only 'default' is")
    if values.get("rope_interleaved"):
        raise ModelConfigError("rope_interleaved is not supported; only rotated halves are")
    partial = _table(values, "rope_parameters").get(
        "partial_rotary_factor", values.get("partial_rotary_factor", 1.0)
    )
    if partial != 1.0:
        raise ModelConfigError(f"partial_rotary_factor {partial} is not supported; only 1.0 is")
    if values.get("use_sliding_window") or (
        values.get("sliding_window") is not None and "use_sliding_window" not in values
    ):
        raise ModelConfigError("sliding-window attention is not supported")
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            raise ModelConfigError(f"{key} is true; projections with a bias are not supported")
    if values.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(
            f"hidden_act {values['hidden_act']!r} is not supported; only 'silu' is"
        )
    for key in ("shared_expert_intermediate_size", "n_shared_experts"):
        if values.get(key):
            raise ModelConfigError(f"{key} is {values[key]}; shared experts are not supported")
    if values.get("quantization_config"):
        raise ModelConfigError("quantization_config is set; load an unquantised checkpoint")
    if values.get("pretraining_tp", 1) not in (None, 1):
        raise ModelConfigError(f"pretraining_tp {values['pretraining_tp']} is not supported")

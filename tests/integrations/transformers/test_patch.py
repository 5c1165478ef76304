"""A patched model computes the contract, an unpatched one what it computed before."""

from __future__ import annotations

import copy

import pytest
import torch

import consistency
from consistency import NumericsContract, kernels
from consistency.errors import InvalidInputError, UnsupportedError
from integrations.trainer.model.attention import VarlenAttention
from integrations.trainer.model.checkpoint import load_checkpoint
from integrations.trainer.model.decoder import Decoder
from integrations.trainer.model.weights import lm_head_weight
from integrations.transformers import OPERATIONS, patch, score_tokens, unpatch

from .conftest import make_model


def tokens(rows: int = 3, length: int = 70) -> torch.Tensor:
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model, ids, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **options).logits


class TestPatched:
    def test_a_row_does_not_notice_the_batch(self, model):
        patch(model)
        together = logits(model, tokens())
        for row in range(3):
            assert torch.equal(together[row], logits(model, tokens()[row : row + 1])[0])

    def test_a_prefix_does_not_notice_what_follows(self, model):
        patch(model)
        assert torch.equal(
            logits(model, tokens())[:, :33], logits(model, tokens()[:, :33].contiguous())
        )

    def test_gradients_do_not_change_the_forward(self, model):
        patch(model)
        without = logits(model, tokens())
        with_gradients = model(input_ids=tokens(), use_cache=False).logits
        assert torch.equal(without, with_gradients)
        with_gradients.logsumexp(-1).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name

    def test_checkpointing_computes_the_same_gradients(self, model):
        patch(model)
        plain = _gradients(model)
        model.gradient_checkpointing_enable()
        model.train()
        assert all(map(torch.equal, plain, _gradients(model)))

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_changes_no_bit(self, model, side):
        patch(model)
        ids, mask = tokens(), torch.ones(3, 70, dtype=torch.int64)
        kept = slice(7, None) if side == "left" else slice(0, 63)
        mask[1] = 0
        mask[1, kept] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded = logits(model, ids, attention_mask=mask, position_ids=positions)
        assert torch.equal(padded[1, kept], logits(model, ids[1:2, kept])[0])
        assert torch.equal(padded[0], logits(model, ids[:1])[0])

    def test_packed_sequences_do_not_see_each_other(self, model):
        patch(model)
        ids = tokens(1, 50)
        positions = torch.cat((torch.arange(20), torch.arange(30)))[None]
        packed = logits(model, ids, position_ids=positions)[0]
        assert torch.equal(packed[:20], logits(model, ids[:, :20])[0])
        assert torch.equal(packed[20:], logits(model, ids[:, 20:])[0])

    @pytest.mark.parametrize("padded", [False, True])
    def test_generation_with_a_cache_agrees_with_one_pass(self, model, padded):
        patch(model)
        ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
        if padded:
            mask[0, :5] = 0
        made = model.generate(
            ids, attention_mask=mask, max_new_tokens=9, do_sample=False, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        stepwise = torch.stack(made.logits, dim=1)
        for row in range(2):
            start = 5 if padded and row == 0 else 0
            whole = logits(model, made.sequences[row : row + 1, start:-1])[0]
            assert torch.equal(stepwise[row], whole[11 - start :])

    def test_the_embedded_decoder_computes_the_same_bits(self, model, tmp_path):
        model.save_pretrained(tmp_path)
        config, weights = load_checkpoint(tmp_path)
        decoder = Decoder(config, NumericsContract())
        ids = tokens(2, 60)
        with torch.no_grad():
            hidden = decoder.forward(
                weights,
                ids.flatten(),
                torch.arange(60).repeat(2),
                VarlenAttention(torch.tensor([0, 60, 120], dtype=torch.int32)),
            )
            ours = kernels.lm_head_logits(hidden, lm_head_weight(weights)).view(2, 60, -1)
        patch(model)
        assert torch.equal(logits(model, ids), ours)

    def test_it_stays_close_to_the_stock_model_in_fp32(self, kind):
        model = make_model(kind, torch.float32)
        stock = logits(model, tokens())
        patch(model)
        torch.testing.assert_close(logits(model, tokens()), stock, rtol=1e-4, atol=1e-4)

    def test_scores_are_those_of_the_fused_head(self, model):
        patch(model)
        ids = tokens(1, 40)
        with torch.no_grad():
            (scored,) = score_tokens(model, ids.tolist(), temperature=0.7)
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
            fused, _ = kernels.lm_head_logprob(
                hidden, model.lm_head.weight, ids[0, 1:], temperature=0.7
            )
        assert torch.equal(scored, fused)

    def test_a_copy_is_patched_too_and_independent(self, model):
        patch(model)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.model.norm.weight.mul_(2)
        assert not torch.equal(logits(twin, tokens()), logits(model, tokens()))
        unpatch(twin)
        assert torch.equal(logits(model, tokens()), logits(patch_again(twin, model), tokens()))


def patch_again(twin, model):
    with torch.no_grad():
        twin.model.norm.weight.copy_(model.model.norm.weight)
    patch(twin)
    return twin


def _gradients(model) -> list[torch.Tensor]:
    model.zero_grad()
    model(input_ids=tokens(), use_cache=False).logits.logsumexp(-1).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


class TestUnpatched:
    def test_it_computes_the_same_bits_as_before(self, model):
        before = logits(model, tokens())
        patch(model)
        assert not torch.equal(before, logits(model, tokens()))
        unpatch(model)
        assert torch.equal(before, logits(model, tokens()))

    def test_every_object_is_the_one_before(self, model):
        def objects():
            parts = {name: dict(vars(module)) for name, module in model.named_modules()}
            return {
                (name, key): id(value)
                for name, attributes in parts.items()
                for key, value in attributes.items()
            }

        before, implementation = objects(), model.config._attn_implementation
        patch(model)
        assert objects() != before
        unpatch(model)
        assert objects() == before
        assert model.config._attn_implementation == implementation

    @pytest.mark.parametrize("operation", OPERATIONS)
    def test_one_operation_alone_can_be_routed(self, operation):
        model = make_model("qwen3_moe")
        before = logits(model, tokens())
        patch(model, operations=[operation])
        routed = [name for name, module in model.named_modules() if "forward" in vars(module)]
        assert routed
        torch.testing.assert_close(logits(model, tokens()).to(before), before, rtol=0, atol=0.6)
        unpatch(model)
        assert torch.equal(before, logits(model, tokens()))


class TestRefused:
    def test_two_patches(self, model):
        patch(model)
        with pytest.raises(UnsupportedError, match="patched already"):
            patch(model)

    def test_an_unpatched_model(self, model):
        with pytest.raises(UnsupportedError, match="not patched"):
            unpatch(model)

    def test_another_architecture(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64)
        with pytest.raises(UnsupportedError, match=r"GPT2LMHeadModel.*LlamaForCausalLM"):
            patch(GPT2LMHeadModel(config))

    def test_a_model_of_no_library(self):
        with pytest.raises(UnsupportedError, match=r"torch\.nn.*patches exist for"):
            consistency.patch(torch.nn.Linear(2, 2))

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"attention_bias": True}, "attention_bias"),
            ({"hidden_act": "gelu"}, "hidden_act"),
            ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
            (
                {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
                "rope",
            ),
        ],
    )
    def test_an_option_without_a_kernel(self, changes, message):
        model = make_model("llama", **changes)
        before = logits(model, tokens())
        with pytest.raises(UnsupportedError, match=message):
            patch(model)
        assert torch.equal(before, logits(model, tokens()))

    def test_a_layer_that_somebody_replaced(self, model):
        class Adapter(torch.nn.Linear):
            pass

        model.model.layers[1].self_attn.q_proj = Adapter(64, 64, dtype=torch.bfloat16)
        with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn\.q_proj is a Adapter"):
            patch(model)

    def test_a_contract_of_another_dtype(self, model):
        with pytest.raises(UnsupportedError, match=r"bfloat16.*float32: load the model"):
            patch(model, contract=NumericsContract(compute_dtype="float32"))

    def test_an_unknown_operation(self, model):
        with pytest.raises(UnsupportedError, match="'softmax': use linear"):
            patch(model, operations=["softmax"])

    def test_a_mask_with_holes(self, model):
        patch(model)
        mask = torch.ones(3, 70, dtype=torch.int64)
        mask[0, 30] = 0
        with pytest.raises(InvalidInputError, match="between the tokens"):
            logits(model, tokens(), attention_mask=mask)

    def test_gradients_through_a_filled_cache(self, model):
        patch(model)
        with torch.no_grad():
            filled = model(input_ids=tokens()[:, :30], use_cache=True)
        # transformers 5.2x renamed past_key_values to cache.
        name = "cache" if "cache" in filled else "past_key_values"
        with pytest.raises(UnsupportedError, match="holds 30 tokens in a pass with gradients"):
            model(input_ids=tokens()[:, 30:], **{name: filled[name]})

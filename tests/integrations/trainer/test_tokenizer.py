from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integrations.errors import TokenizerError
from integrations.trainer.recipe_sections import TokenizerRecipe
from integrations.trainer.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
)

ALPHABET = "0123456789+-= é"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny word tokenizer and a chat template, as a checkpoint would have it."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    words = [
        "<end>",
        "<user>",
        "<system>",
        "<reply>",
        "two",
        "plus",
        "three",
        "five",
        "?",
        "<turn>",
    ]
    vocabulary = {word: index for index, word in enumerate([*words, "<unknown>"])}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end>",
        unk_token="<unknown>",
        additional_special_tokens=["<user>", "<system>", "<reply>", "<turn>"],
    )
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} "
        "{% endfor %}{% if add_generation_prompt %}<reply>{% endif %}"
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save_pretrained(str(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 9]}))
    return folder


@given(st.text(ALPHABET, max_size=20))
def test_characters_read_back(text: str) -> None:
    tokenizer = CharacterTokenizer(ALPHABET)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.response_ids(text)) == text


@given(st.text(max_size=20))
def test_bytes_read_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    text = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.response_ids(text)) == text


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer(ALPHABET), ByteTokenizer()])
def test_every_id_is_below_the_vocabulary_and_the_last_one_ends(tokenizer: Tokenizer) -> None:
    ids = tokenizer.response_ids("1+2 é")
    assert max(ids) < tokenizer.vocab_size
    assert ids[-1:] == tokenizer.stop_token_ids == (tokenizer.vocab_size - 1,)
    assert tokenizer.encode("1+2 é") == ids[:-1] == tokenizer.prompt_ids("1+2 é")


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer(ALPHABET), ByteTokenizer()])
def test_whatever_a_model_samples_can_be_read(tokenizer: Tokenizer) -> None:
    ids = (*tokenizer.encode("1"), tokenizer.vocab_size, 10**6, *tokenizer.encode("2"))
    assert tokenizer.decode(ids) == "1\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}2"
    with pytest.raises(TokenizerError, match="token id -1 is negative"):
        tokenizer.decode([-1])


def test_an_invalid_byte_sequence_can_be_read() -> None:
    assert ByteTokenizer().decode([0xC3, 0x28]) == "\N{REPLACEMENT CHARACTER}("


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer(ALPHABET), ByteTokenizer()])
def test_a_system_message_or_an_empty_prompt_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"set task\.system to null"):
        tokenizer.prompt_ids("1", system="Be brief.")
    with pytest.raises(TokenizerError, match="the prompt has no tokens"):
        tokenizer.prompt_ids("")


def test_a_character_outside_the_alphabet_is_named() -> None:
    with pytest.raises(TokenizerError, match=r"holds the character '\*', which is not in"):
        CharacterTokenizer(ALPHABET).encode("2*3")


def test_a_text_without_bytes_is_refused() -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at 1"):
        ByteTokenizer().encode("a\ud800")


@pytest.mark.parametrize(("alphabet", "line"), [("", "is empty"), ("aba", "holds 'a' twice")])
def test_an_impossible_alphabet_is_refused(alphabet: str, line: str) -> None:
    with pytest.raises(TokenizerError, match=line):
        CharacterTokenizer(alphabet)


def test_a_recipe_names_its_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    characters = load_tokenizer(TokenizerRecipe(kind="characters", alphabet="ab"))
    assert characters.encode("ba") == (1, 0)
    assert load_tokenizer(TokenizerRecipe(kind="bytes")).vocab_size == 257
    recipe = TokenizerRecipe(kind="huggingface")
    assert load_tokenizer(recipe, checkpoint).vocab_size == 11
    with pytest.raises(TokenizerError, match=r"tokenizer\.path: missing"):
        load_tokenizer(recipe)
    elsewhere = TokenizerRecipe(kind="huggingface", path=str(tmp_path / "x"))
    with pytest.raises(TokenizerError, match=r"does not exist; correct tokenizer.path"):
        load_tokenizer(elsewhere, checkpoint)


def test_the_vocabulary_of_a_recipe_is_that_of_its_tokenizer() -> None:
    for recipe in (
        TokenizerRecipe(kind="characters", alphabet=ALPHABET),
        TokenizerRecipe(kind="bytes"),
    ):
        assert recipe.vocab_size == load_tokenizer(recipe).vocab_size


# ---------------------------------------------------------------- Hugging Face


def test_a_prompt_goes_through_the_chat_template_and_opens_the_reply(checkpoint: Path) -> None:
    tokenizer = HuggingFaceTokenizer(checkpoint)
    user, system, reply = (tokenizer.encode(f"<{name}>") for name in ("user", "system", "reply"))
    words = tokenizer.encode("two plus three")
    assert tokenizer.prompt_ids("two plus three") == (*user, *words, *reply)
    assert tokenizer.prompt_ids("two plus three", system="five") == (
        *(*system, *tokenizer.encode("five")),
        *(*user, *words, *reply),
    )


def test_responses_end_with_the_end_token_and_read_without_it(checkpoint: Path) -> None:
    tokenizer = HuggingFaceTokenizer(checkpoint)
    assert tokenizer.response_ids("five") == (*tokenizer.encode("five"), 0)
    assert tokenizer.decode(tokenizer.response_ids("five")) == "five"
    assert tokenizer.decode((7, 999, 0)) == "five\N{REPLACEMENT CHARACTER}"


def test_the_stop_ids_of_the_generation_config_count_too(checkpoint: Path) -> None:
    assert HuggingFaceTokenizer(checkpoint).stop_token_ids == (0, 9)


def test_a_tokenizer_without_a_template_takes_the_prompt_as_it_is(
    checkpoint: Path, tmp_path: Path
) -> None:
    for file in checkpoint.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = HuggingFaceTokenizer(tmp_path)
    assert tokenizer.prompt_ids("two") == tokenizer.encode("two")
    with pytest.raises(TokenizerError, match="needs a chat template"):
        tokenizer.prompt_ids("two", system="five")


def test_a_folder_without_a_usable_tokenizer_is_one_clear_line(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=r"holds no tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path)
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(TokenizerError, match="eos_token_id is 'end'; it must be an id or a list"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="the tokenizer cannot be loaded") as caught:
        HuggingFaceTokenizer(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_tokenizer_without_an_end_token_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="no end token, so no response would end"):
        HuggingFaceTokenizer(tmp_path)

"""Tokenizers behind one protocol: characters, bytes, and those of Hugging Face checkpoints."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from integrations.errors import TokenizerError
from integrations.trainer.recipe_sections import TokenizerRecipe

__all__ = [
    "ByteTokenizer",
    "CharacterTokenizer",
    "HuggingFaceTokenizer",
    "Tokenizer",
    "load_tokenizer",
]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for an id without a text: a model's vocabulary may be larger than its tokenizer's, and
whatever it samples must be readable by a verifier."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id that `encode` gives is smaller."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a response; never empty, the first one is what `response_ids` ends with."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text, without any special token."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out.

        Raises:
            TokenizerError: a negative id. An id above the vocabulary reads as U+FFFD.
        """
        ...

    def prompt_ids(self, prompt: str, system: str | None = None) -> tuple[int, ...]:
        """Ids of everything that stands before a response: chat template and opening included.

        Raises:
            TokenizerError: a system message for a tokenizer without a chat template, or a prompt
                without any token.
        """
        ...

    def response_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a complete response: the text and the token that ends it."""
        ...


class CharacterTokenizer:
    """One id per character of an alphabet, in its order; the last id ends a response.

    Args:
        alphabet: the characters, each once.

    Raises:
        TokenizerError: the alphabet is empty or repeats a character.
    """

    def __init__(self, alphabet: str) -> None:
        if not alphabet:
            raise TokenizerError("the alphabet is empty; give at least one character")
        self._ids = {character: index for index, character in enumerate(alphabet)}
        if len(self._ids) != len(alphabet):
            twice = next(c for c in alphabet if alphabet.count(c) > 1)
            raise TokenizerError(f"the alphabet holds {twice!r} twice; every character once")
        self._alphabet = alphabet

    @property
    def vocab_size(self) -> int:
        return len(self._alphabet) + 1

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (len(self._alphabet),)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text.

        Raises:
            TokenizerError: a character that is not in the alphabet.
        """
        try:
            return tuple(self._ids[character] for character in text)
        except KeyError as error:
            raise TokenizerError(
                f"the text {text[:60]!r} holds the character {error.args[0]!r}, which is not in "
                "tokenizer.alphabet; add it"
            ) from None

    def decode(self, token_ids: Sequence[int]) -> str:
        end, alphabet = len(self._alphabet), self._alphabet
        return "".join(
            alphabet[token] if token < end else _REPLACEMENT
            for token in _not_negative(token_ids)
            if token != end
        )

    def prompt_ids(self, prompt: str, system: str | None = None) -> tuple[int, ...]:
        return _plain_prompt(self, prompt, system)

    def response_ids(self, text: str) -> tuple[int, ...]:
        return (*self.encode(text), *self.stop_token_ids)


class ByteTokenizer:
    """One id per byte of UTF-8; id 256 ends a response."""

    _END = 256

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (self._END,)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text.

        Raises:
            TokenizerError: a lone surrogate, which has no UTF-8.
        """
        try:
            return tuple(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"the text {text[:60]!r} holds a lone surrogate at {error.start}; it has no bytes"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        # 0xff never occurs in UTF-8, so an id without a byte reads as one replacement character.
        kept = (token for token in _not_negative(token_ids) if token != self._END)
        return bytes(min(token, 0xFF) for token in kept).decode("utf-8", errors="replace")

    def prompt_ids(self, prompt: str, system: str | None = None) -> tuple[int, ...]:
        return _plain_prompt(self, prompt, system)

    def response_ids(self, text: str) -> tuple[int, ...]:
        return (*self.encode(text), *self.stop_token_ids)


class HuggingFaceTokenizer:
    """The tokenizer of a checkpoint folder, read from the disk and never from a network.

    Stop ids are the tokenizer's end token and the end tokens of ``generation_config.json``.

    Args:
        folder: folder with ``tokenizer.json`` (and chat template).

    Raises:
        TokenizerError: transformers is not installed, the folder holds no tokenizer, or the
            tokenizer has no end token.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._tokenizer: Any = _load_from_folder(self._folder)
        end = self._tokenizer.eos_token_id
        stops = ([] if end is None else [int(end)]) + _generation_stops(self._folder)
        self._stop_token_ids = tuple(dict.fromkeys(stops))
        if not self._stop_token_ids:
            raise TokenizerError(
                f"{self._folder}: the tokenizer has no end token, so no response would end; "
                "set eos_token in tokenizer_config.json"
            )

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop_token_ids

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        size = self.vocab_size
        pieces: list[str] = []
        known: list[int] = []
        for token in _not_negative(token_ids):
            if token < size:
                known.append(token)
            else:
                pieces += [self._decode_known(known), _REPLACEMENT]
                known = []
        return "".join([*pieces, self._decode_known(known)])

    def prompt_ids(self, prompt: str, system: str | None = None) -> tuple[int, ...]:
        if self._tokenizer.chat_template is None:
            if system is not None:
                raise _no_chat_template()
            return _not_empty(tuple(self._tokenizer.encode(prompt, add_special_tokens=True)))
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return _not_empty(self.encode(text))

    def response_ids(self, text: str) -> tuple[int, ...]:
        return (*self.encode(text), self._stop_token_ids[0])

    def _decode_known(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def load_tokenizer(recipe: TokenizerRecipe, model_folder: str | Path | None = None) -> Tokenizer:
    """The tokenizer that a recipe asks for.

    Args:
        recipe: section ``tokenizer``.
        model_folder: folder of the model: a huggingface tokenizer without a path is taken from it.

    Raises:
        TokenizerError: the tokenizer cannot be loaded.
    """
    if recipe.kind == "characters":
        return CharacterTokenizer(recipe.alphabet or "")
    if recipe.kind == "bytes":
        return ByteTokenizer()
    folder = recipe.path if recipe.path is not None else model_folder
    if folder is None:
        raise TokenizerError("tokenizer.path: missing; the model has no folder to take one from")
    return HuggingFaceTokenizer(folder)


def _plain_prompt(tokenizer: Tokenizer, prompt: str, system: str | None) -> tuple[int, ...]:
    if system is not None:
        raise _no_chat_template()
    return _not_empty(tokenizer.encode(prompt))


def _no_chat_template() -> TokenizerError:
    return TokenizerError(
        "a system message needs a chat template, which this tokenizer has not; "
        "set task.system to null"
    )


def _not_empty(token_ids: tuple[int, ...]) -> tuple[int, ...]:
    if not token_ids:
        raise TokenizerError("the prompt has no tokens; make task.prompt longer than the question")
    return token_ids


def _not_negative(token_ids: Sequence[int]) -> Sequence[int]:
    for token in token_ids:
        if token < 0:
            raise TokenizerError(f"token id {token} is negative; ids begin at 0")
    return token_ids


def _load_from_folder(folder: Path) -> Any:
    if not folder.is_dir():
        raise TokenizerError(f"tokenizer folder {folder} does not exist; correct tokenizer.path")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise TokenizerError(f"{folder} holds no tokenizer.json; name a folder with a tokenizer")
    if importlib.util.find_spec("transformers") is None:
        raise TokenizerError(
            "the huggingface tokenizer needs transformers: pip install 'lockstep-rl[transformers]'"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = " ".join(str(error).split())
        raise TokenizerError(f"{folder}: the tokenizer cannot be loaded: {reason}") from error


def _generation_stops(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"{path} is not a JSON object: {error}") from error
    stops = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(stop, int) for stop in stops):
        raise TokenizerError(
            f"{path}: eos_token_id is {value!r}; it must be an id or a list of ids"
        )
    return stops

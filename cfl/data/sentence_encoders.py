"""Sentence encoders that are available locally; the optional packages that run them are imported when used."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cfl.runtime.errors import ConfigError, reason
from cfl.runtime.extras import install

WORDLLAMA_SIZES = (256, 128, 64)
_BATCH = 256  # texts at a time; affects padding, and so the last digits of a text's mean


class SentenceEncoder(Protocol):
    """Maps texts to vectors of one length.

    Attributes:
        name: part of file names: letters, digits, ``-``, ``_`` and ``.``.
        version: version of code and weights; features of different versions differ.
    """

    name: str
    version: str

    def __call__(self, texts: list[str]) -> NDArray[np.float32]:
        """Encode ``n`` texts as ``[n, D]``, each text by itself."""


class WordLlama:
    """Means of token vectors taken from a large language model's input layer and trained further; MIT licence.

    The package ``wordllama`` contains vectors and tokenizer, so nothing is downloaded. Smaller sizes use the first
    numbers of each vector, for which the vectors were trained.

    Args:
        size: D, one of :data:`WORDLLAMA_SIZES`.

    Raises:
        ConfigError: the size is not one of these, or the package is not installed.
    """

    def __init__(self, size: int = 256) -> None:
        if size not in WORDLLAMA_SIZES:
            raise ConfigError("--encoder", f"wordllama-{size}", _valid())
        package = _package("wordllama", f"wordllama-{size}", install("text"))
        # The cache is the package's own folder, because version 0.4 finds its tokenizer only there.
        own = Path(package.__file__).parent
        self._model = package.WordLlama.load(trunc_dim=size, cache_dir=own, disable_download=True)
        self.name, self.version = f"wordllama-{size}", importlib.metadata.version("wordllama")

    def __call__(self, texts: list[str]) -> NDArray[np.float32]:
        """Encode ``n`` texts as ``[n, D]``."""
        vectors: NDArray[np.float32] = self._model.embed(texts, batch_size=_BATCH)
        return vectors


class SentenceTransformersFolder:
    """A model in the layout of the package ``sentence-transformers``, such as a DistilBERT.

    Args:
        folder: folder of the model. Its name becomes the encoder's name, the SHA-256 of its files part of the version.

    Raises:
        ConfigError: there is no such folder, the package cannot load it, or is not installed.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError("--encoder", str(folder), _valid())
        package = _package("sentence_transformers", str(folder), "pip install sentence-transformers")
        try:
            self._model = package.SentenceTransformer(str(folder.resolve()), local_files_only=True)
        except Exception as error:  # of many classes
            raise ConfigError("--encoder", str(folder), f"{_valid()} ({reason(error)})") from error
        self.name = folder.resolve().name
        self.version = f"{importlib.metadata.version('sentence-transformers')}, files {_sha256(folder)}"

    def __call__(self, texts: list[str]) -> NDArray[np.float32]:
        """Encode ``n`` texts as ``[n, D]``."""
        found = self._model.encode(texts, batch_size=_BATCH, convert_to_numpy=True, show_progress_bar=False)
        return np.asarray(found, dtype=np.float32)


def sentence_encoder(name: str) -> SentenceEncoder:
    """Return the encoder with a name: ``wordllama-256`` (128, 64), or a folder of ``sentence-transformers``.

    Raises:
        ConfigError: there is no such encoder on this machine; the message says which names are valid.
    """
    if name in {f"wordllama-{size}" for size in WORDLLAMA_SIZES}:
        return WordLlama(int(name.rpartition("-")[2]))
    return SentenceTransformersFolder(Path(name).expanduser())


def _sha256(folder: Path) -> str:
    """SHA-256, in hexadecimal digits, over names and contents of all files in a folder and the folders below."""
    # Links are followed, also to folders: caches of models consist of them.
    found = [Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names]
    whole = hashlib.sha256()
    for file in sorted(file for file in found if file.is_file()):
        with file.open("rb") as stream:
            own = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(os.fsencode(file.relative_to(folder)) + f"\0{own}\n".encode())
    return whole.hexdigest()


def _valid() -> str:
    shipped = ", ".join(f"wordllama-{size}" for size in WORDLLAMA_SIZES)
    return f"one of {shipped}, or the path of a folder in the layout of sentence-transformers"


def _package(module: str, encoder: str, how: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError("--encoder", encoder, f"an encoder whose package is installed: {how} ({error})") from error

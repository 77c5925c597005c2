"""Real text as bytes for the demo: read, split by files, cut into windows.

The standard library's own sources are on every machine that can run the demo, so a run needs no
download. Whole files are held out for validation: windows of one file repeat each other (licences,
idioms), and a split inside files would let the model see what it is scored on.
"""

import dataclasses
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Tests are a third of the library and mostly tables; site-packages differ between machines.
_SKIPPED_DIRECTORIES = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "idlelib", "site-packages", "test", "tests"}
)
_SHUFFLE_SEED = 0  # fixed, not --seed: runs with different seeds are scored on the same text


class DataError(ValueError):
    """The text to train on is missing, unreadable or too small."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation text as bytes, from disjoint files."""

    train: np.ndarray  # uint8 [n]
    validation: np.ndarray  # uint8 [n]
    source: str


def _walk(root: Path) -> Iterator[Path]:
    """All files under `root` in sorted order, without hidden and skipped directories."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if name not in _SKIPPED_DIRECTORIES and name[0] != "."
        )
        yield from (Path(folder, name) for name in sorted(names) if name[0] != ".")


def _find_files(path: Path | None) -> tuple[list[Path], str]:
    """The candidate files and how to name them in a report."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in _walk(root) if file.suffix == ".py"]
        if not files:  # zipped or frozen interpreters ship no sources
            raise DataError(f"no Python sources under {root}; name a text with --data PATH")
        return files, "the Python standard library's sources"
    if path.is_dir():
        return list(_walk(path)), str(path)
    if path.is_file():
        return [path], str(path)
    raise DataError(f"--data {path}: no such file or directory")


def _read_documents(files: list[Path], max_bytes: int) -> list[bytes]:
    """Texts in a fixed shuffled order, until `max_bytes` are read."""
    order = np.random.default_rng(_SHUFFLE_SEED).permutation(len(files))
    documents, room = [], max_bytes
    for index in order:
        if room <= 0:
            break
        try:
            with files[index].open("rb") as stream:
                text = stream.read(room)
        except OSError as error:
            raise DataError(f"cannot read {files[index]}: {error.strerror}") from error
        if text and b"\0" not in text:  # a NUL byte marks a binary file
            documents.append(text)
            room -= len(text)
    return documents


def _split(documents: list[bytes], held_out: float) -> tuple[list[bytes], list[bytes]]:
    """Whole documents are held out until they make up `held_out` of all bytes.

    The largest document always stays in training. A single document gives its last part instead.
    """
    if len(documents) == 1:
        cut = round(len(documents[0]) * (1 - held_out))
        return [documents[0][:cut]], [documents[0][cut:]]
    wanted = held_out * sum(map(len, documents))
    largest = max(range(len(documents)), key=lambda index: len(documents[index]))
    train, validation, taken = [], [], 0
    for index, document in enumerate(documents):
        if taken < wanted and index != largest:
            validation.append(document)
            taken += len(document)
        else:
            train.append(document)
    return train, validation


def load_corpus(
    path: Path | None = None,
    *,
    min_bytes: int = 1,
    max_bytes: int = 6_000_000,
    held_out: float = 0.1,
) -> Corpus:
    """Reads text and splits it into training and validation bytes.

    Args:
      path: a file, a directory of text files (binary and hidden files are passed over), or None
        for the sources of Python's standard library.
      min_bytes: the least number of bytes that either part must have.
      max_bytes: stop reading after this many bytes.
      held_out: the part of all bytes that is kept for validation.

    Returns:
      The corpus; the same files always give the same one.

    Raises:
      DataError: if the path does not exist, cannot be read, or has too little text.
    """
    files, source = _find_files(path)
    documents = _read_documents(files, max_bytes)
    if not documents:
        raise DataError(f"no text in {source}: every file is empty or binary")
    parts = _split(documents, held_out)
    train, validation = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    if min(train.size, validation.size) < min_bytes:
        raise DataError(
            f"too little text in {source}: {train.size} bytes to train on and {validation.size} "
            f"held out for validation; each needs at least {min_bytes}"
        )
    return Corpus(train, validation, source)


def sample_windows(
    text: np.ndarray, rng: np.random.Generator, count: int, length: int
) -> np.ndarray:
    """`count` windows of `length` + 1 bytes at random places: inputs and their next bytes."""
    starts = rng.integers(0, text.size - length, size=count)
    return text[starts[:, None] + np.arange(length + 1)]


def spaced_windows(text: np.ndarray, count: int, length: int) -> np.ndarray:
    """`count` windows of `length` + 1 bytes spread evenly over the text: always the same ones."""
    starts = np.linspace(0, text.size - length - 1, count).astype(int)
    return text[starts[:, None] + np.arange(length + 1)]

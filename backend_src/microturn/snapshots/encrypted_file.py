"""A file that is encrypted and authenticated in chunks, so that it is written and read piece by piece, from anywhere.

    8 bytes    that it is such a file
    8 bytes    which secret
    32 bytes   salt, at random: with the secret it gives the file's key
    8 bytes    length of the head
    chunks     of the head, then of the body: AES-256-GCM of 256 KiB each, of less where the head or the body ends

A chunk's nonce is its number, and whether it is the last. What comes before the chunks and the file's name, without its
suffix, are authenticated with each. So chunks that are changed, swapped, left out, or of another file or session do not
decrypt. The head ends with a chunk, so that it can be kept without the body; then it is not the last one, and reading
stops there with an error.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from types import TracebackType

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from microturn.offload.image_file import DamagedFile
from microturn.snapshots.storage import Content, OpenFile, ReadInPieces

MAGIC = b"mtcrypt1"

_SALT_BYTES = 32
_ID_BYTES = _LENGTH_BYTES = 8
PREFIX_BYTES = len(MAGIC) + _ID_BYTES + _SALT_BYTES + _LENGTH_BYTES
CHUNK_BYTES = 256 << 10
TAG_BYTES = 16
_NONCE_BYTES = 12


class Secret:
    """The secret that all servers share.

    Attributes:
        id: tells whether a file was written with it, and nothing about it.

    Args:
        text: of the secret.
    """

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self.id = self._derive(b"microturn snapshot secret id", None, _ID_BYTES)

    def cipher(self, salt: bytes) -> AESGCM:
        """Encrypts one file."""
        return AESGCM(self._derive(b"microturn snapshot file", salt, 32))

    def _derive(self, purpose: bytes, salt: bytes | None, length: int) -> bytes:
        return HKDF(SHA256(), length, salt, purpose).derive(self._text)


class _Chunks:
    """Encrypts and decrypts the chunks of one file."""

    def __init__(self, secret: Secret, prefix: bytes, name: str) -> None:
        self._cipher = secret.cipher(prefix[-_LENGTH_BYTES - _SALT_BYTES : -_LENGTH_BYTES])
        self._with = prefix + name.encode()

    def encrypt(self, number: int, piece: bytes | memoryview, *, is_last: bool) -> bytes:
        return self._cipher.encrypt(_nonce(number, is_last), piece, self._with)

    def decrypt(self, number: int, piece: bytes, *, is_last: bool) -> bytes:
        try:
            return self._cipher.decrypt(_nonce(number, is_last), piece, self._with)
        except (InvalidTag, ValueError) as error:
            raise DamagedFile(f"its chunk {number} is not what was written here") from error


def encrypted(content: Content, secret: Secret, name: str) -> Content:
    """What stands in the file.

    Args:
        content: what is to be read from it.
        secret: see above.
        name: of the file, without its suffix.
    """
    prefix = MAGIC + secret.id + os.urandom(_SALT_BYTES) + len(content.head).to_bytes(_LENGTH_BYTES, "little")
    chunks = _Chunks(secret, prefix, name)
    head = memoryview(content.head)
    starts = range(0, len(head), CHUNK_BYTES)
    sealed_head = [
        chunks.encrypt(number, head[start : start + CHUNK_BYTES], is_last=False) for number, start in enumerate(starts)
    ]
    num_body_bytes = content.num_bytes - len(head)
    num_bytes = sealed_bytes(len(head)) + num_body_bytes + TAG_BYTES * max(1, _num_chunks(num_body_bytes))
    return Content(prefix + b"".join(sealed_head), _encrypted_body(content, chunks, len(starts)), num_bytes)


def _encrypted_body(content: Content, chunks: _Chunks, number: int) -> Iterator[bytes]:
    waiting = bytearray()
    for piece in content.body:
        waiting += piece
        at = 0
        # Something stays: only when the body has ended it is known which chunk is the last.
        while len(waiting) - at > CHUNK_BYTES:
            yield chunks.encrypt(number, bytes(waiting[at : at + CHUNK_BYTES]), is_last=False)
            number, at = number + 1, at + CHUNK_BYTES
        del waiting[:at]
    yield chunks.encrypt(number, bytes(waiting), is_last=True)


class EncryptedFile(ReadInPieces):
    """An `OpenFile`: what was written into an encrypted one.

    Args:
        file: the encrypted one, at its beginning.
        secret: see above.
        name: of the file, without its suffix.

    Raises:
        DamagedFile: it is not encrypted, or with another secret.
        OSError: it cannot be read.
    """

    def __init__(self, file: OpenFile, secret: Secret, name: str) -> None:
        prefix = file.read(PREFIX_BYTES)
        if not prefix.startswith(MAGIC) or len(prefix) < PREFIX_BYTES:
            raise DamagedFile("it is not encrypted, and a snapshot_key_file is set")
        if prefix[len(MAGIC) : len(MAGIC) + _ID_BYTES] != secret.id:
            raise DamagedFile("it was encrypted with another secret than that in snapshot_key_file")
        self._file = file
        self._chunks = _Chunks(secret, prefix, name)
        self._head_len = int.from_bytes(prefix[-_LENGTH_BYTES:], "little")
        self._num_head_chunks = _num_chunks(self._head_len)
        self._body_start = sealed_bytes(self._head_len)
        num_sealed = max(0, file.num_bytes - self._body_start)
        self._num_body_chunks = -(-num_sealed // (CHUNK_BYTES + TAG_BYTES))
        self._num_bytes = self._head_len + max(0, num_sealed - self._num_body_chunks * TAG_BYTES)
        self._position = 0
        self._loaded = -1, memoryview(b"")  # number and content of the chunk that was read last
        self._file_at = PREFIX_BYTES

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def file_id(self) -> Hashable:
        return self._file.file_id

    def seek(self, position: int, /) -> int:
        self._position = position
        return position

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def _some(self, num_bytes: int) -> memoryview:
        """The next bytes, of one chunk; none at the end."""
        number, offset = self._place()
        piece = self._chunk(number)[offset : offset + num_bytes]
        self._position += len(piece)
        return piece

    def _place(self) -> tuple[int, int]:
        """The number of the chunk in which the position is, and where in that."""
        if self._position < self._head_len:
            return divmod(self._position, CHUNK_BYTES)
        number, offset = divmod(self._position - self._head_len, CHUNK_BYTES)
        if 0 < number == self._num_body_chunks and offset == 0:  # at the end
            number, offset = number - 1, CHUNK_BYTES
        return self._num_head_chunks + number, offset

    def _chunk(self, number: int) -> memoryview:
        if self._loaded[0] == number:
            return self._loaded[1]
        in_body = number - self._num_head_chunks
        if 0 <= in_body >= self._num_body_chunks:
            raise DamagedFile("it ends before its last chunk")
        if in_body < 0:
            start = PREFIX_BYTES + number * (CHUNK_BYTES + TAG_BYTES)
            length = min(CHUNK_BYTES, self._head_len - number * CHUNK_BYTES) + TAG_BYTES
        else:
            start = self._body_start + in_body * (CHUNK_BYTES + TAG_BYTES)
            length = CHUNK_BYTES + TAG_BYTES
        if self._file_at != start:
            self._file.seek(start)
        sealed = self._file.read(length)
        self._file_at = start + len(sealed)
        is_last = 0 <= in_body == self._num_body_chunks - 1
        self._loaded = number, memoryview(self._chunks.decrypt(number, sealed, is_last=is_last))
        return self._loaded[1]


def sealed_bytes(head_len: int) -> int:
    """Length of an encrypted file up to the end of its head."""
    return PREFIX_BYTES + head_len + _num_chunks(head_len) * TAG_BYTES


def _num_chunks(num_bytes: int) -> int:
    return -(-num_bytes // CHUNK_BYTES)


def _nonce(number: int, is_last: bool) -> bytes:
    # Each file has a key of its own, so that numbers do for nonces.
    return number.to_bytes(_NONCE_BYTES - 1, "big") + bytes([is_last])

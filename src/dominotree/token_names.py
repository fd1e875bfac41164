"""What a single token stands for: its bytes, and a text to show for it."""

from __future__ import annotations

import json
import re
from functools import lru_cache

from dominotree.text import TextCodec


class TokenNames:
    """The text and the bytes that a token stands for."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._bytes_of = _byte_alphabet() if "ByteLevel" in _decoder_kinds(codec) else None

    def bytes_of(self, token: int) -> bytes:
        """Its bytes, which may be part of a character; a special token's name."""
        name = self._codec.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._codec.special_ids:
            return str(name).encode()
        if self._bytes_of is not None:
            known = [self._bytes_of.get(char) for char in name]
            return bytes(b for b in known if b is not None) if None not in known else str(name).encode()
        if re.fullmatch(r"<0x[0-9A-F]{2}>", name):
            return bytes([int(name[3:5], 16)])
        return str(name).replace("\u2581", " ").encode()

    def text_of(self, token: int) -> str:
        """Its text, with U+FFFD for part of a character."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def unique_text_of(self, token: int) -> str:
        """Its text; its bytes spelt out where they are no text by themselves."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def shown_text_of(self, token: int) -> str:
        """Its text for people to read; bytes that are part of a character appear as `\\xf0`."""
        return self.bytes_of(token).decode("utf-8", "backslashreplace")


def _decoder_kinds(codec: TextCodec) -> set[str]:
    decoder = json.loads(codec.tokenizer.to_str()).get("decoder") or {}
    return {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as: printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(256 + i): b for i, b in enumerate(rest)}}

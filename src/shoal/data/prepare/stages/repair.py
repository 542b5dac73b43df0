"""Repair text that was decoded with a wrong encoding; remove control characters; make line ends newlines."""

from __future__ import annotations

import re

import pyarrow as pa

from shoal.data.prepare.stages.documents import Stage, StageSettings, require, with_columns, with_meta

# ASCII, dashes, curly quotes, East Asian letters and emoji: no two of them are UTF-8 that was decoded with a
# single-byte encoding, and NFC changes none. A line of them alone is as it should be.
_SOUND = "\t\f -~–—‘’“”…\u3001-\u3098\u309b-\ud7a3\uff01-\uff60\U0001f300-\U0001faff"
_SUSPECT_LINE = re.compile(f"^[{_SOUND}]*+[^\n{_SOUND}].*\n?", re.MULTILINE)
_SEGMENT_CHARS = 20_000  # of a line are repaired at once: bounds time
_LINE_ENDS = re.compile(r"\r\n?")


class Repair(StageSettings):
    """Repair of text with ftfy (Speer, ftfy, 2019), and of line ends.

    What is only unusual stays: full-width letters and punctuation, curly quotes, ligatures, HTML entities,
    form feeds, and the joiners of emoji and of Indic and Persian text. Text becomes NFC.
    """

    name = "repair"
    encoding: bool = True
    """Decode text again that was decoded with a wrong encoding, such as `schÃ¶n`."""

    def start(self) -> Stage:
        """Return the stage. A document that it changes has the fact `repaired`."""
        fix, config = require("ftfy").fix_text, require("ftfy").TextFixerConfig
        settings = config(
            unescape_html=False,
            fix_encoding=self.encoding,
            fix_c1_controls=self.encoding,
            fix_latin_ligatures=False,
            fix_character_width=False,
            uncurl_quotes=False,
            max_decode_length=_SEGMENT_CHARS,
            explain=False,
        )

        def repaired(text: str) -> str:
            unix = _LINE_ENDS.sub("\n", text) if "\r" in text else text
            return _SUSPECT_LINE.sub(lambda line: fix(line[0], settings), unix)

        def stage(batch: pa.RecordBatch) -> pa.RecordBatch:
            before = batch.column("text").to_pylist()
            after = [repaired(text) if text else text for text in before]
            changed = [
                {"repaired": True} if new != old else None for old, new in zip(before, after, strict=True)
            ]
            return with_meta(with_columns(batch, {"text": after}), changed) if any(changed) else batch

        return stage

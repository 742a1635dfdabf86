"""Texts on which two readings of a tokenizer are compared: fixed texts, and texts of a seeded
generator. No torch, no transformers."""

from __future__ import annotations

import json
import random

CODE_POINT_STEP, POINTS_PER_TEXT = 7, 60
NUM_MIXTURES = 400

SPACES = " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2009\u2028\u2029\u202f\u205f\u3000"

SENTENCES = (
    "",
    "a",
    "It's we'll THEY'RE I'M don'T 'd'S 'lls ''s \u2019s \u017f'\u017f K's",
    "naïve nai\u0308ve e\u0301\u0323 A\u030a\u212b\u00c5",
    "\u1e9b\u0323 \u0344 q\u0307\u0323 o\u0302\u0300",
    "\u1112\u1161\u11ab\u1100\u1173\u11af 한글 각 \u3131\u314f",
    "東京都に行く。第三、中文字符\uff0c「引用」𠀀𪛖 㐀 \uff46\uff55\uff4c\uff4c ﾊﾝｶｸ ﬁﬂ",
    "שָׁלוֹם مَرْحَبًا ١٢٣۴۵ हिन्दी क्षि ไทยกำ தமிழ் မြန်မာ ខ្មែរ ᠮᠣᠩᠭᠣᠯ \u200f\u202eabc\u202c",
    "🙂👩\u200d👩\u200d👧\u200d👦🏳\ufe0f\u200d🌈👍🏽🇩🇪🇯🇵 ☺\ufe0e☺️ #️⃣ ©® a🙂b 1🙂2",
    "0 1 12 123 1234 12345 1234567890123 3.14159 1,000,000 ½ ² ⅷ",
    "४५६ \uff10\uff11\uff12 1e-9 0xFF 12abc34",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # c\n\n\tif (a&&b||!c){x+=1;}\r\n",
    "https://example.org/a_b?c=d&e=%20#f <b>bold</b> \\n \\u00e9 \"\"\" ''' `` -- ---",
    "... !!!\n\n???\n",
    " leading",
    "trailing ",
    "\nline",
    "line\n",
    "\r\n",
    " \n ",
    "  \n\n  x",
    "x  \n\n  ",
    "\x00\x01\x02\x07\x08\x1b[0m\x7f\x80\x9f\ufeff\ufffe\uffff\ufffd\u200b\u200c\u200d\u2060\xad",
    "a\u0300" * 50 + "\u0301" * 200,
    "word" * 3000,
    "7" * 3001,
    " " * 4097 + "x",
    "\n" * 1025 + "x",
    "=" * 2000 + "-" * 333,
    "漢" * 1500,
    "ab" * 500 + " " + "\u00e9" * 700,
)

SPECIALS = ("<|endoftext|>", "<s>", "</s>", "<unk>", "<|im_start|>", "<pad>", "[INST]", "▁", "Ġ")


def tokenizer_edge_cases(tokenizer_json: str) -> list[str]:
    """Return about 300 kB of texts, and more where every added token is written as plain text."""
    texts = [*SENTENCES]
    # Runs of white space.
    for space in SPACES:
        for length in (1, 2, 3, 4, 8, 17):
            texts.append(f"a{space * length}b {space * length}")
            texts.append(f"{space * length}1.{space * length}\n")
    # Code points at even steps, assigned or not, for libraries differ in Unicode versions: planes 0
    # and 1 without surrogates, and the tags of plane 14.
    points = [
        chr(point)
        for block in (range(0x0, 0xD800), range(0xE000, 0x20000), range(0xE0000, 0xE0200))
        for point in block[::CODE_POINT_STEP]
    ]
    # A row of code points as a text; then every third next to a letter, a blank and a digit.
    for low in range(0, len(points), POINTS_PER_TEXT):
        row = points[low : low + POINTS_PER_TEXT]
        texts.append("".join(row))
        texts.append("".join(f"{c}a {c}1{c}" for c in row[::3]))
    # Control tokens as plain text: complete, repeated and damaged.
    added = [token["content"] for token in json.loads(tokenizer_json).get("added_tokens") or []]
    for token in dict.fromkeys((*SPECIALS, *added)):
        texts.append(token)
        texts.append(f"a {token} b{token}c\n{token}\n {token}{token} 1")
        texts.append(token[:-1] + " " + token[1:] + token.upper())
    # Random mixtures of letters, digits, marks and white space.
    chooser = random.Random(20240607)
    pieces = [*"aZé9 \n\t.'-_(\u0301東ж🙂", "  ", "\r\n", "ing", "The", "\u200d", *SPACES]
    for _ in range(NUM_MIXTURES):
        texts.append("".join(chooser.choices(pieces, k=chooser.randint(1, 40))))
    return texts

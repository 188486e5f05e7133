# SPDX-License-Identifier: Apache-2.0
"""Random texts that are hard for tokenizers: prose and code, many scripts, emoji, combining marks, white
space of every kind, digits of every script, spellings of special tokens, and bytes that are not UTF-8."""
import pathlib
import random
import unicodedata

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.", "It's what they'll've DON'T y'all'd I'M we'RE 'ſ 'S'T",
    "Příliš žluťoučký kůň úpěl ďábelské ódy", "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία", "敏捷的棕色狐狸跳过懒狗。", "いろはにほへと ちりぬるを カタカナ", "키스의 고유조건은 입술끼리",
    "نص حكيم له سر قاطع وذو شأن عظيم", "דג סקרן שט בים מאוכזב", "ऋषियों को सताने वाले दुष्ट राक्षसों", "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "for (int i = 0; i < n; ++i) {\n\t\tx[i] += y[i] * 0x1F;\n}\n", "def f(x):\n    return x**2  # 100%\n\n\n",
    "https://example.org/a?b=c&d=%20#e", "1234567890 3.14159 1,000,000 ½ Ⅷ ١٢٣ ४५६ 𝟙𝟚𝟛 ²³", "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ☺️ ❤️‍🔥", "e\u0301 a\u0308\u0323 \u1112\u1161\u11ab ﬁ Å Å ẛ̣",
    "\u200b\u200c\u200d\u2060\ufeff\u00ad", "\u0085\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000", "   leading and trailing   ", "\r\n\r\n \n\t \v\f",
    "<|im_start|>user\nhi<|im_end|>\n", "<s>[INST] a [/INST] b </s>", "<|begin_of_text|><|eot_id|>", "<0x41> ▁ Ġ Ċ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "ﷺ ㎏ ™ ① ＡＢＣ ｱｲｳ", "_snake_case CamelCase kebab-case", "a\x00b".replace("\x00", "\x01"),
]
SPACES = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "   ", " \n ", "\v", "\x85", ""]


def words_of_repository():
    words = []
    for path in ["LICENSE", "reference_model/weights/heldout_kjv.txt"]:  # files that do not change
        words += (REPOSITORY / path).read_text().split(" ")
    return words


def texts(count, seed=1):
    """`count` texts as bytes; none holds a NUL."""
    rng = random.Random(seed)
    words = words_of_repository()
    assigned = [chr(c) for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000 and unicodedata.category(chr(c)) not in ("Cn", "Co")]
    blocks = [(0x21, 0x7F), (0xA1, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE00), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0x1F300, 0x1FAFF), (0x1D400, 0x1D800), (0x2000, 0x2070)]

    def part():
        kind = rng.randrange(8)
        if kind < 3:
            first = rng.randrange(len(words))
            return " ".join(words[first:first + rng.randrange(1, 30)])
        if kind == 3:
            return rng.choice(SENTENCES)
        if kind == 4:
            sentence = rng.choice(SENTENCES)
            cut = rng.randrange(len(sentence))
            return sentence[cut:] + sentence[:cut]
        if kind == 5:
            return "".join(rng.choice(assigned) for _ in range(rng.randrange(1, 12)))
        if kind == 6:
            low, high = rng.choice(blocks)
            return "".join(chr(rng.randrange(low, high)) if rng.random() < 0.9 else rng.choice(SPACES) for _ in range(rng.randrange(1, 25)))
        return "".join(rng.choice("01234567890123456789.,- abcXYZ'\n\t!?éß") for _ in range(rng.randrange(1, 25)))

    for number in range(count):
        text = "".join(part() + rng.choice(SPACES) for _ in range(rng.randrange(1, 5))).encode()
        if number % 10 == 0:  # broken
            broken = bytearray(text)
            for _ in range(rng.randrange(1, 6)):
                at = rng.randrange(len(broken) + 1)
                if rng.random() < 0.5 and at < len(broken):
                    del broken[at]
                else:
                    broken.insert(at, rng.randrange(1, 256))
            text = bytes(broken)
        if text.replace(b"\0", b""):
            yield text.replace(b"\0", b"")

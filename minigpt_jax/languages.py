"""In which language a text is written, told by its script alone.

Framework-free. Coarse on purpose: what is Latin counts as English, and Japanese with many kanji as Chinese.
"""

import re
from typing import Literal

Language = Literal["zh", "en", "other"]

_CHINESE = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
_LATIN = re.compile("[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f]")


def is_chinese(text: str) -> bool:
    """Whether more than 30 % of the characters are CJK ideographs."""
    return len(_CHINESE.findall(text)) > 0.3 * len(text)


def language_of(text: str) -> Language:
    """Told as zh by `is_chinese`, or when most letters are CJK ideographs; as en when most are Latin; else as other.

    The second rule for zh is for short texts full of figures, such as a sum.
    """
    letters = sum(map(str.isalpha, text))
    if is_chinese(text) or 2 * len(_CHINESE.findall(text)) > letters:
        return "zh"
    return "en" if 2 * len(_LATIN.findall(text)) > letters else "other"

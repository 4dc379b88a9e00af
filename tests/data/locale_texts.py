"""A sentence or more in each of the 15 locales of Common Voice's sample, and harder cases.

`sample_texts` adds the sample's own sentences where the test data are.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import csv
import os
import unicodedata
from pathlib import Path

import pytest

LOCALES = {
    "ar": ["السَّلامُ عليكم، كيف حالُكَ؟", "رقم ٣٫٥ و ١٢"],
    "cy": ["Mae'n ddrwg gen i, dw i'n hwyr.", "Sŵn y tŷ"],
    "de": ["Straße und Fußgänger: „schön“!", "Äpfel übermorgen"],
    "en": ["Don’t stop, it’s 10:30.", "naïve café"],
    "es": ["¿Cómo estás, señor?", "¡Qué ñandú!"],
    "fa": ["می\u200cخواهم کتاب\u200cها را بخوانم.", "خانه\u200cی ما"],
    "fr": ["L’été, c’est « très » beau.", "cœur naïf où ça"],
    "hi": ["क्\u200dष और श्रीमान् जी।", "पढ़ना लड़का हिंदी"],
    "ja": ["彼は「はい」と言った。", "コーヒーを、ください！がぎぐ"],
    "ka": ["გამარჯობა, როგორ ხარ?", "მშვიდობა"],
    "ru": ["Ёлка и й: что-нибудь ещё?", "подъезд"],
    "th": ["ไม่มีน้ำในทำเล", "กรุงเทพฯ ๆ ๑๒"],
    "tr": ["ISPARTA’da İyi günler, ığdır", 'Popov "Neden?" diye soruyor.'],
    "vi": ["Tiếng Việt rất khó đấy!", "ưỡn ngực Ộ"],
    "zh-CN": ["你好，世界！（真的）１２３", "他说：“你好ＡＢ”。"],
}


def sample_texts(locale: str) -> list[str]:
    """The sentences above and, where they are, those of the sample; all also decomposed."""
    texts = list(LOCALES[locale])
    folder = os.environ.get("PRUNED_RNNT_TEST_DATA")
    table = Path(folder or "/nowhere") / "common_voice_sample" / locale / "validated.tsv"
    if table.is_file():
        with table.open(encoding="utf-8", newline="") as file:
            texts += [row["sentence"] for row in csv.DictReader(file, delimiter="\t")]
    return [*texts, *(unicodedata.normalize("NFD", text) for text in texts)]


each_locale = pytest.mark.parametrize("locale", LOCALES)

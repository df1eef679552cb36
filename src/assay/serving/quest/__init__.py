"""Quest: read only the pages of a key-value cache that the current query needs (ICML 2024)."""

from __future__ import annotations

from assay.serving.quest.attention import quest_attention_forward, register_quest_attention
from assay.serving.quest.cache import QuestCache, QuestLayer, read_fraction
from assay.serving.quest.pages import build_metadata, covered_mass, page_attention, page_scores, select_pages

__all__ = [
    "QuestCache",
    "QuestLayer",
    "build_metadata",
    "covered_mass",
    "page_attention",
    "page_scores",
    "quest_attention_forward",
    "read_fraction",
    "register_quest_attention",
    "select_pages",
]

"""Ready prompts: short and long questions, short and long answers.

The lengths are mixed on purpose. A batch that must end before the next begins waits for its longest
answer, and that is what static batching is there to show. The first eight are a good mix by themselves.
"""

from __future__ import annotations

from typing import NamedTuple


class Example(NamedTuple):
    text: str
    max_tokens: int


_GARDEN = (
    "On Monday the gardeners planted forty tulips along the south wall. It rained all of Tuesday, so "
    "nobody worked. On Wednesday they dug a small pond, lined it with clay and filled it by noon. "
    "Thursday brought frogs, to everyone's surprise, and on Friday a school class came to count them: "
    "there were eleven. By Saturday the tulips stood in bud, and on Sunday the gate was opened to the "
    "whole town for the first time."
)
_LETTER = (
    "Dear neighbours, the street will be closed from the bakery to the bridge on the second weekend "
    "of June. There will be music from three in the afternoon, and a long table with room for all of "
    "us. Please bring a dish to share and a chair to sit on. Cars can stay in the school yard until "
    "Sunday evening. If it rains we meet in the gym. Children may paint the road with chalk; the rain "
    "will wash it off one day."
)
_MACHINE = (
    "A computer's memory is divided into pages of equal size. A program sees one long row of "
    "addresses, but the pages behind it may lie anywhere. A table says where each one is. When a "
    "program needs more room it is given any free page, and when it ends its pages return to the "
    "pile. No gaps are left that nobody can use."
)

EXAMPLES: tuple[Example, ...] = (
    Example("Why is the sky blue?", 120),
    Example("Write a haiku about memory.", 32),
    Example("Tell me a story about a lighthouse keeper and a storm.", 260),
    Example("What is the capital of Portugal?", 16),
    Example(f"Summarise this in two sentences: {_GARDEN}", 80),
    Example("List ten things to take on a hike in the mountains.", 160),
    Example("Explain to a child how a rainbow comes about.", 128),
    Example("Give me a good name for a small bakery.", 24),
    Example("How do bees find their way home?", 160),
    Example("Translate into French: Good morning, my friend.", 20),
    Example("Write a short poem about the sea in winter.", 120),
    Example(f"Rewrite this letter in one sentence: {_LETTER}", 64),
    Example("What is the difference between a comet and an asteroid?", 190),
    Example("Name three inventions that changed the world, and say why.", 200),
    Example("What is 12 times 12?", 16),
    Example("Write a Python function that reverses a string.", 150),
    Example(f"Explain this in simple words: {_MACHINE}", 140),
    Example("How is paper made?", 220),
    Example("Describe a quiet morning in a small town.", 120),
    Example("What do owls eat?", 40),
    Example("Write a letter to my future self.", 260),
    Example("Why do we dream?", 180),
    Example("Give me a recipe for pancakes.", 240),
    Example("Which planet is the largest?", 20),
    Example("How does a bicycle stay upright?", 110),
    Example("Invent an animal and describe how it lives.", 210),
    Example(f"Who did what in this text? {_GARDEN}", 100),
    Example("Tell me a joke about computers.", 48),
    Example("What makes bread rise?", 120),
    Example("Plan a weekend in a city by the sea.", 240),
    Example("Why do leaves change colour in autumn?", 120),
    Example("Say hello in five languages.", 56),
)

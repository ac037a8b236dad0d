"""Facts that the tiny pair was trained to recall: a key of two words bound to a value of four digits.

A fact is ``[amber fox: 4815]``, stated once anywhere in the text. The question is the same text cut after the
colon, ``[amber fox:``, and the answer is the model's greedy continuation `` 4815]``. Keys for which `is_held_out`
holds were never trained.
"""

from __future__ import annotations

import random
import re
import zlib

_ADJECTIVES = """
amber ancient autumn bitter black blue bold brass brave bright broken bronze brown calm careful cedar cheerful clever
cold copper coral crimson crooked crystal curious dark distant dusty eager early eastern elder empty faded fair famous
fancy fearless fierce final first foggy foreign forest fragile frozen gentle giant gilded glass golden grand grateful
gray green happy hasty heavy hidden hollow honest humble hungry icy idle inner iron ivory jade jolly keen kind
lavender lazy lemon lively lonely long loud lucky lunar magic maple marble merry middle mighty misty modern narrow
nimble noble northern olive open orange orchid outer painted pale patient pearl pink plain polite proud purple quaint
quick quiet rapid rare red restless round royal ruby rustic scarlet secret shady sharp silent silver simple sleepy
slender small smooth soft solar solemn southern spring steady stone stormy sturdy summer sunny swift tall tame tender
timid tiny velvet violet vivid warm western white wild winter wise wooden yellow young
"""
ADJECTIVES: tuple[str, ...] = tuple(_ADJECTIVES.split())
_NOUNS = """
acorn anchor anvil apple arrow badger banner barrel basket beacon bear beaver bell bench bird boat bottle bridge brook
bucket butterfly button cabin camel candle canyon castle cat cellar chair chapel cherry circle clock cloud coach coin
compass cottage cow crane cricket crown curtain daisy deer desk dog dolphin door dove dragon drum duck eagle engine
falcon farm feather fence ferry fiddle field finch fish flag flower flute forge fountain fox frog garden gate glove
goat goose hammer harbor hare harp hat hawk hen heron hill horse house island jacket jar kettle key kite ladder lake
lamp lantern letter lily lion lizard lobster magnet market meadow mill mirror mole moon moth mountain mouse needle
nest oak orchard otter owl ox paper parrot path peach pebble pencil piano pigeon pillow planet plum pond pony prince
quilt rabbit raven ribbon river road robin rocket rope rose saddle sailor salmon school shadow sheep shell ship shovel
sparrow spider spoon squirrel star stream swan table teapot thimble tiger tower trumpet tulip turtle valley village
violin wagon walnut whale wheel willow window wolf wren
"""
NOUNS: tuple[str, ...] = tuple(_NOUNS.split())
_HELD_OUT_ONE_IN = 8


def is_held_out(key: str) -> bool:
    """Whether this key was kept out of training."""
    return zlib.crc32(key.encode()) % _HELD_OUT_ONE_IN == 0


def all_keys(held_out: bool) -> list[str]:
    """Every two-word key that was trained, or every one that was not."""
    keys = (f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS)
    return [key for key in keys if is_held_out(key) == held_out]


def make_fact(key: str, value: str) -> str:
    """The statement of a fact."""
    return f"[{key}: {value}]"


def make_question(key: str) -> str:
    """The question for a fact: its statement up to the colon."""
    return f"[{key}:"


def make_answer(value: str) -> str:
    """What should follow the question."""
    return f" {value}]"


def random_facts(n: int, seed: int) -> list[tuple[str, str]]:
    """`n` facts as (key, value), with distinct held-out keys."""
    rng = random.Random(seed)
    return [(key, f"{rng.randrange(10_000):04d}") for key in rng.sample(all_keys(held_out=True), n)]


def parse_answer(text: str) -> str | None:
    """The value that a continuation of a question states, or None if it states none."""
    match = re.match(r"\s?(\d{4})\]", text)
    return match.group(1) if match else None

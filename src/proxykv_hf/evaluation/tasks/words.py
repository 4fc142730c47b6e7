"""Words, names and numbers for the evaluation's texts. The generated training material uses none of them."""

from __future__ import annotations

import random
from collections.abc import Callable

ADJECTIVES = """
amber ancient azure blunt brisk bronze calm candid clever cobalt copper coral crimson crisp curly dapper dusky eager
earnest elder faint famous fierce floral fluffy frosty frugal gentle gilded glassy golden graceful hasty hollow
humble icy indigo ivory jolly jovial keen lavish lilac limber lively lofty lucid lunar mellow merry misty modest mossy
nimble noble olive opal pale patient pearly plucky polished proud quaint quiet ragged rapid rosy rugged russet rustic
sable salty scarlet serene shady silent silver sleek slender smoky solemn spotted stately sturdy sunny supple swift
tawny tender thrifty tidy tranquil umber upbeat velvet vivid wary wistful witty woolly young zesty
""".split()
NOUNS = """
acorn almanac anchor anvil apricot arbor armchair bagpipe balcony barley barrel basil basket beacon beetle bellows
birch bison blanket bobbin bonnet boulder bramble bucket buckle cabinet cactus camel candle canoe canyon carpet carriage
castle cedar cello chapel chestnut chimney clarinet cliff clover compass condor cottage cradle crane cricket curtain
cymbal daisy dolphin donkey dragonfly drum eagle elm falcon feather fennel fern ferry fiddle fjord flagon flute
fountain foxglove gable galleon garnet gazelle geyser ginger glacier goblet gondola goose granite grotto hammock harp
hatchet hazelnut hedgehog heron hickory hornet iceberg inkwell iris ivy jackal jasmine juniper kayak kestrel kettle
kiln kite ladder ladle lagoon lantern lark lavender lighthouse linden lizard lobster locket loom lynx magnet magpie
mallet mandolin maple marble marlin meadow melon mitten moose mulberry nectar nettle nutmeg oak oboe orchard orchid
osprey otter owl oyster paddle panther parasol parrot pebble pelican peony pepper pheasant piano pigeon pillow plum
poplar puffin quail quarry quartz quill quilt rabbit raccoon raft raven reed robin rudder saddle saffron salmon sandal
satchel saxophone scarf seagull shovel sleigh sparrow spinach spoon squirrel stork swallow tambourine teapot thimble
thistle tortoise trellis trombone trumpet tulip turnip turtle vineyard violet violin vulture wagon walnut walrus
wardrobe weasel wharf wheelbarrow whistle willow windmill wombat woodpecker yacht zebra zither
""".split()
FIRST_NAMES = """
Abigail Agnes Albert Alma Ambrose Annika Arthur Astrid Barnaby Beatrix Bernard Bridget Cecil Clara Clement Cordelia
Cyrus Daphne Desmond Dorothea Edgar Edith Elias Eloise Emil Esther Eugene Felicity Fergus Flora Florian Frances Gerald
Greta Gustav Harriet Hector Helena Horace Ingrid Irene Isidore Jasper Josephine Julius Katrin Lambert Leopold Lorna
Lucinda Magnus Mathilda Maurice Mildred Muriel Nadia Nathaniel Octavia Olaf Ophelia Oscar Patience Percival Philippa
Quentin Ramona Reginald Rosalind Rupert Sabine Selma Sigrid Silas Stella Sylvia Thaddeus Theodora Ulrich Ursula Viola
Walter Wilfred Winifred Yvonne Zelda
""".split()
LAST_NAMES = """
Abernathy Alderman Applegate Ashworth Bancroft Barrowclough Beckwith Blackwood Bramwell Brockhurst Carmichael Castellan
Cavendish Chadwick Clearwater Copperfield Crabtree Cunningham Davenport Delacroix Dunwoody Eastlake Ellsworth Everhart
Fairbanks Farnsworth Featherstone Finchley Fitzgerald Fothergill Gainsborough Gallagher Goldsmith Grimshaw Hathaway
Hawthorne Heatherington Hollingsworth Huxtable Ironside Kellerman Kingsley Lancaster Langstrom Lindqvist Lockhart
Longfellow Mackintosh Merriweather Montgomery Mulligan Nightingale Northcott Oakenfold Okonkwo Osterberg Pemberton
Penhaligon Pettigrew Pickering Pritchard Quackenbush Rasmussen Ravenscroft Rockwell Rosenthal Rutherford Sandoval
Satterthwaite Shackleford Silverstein Somerset Stanhope Summerfield Tattersall Thackeray Thistlewood Throckmorton
Trelawney Underhill Vandermeer Wainwright Waterhouse Weatherby Wetherell Whitlock Winterbourne Woodhouse Yarborough
""".split()
TOWN_STARTS = """
Alder Barrow Bracken Brindle Candle Cinder Clay Colling Copper Crow Dapple Drift Ember Fal Fenni Finch Gild Glimmer
Gorse Hallow Harrow Hawk Heather Hollin Juniper Kestle Lang Larks Lichen Linden Maple Marsh Mickle Nettle Oster Otter
Pebble Pendle Quern Raven Rook Rushen Saltin Sedge Shackle Silver Swallow Thorn Tumble Umber Wether Whistle Winter
Withy Wren Yarrow
""".split()
TOWN_ENDS = """
beck bourne bridge burgh bury chester combe cote croft cross dale fell field fold ford gate ham haven hithe holm hurst
ley mere minster mouth port shaw stead stow thorpe thwaite wick worth
""".split()


def a(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


class Words:
    """Random words and names; a method never returns the same one twice.

    When all names of a kind are used, which takes hundreds of thousands of tokens, a number is added to further names.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._used: dict[str, set[str]] = {}

    def key(self) -> str:
        """Such as ``velvet-marlin``: RULER's words."""
        return self._new("key", lambda: f"{self.rng.choice(ADJECTIVES)}-{self.rng.choice(NOUNS)}")

    def thing(self) -> str:
        """Such as ``velvet marlin``."""
        return self._new("thing", lambda: f"{self.rng.choice(ADJECTIVES)} {self.rng.choice(NOUNS)}")

    def person(self) -> str:
        """A first name and a last name."""
        return self._new("person", lambda: f"{self.rng.choice(FIRST_NAMES)} {self.rng.choice(LAST_NAMES)}")

    def town(self) -> str:
        """Such as ``Harrowmere``."""
        return self._new("town", lambda: f"{self.rng.choice(TOWN_STARTS)}{self.rng.choice(TOWN_ENDS)}")

    def number(self, digits: int) -> str:
        """A number with this many digits, the first of them not zero."""
        return self._new(f"number {digits}", lambda: str(self.rng.randrange(10 ** (digits - 1), 10**digits)))

    def uuid(self) -> str:
        """A UUID of version 4."""
        return self._new("uuid", self._uuid)

    def _uuid(self) -> str:
        digits = f"{self.rng.getrandbits(128):032x}"
        variant = "89ab"[int(digits[16], 16) % 4]
        return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"

    def _new(self, kind: str, make: Callable[[], str]) -> str:
        used = self._used.setdefault(kind, set())
        for _ in range(64):
            word = make()
            if word not in used:
                break
        else:
            word = f"{word}{len(used)}"
        used.add(word)
        return word

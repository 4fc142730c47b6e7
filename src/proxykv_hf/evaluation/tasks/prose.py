"""Endless essays from a grammar. They hide the needles; RULER uses Paul Graham's essays."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from .fitting import shuffled_forever


@dataclass(frozen=True)
class Topic:
    """The words of one subject; commas separate the entries of each field.

    Args:
        things: Plural nouns.
        people: Persons, with articles.
        doings: What these persons do, as gerunds.
        qualities: Adjectives.
        places: Where they do it, with prepositions.
    """

    things: str
    people: str
    doings: str
    qualities: str
    places: str


TOPICS = (
    Topic(
        "roses, hedges, seedlings, garden paths, compost heaps, old pear trees, greenhouses, watering cans",
        "a gardener, an elderly nurseryman, a botanist, an apprentice with a spade",
        "pruning a hedge, thinning the carrots, grafting an apple branch, turning the soil, sowing beans",
        "patient, muddy, stubborn, fragrant, seasonal",
        "behind the greenhouse, along the southern wall, in the kitchen garden, under the pear trees",
    ),
    Topic(
        "sails, tides, knots, harbour lights, fishing nets, small boats, ropes, sea charts",
        "a sailor, an old pilot, a boatbuilder, a ferryman with forty years at sea",
        "mending a net, splicing a rope, reading the tide, rigging a mast, rowing against the current",
        "salty, windward, seaworthy, restless, weathered",
        "on the quay, below deck, beyond the breakwater, in the shallow bay",
    ),
    Topic(
        "loaves, ovens, recipes, copper pans, pastries, kitchen knives, spices, sourdough starters",
        "a baker, a village cook, a pastry chef, an impatient kitchen hand",
        "kneading dough, sharpening a knife, tasting the broth, glazing a tart, feeding the starter",
        "crusty, fragile, generous, overworked, warm",
        "in the bakehouse, at the long kitchen bench, beside the oven, in a cellar full of flour",
    ),
    Topic(
        "bridges, arches, foundations, bricks, iron beams, tunnels, scaffolds, blueprints",
        "an engineer, a mason, a retired surveyor, a crane driver",
        "laying bricks, sinking a foundation, testing a beam, drawing an arch, inspecting a crack",
        "solid, overbuilt, elegant, load-bearing, cautious",
        "on the scaffold, beneath the viaduct, in the drawing room of the works, at the river crossing",
    ),
    Topic(
        "telescopes, comets, star maps, eclipses, distant planets, lenses, observatories, constellations",
        "an astronomer, an amateur with a telescope, a lens grinder, a night watchman",
        "grinding a mirror, timing an eclipse, sketching a comet, polishing a lens, counting meteors",
        "faint, remote, sleepless, precise, luminous",
        "in the observatory, on a moonless hill, under the dome, far away from street lamps",
    ),
    Topic(
        "libraries, bindings, footnotes, manuscripts, novels, catalogues, bookshops, margins",
        "a librarian, a bookbinder, a careful translator, a student of old manuscripts",
        "binding a manuscript, translating a poem, copying a footnote, dusting the shelves, cataloguing a bequest",
        "learned, dusty, quotable, unfinished, rare",
        "in the reading room, between the tall shelves, at the bindery, in a bookshop without customers",
    ),
    Topic(
        "looms, woollen cloth, patterns, dyes, buttons, embroidered coats, spindles, carpets",
        "a weaver, a tailor, a dyer with blue hands, a seamstress",
        "spinning wool, dyeing a carpet, cutting a pattern, sewing a hem, threading a loom",
        "threadbare, colourful, coarse, delicate, hand-made",
        "at the loom, in the dye works, above the tailor's shop, near the drying racks",
    ),
    Topic(
        "violins, songs, metronomes, rehearsals, church organs, melodies, concert halls, brass bands",
        "a violinist, a conductor, a piano tuner, a choirmaster",
        "tuning a piano, practising scales, conducting a choir, rehearsing a fugue, repairing a violin",
        "melodious, rhythmic, out of tune, solemn, unhurried",
        "in the rehearsal hall, behind the organ, on the bandstand, in the front row",
    ),
    Topic(
        "clocks, springs, gears, church towers, pocket watches, pendulums, workbenches, tiny screws",
        "a clockmaker, a watch repairer, a toolmaker, a sexton",
        "winding a clock, filing a gear, balancing a pendulum, oiling a spring, replacing a dial",
        "punctual, intricate, silent, worn, reliable",
        "in the clock tower, at the workbench, by the shop window, under a magnifying glass",
    ),
    Topic(
        "mountain paths, glaciers, huts, avalanches, walking boots, passes, cairns, pine forests",
        "a mountain guide, a shepherd, a botanising curate, a hut warden",
        "climbing a ridge, marking a path, crossing a glacier, lighting a stove, waiting for the fog to lift",
        "steep, breathless, remote, slippery, magnificent",
        "above the tree line, at the mountain hut, on the northern slope, below the summit",
    ),
    Topic(
        "bees, hives, orchards, honeycombs, meadows, clover fields, swarms, jars of honey",
        "a beekeeper, a farmer, a schoolmaster who keeps bees, a honey merchant",
        "catching a swarm, building a hive, straining honey, planting clover, calming the bees",
        "golden, industrious, sticky, peaceful, well-kept",
        "at the edge of the meadow, near the hives, in the honey shed, across the clover",
    ),
    Topic(
        "railways, timetables, signals, steam engines, branch lines, waiting rooms, luggage vans, level crossings",
        "a stationmaster, a signalman, an engine driver, a traveller with too much luggage",
        "shunting wagons, firing an engine, reading a timetable, cleaning a signal lamp, inspecting the track",
        "delayed, sooty, well-oiled, provincial, impressive",
        "on the platform, in the signal box, at the junction, between two small stations",
    ),
)
SENTENCES = (
    "Most of what {person} learns about {things} is learned {place} and in no classroom.",
    "{Doing} looks easy until the day it has to be done {place}.",
    "There is a kind of {quality} work that nobody but {person} will ever notice.",
    "For years I believed that {things} were a matter of taste; these days I believe they are a matter of practice.",
    "{Person} once explained to me why {things} deserve more respect than {more}.",
    "Ask ten people about {things} and nine of them will talk about {more} instead.",
    "What seems {quality} to a beginner seems ordinary after a summer spent {place}.",
    "The trouble with {things} is that they reward attention only slowly.",
    "Nobody ever became famous for {doing}, and yet everything else depends on it.",
    "If I had to choose between {things} and {more}, I would hesitate longer than is polite.",
    "{Doing} is mostly a way of thinking with the hands.",
    "Books on the subject praise {things}, though their authors have rarely been seen {place}.",
    "A good deal of nonsense has been written about {more}, most of it by people who prefer {things}.",
    "It takes {person} about a decade to stop hurrying.",
    "One winter I watched {person} spend an entire afternoon {doing}, and at dusk the result was {quality}.",
    "The best {things} I ever saw were {quality} in a manner that photographs cannot show.",
    "When {things} fail, they fail quietly, and {person} is blamed.",
    "Some say that {doing} cannot be taught; I think it cannot be taught quickly.",
    "Whoever has tried {doing} {place} will understand why tempers are short there.",
    "{Things} are older than anyone supposes, and so are the quarrels about them.",
    "My grandmother had no patience with {more}, but she loved {things}.",
    "Progress came to {things} late, and it came through {person} rather than through a committee.",
    "There are two schools of opinion: one admires {things}, the other merely tolerates them.",
    "Anything {quality} is usually the fourth attempt.",
    "Money spent on {things} is never wasted, provided that one also learns {doing}.",
    "Visitors expect silence {place}, and they are surprised by the laughter.",
    "I have never met {person} who was not a little superstitious about {things}.",
    "The first rule of {doing} is to begin before one feels ready.",
    "Theories about {more} change every generation, while {things} stay much as they were.",
    "By noon the light {place} turns {quality}, and serious work has to pause.",
    "It would be unfair to call {things} useless simply because they are {quality}.",
    "After a while {person} stops measuring and starts to trust the eye.",
    "There used to be a prize for {doing}, until the same family had won it eleven times.",
    "Every argument about {things} ends, sooner or later, with a story about {more}.",
    "{Quality} things are seldom cheap, and cheap things are seldom {quality} for long.",
    "The secret, if there is one, lies in {doing} a little every evening.",
    "Children grasp {things} at once; adults need diagrams.",
    "A guild once tried to forbid {more}, which only made them more popular.",
    "We talked for hours {place}, chiefly about {things} and hardly at all about ourselves.",
    "To be {quality} without being dull is harder than it looks.",
    "Tools matter less than {person} will admit in public.",
    "Some mistakes in {doing} can be hidden, but none of them can be undone.",
    "In the end {things} outlast the fashions that were supposed to replace them.",
    "Failure {place} has a smell of its own, and one does not forget it.",
    "A neighbour of mine gave up {doing} and has regretted it ever since.",
    "The older handbooks treat {things} and {more} as a single craft.",
    "Perhaps that is why {person} so rarely agrees to be interviewed.",
    "One can admire {more} from a distance, whereas {things} demand company.",
    "Half of the skill consists in knowing which {things} to leave alone.",
    "Luck plays a larger part in {doing} than anybody likes to confess.",
    "Seen from outside, a day spent {doing} resembles idleness.",
    "Under pressure even {quality} habits give way, and then {things} suffer first.",
)
#: The number of sentences on one topic, before the next topic begins.
SENTENCES_PER_TOPIC = 7


def sentences(rng: random.Random) -> Iterator[str]:
    """The sentences of one essay after another."""
    forms = shuffled_forever(rng, SENTENCES)
    for number in shuffled_forever(rng, [str(number) for number in range(len(TOPICS))]):
        topic = TOPICS[int(number)]
        for _ in range(SENTENCES_PER_TOPIC):
            yield written(rng, next(forms), topic)


def written(rng: random.Random, form: str, topic: Topic) -> str:
    """A sentence: ``form``, which is one of ``SENTENCES``, with words of the topic."""
    things, more = rng.sample(topic.things.split(", "), 2)
    words = {"things": things, "more": more}
    for field, choices in (
        ("person", topic.people),
        ("doing", topic.doings),
        ("quality", topic.qualities),
        ("place", topic.places),
    ):
        words[field] = rng.choice(choices.split(", "))
    return form.format(**words, **{word.title(): text[0].upper() + text[1:] for word, text in words.items()})

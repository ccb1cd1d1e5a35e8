"""Hand-written matter of the bundled conversations: facts, code, and other languages.

`make_examples.py` composes rows from these tables. A *fact* is a question with a short answer, a
longer one, and a follow-up with its answer, so that one fact serves a single turn, a terse system
prompt and a second turn. A *snippet* is a small programming task. An *exchange* is one question
and answer in a language other than English. Nothing here depends on a date, a person or a place
that could change: the rows should be as true in ten years as today.
"""

from __future__ import annotations

from typing import NamedTuple


class Fact(NamedTuple):
    """A question, its answer in two lengths, and what one would ask next."""

    question: str
    short: str
    long: str
    next_question: str
    next_answer: str


FACTS = (
    Fact(
        "Why is the sky blue during the day?",
        "Because air scatters blue light more strongly than red.",
        "Sunlight contains all colours. Molecules of air scatter short wavelengths far more than "
        "long ones, roughly with the inverse fourth power of the wavelength, so blue light reaches "
        "your eye from every direction while red light mostly passes straight on.",
        "Then why are sunsets red?",
        "Near the horizon the light crosses much more air. Most of the blue has been scattered out "
        "of the beam before it reaches you, and what is left is orange and red.",
    ),
    Fact(
        "What makes bread dough rise?",
        "Yeast gives off carbon dioxide, which the gluten traps.",
        "Yeast feeds on the sugars in flour and gives off carbon dioxide and a little alcohol. "
        "Kneading has linked the flour's proteins into gluten, an elastic net that holds the gas "
        "as bubbles, so the dough swells.",
        "Can I leave the yeast out?",
        "Yes, but something else has to make gas: baking soda with an acid such as buttermilk, or "
        "a sourdough starter, which is wild yeast and bacteria that you keep alive yourself.",
    ),
    Fact(
        "How does a refrigerator keep food cold?",
        "A pumped refrigerant evaporates inside and condenses outside, carrying heat out.",
        "A compressor moves a refrigerant around a loop. Inside it evaporates and takes up heat; "
        "behind the cabinet it is compressed, condenses and gives that heat to the room. The "
        "motor's own work is added to it, which is why the back feels warm.",
        "Would an open fridge cool my kitchen?",
        "No. The heat it removes in front comes out again at the back together with the motor's "
        "work, so the kitchen as a whole becomes warmer.",
    ),
    Fact(
        "What is the difference between weather and climate?",
        "Weather is the present state of the air; climate is its statistics over decades.",
        "Weather describes the atmosphere at one place and time: temperature, wind, rain. Climate "
        "describes what is usual there, as averages and extremes over some thirty years. One cold "
        "morning is weather; how often such mornings occur is climate.",
        "Which of the two can be predicted further ahead?",
        "Single days are lost in chaos after about two weeks. Statistics can be projected much "
        "further, because they follow from energy balances rather than from exact beginnings.",
    ),
    Fact(
        "Why does ice float on water?",
        "Ice is about nine percent less dense than liquid water.",
        "When water freezes, its molecules arrange themselves in an open hexagonal lattice held by "
        "hydrogen bonds. The lattice takes more room than the liquid did, so the same mass has a "
        "larger volume and the ice floats with about a tenth of it above the surface.",
        "What would happen to lakes if ice sank?",
        "They would freeze from the bottom up and could freeze solid. Floating ice insulates the "
        "water below it, which is how fish get through the winter.",
    ),
    Fact(
        "What does a prime number have to do with encryption?",
        "Multiplying two large primes is easy, finding them again from the product is not.",
        "RSA publishes the product of two large primes. Anybody can use it to encrypt, but "
        "decrypting needs the primes themselves, and no fast method is known to recover them from "
        "the product on ordinary computers.",
        "How large are these primes?",
        "For a 2048-bit key each prime has about 1024 bits, that is roughly 308 decimal digits.",
    ),
    Fact(
        "How do noise-cancelling headphones work?",
        "They play the inverse of the noise, so that both waves cancel.",
        "A microphone hears the outside noise, a small processor computes the inverted wave, and "
        "the speaker plays it together with your music. Where crests meet troughs they cancel. "
        "It works best for steady, low sounds such as engines.",
        "Why not for voices?",
        "Voices change quickly and hold higher frequencies. The shorter the wave, the more exactly "
        "the inverse has to be timed, and a small delay makes it add instead of cancel.",
    ),
    Fact(
        "What is a hash function?",
        "A function that maps data of any length to a short, fixed-length value.",
        "A hash function maps input of any length to a value of fixed length. Equal inputs give "
        "equal values. A good one spreads different inputs evenly; a cryptographic one also makes "
        "it infeasible to find two inputs with the same value.",
        "Are collisions impossible, then?",
        "No, they must exist, because there are more inputs than values. The promise is only that "
        "nobody can find one with a realistic amount of work.",
    ),
    Fact(
        "Why do we have leap years?",
        "The Earth's year is about a quarter of a day longer than 365 days.",
        "The Earth needs about 365.2422 days for one orbit. An extra day every fourth year makes "
        "that 365.25, slightly too much, so century years are ordinary years unless they can be "
        "divided by 400. The mean is then 365.2425 days.",
        "How large is the remaining error?",
        "About 0.0003 days per year, which adds up to one day in some three thousand years.",
    ),
    Fact(
        "What is the Pythagorean theorem good for?",
        "It gives a distance from two perpendicular parts of it.",
        "In a right triangle the squares of the two short sides add up to the square of the long "
        "one. That turns differences in coordinates into distances, so it sits behind navigation, "
        "graphics, surveying and the way we measure errors in statistics.",
        "Give me an example with whole numbers.",
        "Sides 5 and 12: 25 + 144 = 169, and the square root of 169 is 13.",
    ),
    Fact(
        "How does a vaccine protect someone?",
        "It shows the immune system a harmless trait of the germ, so that it answers fast later.",
        "A vaccine presents a harmless part or a weakened form of a germ. The immune system makes "
        "antibodies and keeps memory cells. At a real infection these cells respond within days "
        "instead of weeks, often before one feels ill.",
        "Why do some need several doses?",
        "A first dose makes few memory cells. A second one, weeks later, picks those that bind "
        "best and multiplies them, so protection becomes stronger and lasts longer.",
    ),
    Fact(
        "What causes the tides?",
        "The Moon's pull, and to a lesser degree the Sun's, which differs across the Earth.",
        "The Moon pulls more strongly on the near side of the Earth than on its centre, and more "
        "weakly on the far side. The difference stretches the oceans into two bulges, and the "
        "Earth turns beneath them, so most coasts see two high tides a day.",
        "What are spring tides?",
        "At new and full moon the Sun's and the Moon's pulls line up and the range is largest. "
        "The name has nothing to do with the season.",
    ),
    Fact(
        "Why does salt melt ice on roads?",
        "Salty water freezes at a lower temperature than pure water.",
        "A thin film of water always lies on ice. Salt dissolves in it, and the brine has a lower "
        "freezing point, so more ice melts into it until the brine is too dilute or the road too "
        "cold.",
        "At which temperature does it stop working?",
        "Pure sodium chloride brine freezes at about -21 °C at the best mixture. In practice road "
        "salt does little below about -10 °C.",
    ),
    Fact(
        "What is the difference between a virus and a bacterium?",
        "A bacterium is a living cell; a virus needs a cell to copy itself.",
        "Bacteria are complete cells which feed, grow and divide by themselves. Viruses are "
        "genetic material in a coat; they have no metabolism and must enter a cell and use its "
        "machinery to be copied.",
        "Do antibiotics help against both?",
        "Only against bacteria. They attack things that viruses do not have, such as the bacterial "
        "cell wall.",
    ),
    Fact(
        "How does GPS find a position?",
        "It measures how long signals from several satellites took to arrive.",
        "Each satellite sends its position and the time of sending. The receiver multiplies the "
        "delays by the speed of light to get distances. Three would fix a point in space; a fourth "
        "is needed because the receiver's own clock is not exact.",
        "What has relativity to do with it?",
        "Satellite clocks run about 38 microseconds a day faster than those on the ground. Without "
        "correction, positions would drift by some ten kilometres a day.",
    ),
    Fact(
        "What does a compiler do?",
        "It translates a program into a form that a machine can run directly.",
        "A compiler reads source text, checks that it obeys the language's rules, builds a tree of "
        "its meaning, improves it without changing what it does, and writes machine code or some "
        "other lower-level language.",
        "How is an interpreter different?",
        "An interpreter carries out the program as it reads it. Many systems do both: they compile "
        "to a compact byte code and interpret that.",
    ),
    Fact(
        "Why do onions make you cry?",
        "Cut cells release an irritating gas that reaches your eyes.",
        "Cutting breaks the onion's cells and brings an enzyme together with sulphur compounds. "
        "They form a volatile substance that irritates the eyes, and tears wash it away.",
        "How can I avoid it?",
        "Chill the onion first, use a sharp knife, and cut the root end last; all three reduce the "
        "amount of gas that gets out.",
    ),
    Fact(
        "What is compound interest?",
        "Interest that is paid on earlier interest as well.",
        "With compound interest, each period's interest is added to the capital and earns interest "
        "itself. The capital grows as (1 + rate) to the power of the number of periods, slowly at "
        "first and then faster and faster.",
        "How long until the money doubles at 6 percent?",
        "Roughly 72 / 6 = 12 years by the rule of 72. The exact value is log 2 / log 1.06, about "
        "11.9 years.",
    ),
    Fact(
        "How do bees find their way back to the hive?",
        "They use the sun, polarised light, landmarks and smell.",
        "Bees keep a running account of direction and distance. The sun and the pattern of "
        "polarised light give the direction, the flow of the scenery past their eyes the distance, "
        "and landmarks and scent help over the last metres.",
        "And how do they tell the others about flowers?",
        "By the waggle dance: its angle to the vertical is the direction from the sun, and how "
        "long the waggle lasts says how far it is.",
    ),
    Fact(
        "What is the greenhouse effect?",
        "Some gases let sunlight in and hold back part of the heat going out.",
        "Sunlight warms the ground, which radiates infrared. Water vapour, carbon dioxide and "
        "methane absorb part of it and send some back down, so the surface is warmer than it would "
        "be without them, by about 33 degrees.",
        "So it is not simply bad?",
        "No: without it the mean temperature would be about -18 °C. The concern is that it is "
        "becoming stronger.",
    ),
    Fact(
        "Why do knives become blunt?",
        "Their fine edge bends, chips and wears away.",
        "An edge is only a few micrometres wide. Hard boards and bones bend it to the side, chip "
        "it, or wear it round. Honing straightens a bent edge; only sharpening, which takes steel "
        "away, brings back a worn one.",
        "Which board is gentlest?",
        "Wood or soft plastic. Glass, stone and ceramic are harder than the steel's edge.",
    ),
    Fact(
        "What is entropy?",
        "A measure of in how many ways a state can come about.",
        "Entropy counts, on a logarithmic scale, how many microscopic arrangements look the same "
        "from outside. States with more arrangements are more probable, so a closed system drifts "
        "towards higher entropy.",
        "Does life contradict that?",
        "No. Organisms are not closed: they build order inside and export more disorder as heat "
        "and waste.",
    ),
    Fact(
        "How do plants know which way is up?",
        "Heavy starch grains settle in their cells and show the direction of gravity.",
        "In the root tip some cells hold dense starch grains which sink to the bottom. Where they "
        "rest, the plant moves a growth hormone, and the cells on one side lengthen more than on "
        "the other, so the root bends down and the shoot up.",
        "What happens in weightlessness?",
        "The grains float, so roots lose that hint and follow light, water and touch instead.",
    ),
    Fact(
        "What is a checksum for?",
        "To notice that stored or sent data has changed.",
        "A checksum is a short value computed from data. Whoever reads the data computes it again "
        "and compares. If they differ, something changed on the way; if they agree, an accidental "
        "change is very improbable.",
        "Does it also protect against an attacker?",
        "A plain one does not, since the attacker can compute a new one. For that you need a "
        "signature or a keyed hash.",
    ),
)
"""Two dozen facts: the body of the plain conversations."""

PARTNERS = (
    "You are a patient teacher. Answer in one sentence.",
    "Answer as briefly as you can.",
    "You are an encyclopedia. One sentence, no opinions.",
    "Reply with the core of the answer only.",
)
"""System prompts that ask for the short answer."""

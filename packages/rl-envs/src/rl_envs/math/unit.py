"""Units of quantities, with their powers and their sizes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice, product

MAX_LENGTH = 80
"""Longest string that is read as a unit."""

_PREFIXES = {
    "k": ("kilo", Fraction(10**3)), "M": ("mega", Fraction(10**6)), "G": ("giga", Fraction(10**9)),
    "h": ("hecto", Fraction(100)), "d": ("deci", Fraction(1, 10)), "c": ("centi", Fraction(1, 100)),
    "m": ("milli", Fraction(1, 10**3)), "μ": ("micro", Fraction(1, 10**6)), "n": ("nano", Fraction(1, 10**9)),
}  # fmt: skip
# Each line has a symbol, its words, and its size in the units after it.
_METRIC = """
m meter,metre = 1 m
g gram,gramme,gm = 1 g
s second,sec = 1 s
L liter,litre,l,ℓ = 1/1000 m^3
N newton = 1000 g m s^-2
J joule = 1000 g m^2 s^-2
W watt = 1000 g m^2 s^-3
Pa pascal = 1000 g m^-1 s^-2
Hz hertz = 1 s^-1
A ampere,amp = 1 A
V volt = 1000 g m^2 s^-3 A^-1
Ω ohm = 1000 g m^2 s^-3 A^-2
C coulomb = 1 A s
F farad = 1/1000 g^-1 m^-2 s^4 A^2
T tesla = 1000 g s^-2 A^-1
mol mole = 1 mol
eV electronvolt = 1 eV
cal calorie = 1 cal
B byte = 8 bit
"""
_OTHER = """
min minute,mins = 60 s
h hour,hr,hrs = 3600 s
d day = 86400 s
wk week = 604800 s
mo month = 1 month
yr year = 1 year
decade = 10 year
century,centuries = 100 year
in inch,inches = 254/10000 m
ft foot,feet = 3048/10000 m
yd yard = 9144/10000 m
mi mile = 1609344/1000 m
t tonne = 1000000 g
lb lbs = 45359237/100000 g
oz ounce = 45359237/1600000 g
pound = 45359237/100000 g | 1 £
ton = 1 ton
cc = 1/1000000 m^3
ha hectare = 10000 m^2
acre = 40468564224/10000000 m^2
gal gallon = 1 gal
qt quart = 1/4 gal
pint,pt = 1/8 gal
cup = 1/16 gal
tbsp tablespoon = 1/256 gal
tsp teaspoon = 1/768 gal
mph = 1609344/3600000 m s^-1
kph,kmph,kmh = 1000/3600 m s^-1
rpm = 1/60 r s^-1
rev revolution = 1 r
K kelvin = 1 K
°C celsius = 1 °C
°F fahrenheit = 1 °F
° degree,deg = 1 ° | 1 °C | 1 °F
rad radian = 1 rad
arcmin arcminute = 1/60 °
arcsec arcsecond = 1/3600 °
' = 1/60 ° | 3048/10000 m
" = 1/3600 ° | 254/10000 m
bit = 1 bit
dB decibel = 1 dB
nmi knot = 1 knot
atm atmosphere = 1 atm
% percent,percentage,pct = 1 %
$ dollar,USD,US$,buck = 1 $
cent,¢ = 1/100 $ | 1/100 €
penny,pennies = 1/100 $ | 1/100 £
dime = 1/10 $
nickel = 1/20 $
€ euro,EUR = 1 €
£ GBP,quid = 1 £
pence = 1/100 £
¥ yen,JPY,yuan,CNY,RMB,元,円 = 1 ¥
₹ rupee,INR,Rs,rs,₨ = 1 ₹
₩ won,KRW = 1 ₩
₽ ruble,rouble,RUB = 1 ₽
₪ shekel,ILS = 1 ₪
₺ lira,TRY = 1 ₺
CHF franc = 1 CHF
peso = 1 peso
₫ dong = 1 ₫
₱ PHP = 1 ₱
₦ naira = 1 ₦
฿ baht = 1 ฿
kr krona,kronor,krone,kroner = 1 kr
zł zloty = 1 zł
R$ real,reais = 1 R$
"""
_COUNTED = """
acorn ad animal ant apple arrangement bag ball balloon banana bead bean bear bike bird block boat book bottle box boxes
boy brick bug bus buses cake calf calves can candle candy card car carrot case cat chair chicken child children chip
choice chocolate cigarette circle class classes clip clock coin combination comic computer cookie corner cow cube
cupcake customer cycle dancer desk die dice digit divisor dog doll donkey donut door dot dress dresses edge egg
element elephant employee envelope face fan farmer field fish fishes flower fly flies folder football fork friend fruit
function game gift girl glass glasses goal goat goldfish grape graph group guest guitar hat hen hit home horse house
integer item jar key kid kitten lady ladies lamp leaf leaves lemon letter line liner lollipop lunch lunches man marble
mask match matches meal member men message minion mistake model monkey mouse mice movie muffin multiple number
object option orange outcome outfit page painting pair-of-socks pancake paper part passenger path pattern pea peach
peaches pear pen pencil people period permutation person phone photo picture piece pie pizza plane plant plate player
plum point pole potato potatoes present problem program puppy puppies puzzle question rabbit rectangle ribbon ride
ring robot rock roll room root rose row run salad sandwich sandwiches seat seed sheep sheet shell shelf shelves shirt
shoe sibling side skirt slice snack sock solution song spoon square stamp star step sticker stick stone story stories
strawberry strawberries string student subset sweet sword table tablet task teacher team tent term test
ticket tile time tire toe token tomato tomatoes toy tooth teeth tourist train tree triangle trip truck value
vehicle vertex vertices vote walnut watermelon way wheel window woman women word worker zero zeros zeroes unit
"""
_DEGREES = re.compile(r"(?:°|\bdegrees?)\s*(c|f)(?:elsius|ahrenheit)?\b", re.IGNORECASE)
_AFTER = re.compile(
    r"(?:[ ,]*\b(?:in (?:total|all)|altogether|total|each|apiece|left|long|wide|tall|high|deep|thick|away|apart|old|"
    r"approx(?:imately)?|only))$"
)
"""Words after a unit that do not change it."""
_FACTORS = {
    "dozen": Fraction(12), "hundred": Fraction(100), "thousand": Fraction(10**3), "million": Fraction(10**6),
    "billion": Fraction(10**9), "trillion": Fraction(10**12), "half": Fraction(1, 2), "halves": Fraction(1, 2),
    "third": Fraction(1, 3), "fourth": Fraction(1, 4), "quarter": Fraction(1, 4), "fifth": Fraction(1, 5),
    "sixth": Fraction(1, 6), "seventh": Fraction(1, 7), "eighth": Fraction(1, 8), "ninth": Fraction(1, 9),
    "tenth": Fraction(1, 10), "twelfth": Fraction(1, 12), "hundredth": Fraction(1, 100),
    "thousandth": Fraction(1, 1000),
}  # fmt: skip
_ORDINALS = ("st", "nd", "rd", "th")
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}

SIGNS = "[°%$€£¥₹₩₽₪₺₫₱₦฿¢₨'\"]"
_WRAPPER = re.compile(r"\\text\s*\{([^{}]*)\}")
_TOKEN = re.compile(
    rf"\s*(?:(?P<name>°[CF](?![A-Za-z])|US\$|R\$|[^\W\d_]+|{SIGNS})\.?"
    r"|\^\s*(?:\{\s*(?P<braced>-?\d+)\s*\}|(?P<bare>-?\d))|(?P<over>/)|(?P<times>\\cdot|\\times|[*.])"
    r"|(?P<open>\()|(?P<close>\)))"
)
_Powers = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Unit:
    """A product of powers of basic units or counted things.

    Args:
        powers: Basic units and things with their exponents.
        size: The unit in these.
        count: Factor in words before it, as in `million dollars`.
    """

    powers: _Powers
    size: Fraction = Fraction(1)
    count: Fraction = Fraction(1)

    def is_counted(self) -> bool:
        """Return whether things are counted, which may be called several ways."""
        return any(name in _THINGS for name, _ in self.powers)


def _rows(table: str) -> Iterator[tuple[list[str], list[Unit]]]:
    for line in table.strip().splitlines():
        names, _, sizes = line.partition(" = ")
        units = []
        for size, *powers in map(str.split, sizes.split("|")):
            pairs = (power.partition("^") for power in powers)
            basic = tuple(sorted((name, int(power or 1)) for name, _, power in pairs))
            units.append(Unit(basic, Fraction(size)))
        yield re.split("[ ,]", names), units


def _plurals(name: str) -> list[str]:
    return [name] if name.endswith("s") or len(name) < 2 else [name, f"{name}s"]


def _table() -> tuple[dict[str, list[Unit]], dict[str, list[Unit]]]:
    """Return units by symbols, whose case counts, and by words in lower case."""
    symbols: dict[str, list[Unit]] = {}
    words: dict[str, list[Unit]] = {}
    for (symbol, *names), units in _rows(_METRIC):
        for prefix, (spoken, factor) in [("", ("", Fraction(1))), *_PREFIXES.items()]:
            scaled = [Unit(unit.powers, unit.size * factor) for unit in units]
            symbols.update(
                dict.fromkeys((prefix + symbol, *(prefix + each for each in names if len(each) == 1)), scaled)
            )
            words.update({each: scaled for name in names if len(name) > 1 for each in _plurals(spoken + name)})
    for names, units in _rows(_OTHER):
        for name in names:
            target = words if len(name) > 2 and name.islower() else symbols
            target.update(dict.fromkeys(_plurals(name), units))
    return symbols, words


_SYMBOLS, _WORDS = _table()
_THINGS = frozenset(_COUNTED.split())
_LETTERS = frozenset("mgshLlNJWVAKCFT")
"""Units of one letter that are read after a space; other letters are variables."""


def unwrapped(text: str) -> str:
    """Return a unit without the commands that set it upright."""
    return " ".join(_WRAPPER.sub(r" \1 ", text).split())


def read_unit(text: str, *, is_marked: bool = True) -> tuple[Unit, ...]:
    """Return the units that a string can be, such as both of `pound`; none if it is not a unit.

    Args:
        text: Unit as a response writes it, behind a number or an expression.
        is_marked: True if it is set as text; otherwise one letter must be the symbol of a common unit.
    """
    plain = re.sub(r"\bper cents?\b", "percent", unwrapped(text).strip(" .,"))
    plain = _DEGREES.sub(lambda found: f"°{found[1].upper()}", plain)
    text = _AFTER.sub("", plain)
    if (plain and not text) or plain in _ORDINALS:
        return (Unit(()),)
    factors = _factors(text, is_marked=is_marked) if 0 < len(text) <= MAX_LENGTH else []
    readings = product(*([(unit, exponent) for unit in units] for units, exponent in factors))
    return tuple(dict.fromkeys(map(_multiplied, islice(readings, 16)))) if factors else ()


def _factors(text: str, *, is_marked: bool) -> list[tuple[list[Unit], int]]:
    """Return the parts of a unit with their exponents; none if it has a part that is not a unit."""
    found: list[tuple[list[Unit], int]] = []
    position, sign, power, is_inside = 0, 1, 1, False
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return []
        position = match.end()
        name = (match["name"] or "").replace(" ", "")
        lower = name.lower()
        factor = sized(lower)
        if match["over"] or lower == "per" or (lower in ("a", "an") and found):
            sign = -1
        elif match["open"] or match["close"]:
            is_inside = match["open"] is not None
        elif lower in ("squared", "cubed") or (match["times"] is None and not name):
            exponent = _POWERS.get(lower) or int(match["braced"] or match["bare"])
            if not found:
                return []
            found[-1] = (found[-1][0], found[-1][1] * exponent)
        elif lower in _POWERS:
            power = _POWERS[lower]
        elif factor is not None:
            if any(unit.powers for units, _ in found for unit in units):
                return []
            found.append(([Unit((), count=factor)], 1))
        elif name:
            # Symbols are case-sensitive, words are not.
            if len(name) == 1 and name.isalpha() and not is_marked and name not in _LETTERS:
                return []
            units = _SYMBOLS.get(name) or _WORDS.get(lower)
            if units is None:
                singular = next((each for each in (lower, lower.removesuffix("s")) if each in _THINGS), "")
                if not singular:
                    return []
                units = [Unit(((singular, 1),))]
            found.append((units, sign * power))
            # "m/s kg" divides only by the seconds, "kg/(m s)" divides by both.
            power, sign = 1, sign if is_inside else 1
    return found


def _multiplied(factors: tuple[tuple[Unit, int], ...]) -> Unit:
    powers: Counter[str] = Counter()
    size = count = Fraction(1)
    for unit, exponent in factors:
        powers.update({name: power * exponent for name, power in unit.powers})
        size *= unit.size**exponent
        count *= unit.count
    return Unit(tuple(sorted((name, power) for name, power in powers.items() if power)), size, count)


def combined(prefix: tuple[Unit, ...], suffix: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Return the units of an amount with a sign of currency before it and a unit behind it."""
    if not prefix or any(unit.powers == prefix[0].powers for unit in suffix):
        return suffix
    return tuple(_multiplied(((prefix[0], 1), (unit, 1))) for unit in suffix)


def sized(word: str) -> Fraction | None:
    """Return the factor of `dozen`, `million` or `thirds`; None for other words."""
    return _FACTORS.get(word, _FACTORS.get(word.removesuffix("s")))

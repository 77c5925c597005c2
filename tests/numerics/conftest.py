"""The grids written anew in float64 NumPy: what the numerics are judged by."""

import numpy as np
import pytest

from qstate.numerics import FORMATS, Block, Minifloat, NoScale, PerTensor, Rank1, Storage

NARROW = [format for format in FORMATS.values() if format.bits < 32]
SCALINGS = [PerTensor(), Block(128), Block(128, "bfloat16"), Block(128, "power_of_two"), Rank1()]
SCALED = [
    Storage(format, scaling)
    for format in NARROW
    for scaling in SCALINGS
    if format.name != "bf16" and (isinstance(format, Minifloat) or scaling.scale != "power_of_two")
]


def minifloat(exponent_bits, mantissa_bits, *, bias, signed=True, specials=0, infinity=False):
    """Every code's number. The last ``specials`` codes of a sign are NaN, or infinity and NaN."""
    count = 2 ** (exponent_bits + mantissa_bits)
    field, mantissa = np.divmod(np.arange(count), 2**mantissa_bits)
    numbers = np.where(
        field == 0,
        np.ldexp(mantissa / 2**mantissa_bits, 1 - bias),
        np.ldexp(1 + mantissa / 2**mantissa_bits, field - bias),
    )
    if specials:
        numbers[-specials:] = np.nan
    if infinity:
        numbers[-specials] = np.inf
    return np.concatenate([numbers, -numbers]) if signed else numbers


def dynamic8(signed):
    """Dettmers' map: zeros that lead a byte choose a decade, the bits behind a part of it."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        edges = 0.1 + 0.9 * np.arange(parts + 1) / parts
        middles = 10.0 ** (decade - 6) * 0.5 * (edges[1:] + edges[:-1])
        numbers.extend(middles)
        if signed:
            numbers.extend(-middles)
    return np.sort(numbers)


# Printed in Li et al., arXiv 2309.01507, appendix E.2.
_UPPER_DYNAMIC4 = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]

BY_CODE = {
    "bf16": minifloat(8, 7, bias=127, specials=128, infinity=True),
    "f16": minifloat(5, 10, bias=15, specials=1024, infinity=True),
    "e4m3": minifloat(4, 3, bias=7, specials=1),
    "e5m2": minifloat(5, 2, bias=15, specials=4, infinity=True),
    "e2m1": minifloat(2, 1, bias=1),
    "ue2m2": minifloat(2, 2, bias=1, signed=False),
    "ue4m4": minifloat(4, 4, bias=7, signed=False),
    "int8": np.concatenate([np.arange(128.0), -np.arange(128.0)]),
    "dynamic8": dynamic8(signed=True),
    "udynamic8": dynamic8(signed=False),
    "dynamic4": np.array([-x for x in _UPPER_DYNAMIC4[::-1]] + [0.0, *_UPPER_DYNAMIC4, 1.0]),
    "ulinear4": np.arange(1, 17) / 16,
}


class Grid:
    """A format's finite numbers in rising order, and where other numbers lie among them."""

    def __init__(self, by_code):
        self.by_code = by_code
        codes = np.flatnonzero(np.isfinite(by_code))
        self.points, first = np.unique(by_code[codes], return_index=True)
        self._even = codes[first] % 2 == 0
        self.bottom, self.top = self.points[0], self.points[-1]

    def around(self, y):
        """The grid points about ``y`` (which saturates), and the fraction of the gap below it."""
        y = np.clip(np.asarray(y, np.float64), self.bottom, self.top)
        i = np.clip(np.searchsorted(self.points, y, side="right") - 1, 0, len(self.points) - 2)
        low, high = self.points[i], self.points[i + 1]
        return low, high, (y - low) / (high - low)

    def nearest(self, y):
        """The nearer grid point, ties to the even code."""
        low, high, fraction = self.around(y)
        even = self._even[np.searchsorted(self.points, low)]
        return np.where((fraction < 0.5) | ((fraction == 0.5) & even), low, high)

    def awkward(self):
        """float32 numbers about every grid point and every tie, of both signs."""
        numbers = np.concatenate([self.points, (self.points[1:] + self.points[:-1]) / 2])
        numbers = numbers[np.abs(numbers) < 3e38].astype(np.float32)
        up, down = np.float32(np.inf), np.float32(-np.inf)
        numbers = np.concatenate([numbers, np.nextafter(numbers, up), np.nextafter(numbers, down)])
        return np.concatenate([numbers, -numbers])


@pytest.fixture(scope="session")
def grid_of():
    """``grid_of(format)``: the oracle's `Grid` of a format, found by its name."""
    grids = {name: Grid(by_code) for name, by_code in BY_CODE.items()}
    return lambda format: grids[format.name]


@pytest.fixture(scope="session")
def wide():
    """float32 numbers of both signs and every exponent, subnormal to largest, about 50000."""
    rng = np.random.default_rng(0)
    mantissas = np.concatenate([[0, 1, 0x400000, 0x7FFFFF], rng.integers(0, 2**23, 96)])
    exponents = np.arange(255)
    bits = (exponents[:, None] << 23 | mantissas).astype(np.uint32).reshape(-1)
    return np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)


@pytest.fixture(params=NARROW, ids=str)
def format(request):
    """Every format but float32."""
    return request.param


@pytest.fixture(params=SCALED, ids=str)
def scaled(request):
    """Every format under every scaling that it can have; nearest, in the linear domain."""
    return request.param


@pytest.fixture(params=[*(Storage(format, NoScale()) for format in NARROW), *SCALED], ids=str)
def narrow(request):
    """As ``scaled``, and every format without a scale."""
    return request.param

"""XXH3 with seed 0, written from its published description in Python and numpy alone.

`format_reader` checks with it what docs/format.md says of checksums, so that not even the library
that we compute them with has to be believed. `xxh3_64` and `xxh3_128` give integers; the plain
arithmetic of short inputs is Python's, the accumulators of long ones are numpy's.
"""

from __future__ import annotations

import numpy as np

_MASK = (1 << 64) - 1
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MX_1, _MX_2 = 0x165667919E3779F9, 0x9FB21C651E98DF25
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_STRIPE, _BLOCK = 64, 1024  # bytes that are added at once; bytes between two scramblings


def _r32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _r64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _s64(at: int) -> int:
    return _r64(_SECRET, at)


def _swap(value: int, size: int) -> int:
    return int.from_bytes(value.to_bytes(size, "little"), "big")


def _rotate(value: int, bits: int, width: int) -> int:
    return (value << bits | value >> width - bits) & ((1 << width) - 1)


def _fold(a: int, b: int) -> int:
    product = a * b
    return product & _MASK ^ product >> 64


def _avalanche(value: int) -> int:
    value = (value ^ value >> 37) * _MX_1 & _MASK
    return value ^ value >> 32


def _avalanche_of_xxh64(value: int) -> int:
    value = (value ^ value >> 33) * _P64_2 & _MASK
    value = (value ^ value >> 29) * _P64_3 & _MASK
    return value ^ value >> 32


def _mix(data: bytes, at: int, secret: int) -> int:
    return _fold(_r64(data, at) ^ _s64(secret), _r64(data, at + 8) ^ _s64(secret + 8))


def _few(data: bytes) -> int:
    """One to three bytes and their number, as one word."""
    size = len(data)
    return data[0] << 16 | data[size >> 1] << 24 | data[-1] | size << 8


def xxh3_64(data: bytes) -> int:
    """The 64-bit checksum."""
    size = len(data)
    if size == 0:
        return _avalanche_of_xxh64(_s64(56) ^ _s64(64))
    if size <= 3:
        return _avalanche_of_xxh64(_few(data) ^ _r32(_SECRET, 0) ^ _r32(_SECRET, 4))
    if size <= 8:
        word = _r32(data, size - 4) + (_r32(data, 0) << 32) ^ _s64(8) ^ _s64(16)
        word ^= _rotate(word, 49, 64) ^ _rotate(word, 24, 64)
        word = word * _MX_2 & _MASK
        word = (word ^ (word >> 35) + size) * _MX_2 & _MASK
        return word ^ word >> 28
    if size <= 16:
        low = _r64(data, 0) ^ _s64(24) ^ _s64(32)
        high = _r64(data, size - 8) ^ _s64(40) ^ _s64(48)
        return _avalanche(size + _swap(low, 8) + high + _fold(low, high) & _MASK)
    if size <= 128:
        total = size * _P64_1
        for n in range((size - 1) // 32 + 1):
            total += _mix(data, 16 * n, 32 * n)
            total += _mix(data, size - 16 * (n + 1), 32 * n + 16)
        return _avalanche(total & _MASK)
    if size <= 240:
        first = sum(_mix(data, 16 * n, 16 * n) for n in range(8))
        total = _avalanche(size * _P64_1 + first & _MASK)
        total += sum(_mix(data, 16 * n, 16 * (n - 8) + 3) for n in range(8, size // 16))
        return _avalanche(total + _mix(data, size - 16, 119) & _MASK)
    return _merged(_accumulated(data), 11, size * _P64_1)


def xxh3_128(data: bytes) -> int:
    """The 128-bit checksum."""
    low, high = _halves(data)
    return high << 64 | low


def _halves(data: bytes) -> tuple[int, int]:
    size = len(data)
    if size == 0:
        return _avalanche_of_xxh64(_s64(64) ^ _s64(72)), _avalanche_of_xxh64(_s64(80) ^ _s64(88))
    if size <= 3:
        word = _few(data)
        turned = _rotate(_swap(word, 4), 13, 32)
        return (
            _avalanche_of_xxh64(word ^ _r32(_SECRET, 0) ^ _r32(_SECRET, 4)),
            _avalanche_of_xxh64(turned ^ _r32(_SECRET, 8) ^ _r32(_SECRET, 12)),
        )
    if size <= 8:
        word = _r32(data, 0) + (_r32(data, size - 4) << 32) ^ _s64(16) ^ _s64(24)
        product = word * (_P64_1 + (size << 2))
        low, high = product & _MASK, product >> 64 & _MASK
        high = high + (low << 1) & _MASK
        low ^= high >> 3
        low = (low ^ low >> 35) * _MX_2 & _MASK
        return low ^ low >> 28, _avalanche(high)
    if size <= 16:
        first, last = _r64(data, 0), _r64(data, size - 8)
        product = (first ^ last ^ _s64(32) ^ _s64(40)) * _P64_1
        low = (product & _MASK) + (size - 1 << 54) & _MASK
        last ^= _s64(48) ^ _s64(56)
        high = (product >> 64) + last + (last & 0xFFFFFFFF) * (_P32_2 - 1) & _MASK
        product = (low ^ _swap(high, 8)) * _P64_2
        high = (product >> 64) + high * _P64_2 & _MASK
        return _avalanche(product & _MASK), _avalanche(high)
    if size > 240:
        lanes = _accumulated(data)
        return _merged(lanes, 11, size * _P64_1), _merged(lanes, 117, ~(size * _P64_2))
    low, high = size * _P64_1 & _MASK, 0
    if size <= 128:
        for n in reversed(range((size - 1) // 32 + 1)):
            low, high = _mix_two(low, high, data, 16 * n, size - 16 * (n + 1), 32 * n)
    else:
        for at in range(0, 128, 32):
            low, high = _mix_two(low, high, data, at, at + 16, at)
        low, high = _avalanche(low), _avalanche(high)
        for at in range(128, size - 31, 32):
            low, high = _mix_two(low, high, data, at, at + 16, at - 125)
        low, high = _mix_two(low, high, data, size - 16, size - 32, 103)
    mixed = low * _P64_1 + high * _P64_4 + size * _P64_2 & _MASK
    return _avalanche(low + high & _MASK), -_avalanche(mixed) & _MASK


def _mix_two(
    low: int, high: int, data: bytes, one: int, other: int, secret: int
) -> tuple[int, int]:
    low = low + _mix(data, one, secret) & _MASK
    low ^= _r64(data, other) + _r64(data, other + 8) & _MASK
    high = high + _mix(data, other, secret + 16) & _MASK
    high ^= _r64(data, one) + _r64(data, one + 8) & _MASK
    return low, high


def _secrets(first: int, count: int) -> np.ndarray:
    """Eight words of the secret for each of some stripes, each eight bytes on from the last."""
    return np.array([[_s64(first + 8 * (n + lane)) for lane in range(8)] for n in range(count)],
                    np.uint64)  # fmt: skip


def _accumulated(data: bytes) -> list[int]:
    """The eight lanes after more than 240 bytes."""
    lanes = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], np.uint64)
    secrets, scrambling = _secrets(0, 16), _secrets(128, 1)[0]
    blocks = (len(data) - 1) // _BLOCK
    words = np.frombuffer(data, "<u8", blocks * _BLOCK // 8).reshape(blocks, 16, 8)
    for added in _added(words, secrets):
        lanes = lanes + added
        lanes = (lanes ^ lanes >> np.uint64(47) ^ scrambling) * np.uint64(_P32_1)
    stripes = (len(data) - 1 - blocks * _BLOCK) // _STRIPE
    rest = np.frombuffer(data, "<u8", 8 * stripes, blocks * _BLOCK).reshape(1, stripes, 8)
    last = np.frombuffer(data[-_STRIPE:], "<u8").reshape(1, 1, 8)
    lanes = lanes + _added(rest, secrets[:stripes])[0] + _added(last, _secrets(121, 1))[0]
    return [int(lane) for lane in lanes]


def _added(words: np.ndarray, secrets: np.ndarray) -> np.ndarray:
    """What the stripes of each block add to the lanes."""
    keyed = words ^ secrets
    products = (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))
    swapped = words.reshape(*words.shape[:2], 4, 2)[..., ::-1].reshape(words.shape)
    return (products + swapped).sum(axis=1, dtype=np.uint64)


def _merged(lanes: list[int], secret: int, start: int) -> int:
    pairs = (
        _fold(lanes[n] ^ _s64(secret + 8 * n), lanes[n + 1] ^ _s64(secret + 8 * n + 8))
        for n in range(0, 8, 2)
    )
    return _avalanche(start + sum(pairs) & _MASK)

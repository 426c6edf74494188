"""All randomness of a run, as a function of (seed, round, client, purpose).

A key is a 64-bit integer, and streams are hashes of (key, position). So a whole cohort draws in a few tensor
operations, a client's numbers do not depend on the rest of the cohort, and integers are the same on every device. Only
`normal` uses one `torch.Generator` per client, seeded by the key: it is the fastest way to long vectors of noise, and
its CPU and GPU streams differ.
"""

import hashlib
import math
import secrets
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LARGE = 1 << 16
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch shifts int64 arithmetically: clear the sign bits


def mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64: a bijection of 64-bit integers with pseudo-random output."""
    x = x + _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_FIRST)
    x = (x ^ _shift(x, 27)) * _signed(_SECOND)
    return x ^ _shift(x, 31)


def _mixed(x: int) -> int:
    """`mix` of one number, which takes Python a microsecond and torch fifty."""
    x = x + _GOLDEN & _MASK
    x = (x ^ x >> 30) * _FIRST & _MASK
    x = (x ^ x >> 27) * _SECOND & _MASK
    return x ^ x >> 31


def key(seed: int, *, purpose: str, round: int = 0, client: int | Tensor = 0) -> Tensor:
    """The key of a purpose; a tensor of clients gives a tensor of keys."""
    result = 0
    for part in (seed, word(purpose), round):
        result = _mixed(result ^ _mixed(part & _MASK))
    if isinstance(client, Tensor):
        return mix(mix(client.to(torch.int64)) ^ _signed(result))
    return torch.tensor(_signed(_mixed(result ^ _mixed(client & _MASK))))


def word(purpose: str) -> int:
    """A purpose as a number, for `fold` inside a loss: compiled code cannot hash strings."""
    return zlib.crc32(purpose.encode())


def fold(key: Tensor, purpose: str | int) -> Tensor:
    """A key for a purpose within a purpose."""
    return mix(key ^ (word(purpose) if isinstance(purpose, str) else purpose))


def folds(key: Tensor, purposes: Sequence[str]) -> Tensor:
    """[..., purposes]: `fold` for several purposes at once."""
    hashes = torch.tensor([word(purpose) for purpose in purposes]).to(key.device, non_blocking=True)
    return mix(key.unsqueeze(-1) ^ hashes)


def bits(key: Tensor, count: int) -> Tensor:
    """[..., count] pseudo-random int64 for keys [...]."""
    # Not SplitMix64's own sequence `key + position · golden`: compilers fold arithmetic on a position into the loop
    # index, which has 32 bits on a GPU and undefined overflow in C++. They do not fold xor.
    return mix(key.unsqueeze(-1) ^ torch.arange(count, device=key.device))


def uniform(key: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[..., count] uniform numbers in [0, 1) for keys [...], with as many random bits as `dtype` can hold."""
    width = _DIGITS[dtype]
    return _shift(bits(key, count), 64 - width).to(dtype) * 2.0**-width


def standard(key: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[..., count] standard normal numbers for keys [...], by the inverse distribution function: for few numbers inside
    a loss, where generators cannot be used. Their largest value depends on the digits of `dtype`."""
    tiny = torch.finfo(dtype).eps
    drawn: Tensor = 2**0.5 * torch.erfinv((2 * uniform(key, count, dtype) - 1).clamp(tiny - 1, 1 - tiny))
    return drawn


def permutations(key: Tensor, sizes: Tensor, width: int) -> Tensor:
    """[K, width]: row k starts with a permutation of 0..sizes[k]-1; the rest is unspecified."""
    past_end = torch.arange(width, device=key.device) >= sizes.unsqueeze(-1)
    return _shift(bits(key, width), 1).masked_fill_(past_end, torch.iinfo(torch.int64).max).argsort(dim=-1)


def sample(key: Tensor, population: int, count: int) -> Tensor:
    """`count` of 0..population-1 without replacement, ascending. In a large population repeated draws are rejected, so
    that the cost does not grow with the population."""
    if count >= population:
        return torch.arange(population)
    if population < _LARGE or count > population // 2:
        return bits(key, population).topk(count, largest=False).indices.sort().values
    chosen: dict[int, None] = {}
    draws = count
    while len(chosen) < count:
        draws *= 2
        chosen = dict.fromkeys((_shift(bits(key, draws), 1) % population).tolist())
    return torch.tensor(list(chosen)[:count]).sort().values


def generator(key: Tensor, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator seeded by one scalar key."""
    return torch.Generator(device).manual_seed(int(_shift(key, 1)))


@contextmanager
def seeded(seed: int, *, purpose: str) -> Iterator[None]:
    """Seed torch's global generator on the CPU by (seed, purpose) inside a `with` block and restore it afterwards. For
    weights of new networks, whose initialisers accept no generator."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(int(_shift(key(seed, purpose=purpose), 1)))
        yield


def normal(key: Tensor, *shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """[K, *shape] standard normal noise; row k depends on key[k] alone."""
    out = torch.empty(len(key), *shape, dtype=dtype, device=device)
    for row, one in zip(out, key, strict=True):
        row.normal_(generator=generator(one, device))
    return out


def system_key() -> Tensor:
    """A secret key [4] from the operating system, for `sealed_normal`."""
    return torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.int64)


def system_normal(*shape: int) -> Tensor:
    """Standard normal noise in float64 that nobody can predict or repeat."""
    return sealed_normal(system_key(), b"", math.prod(shape)).view(shape)


def sealed_normal(key: Tensor, context: bytes, count: int) -> Tensor:
    """[count] standard normal noise in float64 that cannot be predicted without the whole key; another `context` gives
    other noise. It is a hash stream (SHAKE-256), made on the CPU for every device: torch's generators use at most 32
    bits of a seed there, and these can be searched."""
    words = key.cpu().contiguous().numpy().tobytes() + context
    stream = torch.frombuffer(bytearray(hashlib.shake_256(words).digest(8 * count)), dtype=torch.int64)
    noise: Tensor = torch.special.ndtri((_shift(stream, 12).double() + 0.5) * 2.0**-52)
    return noise

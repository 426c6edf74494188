"""Audio as features: FLAC to a waveform, and a waveform to log-mel bands."""

import io
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from consilience.core.errors import ConfigError, DataError

FULL_SCALE = 32_700  # of 16 bits: samples at least so large count as clipped
_MAGIC, _LEAST, _FLOOR = b"fLaC", 20.0, 1e-10


def waveform(encoded: bytes | None, what: str, rate: int, clipped: float) -> Tensor:
    """The samples [N] of a FLAC file in [−1, 1]; a DataError that begins with `what` for audio that cannot be used."""
    try:
        import soundfile  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError("audio needs soundfile, which is missing: pip install 'consilience[speech]'") from error
    if not encoded:
        raise DataError(f"{what} has no audio: remove the row, or get the file again")
    if not encoded.startswith(_MAGIC):
        raise DataError(f"{what} is not FLAC (it begins with {encoded[:4]!r}): convert it, for example by ffmpeg")
    try:
        samples, found = soundfile.read(io.BytesIO(encoded), dtype="int16", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise DataError(f"{what} is damaged FLAC ({str(error).rstrip('.')}): get the file again") from error
    if found != rate:
        raise DataError(f"{what} is sampled at {found:,} Hz, and the features are for {rate:,} Hz: resample it")
    if samples.shape[1] != 1:
        raise DataError(f"{what} has {samples.shape[1]} channels: mix them to one")
    wave = torch.from_numpy(samples[:, 0])
    share = float((wave.int().abs() >= FULL_SCALE).double().mean()) if len(wave) else 0.0
    if share > clipped:
        raise DataError(
            f"{what} is clipped: {share:.1%} of its samples are at full scale, and {clipped:.1%} are accepted: record "
            "it at a lower level, remove the row, or pass a larger share as clipped="
        )
    return wave / 32_768


def log_mel(wave: Tensor, rate: int = 16_000, bands: int = 40, window: float = 0.025, hop: float = 0.01) -> Tensor:
    """Logarithms of the power in `bands` mel bands [T, bands] of samples [N], T = 1 + ⌊(N − window) / hop⌋: Hann
    windows of `window` seconds, one every `hop` seconds."""
    length, step = round(window * rate), round(hop * rate)
    size = 1 << (length - 1).bit_length()
    hann = torch.hann_window(length, dtype=wave.dtype)
    padded = F.pad(wave, ((size - length) // 2, size - length - (size - length) // 2))  # no frame beyond the samples
    spectrum = torch.stft(padded, size, step, length, hann, center=False, return_complex=True)
    power = spectrum.abs().square()
    return (mel_filters(rate, size, bands).to(power) @ power).clamp_min(_FLOOR).log().T


@cache
def mel_filters(rate: int, size: int, bands: int) -> Tensor:
    """Triangles [bands, size / 2 + 1] whose corners are evenly spaced from 20 Hz to half the rate on the mel scale,
    m = 2595 log₁₀(1 + f / 700)."""
    ends = 2595 * torch.log10(1 + torch.tensor([_LEAST, rate / 2], dtype=torch.float64) / 700)
    corners = 700 * (10 ** (torch.linspace(float(ends[0]), float(ends[1]), bands + 2, dtype=torch.float64) / 2595) - 1)
    at = torch.linspace(0, rate / 2, size // 2 + 1, dtype=torch.float64)
    low, peak, high = (corners[i : i + bands, None] for i in range(3))
    return torch.minimum((at - low) / (peak - low), (high - at) / (high - peak)).clamp_min(0)

"""Descriptions of GPUs, to estimate how long operations take on one that is not present.

The figures are those of public data sheets: dense matrix products, in float32 without TF32. No program reaches them.
The shares that are assumed to be reached, `compute_share` of the operations and `bandwidth_share` of the bytes, are
about those of large matrix products and large element-wise operations in eager PyTorch: times on paper serve to compare
plans, and are no promise. Memory is counted in units of 10^9 bytes although cards have about 7% more, which is left for
the driver, libraries and what the allocator cannot use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowtide.errors import InputError

_RATES = {
    torch.float64: "float64",
    torch.complex128: "float64",
    torch.float16: "float16",
    torch.bfloat16: "float16",
    torch.float8_e4m3fn: "float8",
    torch.float8_e5m2: "float8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or any other device that runs operations.

    Attributes:
        name: its name in reports.
        memory: bytes that a program may use.
        bandwidth: the most bytes that its memory reads or writes in a second.
        float32, float16, float64, float8: the most floating-point operations in a second, in matrix products of such
            numbers. `float16` applies to bfloat16 too; `float8` is None if the device has none, and such products then
            take as long as in float16.
        start: seconds to start one operation.
        compute_share, bandwidth_share: the shares of these figures that are reached.
    """

    name: str
    memory: int
    bandwidth: float
    float32: float
    float16: float
    float64: float
    float8: float | None = None
    start: float = 5e-6
    compute_share: float = 0.6
    bandwidth_share: float = 0.8

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "float32", "float16", "float64", "compute_share", "bandwidth_share"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name}={getattr(self, name)!r} of a device has to be above 0")
        if self.start < 0 or (self.float8 is not None and self.float8 <= 0):
            raise InputError(f"start={self.start!r} and float8={self.float8!r} of a device must not be below 0")

    def seconds(self, flops: float, moved: float, dtype: torch.dtype) -> float:
        """The seconds of an operation with `flops` floating-point operations and `moved` bytes read and written.

        The slower of the two counts, because a GPU computes while it moves data.
        """
        rate: float = getattr(self, _RATES.get(dtype, "float32")) or self.float16
        return self.start + max(flops / (rate * self.compute_share), moved / (self.bandwidth * self.bandwidth_share))


H100 = Device(
    name="H100 SXM 80 GB",
    memory=80 * 10**9,
    bandwidth=3.35e12,
    float32=66.9e12,
    float16=989.4e12,
    float64=66.9e12,
    float8=1978.9e12,
)
A100 = Device(
    name="A100 SXM 80 GB", memory=80 * 10**9, bandwidth=2.039e12, float32=19.5e12, float16=312e12, float64=19.5e12
)
RTX4090 = Device(
    name="GeForce RTX 4090",
    memory=24 * 10**9,
    bandwidth=1.008e12,
    float32=82.6e12,
    float16=165.2e12,
    float64=1.29e12,
    float8=330.3e12,
)
_PRESETS: dict[str, Device] = {"h100": H100, "a100": A100, "rtx4090": RTX4090}


def device_of(device: Device | str) -> Device:
    """The device itself, or the preset of that name in any spelling: "h100", "H100", "RTX 4090"."""
    if isinstance(device, Device):
        return device
    found = _PRESETS.get(device.lower().replace(" ", "").replace("-", "")) if isinstance(device, str) else None
    if found is None:
        raise InputError(f"device={device!r} is not known; give one of {', '.join(_PRESETS)}, or a Device")
    return found

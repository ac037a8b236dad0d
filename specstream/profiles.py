"""Device profiles: listed ones, so that rounds can be planned for a GPU that is not there, and a device's own."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from specstream.closest import did_you_mean
from specstream.cost import DeviceProfile
from specstream.errors import InvalidOption
from specstream.profile_cache import measured_profile

GB = 10**9
"""Bytes, as data sheets count them; of most devices torch sees a little more."""
GB_PER_S = 1000
"""In bytes a microsecond."""
TFLOPS = 10**6
"""In operations a microsecond."""

# What a program gets of a data sheet's rates. Measured on an H200 (benchmarks/results/h200.json) unless noted.

PCIE_5 = 55.1 * GB_PER_S
"""Copies one way, of the 63.0 GB/s of 16 lanes (32 GT/s each, 128 bits of data in 130): 0.87. Data sheets state both
ways together, "128 GB/s"."""
PCIE_4 = 26.0 * GB_PER_S
"""Of 31.5 GB/s, likewise: 0.83. Read, not measured here: nvbandwidth reports 26.3 to an RTX 4090 and 26.8 from it
(github.com/NVIDIA/nvbandwidth/issues/15), 24.8 to an A100-SXM4-80GB (forums.developer.nvidia.com/t/352186)."""
NVLINK_C2C_TO_DEVICE = 0.77 * 450 * GB_PER_S
"""Of 450 GB/s one way ("900 GB/s" is both). Read, not measured here: nvbandwidth's copy engine reports 346 GB/s to a
GH200, and about 15 % less from it (github.com/NVIDIA/nvbandwidth/issues/23)."""
NVLINK_C2C_TO_HOST = 0.67 * 450 * GB_PER_S
MEMORY_SHARE = 4.15 / 4.8
"""A large copy in the H200's own memory, reads and writes together: 4.10 to 4.21 TB/s of 4.8."""
TENSOR_SHARE = 0.475
"""A prompt of 32,768 tokens of Qwen3-8B in parts of 8192, all on the device: 772 TFLOP, calculated, in 1.64 s, which is
470 of the H200's 989.5 TFLOP/s. Other devices are taken to get the same share."""
ALIKE_NAMES = 0.8
"""By difflib, of a misspelt name: "rtx4090" is 0.93 alike "rtx-4090"; "rtx-2080", another device, 0.75."""
LAUNCH_US = 5
"""A task of a captured graph, some kernels of which are small."""


def _gpu(
    name: str,
    torch_names: tuple[str, ...],
    *,
    gigabytes: int,
    memory_gb_per_s: float,
    tflops: float,
    to_device: float,
    to_host: float,
    source: str,
) -> DeviceProfile:
    """What a program gets of a data sheet's figures; `tflops` are of dense matrices."""
    return DeviceProfile(
        name=name,
        torch_names=torch_names,
        device_memory_bytes=gigabytes * GB,
        host_to_device_bytes_per_us=to_device,
        device_to_host_bytes_per_us=to_host,
        memory_bytes_per_us=MEMORY_SHARE * memory_gb_per_s * GB_PER_S,
        flops_per_us=TENSOR_SHARE * tflops * TFLOPS,
        launch_us=LAUNCH_US,
        source=source,
    )


H200 = _gpu(
    "h200",
    ("NVIDIA H200",),
    gigabytes=141,
    memory_gb_per_s=4800,
    tflops=989.5,
    to_device=PCIE_5,
    to_host=PCIE_5,
    source="NVIDIA H200 data sheet, SXM: 141 GB, 4.8 TB/s, bf16 1,979 TFLOPS with sparsity, half of that dense, PCIe "
    "Gen5 128 GB/s both ways",
)
"""The device that the shares above were measured on; one that is neither listed nor to be measured is taken for one."""

CPU_PROFILE = DeviceProfile(
    name="cpu",
    torch_names=(),
    device_memory_bytes=None,
    host_to_device_bytes_per_us=5 * GB_PER_S,
    device_to_host_bytes_per_us=5 * GB_PER_S,
    memory_bytes_per_us=5 * GB_PER_S,
    flops_per_us=math.inf,
    launch_us=30,
    source="two cores of a server, in round figures: host and device tier are the same memory; what it computes is not "
    "reckoned with",
)

PROFILES = (
    H200,
    _gpu(
        "h100",
        ("NVIDIA H100 80GB HBM3",),
        gigabytes=80,
        memory_gb_per_s=3350,
        tflops=989.5,
        to_device=PCIE_5,
        to_host=PCIE_5,
        source="NVIDIA H100 data sheet, SXM: 80 GB, 3.35 TB/s, bf16 1,979 TFLOPS with sparsity, half of that dense, "
        "PCIe Gen5 128 GB/s both ways",
    ),
    _gpu(
        "gh200",
        ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"),
        gigabytes=96,
        memory_gb_per_s=4000,
        tflops=989.5,
        to_device=NVLINK_C2C_TO_DEVICE,
        to_host=NVLINK_C2C_TO_HOST,
        source="NVIDIA GH200 Grace Hopper data sheet, HBM3: 96 GB, 4 TB/s, bf16 1,979 TFLOPS with sparsity, half of "
        "that dense, NVLink-C2C 900 GB/s both ways; the size in torch's name is that of the CPU's memory",
    ),
    _gpu(
        "a100-80g",
        ("NVIDIA A100-SXM4-80GB",),
        gigabytes=80,
        memory_gb_per_s=2039,
        tflops=312,
        to_device=PCIE_4,
        to_host=PCIE_4,
        source="NVIDIA A100 data sheet, 80GB SXM: 80 GB, 2,039 GB/s, bf16 312 TFLOPS dense (624 with sparsity), PCIe "
        "Gen4 64 GB/s both ways",
    ),
    _gpu(
        "l40s",
        ("NVIDIA L40S",),
        gigabytes=48,
        memory_gb_per_s=864,
        tflops=362.05,
        to_device=PCIE_4,
        to_host=PCIE_4,
        source="NVIDIA L40S data sheet: 48 GB with ECC, 864 GB/s, bf16 362.05 TFLOPS dense (733 with sparsity), PCIe "
        "Gen4 x16 64 GB/s both ways",
    ),
    _gpu(
        "rtx-5090",
        ("NVIDIA GeForce RTX 5090",),
        gigabytes=32,
        memory_gb_per_s=1792,
        tflops=209.5,
        to_device=PCIE_5,
        to_host=PCIE_5,
        source="NVIDIA RTX Blackwell architecture white paper: 32 GB, 1,792 GB/s, bf16 with fp32 accumulation 209.5 "
        "TFLOPS dense (419 with sparsity), PCIe Gen5 x16",
    ),
    _gpu(
        "rtx-4090",
        ("NVIDIA GeForce RTX 4090",),
        gigabytes=24,
        memory_gb_per_s=1008,
        tflops=165.2,
        to_device=PCIE_4,
        to_host=PCIE_4,
        source="NVIDIA Ada architecture white paper: 24 GB, 1,008 GB/s, bf16 with fp32 accumulation 165.2 TFLOPS dense "
        "(330.4 with sparsity), PCIe Gen4 x16",
    ),
    _gpu(
        "rtx-3090",
        ("NVIDIA GeForce RTX 3090",),
        gigabytes=24,
        memory_gb_per_s=936,
        tflops=71,
        to_device=PCIE_4,
        to_host=PCIE_4,
        source="NVIDIA Ampere GA102 architecture white paper: 24 GB, 936 GB/s, bf16 with fp32 accumulation 71 TFLOPS "
        "dense (142 with sparsity), PCIe Gen4 x16",
    ),
    CPU_PROFILE,
)


def find_profile(name: str) -> DeviceProfile | None:
    """The profile of a short name or of torch's name of a device, in upper or lower case."""
    for profile in PROFILES:
        if name.lower() in (profile.name, *map(str.lower, profile.torch_names)):
            return profile
    return None


def device_profile(device: torch.device) -> DeviceProfile:
    """The profile of a device of this machine, by which an engine on it is planned.

    A CUDA device's is measured, and the listed one if that fails; a CPU's figures are fixed.
    """
    if device.type != "cuda":
        return CPU_PROFILE
    measured = measured_profile(device)
    return cuda_profile(torch.cuda.get_device_name(device)) if measured is None else with_listed_name(measured)


def with_listed_name(measured: DeviceProfile) -> DeviceProfile:
    """A measured profile with the short name of its device, if that is listed."""
    listed = find_profile(measured.name)
    return measured if listed is None else replace(measured, name=listed.name)


def cuda_profile(torch_name: str) -> DeviceProfile:
    """The listed profile of a CUDA device that torch calls so: the H200's if there is none."""
    return find_profile(torch_name) or H200


def named_profile(option: str, name: str) -> DeviceProfile:
    """The profile that a user names.

    Raises:
        InvalidOption: there is none of that name; the text lists them.
    """
    profile = find_profile(name)
    if profile is None:
        names = [listed.name for listed in PROFILES]
        raise InvalidOption(option, name, ", ".join(names), did_you_mean(name, [*names, "auto"], ALIKE_NAMES))
    return profile

"""What kernels add to a call in which they follow each other."""

from __future__ import annotations

import pytest

from relax_fusion.estimator import Prediction
from relax_fusion.estimator.sequence import EARLY_S, Part, added_s, other_s
from relax_fusion.hardware import device

GPU, CPU = device("h200"), device("cpu")
RATE = GPU.tensor_float16_flops_per_s


def part(seconds: float, count: int = 1, flops: float = 0.0) -> Part:
    return Part(Prediction(seconds, 0.0, flops, 1, "compute"), count, RATE)


def test_a_processor_runs_one_after_the_other() -> None:
    assert added_s([part(2e-5, 3), part(1e-6)], CPU) == [pytest.approx(6e-5), 1e-6]


def test_launches_overlap_and_kernels_begin_early() -> None:
    long, short = added_s([part(3e-5, 4), part(4e-6, 2)], GPU)
    assert long == pytest.approx(4 * (3e-5 - GPU.launch_s - EARLY_S)) and short == 0.0


def test_tensor_cores_that_multiply_for_long_slow_down_together() -> None:
    one = part(1e-4, flops=RATE * 8e-5)
    (alone,), each = added_s([one], GPU), added_s([one] * 40, GPU)
    assert alone < 1e-4 < min(each) <= (1 + GPU.slowed_part) * 1e-4
    memory = added_s([part(1e-4)] * 40, GPU)  # whose tensor cores are idle
    assert memory == [alone] * 40


def test_another_kernel_adds_what_it_moves() -> None:
    small, large = other_s(0, 0.0, GPU), other_s(4.8e9, 0.0, GPU)
    assert 1e-6 < small < GPU.launch_s < 1e-3 < large
    assert other_s(0, 1.0, GPU) > 1 and other_s(0, 0.0, CPU) == CPU.launch_s

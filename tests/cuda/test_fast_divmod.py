"""FastDivmod against / and %, compiled for the host from the header that the kernels use."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).parents[2] / "csrc" / "fast_divmod.h"
COMPILER = shutil.which("c++") or shutil.which("g++")

# Counts the dividends with a wrong quotient or remainder for one divisor. The dividends are both
# ends of the range, multiples of the divisor and their neighbours, and random numbers.
SOURCE = """
#include "fast_divmod.h"
extern "C" uint64_t count_wrong(uint32_t divisor, uint32_t last, uint32_t samples) {
  const pruned_rnnt::FastDivmod fast(divisor);
  uint64_t count = 0;
  const auto check = [&](uint64_t dividend) {
    if (dividend > last) return;
    const uint32_t x = static_cast<uint32_t>(dividend);
    const pruned_rnnt::Division division = fast.divmod(x);
    count += division.quotient != x / divisor || division.remainder != x % divisor;
    count += fast.divide(x) != x / divisor;
  };
  const uint64_t multiples = uint64_t(last) / divisor + 1;
  const uint64_t stride = multiples / samples + 1;
  for (uint64_t k = 0; k < multiples; k += stride) {
    for (int64_t offset = -1; offset <= 1; ++offset) check(k * divisor + offset);
  }
  uint64_t random = divisor;
  for (uint32_t i = 0; i < samples; ++i) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    check(random >> 32);
  }
  for (uint64_t i = 0; i < 64; ++i) {
    check(i);
    check(last - i);
    check(multiples * divisor - i);
  }
  return count;
}
"""

LAST_INT32 = 2**31 - 1
LAST_UINT32 = 2**32 - 1


def divisors() -> list[int]:
    """Small ones; powers of two and their neighbours; powers of primes; those near the ends of both
    ranges; those whose reciprocal has the largest remainder; arbitrary large ones."""
    powers = [2**k + near for k in range(32) for near in (-1, 0, 1)]
    primes = [p**k for p in (3, 5, 7, 641, 65537) for k in range(1, 21)]
    ends = [LAST_INT32 - k for k in range(5)] + [LAST_UINT32 - k for k in range(5)]
    large = [1_000_003 * k + 12_345 for k in range(1, 2000, 37)]
    found = {*range(1, 2049), *powers, *primes, *ends, *large, 6_700_417, 715_827_883}
    return sorted(d for d in found if 1 <= d <= LAST_UINT32)


@pytest.fixture(scope="module")
def count_wrong(tmp_path_factory):
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("fast_divmod")
    (folder / "check.cpp").write_text(SOURCE)
    command = [COMPILER, "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{HEADER.parent}"]
    subprocess.run(
        [*command, str(folder / "check.cpp"), "-o", str(folder / "check.so")], check=True
    )
    function = ctypes.CDLL(str(folder / "check.so")).count_wrong
    function.restype = ctypes.c_uint64
    function.argtypes = [ctypes.c_uint32] * 3
    return function


@pytest.mark.parametrize("last", [LAST_INT32, LAST_UINT32])
def test_quotients_and_remainders(count_wrong, last: int) -> None:
    failures = [d for d in divisors() if count_wrong(d, last, 2000) != 0]
    assert failures == []


def test_small_divisors_with_all_small_dividends(count_wrong) -> None:
    assert [d for d in range(1, 300) if count_wrong(d, 70_000, 70_001) != 0] == []

"""qevict_bench: a test bench for key-value cache eviction and quantization, bounded in bytes."""

from __future__ import annotations

__version__ = "0.1.0"

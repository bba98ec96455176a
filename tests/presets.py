"""Policies whose fields tests know."""

from __future__ import annotations

from typing import Any

from methods.qevict import QEvict


def qevict(**fields: Any) -> QEvict:
    """QEvict at the paper's sizes: windows of 8 with 16-bit parameters, q 0.7; other fields as their defaults."""
    return QEvict(**({"window": 8, "q": 0.7, "key_params": "window"} | fields))

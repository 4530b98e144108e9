"""Logins as web requests carry them."""

from __future__ import annotations

import base64
from typing import Any


def basic_auth(login: Any) -> str:
    """Make the Authorization header of (user, password), a tuple or aiohttp's BasicAuth."""
    text = base64.b64encode(f"{login[0]}:{login[1]}".encode()).decode()
    return f"Basic {text}"

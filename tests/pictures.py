"""Encoded images."""

from __future__ import annotations

import io
from typing import Any


def encoded(pixels: Any, form: str = "PNG", **options: Any) -> bytes:
    """An array of pixels as the content of an image file."""
    from PIL import Image as Pillow  # not at the top: ranks import what imports this module

    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, form, **options)
    return file.getvalue()

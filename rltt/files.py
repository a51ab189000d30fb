"""Files that appear whole or not at all."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, never sees half of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)

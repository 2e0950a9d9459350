"""Where the repository and the files of tests lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
"""Worker programs that tests start as processes of their own."""
STORED = Path(__file__).parent / "stored"
"""What earlier releases have stored."""

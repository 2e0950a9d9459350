"""Pytrees of sharded arrays; see ``sharded_jax_cases.py``."""

from pathlib import Path

from tests.support.isolated import run_cases


def test_sharded_jax_cases_pass_in_a_process_of_their_own() -> None:
    run_cases(Path(__file__).with_name("sharded_jax_cases.py"))

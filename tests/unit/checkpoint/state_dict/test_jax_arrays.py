"""Arrays of JAX in a state; see ``jax_arrays_cases.py``."""

from pathlib import Path

from tests.support.isolated import run_cases


def test_jax_cases_pass_in_a_process_of_their_own() -> None:
    run_cases(Path(__file__).with_name("jax_arrays_cases.py"))

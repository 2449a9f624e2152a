"""Settings of the evaluation that go together or not, without loading anything."""

from decode.settings import EvalConfig


def test_the_doctor_needs_no_more_than_a_checkpoint() -> None:
    """Defaults that are made afresh (engine_args) are no settings of the user's."""
    assert EvalConfig(ckpt="drafter", doctor=True).doctor

"""The age of a running step: what tells an engine that hangs from one that compiles."""

from paged_jax.step_clock import StepClock


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a69_a_step_ages_while_it_runs_and_not_while_it_compiles():
    time = Time()
    clock = StepClock(time)
    assert clock.age_s == 0
    with clock.running():
        time.now += 5
        assert clock.age_s == 5
        with clock.compiling():
            time.now += 1000
            assert clock.age_s == 0
        assert clock.age_s == 0
        time.now += 2
        assert clock.age_s == 2
    time.now += 50
    assert clock.age_s == 0


def test_compiling_outside_of_a_step_starts_none():
    time = Time()
    clock = StepClock(time)
    with clock.compiling():
        pass
    time.now += 9
    assert clock.age_s == 0

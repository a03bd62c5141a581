"""Which loader feeds the training, among all that a program iterates over."""

from __future__ import annotations

import pytest

from star_hvd.input.feeding import Feeding

TRAINING, OTHER, LATER = 3, 4, 5


class Program:
    """What a program does: batches of loaders, and gradients."""

    def __init__(self) -> None:
        self.found: list[int] = []
        self.mixed: list[int] = []
        self.made = 0  # Steps.
        self.feeding = Feeding(self.found.append, self.mixed.append, lambda: self.made)

    def step(self, *loaders: int, weight: float = 1.0) -> float:
        """Take a batch of each loader; return the weight of the gradient that follows."""
        for loader in loaders:
            self.feeding.note(loader, weight)
        return self.feeding.weight(1)


@pytest.fixture
def program() -> Program:
    return Program()


def test_a_batch_weighs_nothing_special_without_a_loader(program: Program) -> None:
    assert program.feeding.weight(1) == 1.0 and program.feeding.largest == 0.0 and program.feeding.loader == -1


def test_the_weight_of_a_batch_ends_with_its_loop(program: Program) -> None:
    """Training on batches of another loader, with a validation that ends in a short batch."""
    program.feeding.begin(OTHER)
    program.feeding.note(OTHER, 1.0)
    program.feeding.note(OTHER, 0.25)
    program.feeding.end(OTHER)
    assert program.feeding.weight(1) == 1.0
    assert program.found == [] and program.feeding.loader == -1


def test_what_the_user_gave_ends_with_the_loop_too(program: Program) -> None:
    program.feeding.begin(TRAINING)
    program.feeding.note(TRAINING, 0.5)
    program.feeding.weigh(100.0)
    assert program.feeding.weight(1) == 100.0
    program.feeding.end(TRAINING)
    assert program.feeding.weight(1) == 1.0
    program.feeding.weigh(30.0)
    assert program.feeding.weight(1) == program.feeding.weight(1) == 30.0, "of two optimizers, say"


def test_a_validation_in_the_middle_changes_nothing(program: Program) -> None:
    feeding = program.feeding
    feeding.begin(TRAINING)
    assert program.step(TRAINING, weight=0.75) == 0.75
    feeding.begin(OTHER)
    for _ in range(3):
        feeding.note(OTHER, 0.1)
    feeding.end(OTHER)
    assert feeding.weight(1) == 0.75, "another step with the same batch"
    assert program.step(TRAINING, weight=0.5) == 0.5
    assert program.found == [TRAINING]


def test_a_loader_that_takes_over_is_found(program: Program) -> None:
    feeding = program.feeding
    for loader in (TRAINING, LATER):  # A stage, or an epoch, after the other.
        feeding.begin(loader)
        assert [program.step(loader, weight=w) for w in (1.0, 0.5, 0.25)] == [1.0, 0.5, 0.25]
        feeding.end(loader)
    assert program.found == [TRAINING, LATER] and feeding.largest == 1.0


def test_of_two_loaders_in_every_step_the_first_feeds(program: Program) -> None:
    program.feeding.begin(TRAINING)
    program.feeding.begin(OTHER)
    for weight in (0.5, 0.75):
        program.feeding.note(TRAINING, weight)
        program.feeding.note(OTHER, 1.0)
        assert program.feeding.weight(1) == weight
    assert program.found == [TRAINING]


def test_gradients_of_several_loaders_batches_are_found_also_if_not_every_one_is(program: Program) -> None:
    for loader in (TRAINING, OTHER, LATER):
        program.feeding.begin(loader)
    for count in range(12):
        program.step(TRAINING, *([OTHER] if count in (5, 8, 10) else []))
        assert program.mixed == [TRAINING] * (count >= 8)
    program.feeding.end(OTHER)
    program.feeding.end(TRAINING)
    for _ in range(4):
        program.step(LATER)
    assert program.found == [TRAINING, LATER] and program.mixed == [TRAINING]


def test_gradients_of_several_loaders_are_found_again_behind_a_training_without_one(program: Program) -> None:
    for stage in (1, 2):
        for loader in (TRAINING, OTHER):
            program.feeding.begin(loader)
        for _ in range(4):
            program.step(TRAINING, OTHER)
            program.made += 1
        assert program.found == [TRAINING, -1, TRAINING][: 2 * stage - 1] and program.mixed == [TRAINING] * stage
        for loader in (TRAINING, OTHER):
            program.feeding.end(loader)
        for _ in range(2):
            program.feeding.weight(1)
            program.made += 1
    assert program.found == [TRAINING, -1, TRAINING, -1]


def test_batches_looked_at_before_the_first_step_mix_no_gradients(program: Program) -> None:
    program.feeding.begin(OTHER)
    program.feeding.note(OTHER, 1.0)
    program.feeding.begin(TRAINING)
    for _ in range(5):
        program.step(TRAINING)
    assert program.mixed == []


@pytest.mark.parametrize("parts", [False, True])
def test_a_training_that_goes_on_without_the_loader_is_found(program: Program, *, parts: bool) -> None:
    feeding = program.feeding
    for stage in range(2):
        feeding.begin(TRAINING)
        for _ in range(3):
            program.step(TRAINING)
        feeding.end(TRAINING)
        assert program.found == [TRAINING, -1] * stage + [TRAINING]
        for count in range(4):
            for _ in range(5):  # Buckets.
                feeding.note_place() if parts else feeding.weight(1)
            program.made += 1
            assert program.found == [TRAINING, -1] * stage + [TRAINING, -1][: 1 + (count > 0)]


def test_a_step_behind_every_epoch_is_no_training_without_the_loader(program: Program) -> None:
    for _ in range(3):
        program.feeding.begin(TRAINING)
        for _ in range(3):
            program.step(TRAINING)
            program.made += 1
        program.feeding.end(TRAINING)
        assert program.feeding.weight(1) == 1.0
        program.made += 1
    assert program.found == [TRAINING]


def test_loaders_in_turn_have_their_own_weights_and_none_is_named(program: Program) -> None:
    program.feeding.begin(TRAINING)
    program.feeding.begin(OTHER)
    for _ in range(4):
        assert program.step(TRAINING, weight=0.5) == 0.5
        assert program.step(OTHER, weight=2.0) == 2.0
    assert program.found == []


def test_several_passes_weigh_their_mean_and_the_user_s_weight_counts_for_one_batch(program: Program) -> None:
    feeding = program.feeding
    feeding.begin(TRAINING)
    feeding.note(TRAINING, 1.0)
    feeding.note(TRAINING, 0.5)
    assert feeding.weight(2) == 0.75
    feeding.weigh(7.0)
    assert feeding.weight(1) == 7.0
    assert program.step(TRAINING, weight=0.5) == 0.5


def test_weights_that_the_user_gives_to_several_passes_are_averaged(program: Program) -> None:
    """Within a loop over a loader, and for batches that come from elsewhere."""
    feeding = program.feeding
    for inside in (False, True):
        if inside:
            feeding.begin(TRAINING)
        for first, second in ((3.0, 1.0), (4.0, 8.0)):
            for weight in (first, second):
                if inside:
                    feeding.note(TRAINING, 1.0)
                feeding.weigh(weight)
            assert [feeding.weight(2), feeding.weight(2)] == [(first + second) / 2] * 2, "of two buckets"
    feeding.note(TRAINING, 1.0)
    feeding.note(TRAINING, 1.0)
    feeding.weigh(9.0)
    assert feeding.weight(2) == 9.0, "given once for both passes"


def test_an_iteration_inside_one_of_the_same_loader_ends_alone(program: Program) -> None:
    feeding = program.feeding
    feeding.begin(TRAINING)
    feeding.begin(TRAINING)
    feeding.note(TRAINING, 0.5)
    feeding.end(TRAINING)
    assert feeding.weight(1) == 0.5
    feeding.end(TRAINING)
    assert feeding.weight(1) == 1.0


def test_every_one_of_many_loaders_after_another_is_found(program: Program) -> None:
    for loader in range(100):
        program.feeding.begin(loader)
        assert [program.step(loader, weight=0.5), program.step(loader)] == [0.5, 1.0]
        program.feeding.end(loader)
    assert program.found == list(range(100))


def look_ahead(
    feeding: Feeding, weights: list[float], passes: int = 1, until: int | None = None, given: float = 0.0
) -> list[float]:
    """An epoch of a loop that fetches a batch ahead; return the weights of its gradients."""
    found = []
    feeding.begin(TRAINING)
    for i in range(len(weights)):
        if i == 0:
            feeding.note(TRAINING, weights[0])
        if i + 1 < len(weights):
            feeding.note(TRAINING, weights[i + 1])
        else:
            feeding.end(TRAINING, exhausted=True)
        if given:
            feeding.weigh(given)
        if (i + 1) % passes == 0:
            found.append(feeding.weight(passes))
            assert feeding.weight(passes) == found[-1], "another bucket"
        if i + 1 == until:
            feeding.end(TRAINING)
            break
    return found


def test_a_gradient_has_the_weight_of_its_own_batch_if_the_loop_fetches_one_ahead(program: Program) -> None:
    feeding = program.feeding
    weights = [1.0, 0.5, 0.75, 2.0, 0.25]
    assert not feeding.fetches_ahead(TRAINING)
    for _ in range(2):
        assert look_ahead(feeding, weights) == weights
        assert feeding.fetches_ahead(TRAINING)
    assert look_ahead(feeding, weights, until=3) == weights[:3], "left in the middle"
    assert feeding.weight(1) == 1.0
    assert look_ahead(feeding, [0.5]) == [0.5] and look_ahead(feeding, weights) == weights
    assert program.found == [TRAINING]
    feeding.begin(TRAINING)
    assert [program.step(TRAINING, weight=w) for w in weights] == weights and not feeding.fetches_ahead(TRAINING)


def test_a_loop_that_fetches_one_ahead_may_weigh_its_batches_itself(program: Program) -> None:
    feeding = program.feeding
    for _ in range(3):
        assert look_ahead(feeding, [1.0, 0.5, 0.75], given=30.0) == [30.0] * 3
        assert feeding.fetches_ahead(TRAINING)


def test_several_passes_are_of_their_own_batches_if_the_loop_fetches_one_ahead(program: Program) -> None:
    weights = [1.0, 0.5, 0.25, 0.75, 2.0, 4.0]
    for _ in range(2):
        assert look_ahead(program.feeding, weights, passes=2) == [0.75, 0.5, 3.0]
        assert look_ahead(program.feeding, weights[:5], passes=2) == [0.75, 0.5], "too few are left for a third"


def test_batches_without_a_gradient_in_the_middle_shift_no_weight(program: Program) -> None:
    feeding = program.feeding
    feeding.begin(TRAINING)
    for weight in (1.0, 0.5):
        assert program.step(TRAINING, weight=weight) == weight
    for weight in (0.25, 0.75):
        feeding.note(TRAINING, 9.0)
        assert program.step(TRAINING, weight=weight) == weight
    assert not feeding.fetches_ahead(TRAINING)


def test_a_step_of_two_batches_is_not_taken_for_one_fetched_ahead(program: Program) -> None:
    feeding = program.feeding
    for _ in range(2):
        feeding.begin(TRAINING)
        for step in range(4):
            feeding.note(TRAINING, 1.0)
            weight = program.step(TRAINING, weight=1.0 if step == 0 else 0.5)
            assert weight == (1.0 if step == 0 else 0.5)
        assert not feeding.fetches_ahead(TRAINING)
        feeding.end(TRAINING, exhausted=True)
        assert feeding.weight(1) == 1.0


def test_a_loop_that_skips_its_first_batch_is_known_after_an_epoch(program: Program) -> None:
    feeding = program.feeding
    for epoch in range(3):
        feeding.begin(TRAINING)
        feeding.note(TRAINING, 9.0)
        assert program.step(TRAINING, weight=0.5) == (0.5 if epoch else 9.0)
        assert feeding.fetches_ahead(TRAINING) == (epoch == 0)
        feeding.end(TRAINING, exhausted=True)


def test_a_batch_that_was_weighed_in_parts_is_none_fetched_ahead(program: Program) -> None:
    feeding = program.feeding
    feeding.begin(TRAINING)
    feeding.note(TRAINING, 1.0)
    feeding.used(TRAINING)
    assert program.step(TRAINING, weight=0.5) == 0.5 and not feeding.fetches_ahead(TRAINING)


def test_a_loop_may_fetch_ahead_if_it_has_taken_several_batches_before_its_first_gradient(program: Program) -> None:
    feeding = program.feeding
    assert not feeding.may_fetch_ahead(TRAINING)
    feeding.begin(TRAINING)
    found = []
    for _ in range(3):
        feeding.note(TRAINING, 1.0)
        found.append(feeding.may_fetch_ahead(TRAINING))
    assert found == [False, True, True]
    feeding.weight(1)
    assert not feeding.may_fetch_ahead(TRAINING)
    for _ in range(2):
        feeding.note(TRAINING, 1.0)
    assert not feeding.may_fetch_ahead(TRAINING), "batches that were left out"


def test_the_largest_batch_is_known_however_long_ago_it_was(program: Program) -> None:
    """The memory that a batch takes is judged by the peak since the start, whatever the rank's share is now."""
    program.feeding.begin(TRAINING)
    program.step(TRAINING, weight=1.0)
    for _ in range(100):
        program.step(TRAINING, weight=0.3125)
    assert program.feeding.largest == 1.0

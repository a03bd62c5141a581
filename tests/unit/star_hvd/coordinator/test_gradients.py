"""What steps say of an optimizer's gradients: the bytes that they send, and the noise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from star_hvd.channel.messages.base import HeaderNote, Register
from star_hvd.coordinator.gradients import Gradients

NOTE = HeaderNote(0, 1, 0, [0, 1, 2, 3], 0.5, 32.0, 256.0, 64.0, 4, 1.0, 0.0)


def test_the_part_of_the_bytes_that_steps_send_is_that_of_the_smallest_form() -> None:
    gradients = Gradients(4)
    assert gradients.reduced_part == 1.0
    gradients.registered(Register(0, {}, {}, 1000, edge_part=0.5, pushed_part=0.25))
    assert (gradients.total_bytes, gradients.edge_part, gradients.pushed_part) == (1000, 0.5, 0.25)
    for sent, part in ((0, 1.0), (2000, 1.0), (500, 0.5), (1000, 0.5)):
        gradients.note(replace(NOTE, sent_bytes=sent))
        assert gradients.reduced_part == part
    for _ in range(32):
        gradients.note(replace(NOTE, sent_bytes=1000))
    assert gradients.reduced_part == 1.0, "that form was left"


def test_the_noise_scale_is_in_usual_gradients_of_one_rank() -> None:
    found = []
    for unit in (1.0, 1000.0):  # Weights in samples, or in tokens.
        gradients = Gradients(4)
        assert math.isnan(gradients.noise.value)
        for _ in range(8):
            gradients.note(replace(NOTE, weight=32.0 * unit, local_sqr=64.0 * unit))
        found.append(gradients.noise.value)
    assert found == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("change", [{"local_count": 3}, {"folds": 1}, {"weight": 0.0}])
def test_steps_without_a_gradient_of_every_rank_say_nothing_of_the_noise(change: dict[str, float]) -> None:
    gradients = Gradients(4)
    gradients.note(replace(NOTE, **change))  # type: ignore[arg-type]
    assert gradients.noise.updates == 0

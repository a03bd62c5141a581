"""What steps say of an optimizer's gradients: the bytes that they send, and the noise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from star_hvd.channel.messages.base import GradientSizes, HeaderNote, Register
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


def test_the_sizes_are_those_since_parameters_were_added() -> None:
    """A head of 1000 bytes, then with its backbone; ranks and headers may be heard in any order."""
    gradients = Gradients(2)
    gradients.registered(Register(0, {}, {}, 1000, edge_part=1.0, pushed_part=0.25))
    for step in range(20):
        gradients.note(replace(NOTE, step=step, sent_bytes=500))
    whole = GradientSizes(0, 20, 50_000, 0.1, 0.26)
    gradients.resized(whole)
    assert (gradients.total_bytes, gradients.edge_part, gradients.pushed_part) == (50_000, 0.1, 0.26)
    gradients.note(replace(NOTE, step=19, sent_bytes=500))
    assert gradients.reduced_part == 1.0, "the head alone passes for a form of compression"
    gradients.note(replace(NOTE, step=20, sent_bytes=25_000))
    gradients.resized(whole)  # Of the second rank.
    assert gradients.reduced_part == 0.5
    gradients.resized(GradientSizes(0, 30, 80_000, 0.1, 0.26))
    gradients.resized(whole)  # Of a rank that was slow to say so.
    assert gradients.total_bytes == 80_000


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

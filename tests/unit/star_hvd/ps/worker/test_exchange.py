"""The time that answers and clients take for models of very many chunks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch

from star_hvd.ps.common.auth import JobKey
from star_hvd.ps.common.layout import BucketLayout, Chunk, Layout
from star_hvd.ps.common.wire import Header, Kind
from star_hvd.ps.worker.client import Client
from star_hvd.ps.worker.exchange import Exchange

CHUNKS = 10_000  # As a model of 10 GB has.


def layout_of(chunks: int, per_bucket: int = 10) -> Layout:
    """Chunks of two elements."""
    buckets = [BucketLayout(torch.float32, ((2 * per_bucket,),), (0,), ((0,),)) for _ in range(chunks // per_bucket)]
    starts = [2 * (number % per_bucket) for number in range(chunks)]
    made = [Chunk(i, i // per_bucket, start, start + 2, 0, ()) for i, start in enumerate(starts)]
    return Layout(tuple(buckets), tuple(made), 1)


def test_chunks_that_are_held_back_take_time_in_proportion_to_their_number() -> None:
    layout = layout_of(CHUNKS)
    flats = [torch.empty(bucket.numel) for bucket in layout.buckets]
    exchange = Exchange(layout, flats, Kind.PULLED, known=7)
    began_s = time.thread_time()
    for chunk in range(CHUNKS):
        assert not exchange.complete
        exchange.add(Header(Kind.PULLED, 0, 0, 0, 1, chunk, 7), bytearray())
    took_s = time.thread_time() - began_s
    assert took_s < 1.0, "it takes 0.1 s; with a search among all missing parts for every chunk it took several"
    assert exchange.complete and exchange.reply().kind == "known"
    assert exchange.has(0)


class Counted(tuple[Any, ...]):
    """A tuple that counts how often it is read as a whole."""

    reads = 0

    def __iter__(self) -> Iterator[Any]:
        type(self).reads += 1
        return super().__iter__()


def test_the_chunks_of_a_bucket_are_known_without_a_search() -> None:
    layout = layout_of(40)
    layout = dataclasses.replace(layout, chunks=Counted(layout.chunks))
    client = Client(0, 0, 0, [], layout, JobKey.new())
    before = Counted.reads
    found = [client.ranges(index) for index in range(4)]
    assert Counted.reads == before
    assert found[1] == [(10 + i, 2 * i, 2 * i + 2) for i in range(10)] and [len(each) for each in found] == [10] * 4

"""Cut model -> round graph: every attention becomes append, local part, one fetch and attend a group, merge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specstream.graph import PlannableModel
from specstream.pieces import Pieces
from specstream.pipeline import LongPass
from specstream.round_graph import IN_PLACE, Content, GraphBuilder, Region, RoundGraph, Task, TaskKind
from specstream.round_spec import PROMPT_SLOTS, ChunkRun, RoundSpec, SeatSpec
from specstream.round_work import PIECE_LAUNCHES, SAMPLING_LAUNCHES, RoundWork


@dataclass(frozen=True)
class ExpandFetches(LongPass[RoundGraph]):
    """Lists the tasks of one round in an order that would be right if they ran one after the other.

    Fetches are listed just before the attend that needs them; how early they really start is left to
    `assign_lanes`, within what the ring slots allow.
    """

    spec: RoundSpec
    verified_rows: int = 1
    """Rows of a verification, at most, for the costs."""
    name: str = "expand_fetches"

    def pieces(self, ir: PlannableModel) -> Pieces[RoundGraph]:
        builder = GraphBuilder(self.spec)
        for task in self._tasks(ir):
            builder.add(task)
            yield
        return builder.graph()

    def check(self, ir: RoundGraph) -> None:
        """Every layer attends to every streamed chunk exactly once."""
        expected = [(layer, run) for layer in range(self.spec.num_layers) for run in self.spec.groups]
        attended = [(t.layer, t.run) for t in ir.tasks if t.kind is TaskKind.ATTEND]
        if attended != expected:
            raise ValueError(f"attended groups {attended} are not the streamed ones {expected}")

    def _tasks(self, model: PlannableModel) -> Iterator[Task]:
        spec, work = self.spec, RoundWork(self.spec, model.spec, self.verified_rows)
        fetch_index, issued_before = 0, len(spec.entry)
        for layer, site in enumerate(model.sites):
            yield self._piece(model, layer, work)
            operands = (_value(site.query), _value(site.key), _value(site.value))
            written = [content for seat in spec.seats for content in _appended(layer, seat)]
            begun = [region for seat in spec.seats for region in _taken_over(layer, seat)]
            yield Task(
                f"append/{layer}",
                TaskKind.APPEND,
                reads=(*operands[1:], *begun),
                writes=tuple(c.region for c in written),
                leaves=tuple(written),
                layer=layer,
            )
            for place, seat in enumerate(spec.seats):
                if seat.offload:
                    yield self._offload(layer, place, seat)
            on_device = [(seat, _on_device(layer, seat)) for seat in spec.seats]
            local = [content for _, contents in on_device for content in contents]
            yield Task(
                f"local/{layer}",
                TaskKind.LOCAL,
                reads=(operands[0], *(c.region for c in local)),
                writes=(Region("state"),),
                expects=tuple(local),
                layer=layer,
                memory_bytes=_chunks(local) * spec.bytes_per_chunk,
                flops=sum(work.local(site.spec, seat, _chunks(contents)) for seat, contents in on_device),
            )
            for group, run in enumerate(spec.groups):
                phase = "before" if fetch_index < issued_before else "now"
                staged = _staged(layer, run, fetch_index % spec.staging_slots)
                yield self._fetch(f"fetch/{layer}/{group}", layer, group, run, staged, phase)
                flops = work.attend(site.spec, run.seat, run.count)
                yield self._attend(layer, group, run, staged, operands[0], flops)
                fetch_index += 1
            yield Task(
                f"merge/{layer}",
                TaskKind.MERGE,
                reads=(Region("state"),),
                writes=(_value(site.out),),
                layer=layer,
            )
        yield self._piece(model, spec.num_layers, work)
        for index, (layer, run) in enumerate(spec.exit):
            staged = _staged(layer, run, (fetch_index + index) % spec.staging_slots)
            group = index % len(spec.next_groups)
            yield self._fetch(f"ahead/{layer}/{group}", layer, group, run, staged, "ahead")
        yield Task(
            "accept",
            TaskKind.ACCEPT,
            reads=(_value(model.output), Region("candidates")),
            writes=(Region("outcome"),),
            launches=SAMPLING_LAUNCHES,
        )

    def _piece(self, model: PlannableModel, index: int, work: RoundWork) -> Task:
        piece = model.pieces[index]
        return Task(
            f"piece/{index}",
            TaskKind.PIECE,
            reads=tuple(map(_value, piece.inputs)),
            writes=tuple(map(_value, piece.outputs)),
            layer=index,
            memory_bytes=piece.read_bytes,
            flops=work.piece(index, piece.read_bytes),
            launches=PIECE_LAUNCHES,
        )

    def _offload(self, layer: int, place: int, seat: SeatSpec) -> Task:
        run = seat.offloaded
        in_blocks = tuple(_device(layer, seat, chunk) for chunk in range(run.start, run.stop))
        source = _buffered(layer, seat)[:1] or in_blocks
        host = _host(layer, run)
        return Task(
            f"offload/{layer}/{place}",
            TaskKind.OFFLOAD,
            reads=tuple(c.region for c in source),
            writes=(host.region,),
            expects=source,
            leaves=(host,),
            layer=layer,
            run=run,
            place=place,
            link_bytes=run.count * self.spec.bytes_per_chunk,
        )

    def _fetch(self, name: str, layer: int, group: int, run: ChunkRun, staged: Content, phase: str) -> Task:
        source = _host(layer, run)
        return Task(
            name,
            TaskKind.FETCH,
            reads=(source.region,),
            writes=(staged.region,),
            expects=(source,),
            leaves=(staged,),
            layer=layer,
            run=run,
            group=group,
            slot=staged.region.start,
            phase=phase,
            link_bytes=run.count * self.spec.bytes_per_chunk,
        )

    def _attend(self, layer: int, group: int, run: ChunkRun, staged: Content, query: Region, flops: int) -> Task:
        return Task(
            f"attend/{layer}/{group}",
            TaskKind.ATTEND,
            reads=(query, staged.region, Region("state")),
            writes=(Region("state"),),
            expects=(staged,),
            layer=layer,
            run=run,
            group=group,
            slot=staged.region.start,
            memory_bytes=run.count * self.spec.bytes_per_chunk,
            flops=flops,
        )


def _value(name: str) -> Region:
    return Region(f"value/{name}")


def _chunks(contents: list[Content]) -> int:
    return sum(content.region.stop - content.region.start for content in contents)


def _device(layer: int, seat: SeatSpec, chunk: int) -> Content:
    slot = seat.device_slot(chunk)
    value = IN_PLACE if chunk < seat.resident else f"chunk {chunk}"
    return Content(Region(f"device/{layer}/{seat.seat}", slot, slot + 1), value)


def _host(layer: int, run: ChunkRun) -> Content:
    return Content(Region(f"host/{layer}/{run.seat}", run.start, run.stop), IN_PLACE)


def _staged(layer: int, run: ChunkRun, slot: int) -> Content:
    return Content(Region("slot", slot, slot + 1), f"layer {layer} {run}")


def _buffered(layer: int, seat: SeatSpec) -> tuple[Content, ...]:
    """What the prompt buffer holds of a seat: the chunks that are written out, then the one that stays, if any."""
    if seat.buffer_start is None:
        return ()
    contents = []
    for run in (seat.offloaded, seat.kept):
        if run.count:
            start = seat.buffer_start + run.start - seat.buffered.start
            region = Region(f"prompt/{layer % PROMPT_SLOTS}", start, start + run.count)
            contents.append(Content(region, f"layer {layer} {run}"))
    return tuple(contents)


def _taken_over(layer: int, seat: SeatSpec) -> tuple[Region, ...]:
    """The open chunk in the tail, whose tokens the append copies to the prompt buffer."""
    continues = seat.buffered.count > 0 and seat.open == seat.buffered.start
    return (_device(layer, seat, seat.open).region,) if continues else ()


def _appended(layer: int, seat: SeatSpec) -> list[Content]:
    """What the append leaves: chunks in the seat's own blocks, and in the prompt buffer."""
    own = [*range(seat.open, seat.buffered.start), *range(seat.kept.start, seat.kept.stop)]
    return [*(_device(layer, seat, chunk) for chunk in own), *_buffered(layer, seat)]


def _on_device(layer: int, seat: SeatSpec) -> list[Content]:
    """What the local part reads: the resident chunks, and those after what is fetched, the appended included."""
    end = seat.open + seat.span
    resident = Content(Region(f"device/{layer}/{seat.seat}", 0, min(seat.resident, end)), IN_PLACE)
    own = [_device(layer, seat, chunk) for chunk in range(seat.on_host.stop, seat.buffered.start)]
    return [*([resident] if seat.resident else []), *own, *_buffered(layer, seat)]

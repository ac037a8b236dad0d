"""Recording an engine: every round, with the engine's own totals, and nothing once it is over."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specstream import batch, round_batch, tracing
from specstream.engine import Engine
from specstream.errors import EngineBusy, EngineClosed, InvalidOption
from specstream.executor import CpuExecutor
from specstream.metrics import Metrics
from specstream.round_plan import Lane
from specstream.traces.records import RecordedRound, RoundSummary
from specstream.traces.run_writer import RunWriter
from specstream.traces.validate import validate
from tests.helpers import best, cpu_executor, make_engine, model, new_engine, prompt, step_to_end
from tests.trace_cases import OnDisk, on_disk


def serve_three(engine: Engine) -> None:
    for length, seed in ((30, 0), (17, 1), (9, 2)):
        engine.submit(prompt(length, seed), max_new_tokens=12)
    step_to_end(engine)


def check(found: OnDisk, metrics: Metrics) -> None:
    """That all rounds are there, with the engine's totals, and their spans are those of their plans."""
    summaries = found.summaries
    assert [each.index for each in summaries] == list(range(metrics.num_rounds))
    assert summaries == [RoundSummary.of(each) for each in found.rounds.values()]
    assert sum(each.streamed_bytes for each in summaries) == metrics.streamed_bytes
    assert sum(each.fetched_bytes for each in summaries) == metrics.link_bytes
    assert sum(each.produced for each in summaries) == metrics.generated_tokens
    assert sum(each.candidates for each in summaries) == metrics.num_draft_tokens
    assert sum(each.accepted for each in summaries) == metrics.num_accepted_tokens
    requests = [each for recorded in found.rounds.values() for each in recorded.requests]
    assert sum(not each.prompt_tokens for each in requests) == metrics.num_verify_rounds
    assert sum(each.duration_us for each in summaries) / 1e6 == pytest.approx(
        metrics.prefill_seconds + metrics.decode_seconds, abs=1e-6 * len(summaries)
    )
    for first, second in pairwise(summaries):
        assert first.start_us + first.duration_us <= second.start_us
    for recorded in found.rounds.values():
        check_spans(recorded, found)


def check_spans(recorded: RecordedRound, found: OnDisk) -> None:
    plan = found.plans[recorded.plan]
    assert plan.streamed_bytes == pytest.approx(recorded.streamed_bytes, rel=tracing.ALIKE / (1 - tracing.ALIKE))
    tasks = {task.name: task for task in plan.tasks}
    names = [span.task for span in recorded.spans]
    assert len(names) == len(set(names))
    always = {name for name, task in tasks.items() if task.kind != "offload" and not name.startswith("ahead")}
    assert always <= set(names) <= set(tasks)
    for lane in Lane:
        spans = sorted((s for s in recorded.spans if tasks[s.task].lane == lane), key=lambda span: span.start_us)
        assert all(one.stop_us <= other.start_us for one, other in pairwise(spans))
    for span in recorded.spans:
        assert 0 <= span.start_us <= span.stop_us
        assert span.stop_us <= recorded.duration_us or span.task.startswith("ahead")


def wait_for_copies(engine: Engine) -> None:
    for worker in cpu_executor(engine)._workers.values():
        worker.synchronize()


@settings(max_examples=12, deadline=None)
@given(
    chunk_tokens=st.integers(2, 6),
    staging_slots=st.integers(1, 4),
    num_speculative_tokens=st.integers(1, 4),
    drafting=st.sampled_from(["sequential", "cohorts", "lookahead", "off"]),
    max_num_batched_tokens=st.sampled_from([7, 64]),
    max_num_seqs=st.integers(2, 3),
    draft=st.sampled_from([0, 1]),
)
@pytest.mark.filterwarnings("ignore:the draft was of no use")
def test_every_round_is_recorded(tmp_path_factory: pytest.TempPathFactory, draft: int, **options: Any) -> None:
    sizes: dict[str, Any] = {"max_model_len": 48, "gpu_kv_budget": "min"}
    with make_engine(model("qwen3"), model("qwen3", seed=draft), **sizes, **options) as engine:
        with engine.trace(tmp_path_factory.mktemp("logs")) as run:
            serve_three(engine)
            wait_for_copies(engine)
        found = on_disk(run)
        check(found, engine.metrics())
        assert [validate(trace) for trace in found.traces] == [[]] * len(found.traces)
        assert found.traces
        assert len({each.text for each in found.plans.values()}) <= len(found.plans) <= len(found.rounds)


def test_requests_that_fill_chunks_in_different_rounds_share_predictions(tmp_path: Path) -> None:
    """To make one takes longer than a short round."""
    sizes: dict[str, Any] = {"max_model_len": 256, "gpu_kv_budget": "400KiB", "chunk_tokens": 8, "group_chunks": 64}
    with make_engine(model("qwen3"), max_num_seqs=6, **sizes) as engine:
        with engine.trace(tmp_path) as run:
            for number in range(6):
                engine.submit(prompt(200 + 3 * number, number), max_new_tokens=28)
            step_to_end(engine)
        found = on_disk(run)
        check(found, engine.metrics())
    written = [{task for task in map(str, each.spans) if "offload" in task} for each in found.rounds.values()]
    assert sum(map(bool, written)) > 8, "chunks are written out in many rounds"
    assert len(found.plans) < len(found.rounds) / 3


def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    with new_engine(draft_window=8) as engine:
        with engine.trace(tmp_path, run="named") as run:
            pass
        info = on_disk(run).info
        assert (info.name, info.kind, info.target, info.draft) == ("named", "engine", "Qwen3ForCausalLM", "self")
        assert info.options["draft_window"] == 8
        assert info.memory["ring"] + info.memory["blocks"] == engine.memory.device_kv
        assert info.versions.keys() == {"specstream", "torch", "transformers"}
        assert info.link_bytes_per_us == 5000
        with engine.trace(tmp_path) as first, engine_without_draft().trace(tmp_path) as second:
            assert first != second
        assert on_disk(second).info.draft is None
    assert not on_disk(run).rounds


@pytest.mark.parametrize(("logdir", "run", "said"), [("", None, "logdir"), (None, None, "logdir"), (".", 5, "run")])
def test_what_is_no_folder_or_name_is_refused(
    logdir: Any, run: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with engine_without_draft() as engine:
        with pytest.raises(InvalidOption, match=f"^{said}: got"), engine.trace(logdir, run=run):
            pass
        assert not list(tmp_path.iterdir())
        with engine.trace("logs"):  # nothing of the refused one is left
            pass


def engine_without_draft() -> Engine:
    return make_engine(model("qwen3"), max_model_len=64)


def test_tokens_are_the_same_and_a_plan_that_repeats_is_kept_once(tmp_path: Path) -> None:
    with new_engine() as engine:
        with engine.trace(tmp_path) as run:
            for _ in range(2):
                engine.submit(prompt(14), max_new_tokens=12)
                (tokens,) = step_to_end(engine).values()
                assert tokens == best(prompt(14), 12)
        found = on_disk(run)
    half = len(found.rounds) // 2
    plans = [each.plan for each in found.rounds.values()]
    assert plans[1:half] == plans[half + 1 :]  # the first ones differ in what is in flight before them
    texts = [(plan.text, plan.tasks) for plan in found.plans.values()]
    assert len(texts) > 1
    assert all(one != other for index, one in enumerate(texts) for other in texts[:index])


def test_lookahead_says_what_was_foreseen(tmp_path: Path) -> None:
    with new_engine(drafting="lookahead") as engine:
        with engine.trace(tmp_path) as run:
            serve_three(engine)
        foreseen = [each.foreseen for recorded in on_disk(run).rounds.values() for each in recorded.requests]
        metrics = engine.metrics()
        assert foreseen.count(True) == metrics.num_foreseen_outcomes
        assert foreseen.count(True) + foreseen.count(False) == metrics.num_outcomes > 0


def test_the_ring_bounds_what_is_kept(tmp_path: Path) -> None:
    with new_engine() as engine:
        with engine.trace(tmp_path, rounds=5) as run:
            for _ in range(4):
                serve_three(engine)
        found, count = on_disk(run), engine.metrics().num_rounds
    assert count > 10
    assert 3 <= len(found.rounds) <= 5
    assert max(found.rounds) == count - 1


def test_nothing_is_recorded_or_timed_while_it_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[batch.RoundBatch] = []

    class Kept(batch.RoundBatch):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            batches.append(self)

    monkeypatch.setattr(round_batch, "RoundBatch", Kept)
    with new_engine() as engine:
        serve_three(engine)
        with engine.trace(tmp_path) as run:
            serve_three(engine)
        traced = len(on_disk(run).rounds)
        files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        serve_three(engine)
        assert engine.recorder is None
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert sum(each.spans is not None for each in batches) == traced
    assert len(batches) > 2 * traced


def test_rounds_are_written_while_a_device_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an executor that leaves time for it; then none is written between two rounds."""
    run, add, running = CpuExecutor.run, RunWriter.add, [False]
    within = list[bool]()

    def working_ahead(self: CpuExecutor, plan: Any, spec: Any, batch: Any) -> None:
        running[0] = True
        while batch.work_ahead():
            pass
        run(self, plan, spec, batch)
        running[0] = False

    def noted(self: RunWriter, recorded: RecordedRound) -> None:
        within.append(running[0])
        add(self, recorded)

    monkeypatch.setattr(CpuExecutor, "run", working_ahead)
    monkeypatch.setattr(RunWriter, "add", noted)
    with new_engine() as engine:
        with engine.trace(tmp_path) as path:
            serve_three(engine)
        check(on_disk(path), engine.metrics())
    assert all(within[:-2]), "but for those that are over when the trace ends"


def test_a_second_trace_is_refused(tmp_path: Path) -> None:
    with new_engine() as engine:
        with engine.trace(tmp_path) as run:
            refusal = r"one trace of an engine at a time\. Leave the one in .* first"
            with pytest.raises(InvalidOption, match=refusal), engine.trace(tmp_path / "other"):
                pytest.fail("it was let in")
            serve_three(engine)
        check_count(run, engine.metrics().num_rounds)
        assert not (tmp_path / "other").exists()
        with engine.trace(tmp_path):
            pass
    with pytest.raises(EngineClosed), engine.trace(tmp_path):
        pass


def check_count(run: Path, rounds: int) -> None:
    assert len(on_disk(run).rounds) == rounds > 0


def test_a_trace_cannot_begin_within_a_round_or_another_call(tmp_path: Path) -> None:
    refused: list[BaseException] = []
    with new_engine() as engine:

        def criterion(ids: Tensor, scores: Any, **_: Any) -> bool:
            with pytest.raises(EngineBusy) as error, engine.trace(tmp_path):
                pass
            refused.append(error.value)
            thread = threading.Thread(target=begin)
            thread.start()
            thread.join()
            return False

        def begin() -> None:
            with pytest.raises(EngineBusy) as error, engine.trace(tmp_path):
                pass
            refused.append(error.value)

        engine.submit(prompt(9), max_new_tokens=2, stopping_criteria=[criterion])
        step_to_end(engine)
    assert len(refused) >= 2
    assert not list(tmp_path.iterdir())


def test_a_reset_does_not_end_it(tmp_path: Path) -> None:
    with new_engine() as engine:
        with engine.trace(tmp_path) as run:
            serve_three(engine)
            before = engine.metrics().num_rounds
            engine.reset()
            serve_three(engine)
        check_count(run, before + engine.metrics().num_rounds)


def test_rounds_after_the_end_are_none_of_the_recorders(tmp_path: Path) -> None:
    with new_engine() as engine:
        with engine.trace(tmp_path) as run:
            engine.submit(prompt(9), max_new_tokens=4)
            engine.step()
            recorder = engine.recorder
        assert isinstance(recorder, tracing.Recorder)
        engine.recorder = recorder  # as a round that was under way in another thread sees it
        step_to_end(engine)
        check_count(run, 1)

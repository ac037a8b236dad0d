"""Makes the pictures of docs/traces.md: `python docs/pictures.py`, with the extra `tensorboard`.

What was measured on an H200 is in docs/example_runs (`benchmarks/trace_overhead.py --logdir` recorded it). Screenshots
are of the demo, traced on this machine; they need selenium and the programs chromium and chromedriver, and are left out
without them. What was planned needs neither a device nor weights.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import fx, nn

from specstream.bench_setup import BenchModel
from specstream.graph import AttentionSite, AttentionSpec, ModelSpec, PartitionedModel, Piece
from specstream.models.presets import dummy_model, preset_config
from specstream.planner import Planner
from specstream.profiles import H200
from specstream.round_spec import ChunkRun, RoundSpec, SeatSpec
from specstream.traces.figures import run_figures
from specstream.traces.picture import save_picture
from specstream.traces.planned import planned_round
from specstream.traces.records import RunInfo
from specstream.traces.run_reader import RunReader, find_runs

PICTURES, EXAMPLE_RUNS = (Path(__file__).parent / folder for folder in ("pictures", "example_runs"))
TARGET, DRAFT, CONTEXT, DEPTH = "qwen3-8b", "qwen3-0.6b", 16_384, 4
CHUNK_TOKENS, GROUP_CHUNKS, SLOTS = 256, 64, 4
"""As in the measurements of README.md."""
MOST_BYTES = 250_000
PROGRAMS = ("chromium", "chromedriver")
WINDOW = (1280, 900)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    planned_picture(PICTURES / "planned.png")
    measured_picture(EXAMPLE_RUNS, PICTURES / "measured.png")
    with TemporaryDirectory() as logdir:
        subprocess.run([sys.executable, "-m", "specstream", "demo", "--trace", logdir], check=True)
        try:
            take_screenshots(Path(logdir))
        except ImportError:
            print("no screenshots: selenium is not installed")
    for path in sorted(PICTURES.glob("*.png")):
        size = path.stat().st_size
        print(f"{path}: {size / 1e3:.0f} KB")
        if size > MOST_BYTES:
            sys.exit(f"{path} has more than {MOST_BYTES} bytes")


def planned_picture(path: Path) -> None:
    """A round of one of two cohorts, each a request of which nothing is resident, while the other is drafted for."""
    streamed = CONTEXT // CHUNK_TOKENS - 1
    seat = SeatSpec(0, 0, 3, streamed, 0, streamed, 2)
    model, draft = without_weights(meta_model(TARGET)), meta_model(DRAFT).draft_work
    block_bytes = CHUNK_TOKENS * model.spec.kv_bytes_per_token_layer
    spec = RoundSpec(model.spec.num_layers, SLOTS, GROUP_CHUNKS, block_bytes, (seat,), 0, DEPTH)
    spec = replace(spec.warm(), drafts_beside=True, next_runs=(ChunkRun(1, 0, streamed),))
    link = H200.host_to_device_bytes_per_us
    planned = planned_round(Planner(model, H200, draft, DEPTH + 1).plan(spec.canonical()), 0, link)
    info = RunInfo(
        name="planned",
        started=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        kind="plan",
        machine={"device": H200.name},
        versions={},
        target="Qwen3-8B",
        draft="Qwen3-0.6B",
        options={},
        memory={},
        link_bytes_per_us=link,
    )
    save_picture(path, planned, info)


def measured_picture(logdir: Path, path: Path) -> None:
    """The round of the only run there that the tab opens first."""
    (run,) = find_runs(logdir).values()
    reader = RunReader(run)
    typical = run_figures(reader.info, reader.summaries()).typical_round
    assert typical is not None
    recorded = reader.round(typical)
    save_picture(path, reader.plan(recorded.plan), reader.info, recorded)


def meta_model(preset: str) -> BenchModel:
    return BenchModel(preset, dummy_model(preset_config(preset, CONTEXT)[0], torch.bfloat16, "meta"))


def without_weights(model: BenchModel) -> PartitionedModel:
    """A model cut at its attentions, of which there is nothing but what planning looks at: shapes and sizes."""
    untyped: Any = model.module
    layers, config = untyped.model.layers, untyped.config
    before = [sum(size_of(getattr(layer.self_attn, f"{name}_proj")) for name in "qkv") for layer in layers]
    after = [size_of(layer) - size for layer, size in zip(layers, before, strict=True)]
    after[-1] += size_of(untyped.get_output_embeddings())
    sizes = [before[0], *(one + other for one, other in zip(after, before[1:], strict=False)), after[-1]]
    names = [("ids",), *((f"o{layer}", f"h{layer}") for layer in range(len(layers)))]
    outputs = [*((f"q{layer}", f"k{layer}", f"v{layer}", f"h{layer}") for layer in range(len(layers))), ("logits",)]
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    attentions = tuple(AttentionSpec(layer, "", *heads, 1.0) for layer in range(len(layers)))
    sites = tuple(AttentionSite(each, *(f"{name}{each.layer}" for name in "qkvo")) for each in attentions)
    spec = ModelSpec(model.name, config.vocab_size, torch.bfloat16, torch.device("meta"), None, attentions)
    pieces = tuple(map(piece, names, outputs, sizes))
    return PartitionedModel(pieces, sites, ("ids",), "logits", spec)


def size_of(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def piece(inputs: tuple[str, ...], outputs: tuple[str, ...], parameters: int) -> Piece:
    root = nn.Module()
    root.weight = nn.Parameter(torch.empty(parameters, dtype=torch.bfloat16, device="meta"))
    graph = fx.Graph()
    for name in inputs:
        graph.placeholder(name)
    graph.get_attr("weight")
    graph.output((None,) * len(outputs))
    return Piece(fx.GraphModule(root, graph), inputs, outputs, ())


def take_screenshots(logdir: Path) -> None:
    """Of the tab SpecStream: a round, and a part of it, with a task selected."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        print(f"no screenshots: there is no {' and no '.join(missing)}")
        return
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.wait import WebDriverWait

    with tensorboard(logdir) as address, chromium() as browser:
        wait = WebDriverWait(browser, 60)
        browser.get(f"{address}#specstream")
        wait.until(lambda _: browser.find_elements(By.TAG_NAME, "iframe"))
        browser.switch_to.frame(browser.find_element(By.TAG_NAME, "iframe"))
        wait.until(lambda _: browser.find_elements(By.ID, "plan") and browser.find_element(By.ID, "plan").text)
        wait.until(lambda _: browser.find_element(By.ID, "status").text == "")
        browser.save_screenshot(str(PICTURES / "tab.png"))
        canvas = browser.find_element(By.ID, "canvas")
        for keys in ("w" * 4, "n" * 3, Keys.ARROW_DOWN * 3):  # zooms in, selects a task, goes to a measured fetch
            canvas.send_keys(keys)
        timeline = browser.find_element(By.CSS_SELECTOR, "section[aria-label='timeline of the round']")
        timeline.screenshot(str(PICTURES / "zoomed.png"))


@contextmanager
def tensorboard(logdir: Path) -> Iterator[str]:
    """A TensorBoard of that folder, at the address given."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0", "--load_fast", "false"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            yield next(line for line in server.stderr or () if " at http://" in line).split(" at ")[1].split()[0]
        finally:
            server.terminate()


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser without a window, which reaches nothing but this machine."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    program, driver = map(shutil.which, PROGRAMS)
    options = ChromeOptions()
    options.binary_location = str(program)
    offline = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", offline):
        options.add_argument(argument)
    options.add_argument(f"--window-size={WINDOW[0]},{WINDOW[1]}")
    browser = Chrome(options=options, service=Service(driver))
    try:
        yield browser
    finally:
        browser.quit()


if __name__ == "__main__":
    main()

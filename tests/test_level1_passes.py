"""The passes on the model graph: what they promise of numbers and structure, each with its negative twin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specstream.capture import capture, forward_of
from specstream.compiler import compile_model, model_passes
from specstream.errors import UnsupportedModel
from specstream.graph import ModelGraph, PartitionedModel
from specstream.nodes import example, writes
from specstream.ops import stream_verify
from specstream.passes.canonicalize import Canonicalize, attention_calls
from specstream.passes.partition import Partition
from specstream.passes.select_logits import SelectLogits
from specstream.passes.stream_attention import StreamAttention
from specstream.pipeline import Pass, PassRunner
from specstream.probe import probe, run_pieces
from tests.architectures import ARCHITECTURES, VOCAB, PlainMask, PlainRepeat, build


def after(model: nn.Module, *passes: Pass) -> ModelGraph:
    graph: ModelGraph = PassRunner("m").run(passes, capture(model, name="m", max_model_len=None))
    return graph


def inputs(tokens: int = 9) -> tuple[Tensor, Tensor]:
    return torch.randint(VOCAB, (1, tokens)), torch.arange(tokens)[None]


def alone(site: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the rows of one call, without history."""
    return stream_verify(q, k, v, 0, site.spec.scale)  # type: ignore[attr-defined, no-any-return]


# All passes, all architectures


@pytest.fixture(scope="module", params=ARCHITECTURES)
def cut(request: pytest.FixtureRequest) -> tuple[nn.Module, PartitionedModel, PassRunner]:
    model = build(request.param)
    runner = PassRunner("m")
    return model, runner.run(model_passes(None), capture(model, name="m", max_model_len=None)), runner


def test_pieces_compute_the_model(cut: tuple[nn.Module, PartitionedModel, PassRunner]) -> None:
    model, partitioned, _ = cut
    for tokens, chosen in ((1, [0]), (2, [1]), (9, [0, 3]), (9, range(9)), (64, [63, 0, 63])):
        ids, positions = inputs(tokens)
        rows = torch.tensor(chosen)
        with torch.no_grad():
            expected = forward_of(model)(ids, positions)[:, rows]
            logits = run_pieces(partitioned, (ids, positions, rows), alone)
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_pieces_pass_the_probe(cut: tuple[nn.Module, PartitionedModel, PassRunner]) -> None:
    model, partitioned, _ = cut
    probe(forward_of(model), partitioned, max_model_len=None)


def test_structure(cut: tuple[nn.Module, PartitionedModel, PassRunner]) -> None:
    model, partitioned, runner = cut
    layers = partitioned.spec.num_layers
    assert [record.name for record in runner.records] == [
        "canonicalize",
        "stream_attention",
        "select_logits",
        "partition",
    ]
    assert runner.records[1].op_changes == {"scaled_dot_product_attention": -layers, "stream_verify": layers}
    assert runner.records[2].op_changes == {"index_select": 1}
    assert len(partitioned.pieces) == layers + 1
    assert partitioned.inputs == ("input_ids", "position_ids", "logit_rows")
    assert [site.spec.layer for site in partitioned.sites] == list(range(layers))
    for site in partitioned.sites:
        attention = model.get_submodule(site.spec.module)
        assert site.spec.num_kv_heads == getattr(attention, "kv_heads", site.spec.num_kv_heads)
    counts = partitioned.op_counts()
    for repeated in ("repeat_interleave", "tril", "masked_fill", "ge", "arange"):
        assert counts[repeated] == 0


def test_pieces_share_the_models_tensors(cut: tuple[nn.Module, PartitionedModel, PassRunner]) -> None:
    model, partitioned, _ = cut
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for piece in partitioned.pieces:
        for tensor in (*piece.module.parameters(), *piece.module.buffers()):
            assert tensor.untyped_storage().data_ptr() in storages


def test_environment_keeps_what_is_needed_and_no_more(cut: tuple[nn.Module, PartitionedModel, PassRunner]) -> None:
    _, partitioned, _ = cut
    held = set(partitioned.inputs)
    for index, piece in enumerate(partitioned.pieces):
        held = (held | set(piece.outputs)) - set(piece.frees)
        later = {name for other in partitioned.pieces[index + 1 :] for name in other.inputs}
        if index < len(partitioned.sites):
            for site in partitioned.sites[index:]:
                later |= {site.query, site.key, site.value}
            assert held <= later
            site = partitioned.sites[index]
            held = (held - {site.query, site.key, site.value}) | {site.out}
    assert held == {partitioned.output}


def test_layers_of_one_kind_make_pieces_of_one_kind() -> None:
    partitioned = compile_model(build("plain_mask", layers=4), "m", None)
    nodes = [piece.module.graph.nodes for piece in partitioned.pieces[1:-1]]
    inner = [[str(node.target) for node in piece if node.op.startswith("call")] for piece in nodes]
    assert all(ops == inner[0] for ops in inner)


# The op


def test_op_is_causal_attention_of_its_rows() -> None:
    q, k, v = torch.randn(1, 6, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    out = stream_verify(q, k, v, 3, 0.7)
    wide_k, wide_v = (x.repeat_interleave(3, 1) for x in (k, v))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, wide_k, wide_v, is_causal=True, scale=0.7))
    assert out.transpose(1, 2).is_contiguous()
    torch.library.opcheck(stream_verify, (q, k, v, 3, 0.7), test_utils=("test_schema", "test_faketensor"))


# canonicalize


@pytest.mark.parametrize(("how", "kv_heads"), [("expand", 2), ("interleave", 2), ("before_transpose", 2), ("tile", 6)])
def test_repeated_heads_are_stripped(how: str, kv_heads: int) -> None:
    """Tiling orders heads otherwise than repeating does: it must stay."""
    model = build("plain_repeat", how=how, layers=1)
    graph = after(model, Canonicalize())
    (call,) = attention_calls(graph.gm)
    assert example(call.args[1]).shape[1] == example(call.args[2]).shape[1] == kv_heads
    assert call.kwargs == {"is_causal": True, "scale": 0.4, "enable_gqa": kv_heads != 6}
    at = inputs()
    torch.testing.assert_close(graph.gm(*at), forward_of(model)(*at))


class OneRepeated(PlainRepeat):
    """Repeats K by expanding and V by an op that is not known."""

    def repeat(self, x: Tensor) -> Tensor:
        heads = torch.arange(self.heads) // (self.heads // self.kv_heads)
        if x.is_contiguous():
            return super().repeat(x)
        return x.transpose(1, 2)[:, heads]


def test_heads_are_stripped_of_both_or_neither() -> None:
    partitioned = compile_model(OneRepeated().eval().double(), "m", None)
    assert partitioned.spec.num_kv_heads == 6


@pytest.mark.parametrize("additive", [False, True])
def test_causal_masks_are_dropped_with_what_makes_them(additive: bool) -> None:
    model = build("plain_mask", additive=additive)
    captured = capture(model, name="m", max_model_len=None)
    assert captured.op_counts()["arange"] == 1
    graph = PassRunner("m").run((Canonicalize(),), captured)
    assert all("attn_mask" not in call.kwargs for call in attention_calls(graph.gm))
    assert graph.op_counts()["arange"] == graph.op_counts()["ge"] == 0
    at = inputs()
    torch.testing.assert_close(graph.gm(*at), model(*at))


def test_canonicalize_checks_its_result() -> None:
    captured = capture(build("plain_repeat"), name="m", max_model_len=None)
    with pytest.raises(ValueError, match="is not canonical"):
        Canonicalize().check(captured)


class ArangeMeansPositions(PlainMask):
    """Row numbers that matter only far into a text, where no probe looks."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        rows = torch.arange(input_ids.shape[1])
        return super().forward(input_ids, position_ids) * (1 + rows // 8192)[None, :, None].double()


class ArangeMeansRows(PlainMask):
    """The same tensor used as what it is: to sort rows and put them back."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        rows = torch.arange(input_ids.shape[1])
        order = torch.flip(rows, (0,))
        return super().forward(input_ids, position_ids)[:, order][:, order]


def test_row_numbers_are_not_positions() -> None:
    with pytest.raises(UnsupportedModel, match=r"the model: it calculates with torch\.arange over the tokens"):
        compile_model(ArangeMeansPositions(layers=1).eval().double(), "m", None)
    compile_model(ArangeMeansRows(layers=1).eval().double(), "m", None)


# stream_attention


def test_attentions_become_the_op() -> None:
    model = build("qwen3", num_hidden_layers=2)
    graph = after(model, Canonicalize(), StreamAttention())
    calls = graph.gm.graph.find_nodes(op="call_function", target=stream_verify)
    assert [call.args[3:] for call in calls] == [(layer, 8**-0.5) for layer in range(2)]
    assert [spec.module for spec in graph.spec.attentions] == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert (graph.spec.num_kv_heads, graph.spec.head_dim, graph.spec.kv_bytes_per_token_layer) == (2, 8, 256)
    for call in calls:
        assert "nn_module_stack" in call.meta
        value = example(call)
        assert value.transpose(1, 2).is_contiguous()
        assert value.shape[1:2] + value.shape[3:] == (4, 8)
    at = inputs()
    with torch.no_grad():
        torch.testing.assert_close(graph.gm(*at), forward_of(model)(*at), rtol=1e-6, atol=1e-6)


def test_stream_attention_checks_its_result() -> None:
    graph = after(build("plain_repeat"), Canonicalize(), StreamAttention())
    missing = dataclasses.replace(graph.spec, attentions=graph.spec.attentions[:1])
    with pytest.raises(ValueError, match="the spec lists 1"):
        StreamAttention().check(ModelGraph(graph.gm, missing))
    with pytest.raises(ValueError):
        StreamAttention().check(capture(build("plain_repeat"), name="m", max_model_len=None))


# select_logits


class Head(PlainRepeat):
    """PlainRepeat with something after its hidden states."""

    def __init__(self, finish: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.finish = finish
        self.eval().double()

    def forward(self, idx: Tensor, pos: Tensor) -> dict[str, Tensor]:
        x = self.tokens(idx) + self.angles(pos[..., None].double()).sin()
        q, k, v = self.layers[0](x).unflatten(-1, (10, -1)).split([6, 2, 2], dim=2)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return {"logits": self.finish(self.head, x + attended.transpose(1, 2).flatten(2))}


HEADS: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], bool]] = {
    "linear": (lambda head, x: head(x), True),
    "scaled": (lambda head, x: head(x) / 3, True),
    "softcapped": (lambda head, x: torch.tanh(head(x).float() / 30) * 30, True),
    "sliced": (lambda head, x: head(x[:, slice(0, None), :]), True),
    "matmul": (lambda head, x: x @ head.weight.t(), True),
    "read_twice": (lambda head, x: (y := head(x)) + y.mean(-1, keepdim=True), False),
    "permuted": (lambda head, x: head(x)[..., torch.arange(VOCAB - 1, -1, -1)], False),
    "einsum": (lambda head, x: torch.einsum("bnd,vd->bnv", x, head.weight), False),
}


@pytest.mark.parametrize("case", HEADS)
def test_head_sees_only_the_selected_rows(case: str) -> None:
    finish, found = HEADS[case]
    model = Head(finish)
    graph = after(model, Canonicalize(), StreamAttention(), SelectLogits())
    (select,) = graph.gm.graph.find_nodes(op="call_function", target=torch.index_select)
    assert (example(select).shape[2] == 24) is found
    assert str(example(graph.gm.graph.output_node().args[0]).shape[1]) == str(example(select).shape[1])
    ids, positions = inputs()
    for rows in ([8], [0, 3, 3, 1], list(range(9))):
        logits = graph.gm(ids, positions, torch.tensor(rows))
        torch.testing.assert_close(logits, model(ids, positions)["logits"][:, rows])


def test_select_logits_checks_its_result() -> None:
    graph = after(build("plain_repeat"), Canonicalize(), StreamAttention())
    with pytest.raises(ValueError, match="logit_rows is not read"):
        SelectLogits().check(graph)


# partition


class SharedKeys(PlainRepeat):
    """The second attention reads the first one's keys and values, and its queries twice: as in models that share KV."""

    def forward(self, idx: Tensor, pos: Tensor) -> dict[str, Tensor]:
        x = self.tokens(idx) + self.angles(pos[..., None].double()).sin()
        q, k, v = (y.transpose(1, 2) for y in self.layers[0](x).unflatten(-1, (10, -1)).split([6, 2, 2], dim=2))
        one = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        two = F.scaled_dot_product_attention(q + one, k, v, is_causal=True, enable_gqa=True)
        three = F.scaled_dot_product_attention(two, two[:, :2], two[:, :2], is_causal=True, enable_gqa=True)
        return {"logits": self.head(x + (two + three + q).transpose(1, 2).flatten(2))}


def test_operands_that_others_read_too() -> None:
    partitioned = compile_model(SharedKeys(layers=1).eval().double(), "m", None)
    names = [name for site in partitioned.sites for name in (site.query, site.key, site.value)]
    assert len(set(names)) == 9


class InPlace(PlainRepeat):
    """Adds residuals in place, across attentions."""

    def forward(self, idx: Tensor, pos: Tensor) -> dict[str, Tensor]:
        x = self.tokens(idx) + self.angles(pos[..., None].double()).sin()
        total = x.clone()
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (10, -1)).transpose(1, 2).split([6, 2, 2], dim=1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = attended.transpose(1, 2).flatten(2)
            total += x
        total.mul_(0.5)
        return {"logits": self.head(total)}


def test_writes_in_place_stay() -> None:
    partitioned = compile_model(InPlace().eval().double(), "m", None)
    calls = [node for p in partitioned.pieces for node in p.module.graph.nodes if node.op.startswith("call")]
    assert sum(map(writes, calls)) == 3


def test_partition_checks_its_result() -> None:
    partitioned = compile_model(build("plain_repeat"), "m", None)
    with pytest.raises(ValueError, match="1 sites for 2 attentions"):
        Partition().check(dataclasses.replace(partitioned, sites=partitioned.sites[:1]))
    broken = dataclasses.replace(partitioned.pieces[0], outputs=("x",) * len(partitioned.pieces[0].outputs))
    with pytest.raises(ValueError, match="which nothing wrote"):
        dataclasses.replace(partitioned, pieces=(broken, *partitioned.pieces[1:])).validate()


def test_dumps(tmp_path: Path) -> None:
    captured = capture(build("plain_repeat"), name="m", max_model_len=None)
    PassRunner("tiny", dump_dir=tmp_path).run(model_passes(None), captured)
    files = sorted(path.name for path in (tmp_path / "tiny").iterdir())
    names = ["input", "canonicalize", "stream_attention", "select_logits", "partition"]
    assert files == [f"{index:02d}_{name}.txt" for index, name in enumerate(names)]
    assert "# attention AttentionSite" in (tmp_path / "tiny" / "04_partition.txt").read_text()

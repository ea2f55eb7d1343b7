"""`init --to`: a draft for every format that can be written, and back to BF16 from every format that can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.pipeline.errors import PlanError, RecipeError
from shardmill.pipeline.formats import formats
from shardmill.pipeline.formats.base import Params
from shardmill.pipeline.init.draft import RecipeDraft, default_profile, draft
from tests.pipeline.init.layouts import Tensor, parent_of
from tests.pipeline.init.test_init import ATTENTION, LAYER, bf16, drafted, families, init
from tests.pipeline.parents import write_parent

MLP = {
    "mlp.gate_proj.weight": (512, 256),
    "mlp.up_proj.weight": (512, 256),
    "mlp.down_proj.weight": (256, 512),
}
WRITTEN = sorted(name for name, form in formats().items() if form.encode and form.name != "bf16")


def aimed(tensors: list[Tensor], aim: str, **config: object) -> RecipeDraft:
    parent = parent_of("made", dict(config), tensors)
    return draft(parent, "made", default_profile(parent, aim), aim)


@pytest.mark.parametrize("aim", WRITTEN)
def test_every_format_is_an_aim(aim: str) -> None:
    """Attention and MLP convert to the format, under a profile that has words for it, and the draft plans."""
    made = aimed(bf16({**ATTENTION, **MLP}), aim)
    assert len(made.plan.conversions) == 7
    assert {family.action for family in made.plan.families} == {"convert", "keep"}
    assert made.share > 0.9


@pytest.mark.parametrize("name", sorted(set(formats()) - {"bf16"}))
def test_bf16_is_the_way_back_from_every_format(name: str) -> None:
    """A Linear in any format and spelling becomes one BF16 weight; scales of activations go with its codes."""
    form = formats()[name]
    for spelling in form.spellings:
        base = "layers.0.mlp.down_proj"
        parts = form.stored((256, 512), Params(), spelling)
        tensors = [(base + spelling.ends[part.role], part.dtype, part.shape) for part in parts]
        tensors += [(base + ".input_scale", "F32", ()), ("layers.0.norm.weight", "BF16", (8,))]
        made = aimed(tensors, "bf16")
        assert set(made.plan.weight_map) - {"layers.0.norm.weight"} <= {
            base + ".weight",
            base,
            base + ".input_scale",
        }
        assert b"quantization_config" not in made.plan.config


def test_towers_are_known_by_their_place() -> None:
    """What lies beside the embeddings is the language model; the same names elsewhere are kept, but for MTP."""
    model = [*bf16(ATTENTION, "llm.model.layers.0."), ("llm.model.embed_tokens.weight", "BF16", (256, 256))]
    others = bf16(ATTENTION, "vpm.encoder.layers.0.") + bf16(ATTENTION, "talker.model.layers.0.")
    made = drafted(model + others + bf16(ATTENTION, "mtp.layers.0."))
    assert {name.partition(".")[0] for name in made.plan.conversions} == {"llm", "mtp"}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("aim", ["fp8", "nvfp4"])
def test_a_stack_of_experts_becomes_one_tensor_an_expert(aim: str, transposed: bool) -> None:
    """Experts in one tensor, stored either way, become what makers publish: experts.E.{gate,up,down}_proj."""
    shapes = {"mlp.experts.gate_up_proj": (8, 256, 512), "mlp.experts.down_proj": (8, 256, 256)}
    if not transposed:
        shapes["mlp.experts.gate_up_proj"] = (8, 512, 256)
    made = aimed(bf16({**ATTENTION, **shapes}), aim)
    names = {name.rpartition(".")[0] for name in made.plan.weight_map if ".experts." in name}
    wanted = {f"{LAYER}mlp.experts.{e}.{own}_proj" for e in range(8) for own in ("gate", "up", "down")}
    assert names == wanted
    assert ("transposed = true" in made.text) == transposed


def test_interleaved_experts_stay() -> None:
    """gpt-oss alternates rows of gate and up, which no two modules can hold: its stacks are kept, with a reason."""
    shapes = {"mlp.experts.gate_up_proj": (8, 256, 512), "mlp.experts.down_proj": (8, 256, 256)}
    made = drafted(bf16({**ATTENTION, **shapes}), model_type="gpt_oss")
    assert families(made)["stacks"].action == "keep"


def test_what_converts_nothing_is_refused(tmp_path) -> None:
    """A model of which no name is known gives no recipe, but the reason and its largest part."""
    unknown = parent_of("made", {}, bf16({"mystery.projection.weight": (512, 256)}, "transformer.h.0."))
    with pytest.raises(PlanError, match=r"0 weights would convert to fp8.*'unknown' \(262,144 bytes\)"):
        draft(unknown, "plain", "fp8", must_convert=True)


def test_transposed_linears_are_known_by_the_models_type() -> None:
    """GPT-2 stores c_attn [columns, rows] and is refused; the first Qwen has the same name for a Linear."""
    names = bf16({"attn.c_attn.weight": (768, 256), "attn.c_proj.weight": (256, 256)}, "transformer.h.0.")
    for model_type, converts in (("gpt2", 0), ("qwen", 2)):
        made = draft(parent_of("x", {"model_type": model_type}, names), "x", "fp8")
        assert len(made.plan.conversions) == converts


def test_an_unknown_aim_is_answered_with_the_known(tmp_path) -> None:
    with pytest.raises(RecipeError, match=r"fp7: is no format that can be written; choose from fp8, .*nvfp4"):
        init(str(tmp_path), "--to", "fp7")


def test_names_without_a_dot_are_no_error() -> None:
    """Parameters at the top of a model (CLIP's logit_scale) are kept like any vector."""
    made = drafted([*bf16(ATTENTION), ("logit_scale", "F32", ()), ("logit_bias", "F32", (1,))])
    assert families(made)["vectors"].tensors >= 2


def test_a_draft_that_a_loader_cannot_read_says_so(tmp_path: Path) -> None:
    """The same reason as plan's refusal, and what to change; the profile stands in the first line."""
    experts = {
        f"mlp.experts.{e}.{own}_proj.weight": (128, 128) for e in range(2) for own in ("gate", "up", "down")
    }
    tensors = {name: (dtype, shape, bytes(2 * shape[0] * shape[1])) for name, dtype, shape in bf16(experts)}
    parent = write_parent(tmp_path / "parent", {"model.safetensors": tensors})
    draft_at = tmp_path / "mine.toml"
    said = init(str(parent), "-o", str(draft_at), "--to", "nvfp4").output
    assert said.startswith(f"{draft_at}, profile compressed-tensors: ")
    assert "warning: plan refuses this recipe as it is: " in said
    assert "# loaders = " in draft_at.read_text()


@pytest.mark.parametrize("place", ["attention.attention.{}", "attention.self.{}", "attention.{}_lin"])
def test_attention_of_encoders_converts(place: str) -> None:
    """ViT and DINOv2, BERT, DistilBERT."""
    words = ("q", "k", "v") if place.endswith("_lin") else ("query", "key", "value")
    shapes = {f"{place.format(word)}.weight": (256, 256) for word in words}
    made = drafted(bf16(shapes, "vit.encoder.layer.0."))
    assert families(made)["attention projections"].tensors == 3


def test_codes_that_only_the_way_back_reads_are_answered_with_it() -> None:
    """GPTQ can't become FP8 at once, but BF16, and then anything."""
    form = formats()["gptq"]
    base = "model.layers.0.mlp.down_proj"
    parts = form.stored((256, 512), Params(), form.spellings[0])
    tensors = [(base + form.spellings[0].ends[part.role], part.dtype, part.shape) for part in parts]
    parent = parent_of("made", {}, tensors)
    with pytest.raises(PlanError, match="`--to bf16` reads it"):
        draft(parent, "made", "fp8", must_convert=True)

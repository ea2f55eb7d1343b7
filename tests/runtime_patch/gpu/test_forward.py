"""What can be asked of the forward harness without a GPU: the toy's laws, the tables, and the judge's sentences."""

import json

import ml_dtypes
import numpy as np
import pytest

from tests.runtime_patch.gpu import accept, audit, cases, forward, inside, judge, pack, toy


def answer(tokens, prompt, cached=0):
    """One request's answer: greedy tokens, and a distribution over three words at each prompt position."""
    rows = [None, *[{str(word): float(np.log(p)) for word, p in enumerate(position)} for position in prompt]]
    spoken = [{str(token): -0.5, "9": -1.5} for token in tokens]
    return {"tokens": tokens, "logprobs": spoken, "prompt_logprobs": rows, "cached": cached}


def test_every_pair_names_two_cases():
    """A pair compares cases of the table, a floor has its limit, and what starts is compared or traced."""
    for pair in cases.PAIRS:
        assert {pair.base, pair.test} <= set(cases.CASES)
        assert (pair.law in ("floor", "until")) == (pair.least > 0)
    used = {name for pair in cases.PAIRS for name in (pair.base, pair.test)}
    assert {n for n, c in cases.CASES.items() if not (c.refused or c.trace)} == used


def test_answers_have_files_of_their_own():
    """No two cases share an answer's file."""
    assert len({forward.file_name(name) for name in cases.CASES}) == len(cases.CASES)


def test_equal_answers_are_equal_bit_for_bit():
    """The same answer twice holds the law; one last bit of one log probability breaks it and is located."""
    one = answer([1, 2], [[0.5, 0.3, 0.2]] * 5)
    found = judge.compare({"short": [one]}, {"short": [one]}, "short")
    assert (found.bits, found.top1, found.kl, found.first_position, found.worst) == (
        True,
        1.0,
        0.0,
        None,
        0.0,
    )
    other = json.loads(json.dumps(one))
    other["prompt_logprobs"][3]["0"] += 1e-6
    found = judge.compare({"short": [one]}, {"short": [other]}, "short")
    assert not found.bits
    assert found.first_position == 3
    pair = cases.Pair("a", "b", "bits", "")
    assert judge.holds(pair, {"short": found}) is False


def test_a_difference_before_the_named_position_breaks_the_law():
    """`until` asks for equal bits before a position, and lets what follows be."""
    one = answer([1], [[0.5, 0.3, 0.2]] * 9)
    other = json.loads(json.dumps(one))
    other["prompt_logprobs"][6]["0"] += 1e-3
    found = {"long": judge.compare({"long": [one]}, {"long": [other]}, "long")}
    assert judge.holds(cases.Pair("a", "b", "until", "", least=6), found) is True
    assert judge.holds(cases.Pair("a", "b", "until", "", least=7), found) is False
    same = {"long": judge.compare({"long": [one]}, {"long": [one]}, "long")}
    assert judge.holds(cases.Pair("a", "b", "until", "", least=7), same) is True


def test_cases_go_to_the_card_with_room():
    """The emptiest card is taken, a held card never, and two ranks want two cards."""
    assert forward.free_cards(1, [2, 1], 3, held=False) == (1,)
    assert forward.free_cards(1, [0, 3], 3, held=True) is None
    assert forward.free_cards(1, [0, 3], 3, held=False) == (0,)
    assert forward.free_cards(2, [3, 3], 3, held=False) == (0, 1)
    assert forward.free_cards(2, [0], 3, held=False) is None
    assert forward.free_cards(2, [6, 0], 3, held=False) is None


def test_a_parent_gets_the_processor_of_its_own_patches(tmp_path):
    """The picture processor takes the tower's patch size, not the real model's."""
    vision = {"patch_size": 7, "temporal_patch_size": 2, "spatial_merge_size": 2}
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": vision}))
    toy.add_processor(tmp_path)
    said = json.loads((tmp_path / "processor_config.json").read_text())["image_processor"]
    assert (said["patch_size"], said["merge_size"], said["max_image_tokens"]) == (7, 2, 256)


def test_agreement_and_divergence_are_counted():
    """Two of four positions keep the first choice, and KL is that of the two distributions."""
    p, q = [0.6, 0.3, 0.1], [0.3, 0.6, 0.1]
    base, test = answer([1, 2, 3], [p, p, p, p]), answer([1, 5, 3], [p, q, p, q])
    found = judge.compare({"short": [base]}, {"short": [test]}, "short")
    assert (found.positions, found.top1, found.tokens_equal, found.first_token) == (4, 0.5, 0, 1)
    assert found.kl == pytest.approx(2 * (0.6 * np.log(2) - 0.3 * np.log(2)) / 4, abs=1e-6)
    assert found.top1_low < 0.5 < found.top1_high
    floor = cases.Pair("a", "b", "floor", "", least=0.95)
    assert judge.holds(floor, {"short": found}) is False


def test_what_was_not_run_is_named(tmp_path):
    """The table names missing cases, failures and refusals that did not happen."""
    whole = {part: [answer([1], [[0.5, 0.3, 0.2]] * 3)] for part in ("short", "long", "again")}
    whole |= {"four": [answer([1], [])] * 2, "alone": [answer([1], [])], "seams": {}}
    for name in ("parent", "parent again"):
        (tmp_path / f"{forward.file_name(name)}.json").write_text(json.dumps({"case": name} | whole))
    (tmp_path / "x.json").write_text(json.dumps({"case": "child", "error": "RuntimeError: no"}))
    (tmp_path / "y.json").write_text(json.dumps({"case": "a misspelt variable"} | whole))
    verdict = judge.judge(tmp_path)
    text = judge.markdown(verdict)
    assert "| parent | parent again | bit for bit holds | equal bit for bit |" in text
    assert "child: **failed**: RuntimeError: no" in text
    assert "a misspelt variable: **not refused**" in text
    assert "child 8666" in text.splitlines()[-1]


def write(folder, tensors):
    """A folder of one safetensors file."""
    header, data = {}, b""
    for name, (dtype, values) in tensors.items():
        raw = values.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    head = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)
    kinds = ["linear_attention", "deepseek_sparse_attention"]
    (folder / "config.json").write_text(json.dumps({"text_config": {"layer_types": kinds}}))
    return folder


def bf16(*shape):
    return np.random.default_rng(3).standard_normal(shape).astype(ml_dtypes.bfloat16)


@pytest.fixture
def parent(tmp_path):
    layers = "model.language_model.layers."
    return write(
        tmp_path / "parent",
        {
            toy.EMBED: ("BF16", bf16(64, 32)),
            toy.HEAD: ("BF16", bf16(64, 32)),
            f"{layers}0.self_attn.o_proj.weight": ("BF16", bf16(8, 8)),
            f"{layers}1.self_attn.o_proj.weight": ("BF16", bf16(8, 8)),
            f"{layers}1.mlp.experts.0.down_proj.weight_scale_2": ("F32", np.float32([3.0])),
            f"{layers}1.mlp.experts.0.gate_proj.weight_scale_2": ("F32", np.float32([5.0])),
        },
    )


def test_the_toy_is_rescaled_by_powers_of_two(parent):
    """Each tensor is an exact multiple of what it was, and those without a factor keep their bytes."""
    before = {name: toy.read(entry).astype(np.float32) for name, entry in toy.tensors(parent)}
    toy.inform(parent)
    after = {name: toy.read(entry).astype(np.float32) for name, entry in toy.tensors(parent)}
    factors = {name: np.unique(after[name] / before[name]).tolist() for name in before if name != toy.HEAD}
    layers = "model.language_model.layers."
    assert factors == {
        toy.EMBED: [64.0],
        f"{layers}0.self_attn.o_proj.weight": [toy.KDA_OUT],
        f"{layers}1.self_attn.o_proj.weight": [toy.MLA_OUT],
        f"{layers}1.mlp.experts.0.down_proj.weight_scale_2": [toy.EXPERT_OUT],
        f"{layers}1.mlp.experts.0.gate_proj.weight_scale_2": [1.0],
    }


def test_a_word_has_its_successor(parent):
    """Each word's embedding alone predicts one successor where it leans enough, and no two words share one."""
    embeddings = np.random.default_rng(5).standard_normal((512, 256)).astype(np.float32)
    found = (embeddings @ toy.successors(embeddings).T).argmax(1)
    assert 256 < len(np.unique(found)) < 512  # certain after some words, open after others


def test_one_bit_changes_the_lowest_bit_alone(parent, tmp_path):
    """The noisy twin differs in the embedding's lowest bits, about half of them, and nowhere else."""
    toy.one_bit(parent, tmp_path / "bit")
    a, b = dict(toy.tensors(parent)), dict(toy.tensors(tmp_path / "bit"))
    changed = toy.read(a[toy.EMBED]).view(np.uint16) ^ toy.read(b[toy.EMBED]).view(np.uint16)
    assert set(np.unique(changed)) == {0, 1}
    assert 0.4 < changed.mean() < 0.6
    assert all((toy.read(a[n]) == toy.read(b[n])).all() for n in a if n != toy.EMBED)


def test_only_other_cards_code_is_zeroed(tmp_path):
    """Of a fatbin's entries, machine code of SM90 and PTX of 80 and 90 stay; the file keeps its length."""
    import struct

    def entry(kind, architecture, fill):
        return struct.pack("<HHIQIIHHI", kind, 0, 64, 16, 0, 0, 0, 0, architecture).ljust(64, b"\0") + bytes(
            [fill] * 16
        )

    entries = entry(2, 90, 1) + entry(2, 120, 2) + entry(1, 90, 3) + entry(1, 120, 4)
    fat = struct.pack("<IHHQ", pack.MAGIC, 1, 16, len(entries)) + entries
    names = b"\0.nv_fatbin\0.shstrtab\0"
    begin = 64 + 3 * 64
    rows = [(0, 0, 0, 0), (1, 1, begin, len(fat)), (12, 3, begin + len(fat), len(names))]
    table = b"".join(struct.pack("<IIQQQQ", n, t, 0, 0, at, size).ljust(64, b"\0") for n, t, at, size in rows)
    elf = bytearray(64)
    struct.pack_into("<Q", elf, 0x28, 64)
    struct.pack_into("<HHH", elf, 0x3A, 64, 3, 2)
    library = tmp_path / "x.so"
    library.write_bytes(bytes(elf) + table + fat + names)
    got = pack.narrowed(library)
    assert len(got) == library.stat().st_size
    kept = [got.count(bytes([fill] * 16)) for fill in (1, 2, 3, 4)]
    assert kept == [1, 0, 1, 0]


def lowest(scores, k, low_first):
    """The k best columns of each row; of equals the lower or the higher ones."""
    torch = pytest.importorskip("torch")
    order = [
        sorted(range(len(row)), key=lambda c: (-row[c], c if low_first else -c))[:k]
        for row in scores.tolist()
    ]
    return torch.tensor(order, dtype=torch.int32)


def test_the_audit_tells_a_choice_among_equals_from_a_worse_one():
    """Rows that part by equal scores alone are counted apart from rows whose scores differ, and placed."""
    torch = pytest.importorskip("torch")
    scores = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    scores[2, 30] = scores[2].topk(8).values[-1]
    best, other = lowest(scores, 8, True), lowest(scores, 8, False)
    found = audit.Audit(6 << 20)
    audit._count(
        found, best, other, scores, [(0, scores[:, :20]), (20, scores[:, 20:])], torch.full((4,), 40)
    )
    assert (found.rows, found.parted, found.unequal, found.tied) == (4, 1, 0, 1)
    assert found.scores_parted == 0
    assert found.examples[0]["row"] == 2
    worse = best.clone()
    worse[0, 0] = int(scores[0].argmin())
    audit._count(found, best, worse, scores, [(0, scores + 1)], torch.full((4,), 40))
    assert (found.parted, found.unequal, found.scores_parted) == (2, 1, 160)


def test_the_stand_in_for_flashattention_is_attention():
    """Two sequences of other lengths, causal and over a context: torch's own attention, and its sums."""
    torch = pytest.importorskip("torch")
    draw = torch.Generator().manual_seed(2)
    q, k = (torch.randn(n, 2, 8, generator=draw) for n in (5, 7))
    v = torch.randn(7, 2, 6, generator=draw)
    ends_q, ends_k = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 7])
    for causal in (False, True):
        out, sums = inside.torch_varlen(
            None, q, k, v, True, 0.3, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, causal=causal
        )
        for a, b, c, d in ((0, 2, 0, 4), (2, 5, 4, 7)):
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a)) if causal else None
            heads = [x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d])]
            plain = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.3)
            assert torch.allclose(out[a:b].transpose(0, 1), plain, atol=1e-6)
    alone = (q[0] * k[0]).sum(-1) * 0.3  # of four keys the first query sees three
    assert sums.shape == (2, 5)
    assert (sums[:, 0] >= alone).all()


def test_accept_asks_documents_that_gates_can_decide(tmp_path):
    """The protocol of the served toys parses, has the 80 documents that its gates need, and its flags are vLLM's."""
    from shardmill.verify.accept.protocol import read_protocol

    (tmp_path / "forward.toml").write_text(accept.protocol())
    protocol = read_protocol(str(tmp_path / "forward.toml"))
    assert len(protocol.documents) == 80
    assert {gate.metric for gate in protocol.gates} == {"top1_agreement", "mean_kl", "confident_flips"}
    words = accept.flags()
    assert words[words.index("--kv-cache-dtype") + 1] == "fp8_ds_mla"
    assert "--disable-flashinfer-autotune" in words
    assert "--skip-tokenizer-init" not in words
    named = {name for pair in accept.PAIRS for name in pair}
    assert named == set(accept.SERVERS)
    assert {base for base, _ in accept.PAIRS} == set(accept.TWICE)

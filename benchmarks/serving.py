"""Compare paged continuous batching with static batching and with transformers' own generate.

Rows "trace": one stream of requests with mixed lengths, with the same memory, fully used. Ours
pages and admits requests before every step. Theirs reserves the model's window for each request and
admits requests when all others have ended. (Both use our engine; the static one computes no
padding, so it is a good static one.) That changes several things at once. The two rows below change
one thing each: static with paged blocks, and continuous with the window reserved. All requests are
there at the start, except in the row "one every 4 steps".
Rows "empty": the share of token slots in used blocks that hold no token, compared with 4 % and with
the share under reservation.
Row "a decode step": one new token after 448 others, from the cache and by recomputing the window.
Rows "transformers": the same weights, greedy decoding, the same prompts, a Llama of 4 layers x 256.
Every run compares our texts with theirs. The rows run on one rank, and with tp_plan="auto" on 4
gloo ranks in the same processes by turns. Bytes are the ledger's count for one token of each
sequence, all ranks together. On one rank ours took 0.95 of their CPU time on two shared cores in
November 2026. It took 1.06 before three changes: tokens lost their batch dim, prompts of one length
attend in one call, and the layers' matrices are stored inputs first (serving/engine.py). On both
sides more than half of the time is the same products of 8 rows with all weights. These rows need
transformers and accelerate, which nothing else here needs:

    pip install -e '.[bench]'
"""

import random
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec

import torch
from _form import Case, main

from mini_dist import GPT, ModelConfig, launch
from mini_dist.serving import Cache, Engine, Memory, Policy, Request, forward, measure
from mini_dist.strategies.tensor_parallel import GPT_PLAN, shard_model

CONFIG = ModelConfig(
    d_model=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    seq_len=512,
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
)
RANKS = 4
MEMORY = Memory(num_blocks=256, block_size=8)  # 2,048 tokens: four windows


def trace(number, between=0):
    """Make prompts of 8 to 128 tokens and answers of 8 to 256.

    Few are long, and none is near the window. between: steps from one arrival to the next.
    """
    rng = random.Random(0)
    requests = []
    for i in range(number):
        prompt = [rng.randrange(256) for _ in range(min(128, 8 + int(rng.expovariate(1 / 40))))]
        new = min(256, 8 + int(rng.expovariate(1 / 60)))
        requests.append(Request(str(i), prompt, new, arrival=i * between))
    return requests


POLICIES = {
    "paged": Policy(max_batch=64, max_tokens=256),
    "static": Policy(max_batch=64, static=True, reserve=CONFIG.seq_len),
    "static, paged": Policy(max_batch=64, static=True),
    "continuous, contiguous": Policy(max_batch=64, reserve=CONFIG.seq_len),
}


def trace_cases(long):
    model, number = GPT(CONFIG), 96 if long else 32
    together, arriving = trace(number), trace(number, between=4)
    texts, wasted = {}, {}

    def run(name, requests=together):
        began = time.perf_counter()
        served = Engine(model, MEMORY, None).serve(requests, POLICIES[name])
        taken = 1e3 * (time.perf_counter() - began)
        texts[name] = served.texts
        wasted[name] = 100 * measure(served.steps, requests, MEMORY).wasted
        return taken

    repeats = 5 if long else 3
    name = f"trace of {number}, paged / static"
    yield Case(name, lambda: run("paged"), lambda: run("static"), 0.5, repeats=repeats)
    for name in ("static, paged", "continuous, contiguous"):
        title = f"of that alone: {name} / static"
        yield Case(title, lambda name=name: run(name), lambda: run("static"), repeats=1)
    assert all(text == texts["static"] for text in texts.values()), "the policies' texts differ"
    yield Case("empty, paged / 4 %", lambda: wasted["paged"], 4.0, 1.0, "%", 1, 0)
    yield Case(
        "empty, paged / reserved",
        lambda: wasted["paged"],
        lambda: wasted["static"],
        None,
        "%",
        1,
        0,
    )
    yield Case(
        "one every 4 steps, paged / static",
        lambda: run("paged", arriving),
        lambda: run("static", arriving),
        repeats=1,
    )
    assert texts["paged"] == texts["static"], "the policies gave different texts"


def step_case():
    model, tokens = GPT(CONFIG).eval(), torch.arange(449) % 256
    cache = Cache(CONFIG.num_layers)
    forward(model, tokens[:-1], cache)

    def decode():
        forward(model, tokens[-1:], cache)
        cache.cut(448)

    def again():
        with torch.no_grad():
            model(tokens[None])

    yield Case("a decode step / the whole window", decode, again, 0.25, repeats=15)


# ---- transformers --------------------------------------------------------------------------------

OUTER = {
    "embed.token.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.out.weight": "lm_head.weight",
}
INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn.{name}": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"ffn.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
PROMPT, BATCH = 64, 8


def llama_from(model):
    """Return transformers' model with the weights of ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.d_model,
        intermediate_size=CONFIG.d_ffn,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        max_position_embeddings=CONFIG.seq_len,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        bos_token_id=None,
        eos_token_id=None,  # No text ends early.
        attn_implementation="sdpa",
    )
    state = {}
    for name, value in model.state_dict().items():
        if name not in OUTER:
            _, layer, rest = name.split(".", 2)
            name = f"model.layers.{layer}.{INNER[rest.removesuffix('.weight')]}.weight"
        state[OUTER.get(name, name)] = value
    theirs = LlamaForCausalLM(config)
    theirs.load_state_dict(state)
    return theirs.eval()


def prompts():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, CONFIG.vocab_size, (BATCH, PROMPT), generator=generator)


def sides(model, theirs, new, group):
    """Return two functions that continue all prompts and return the texts [B, new]."""
    tokens = prompts()
    requests = [Request(str(i), row.tolist(), new) for i, row in enumerate(tokens)]

    def ours():
        engine = Engine(model, Memory(BATCH * 8, 16), group)
        texts = engine.serve(requests, Policy(max_batch=BATCH)).texts
        return torch.tensor(list(texts.values()))

    def hugging_face():
        out = theirs.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        return out[:, PROMPT:]

    return {"ours": ours, "theirs": hugging_face}


def one_rank_case(new, repeats):
    model = GPT(CONFIG).eval()
    both = sides(model, llama_from(model), new, None)
    texts = {name: side() for name, side in both.items()}
    assert torch.equal(texts["ours"], texts["theirs"]), "the texts differ"

    def a_token(side):  # One thread per side, so CPU time equals time alone.
        began = time.process_time()
        both[side]()
        return 1e3 * (time.process_time() - began) / new

    name = f"transformers, 1 rank: CPU time of a token of {BATCH} texts"
    yield Case(name, lambda: a_token("ours"), lambda: a_token("theirs"), 1.0, repeats=repeats)


def both_on_ranks(folder, new, group):
    import os

    import torch.distributed as dist
    from transformers import LlamaForCausalLM

    rank, size = group.rank(), group.size()
    # transformers reads these variables.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    theirs = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", device_mesh=mesh).eval()
    model = shard_model(GPT(CONFIG).eval(), GPT_PLAN, group)
    return sides(model, theirs, new, group)


def in_turn_on_ranks(folder, new, rounds, group):
    """Return {side: [seconds of each round]}, and both sides' texts."""
    both = both_on_ranks(folder, new, group)
    texts = {name: side() for name, side in both.items()}
    taken = {name: [] for name in both}
    for turn in range(rounds):
        for name in both if turn % 2 else reversed(both):
            group.barrier().wait()
            began = time.perf_counter()
            both[name]()
            taken[name].append(time.perf_counter() - began)
    return taken, texts


def once_on_ranks(folder, new, name, group):
    both_on_ranks(folder, new, group)[name]()


def ranks_cases(new, rounds):
    with tempfile.TemporaryDirectory() as folder:
        llama_from(GPT(CONFIG)).save_pretrained(folder)
        results = launch(in_turn_on_ranks, RANKS, (folder, new, rounds), timeout=500).results
        sent = {}
        for side in ("ours", "theirs"):  # Eight tokens more, without prompt and set-up.
            few, more = (
                launch(once_on_ranks, RANKS, (folder, n, side), timeout=500).ledger.total_bytes()
                for n in (4, 12)
            )
            sent[side] = (more - few) / 8
    ms = {}
    for side in ("ours", "theirs"):
        assert all(torch.equal(texts[side], results[0][1]["theirs"]) for _, texts in results)
        slowest = [max(turns) for turns in zip(*(taken[side] for taken, _ in results))]
        ms[side] = 1e3 * statistics.median(slowest) / new
    name = f"transformers, tp on {RANKS} ranks: a token of {BATCH} texts"
    yield Case(name, lambda: ms["ours"], lambda: ms["theirs"], 1.0, "ms", 1, 0)
    yield Case(name, lambda: sent["ours"], lambda: sent["theirs"], 1.0, "bytes", 1, 0)


def cases(long):
    torch.set_num_threads(1)  # on both sides
    yield from trace_cases(long)
    yield from step_case()
    if not (find_spec("transformers") and find_spec("accelerate")):
        print("no rows for transformers, which is not installed: pip install -e '.[bench]'")
        return
    yield from one_rank_case(64 if long else 32, 7 if long else 5)
    yield from ranks_cases(64 if long else 16, 7 if long else 3)


sys.exit(main(cases, __doc__))

"""The tokens equal those of one model without a cache, and no block is lost.

This holds however requests are batched, placed, preempted or sharded over ranks.
"""

import random
from collections import Counter

import pytest
import torch

from mini_dist import GPT, ModelConfig, generate, launch
from mini_dist.serving import (
    Cache,
    Engine,
    Memory,
    Policy,
    Request,
    Scheduler,
    ServerAction,
    ServingError,
    Text,
    accept,
    choose,
    continue_text,
    decode_in_pipeline,
    decode_in_stages,
    forward,
    measure,
    num_tokens,
    paged_attention,
    pick,
    place_tokens,
    plan,
    replayed,
    speculate,
    token_times,
    uniform,
    weight_bytes,
    who_runs,
    with_int8_weights,
)
from mini_dist.serving.engine import Places
from mini_dist.serving.ideas import stage_of
from mini_dist.strategies.tensor_parallel import GPT_PLAN, shard_model

SMALL = ModelConfig(vocab_size=64, seq_len=64, d_model=32, num_layers=2, num_heads=4)
MODELS = {
    "rotary, as many kv heads": SMALL,
    "learned positions, tied, 2 kv heads": SMALL.replace(
        positions="learned", tied_embedding=True, num_kv_heads=2
    ),
    "llama, one kv head": SMALL.replace(
        norm="rmsnorm", activation="swiglu", bias=False, num_kv_heads=1
    ),
    "experts": SMALL.replace(num_experts=4, top_k=2),
}
models = pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())


def model_of(config, seed=0):
    """Make a model in float64, so that another order of additions changes no token.

    Its layers outweigh the embedding. Otherwise a text would repeat its last token, and a wrong
    read would go unnoticed.
    """
    model = GPT(config, seed, dtype=torch.float64).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(8 if name.startswith("blocks") and "norm" not in name else 1)
    return model


def requests_of(config, number=10, temperature=0.0, **more):
    """Make requests of mixed lengths; every second prompt begins with the same nine tokens."""
    rng = random.Random(3)

    def tokens(count):
        return tuple(rng.randrange(config.vocab_size) for _ in range(count))

    shared = tokens(9)
    return [
        Request(
            f"r{i}",
            (shared if i % 2 else ()) + tokens(rng.randint(1, 20)),
            rng.randint(1, 18),
            arrival=rng.randint(0, 8),
            temperature=temperature,
            seed=i,
            **more,
        )
        for i in range(number)
    ]


def alone(model, request, sample=0):
    """The oracle: run the whole text, alone, through the model for every token, without a cache."""
    tokens = list(request.prompt)
    for place in range(request.max_new_tokens):
        with torch.no_grad():
            logits = model(torch.tensor(tokens)[None])[0, -1]
        u = uniform(request.seed, f"{sample}/{place}")
        tokens.append(choose(logits, request.temperature, u))
    return tokens[len(request.prompt) :]


def kinds(steps):
    return Counter(action.kind for step in steps for action in step.actions)


# ---- the page ------------------------------------------------------------------------------------


@models
def test_a_cache_changes_no_token(config):
    model, prompt = model_of(config), torch.arange(7)
    expected = generate(model, prompt, 12, temperature=0)
    assert torch.equal(continue_text(model, prompt, 12), expected)
    assert len(set(expected.tolist())) > 8  # (a model that repeats one token would prove nothing)


def test_a_cache_holds_two_numbers_for_each_layer_kv_head_and_dim_of_a_token():
    for config in MODELS.values():
        cache = Cache(config.num_layers)
        forward(model_of(config), torch.arange(11), cache)
        numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        assert (cache.length, cache.nbytes) == (11, 11 * numbers * 8)


def test_logits_after_a_cache_are_those_of_the_whole_text_and_a_cut_cache_forgets():
    model, tokens = model_of(SMALL), torch.arange(12)
    whole = model(tokens[None])[0]
    cache = Cache(SMALL.num_layers)
    parts = [forward(model, part, cache) for part in tokens.split([5, 1, 6])]
    torch.testing.assert_close(torch.cat(parts), whole)
    cache.cut(7)
    torch.testing.assert_close(forward(model, tokens[7:], cache), whole[7:])


def test_a_text_beyond_the_window_is_refused():
    with pytest.raises(ServingError, match="beyond the model's window, seq_len=64"):
        continue_text(model_of(SMALL), torch.arange(60), 6)
    assert len(continue_text(model_of(SMALL), torch.arange(60), 5)) == 65


@pytest.mark.parametrize("length", [1, 3, 4, 11, 12])
def test_attention_over_blocks_anywhere_is_attention_over_a_row(length):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    keys, values = torch.randn(2, 9, 4, 2, 8, generator=generator, dtype=torch.float64)
    table = [7, 0, 4]
    k, v = (t[table].flatten(0, 1)[:length].transpose(0, 1) for t in (keys, values))  # [K, T, H]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None, :, None], k[None], v[None], enable_gqa=True
    )[0, :, 0]
    torch.testing.assert_close(paged_attention(q, keys, values, table, length), expected)


def test_a_choice_depends_on_its_seed_and_place_alone_and_has_the_models_probabilities():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    drawn = Counter(choose(logits, 0.8, uniform(5, place)) for place in range(20_000))
    for token, p in enumerate((logits / 0.8).softmax(-1).tolist()):
        assert abs(drawn[token] / 20_000 - p) < 4 * (p * (1 - p) / 20_000) ** 0.5
    assert choose(logits, 0, 0.99) == 2
    assert uniform(1, "0/3") == uniform(1, "0/3") != uniform(2, "0/3") != uniform(1, "0/4")


def test_a_pick_never_has_probability_zero():
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert [pick(p, u) for u in (0.0, 0.499, 0.5, 0.999)] == [1, 1, 3, 3]


def test_the_page_places_tokens_where_the_engine_writes_them():
    memory, free = Memory(6, 4), [3, 0, 5]
    assert place_tokens([], free, 0, 5, 4) == ([3, 0], [12, 13, 14, 15, 0])
    for block in free:
        memory.do(ServerAction("a", "TAKE", block))
    for first, last in ((0, 3), (3, 4), (4, 11)):
        action = ServerAction("a", "RUN", first, last)
        memory.do(action)
        table = memory.tables["a"]
        expected = place_tokens(table, [], first, last - first, 4)
        assert (table, Places([action], memory, torch.empty(0)).write.tolist()) == expected


def test_the_engine_attends_as_the_page_does():
    """Sequences of several lengths share a batch, and their blocks may be anywhere."""
    memory, generator = Memory(12, 4), torch.Generator().manual_seed(0)
    lengths = {"a": 1, "b": 9, "c": 12}
    for name, length in lengths.items():
        for _ in range(memory.blocks_for(length)):
            memory.do(ServerAction(name, "TAKE", list(memory.free)[-1 if length == 9 else 0]))
        if length > 1:
            memory.do(ServerAction(name, "RUN", 0, length - 1))
    batch = [ServerAction(name, "RUN", length - 1, length) for name, length in lengths.items()]
    for action in batch:
        memory.do(action)
    keys, values = torch.randn(2, 12, 4, 2, 8, generator=generator, dtype=torch.float64)
    q = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 3, 2, 8, generator=generator, dtype=torch.float64)
    out = Places(batch, memory, torch.empty(0, dtype=torch.float64)).attend(q, k, v, keys, values)
    for row, (name, length) in enumerate(lengths.items()):
        last = memory.tables[name][(length - 1) // 4], (length - 1) % 4
        assert torch.equal(keys[last], k[row]) and torch.equal(values[last], v[row])
        expected = paged_attention(q[row], keys, values, memory.tables[name], length)
        torch.testing.assert_close(out[row], expected)


def test_chunks_of_equally_many_tokens_attend_in_one_call_and_each_sees_its_own_beginning():
    """Two RUNs have two tokens, at different positions of their texts; the others have 1 and 3."""
    memory, generator = Memory(12, 4), torch.Generator().manual_seed(0)
    runs = {"d": (8, 9), "a": (3, 5), "b": (0, 2), "c": (4, 7)}
    for name, (first, last) in runs.items():
        for _ in range(memory.blocks_for(last)):
            memory.do(ServerAction(name, "TAKE", list(memory.free)[-1 if name == "b" else 0]))
        if first:
            memory.do(ServerAction(name, "RUN", 0, first))
    batch = [ServerAction(name, "RUN", *run) for name, run in runs.items()]
    for action in batch:
        memory.do(action)
    places = Places(batch, memory, torch.empty(0, dtype=torch.float64))
    assert [group.num_runs for group in places.groups] == [1, 2, 1]
    keys, values = torch.randn(2, 12, 4, 2, 8, generator=generator, dtype=torch.float64)
    q = torch.randn(8, 4, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 8, 2, 8, generator=generator, dtype=torch.float64)
    rows = iter(places.attend(q, k, v, keys, values))
    tokens = [(name, i) for name, (first, last) in runs.items() for i in range(first, last)]
    for query, (name, i), row in zip(q, tokens, rows, strict=True):
        expected = paged_attention(query, keys, values, memory.tables[name], i + 1)
        torch.testing.assert_close(row, expected)


def test_the_page_decides_as_the_scheduler_does():
    """Compare which texts leave and enter at each step of a run with little memory."""
    scheduler = Scheduler(Memory(12, 4), Policy(99, share=False))
    for request in requests_of(SMALL, 20):
        scheduler.add(request)
    left = 0
    while scheduler.is_busy:
        held = scheduler.memory.tables
        free = len(scheduler.memory.free) + sum(len(held[each.name]) for each in scheduler.ended)
        running, waiting = (
            [Text(each.name, each.known, len(held.get(each.name, []))) for each in sequences]
            for sequences in (scheduler.running, scheduler.waiting)
        )
        expected = who_runs(running, waiting, free, 4)
        before = {each.name for each in scheduler.running}
        actions = scheduler.step()
        leave = [action.sequence for action in actions if action.kind == "DROP"]
        ran = {action.sequence for action in actions if action.kind == "RUN"}
        assert (leave, ran - before) == (expected[0], {*expected[1]})
        left += len(leave)
    assert left > 3


# ---- the memory ----------------------------------------------------------------------------------


def test_actions_print_as_they_are_written():
    texts = ["a RUN 0:16", "a TAKE 3", "a SHARE 3", "a COPY 3>7", "a FORK a.1", "a OUT 3>0"]
    texts += ["a IN 0>5", "a DROP", "a FREE"]
    assert [str(ServerAction.parse(text)) for text in texts] == texts
    with pytest.raises(ServingError, match="is not an action"):
        ServerAction.parse("a EAT 3")


@pytest.mark.parametrize(
    "before, action, why",
    [
        ("a TAKE 0", "b TAKE 0", "block 0 is in use"),
        ("", "a TAKE 4", "block 4 is not there"),
        ("a TAKE 0", "a RUN 0:3", "a has 1 blocks of 2"),
        ("a TAKE 0", "a RUN 1:2", "0 tokens of a are cached"),
        ("a TAKE 0; a RUN 0:1; a FORK b", "b RUN 1:2", "others read block 0"),
        ("a TAKE 0; a RUN 0:1", "b SHARE 0; b SHARE 0; b RUN 2:3", "others read|are cached|blocks"),
        ("a TAKE 0; a RUN 0:1", "a FREE", "runs in this step"),
        ("a TAKE 0; a RUN 0:1", "a DROP", "runs in this step"),
        ("", "a FREE", "a has no blocks"),
        ("a TAKE 0", "a OUT 0>5", "place 5 on the host is not free"),
        ("a TAKE 0", "a IN 0>1", "not the next"),
        ("a TAKE 0", "a COPY 1>2", "block 1 is not a's"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(before, action, why):
    memory = Memory(4, 2, host_blocks=1)
    for text in filter(None, before.split("; ")):
        memory.do(ServerAction.parse(text))
    with pytest.raises(ServingError, match=why):
        for text in action.split("; "):
            memory.do(ServerAction.parse(text))


def test_what_is_unused_counts_each_block_once():
    memory = Memory(4, 4)
    for text in ("a TAKE 0", "a TAKE 1", "a RUN 0:5", "a FORK b"):
        memory.do(ServerAction.parse(text))
    assert (memory.used, memory.unused_share) == (2, 3 / 8)


# ---- the scheduler -------------------------------------------------------------------------------

POLICIES = {
    "continuous": Policy(4),
    "chunks of a prompt": Policy(6, max_tokens=5),
    "swapped": Policy(8, max_tokens=16, preempt="swap"),
    "recomputed": Policy(8),
    "nothing shared": Policy(8, share=False),
    "static, contiguous": Policy(4, static=True, reserve=48),
    "static, paged": Policy(4, static=True),
    "continuous, contiguous": Policy(4, reserve=40),
}
policies = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


@policies
def test_every_policy_answers_everybody_and_gives_every_block_back(policy):
    requests, memory = requests_of(SMALL, 20), Memory(12, 4, host_blocks=20)
    steps = plan(requests, Scheduler(memory, policy))
    times = token_times(steps, requests)
    assert {name: len(each) for name, each in times.items()} == {
        request.name: request.max_new_tokens for request in requests
    }
    assert memory.used == 0 and not memory.tables and not memory.hosted
    assert len(memory.free) == 12 and len(memory.free_places) == 20
    for step, book in replayed(steps, memory):
        assert len(book.ran) <= policy.max_batch
        assert policy.max_tokens is None or num_tokens(step.actions) <= policy.max_tokens
        assert sum(book.users) >= book.used == sum(users > 0 for users in book.users)


def test_little_memory_makes_sequences_leave_and_the_preemption_is_the_one_asked_for():
    requests = requests_of(SMALL, 20)
    found = {
        how: kinds(plan(requests, Scheduler(Memory(12, 4, 20), Policy(8, preempt=how))))
        for how in ("recompute", "swap")
    }
    assert found["recompute"]["DROP"] > 0 == found["recompute"]["OUT"]
    assert found["swap"]["OUT"] == found["swap"]["IN"] > 0
    assert not kinds(plan(requests, Scheduler(Memory(400, 4), Policy(8))))["DROP"]


def test_a_swap_without_room_on_the_host_recomputes():
    steps = plan(requests_of(SMALL, 20), Scheduler(Memory(12, 4, 1), Policy(8, preempt="swap")))
    assert kinds(steps)["DROP"] > 0


def test_static_batching_lets_nobody_in_before_all_have_ended():
    requests = [Request(f"r{i}", (1,), n) for i, n in enumerate((2, 8, 3, 3))]
    for static, last in ((True, 8 + 3), (False, 8)):
        steps = plan(requests, Scheduler(Memory(40, 1), Policy(2, static=static)))
        assert max(max(each) for each in token_times(steps, requests).values()) == last


def test_chunks_let_others_go_on_while_a_long_prompt_is_read():
    """Without chunks, a running text waits for the whole prompt of a new text."""
    requests = [Request("short", (1,), 20), Request("long", (2,) * 40, 2, arrival=3)]
    gaps = {}
    for budget in (None, 8):
        scheduler = Scheduler(Memory(80, 1), Policy(2, max_tokens=budget))
        steps = plan(requests, scheduler, seconds=num_tokens)
        times = token_times(steps, requests)["short"]
        gaps[budget] = max(b - a for a, b in zip(times, times[1:]))
    assert gaps == {None: 41, 8: 8}


def test_next_tokens_come_before_prompts():
    requests = [Request("long", (1,) * 30, 2), Request("short", (2,), 5)]
    scheduler = Scheduler(Memory(80, 1), Policy(2, max_tokens=16))
    steps = plan(requests, scheduler)
    assert [str(a) for a in steps[1].actions if a.kind == "RUN"] == [
        "long RUN 16:30",
        "short RUN 0:1",
    ]


def test_equal_beginnings_are_computed_once_even_after_their_first_owner_has_gone():
    prompt = tuple(range(12))
    requests = [Request(name, prompt, 2, arrival=10 * i) for i, name in enumerate("abc")]
    steps = plan(requests, Scheduler(Memory(20, 4), Policy(4)))
    runs = [str(a) for step in steps for a in step.actions if a.kind == "RUN" and a.first < 12]
    assert runs == ["a RUN 0:12", "b RUN 8:12", "c RUN 8:12"]
    other = [Request("a", prompt, 2), Request("b", (9, *prompt[1:]), 2, arrival=10)]
    assert not kinds(plan(other, Scheduler(Memory(20, 4), Policy(4))))["SHARE"]


def test_a_block_that_was_written_over_is_not_shared():
    first, second = tuple(range(8)), tuple(range(20, 28))
    requests = [Request("a", first, 1), Request("b", second, 1, arrival=5)]
    requests.append(Request("c", first, 1, arrival=10))
    assert not kinds(plan(requests, Scheduler(Memory(2, 4), Policy(1))))["SHARE"]
    assert kinds(plan(requests, Scheduler(Memory(8, 4), Policy(1))))["SHARE"] == 1


def test_samples_share_their_prompt_and_copy_the_block_they_write_into():
    request = Request("a", tuple(range(6)), 4, samples=3)
    steps = plan([request], Scheduler(Memory(20, 4), Policy(4)))
    found = kinds(steps)
    assert (found["FORK"], found["COPY"]) == (2, 2)  # the last writer has the block to itself
    after_prompt = next(iter(replayed(steps, Memory(20, 4))))[1]
    assert after_prompt.users[0] == after_prompt.users[1] == 3


# ---- the engine ----------------------------------------------------------------------------------


@models
@policies
def test_every_path_gives_the_tokens_of_the_model_without_a_cache(config, policy):
    model, requests = model_of(config), requests_of(config)
    expected = {
        r.name: generate(model, torch.tensor(r.prompt), r.max_new_tokens, temperature=0)[
            len(r.prompt) :
        ].tolist()
        for r in requests
    }
    assert len({token for text in expected.values() for token in text}) > 10
    for memory in (Memory(12, 4, 20), Memory(7, 8, 20), Memory(48, 1, 60)):
        engine = Engine(model, memory, None)
        served = engine.serve(requests, policy)
        assert served.texts == expected
        assert engine.memory.used == 0 and not engine.memory.hosted


@policies
def test_a_seed_gives_the_same_tokens_whatever_the_batching(policy):
    model = model_of(SMALL)
    requests = requests_of(SMALL, temperature=0.9)
    expected = {request.name: alone(model, request) for request in requests}
    greedy = {r.name: alone(model, Request(r.name, r.prompt, r.max_new_tokens)) for r in requests}
    assert expected != greedy
    assert Engine(model, Memory(12, 4, 20), None).serve(requests, policy).texts == expected


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_samples_are_what_each_would_be_alone_also_when_preempted(preempt):
    model = model_of(SMALL)
    requests = [
        Request("a", tuple(range(6)), 14, samples=3, temperature=1.0, seed=1),
        Request("b", tuple(range(10)), 14, temperature=1.0, seed=2),
    ]
    served = Engine(model, Memory(10, 4, 20), None).serve(requests, Policy(4, preempt=preempt))
    assert kinds(served.steps)["DROP" if preempt == "recompute" else "OUT"]
    for sample in range(3):
        assert served.texts[f"a.{sample}"] == alone(model, requests[0], sample)
    assert served.texts["b"] == alone(model, requests[1])


def test_an_engine_that_reads_the_wrong_block_gives_other_tokens():
    """The control: the comparisons above can fail."""
    model, requests = model_of(SMALL), requests_of(SMALL)
    right = Engine(model, Memory(12, 4), None).serve(requests)
    broken = Engine(model, Memory(12, 4), None)
    broken.move = lambda kind, first, last: broken.keys[:, 0].zero_()
    assert broken.serve(requests).texts != right.texts


def test_an_engine_runs_steps_that_somebody_else_wrote():
    model = model_of(SMALL)
    request = Request("a", (5, 6, 7), 3)
    engine = Engine(model, Memory(3, 2), None)
    engine.expect(request)
    for step in ("a TAKE 2; a TAKE 0; a RUN 0:2", "a RUN 2:3", "a RUN 3:4", "a TAKE 1; a RUN 4:5"):
        engine.execute([ServerAction.parse(text) for text in step.split("; ")])
    assert engine.tokens["a"][3:] == alone(model, request)


def test_the_model_attends_as_before_when_the_engine_is_done_or_has_failed():
    model = model_of(SMALL)
    engine, tokens = Engine(model, Memory(12, 4), None), torch.arange(9)[None]
    before = model(tokens)
    engine.serve(requests_of(SMALL))
    assert torch.equal(model(tokens), before)
    engine.attention_of_each_layer = lambda batch, positions: [None] * SMALL.num_layers
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        engine.serve(requests_of(SMALL))
    assert torch.equal(model(tokens), before)  # also after an error


def test_an_engine_moves_matrices_in_memory_and_leaves_their_shapes_and_values():
    model, same = model_of(SMALL), model_of(SMALL)
    held = sum(each.untyped_storage().nbytes() for each in model.parameters())
    Engine(Engine(model, Memory(12, 4), None).model, Memory(12, 4), None)
    for (name, moved), whole in zip(model.named_parameters(), same.parameters(), strict=True):
        in_layer = name.startswith("blocks") and moved.ndim == 2
        assert torch.equal(moved, whole)
        assert moved.stride() == ((1, len(whole)) if in_layer else whole.stride()), name
    assert sum(each.untyped_storage().nbytes() for each in model.parameters()) == held
    model(torch.arange(9)[None]).sum().backward()  # it can still be trained


def test_a_stop_token_ends_a_text_and_frees_its_blocks():
    model = model_of(SMALL)
    text = alone(model, Request("a", (1, 2, 3), 12))
    stop = text[5]
    engine = Engine(model, Memory(12, 4), None)
    served = engine.serve([Request("a", (1, 2, 3), 12, stop=stop), Request("b", (4,), 12)])
    assert served.texts["a"] == text[: text.index(stop) + 1]
    assert len(served.texts["b"]) == 12 and engine.memory.used == 0


@pytest.mark.parametrize("when", [0, 1, 2, 5, 9, 14, 100])
@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_a_cancelled_request_leaves_no_block_behind_and_disturbs_nobody(when, preempt):
    model, requests = model_of(SMALL), requests_of(SMALL)
    engine = Engine(model, Memory(12, 4, 20), None)
    cancel = {"r1": when, "r4": when, "r8": when}
    served = engine.serve(requests, Policy(8, max_tokens=8, preempt=preempt), cancel=cancel)
    for request in requests:
        whole = alone(model, request)
        found = served.texts[request.name]
        assert found == whole[: len(found)]
        assert request.name in cancel or found == whole
    memory = engine.memory
    assert memory.used == 0 and not memory.tables and not memory.hosted
    assert len(memory.free_places) == 20


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: Memory(0, 4), "num_blocks=0 is too small: give 1 or more"),
        (lambda: Memory(4, 0), "block_size=0 is too small"),
        (lambda: Memory(8, 1.5), "block_size=1.5 is not a whole number"),
        (lambda: Memory(8, 4, -1), "host_blocks=-1 is too small: give 0 or more"),
        (lambda: Policy(0), "max_batch=0 is too small: give 1 or more"),
        (lambda: Policy(1.5), "max_batch=1.5 is not a whole number"),
        (lambda: Policy(max_tokens=0), "max_tokens=0 is too small"),
        (lambda: Policy(reserve=-5), "reserve=-5 is too small: give 0 or more"),
        (lambda: Policy(preempt="wait"), "'recompute' or 'swap'"),
        (lambda: Request("a", (), 3), "'a' is empty"),
        (lambda: Request("a", (1,), 0), "max_new_tokens=0"),
        (lambda: Request("a", (1,), 1.5), "max_new_tokens=1.5 is not a whole number"),
        (lambda: Request("a", (1,), 1, samples=True), "samples=True is not a whole number"),
        (lambda: Request("a", (1.5,), 1), "other things than tokens"),
        (lambda: Request("a b", (1,), 1), "'a b' is no name"),
        (lambda: Request("", (1,), 1), "'' is no name"),
        (lambda: Request("a", (1,), 1, arrival=float("nan")), "arrival=nan"),
        (lambda: Request("a", (1,), 1, arrival=float("inf")), "arrival=inf"),
        (lambda: Request("a", (1,), 1, temperature=-1), "temperature=-1"),
        (lambda: Request("a", (1,), 1, temperature=float("nan")), "temperature=nan"),
        (lambda: cancelled({"nope": 1}), "'nope': ...} is no request's name: give one of a, b"),
        (lambda: cancelled({"a.0": 1}), "'a.0': ...} is no request's name: give one of a, b"),
        (lambda: cancelled({"a": float("nan")}), "'a': nan} is no time"),
        (lambda: measure([], [], Memory(8, 4)), "there are no steps to measure"),
        (lambda: continue_text(model_of(SMALL), torch.tensor([]), 2), "no token to continue"),
        (
            lambda: speculate(
                model_of(SMALL), model_of(SMALL.replace(vocab_size=32)), torch.arange(3), 4
            ),
            "the draft's vocab_size=32 is not the target's 64",
        ),
        (lambda: stage_of(model_of(SMALL), 0, 1), "1 stages of 2 layers .* give 2 to 2 ranks"),
        (lambda: stage_of(model_of(SMALL), 0, 3), "3 stages of 2 layers will not do"),
        (lambda: served(Request("a", (1,) * 65, 1)), "more than the model's window, seq_len=64"),
        (lambda: served(Request("a", (1,) * 30, 4), blocks=8), "would never fit"),
        (lambda: served(Request("a", (64,), 4)), "a token outside 0..63"),
        (lambda: served(Request("a", (1,), 4, samples=20)), "would never fit"),
        (lambda: served(Request("a", (1,), 4), Request("a", (2,), 4)), "two requests"),
    ],
)
def test_bad_input_is_one_sentence(make, why):
    with pytest.raises(ServingError, match=why) as error:
        make()
    assert "\n" not in str(error.value)


def served(*requests, blocks=40):
    return Engine(model_of(SMALL), Memory(blocks, 4), None).serve(requests)


def cancelled(cancel):
    requests = [Request("a", (1, 2), 4, samples=2), Request("b", (3,), 4)]
    return plan(requests, Scheduler(Memory(40, 4), Policy(4)), cancel=cancel)


def test_a_refused_cancel_leaves_no_block_behind():
    engine = Engine(model_of(SMALL), Memory(8, 4), None)
    with pytest.raises(ServingError, match="is no request's name"):
        engine.serve([Request("a", (1, 2), 5)], cancel={"a": 2, "nope": 1})
    assert engine.memory.used == 0


def test_tokens_of_a_prompt_may_be_anything_that_is_a_whole_number():
    assert Request("a", torch.arange(3), 1).prompt == Request("a", range(3), 1).prompt == (0, 1, 2)


@pytest.mark.parametrize(
    "bad, why",
    [
        (Request("b", (1,) * 65, 1, arrival=3), "more than the model's window, seq_len=64"),
        (Request("b", (1,) * 30, 9, arrival=3), "would never fit"),
        (Request("b", (1,), 4, samples=20, arrival=3), "would never fit"),
        (Request("b", (64,), 4, arrival=3), "a token outside 0..63"),
        (Request("a", (2,), 4, arrival=3), "two requests are called 'a'"),
    ],
)
def test_a_refused_request_leaves_no_block_behind(bad, why):
    """It would arrive long after `a` got blocks, but it is refused before `a` gets one."""
    engine, good = Engine(model_of(SMALL), Memory(8, 4), None), Request("a", (1, 2), 5)
    with pytest.raises(ServingError, match=why):
        engine.serve([good, bad])
    assert engine.memory.used == 0 and len(engine.memory.free) == 8
    assert len(engine.serve([good]).texts["a"]) == 5
    assert engine.memory.used == 0 and len(engine.memory.free) == 8


# ---- ranks ---------------------------------------------------------------------------------------


def serve_on_ranks(config, requests, policy, group):
    model = shard_model(model_of(config), GPT_PLAN, group)
    engine = Engine(model, Memory(12, 4, 20), group)
    served = engine.serve(requests, policy)
    return served.texts, served.steps, engine.nbytes, engine.memory.used


ROTARY, LEARNED, ONE_KV_HEAD = list(MODELS)[:3]


@pytest.mark.parametrize(
    "size, name, preempt, temperature",
    [
        (1, ONE_KV_HEAD, "recompute", 0.9),
        (2, ROTARY, "recompute", 0.0),
        (2, LEARNED, "swap", 0.9),
        (2, ONE_KV_HEAD, "recompute", 0.9),
        (4, ROTARY, "swap", 0.9),
        (4, LEARNED, "recompute", 0.0),
        (4, ONE_KV_HEAD, "swap", 0.0),
    ],
)
def test_ranks_give_the_same_tokens_and_send_two_all_reduces_a_layer(
    size, name, preempt, temperature
):
    """Some of the texts were preempted, share a beginning or copied a block."""
    config, model = MODELS[name], model_of(MODELS[name])
    requests = requests_of(config, 6, temperature)
    requests.append(Request("two", range(6), 12, samples=2, temperature=0.9))
    expected = {
        each: alone(model, request, sample)
        for request in requests
        for sample, each in enumerate(request.sequences)
    }
    policy = Policy(4, max_tokens=12, preempt=preempt)
    run = launch(serve_on_ranks, size, (config, requests, policy))
    done = kinds(run.results[0][1])
    left = {"swap": ("OUT", "IN"), "recompute": ("DROP",)}[preempt]
    assert all(done[kind] for kind in ("SHARE", "FORK", "COPY", *left)), done
    whole = Memory(12, 4).num_blocks * 4 * 2 * config.num_layers * config.head_dim * 8
    for texts, steps, nbytes, used in run.results:
        assert texts == expected and used == 0
        assert nbytes == whole * max(config.num_kv_heads // size, 1)
        assert steps == run.results[0][1]
    if size > 1:
        assert run.ledger.total_bytes() - check_bytes(size) == sum(
            bytes_of_step(step, config, size) for step in run.results[0][1]
        )


def check_bytes(size):
    """Return the bytes shard_model sends to check that the ranks' models agree: a float64 each."""
    return 8 * size * (size - 1)


def bytes_of_step(step, config, size):
    """Count all-reduces of [S, D], 1 for the embedding and 2 per layer, and B tokens' logits."""
    runs = [action for action in step.actions if action.kind == "RUN"]
    if not runs:
        return 0
    hidden = 8 * config.d_model * num_tokens(runs)
    logits = 8 * config.vocab_size * len(runs)
    return (1 + 2 * config.num_layers) * 2 * (size - 1) * hidden + (size - 1) * logits


# ---- speculation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("guesses", [0, 1, 4])
@models
def test_speculation_is_greedily_exact_with_any_draft(config, guesses):
    target, prompt = model_of(config), torch.arange(5)
    expected = generate(target, prompt, 15, temperature=0)
    for draft in (target, model_of(config, seed=1)):
        found = speculate(target, draft, prompt, 15, guesses)
        assert torch.equal(found.tokens, expected)
        assert found.forwards + found.accepted == 15
    assert speculate(target, target, prompt, 15, 4).forwards == 3  # 15 = 3 (4 + 1)


def test_what_accept_gives_is_distributed_as_the_targets_own_draws():
    """Draw two guesses many times; compare how often each first and second token comes with p."""
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    trials, firsts, seconds = 20_000, Counter(), Counter()
    for trial in range(trials):
        us = [uniform("accept", f"{trial}/{i}") for i in range(8)]
        guesses = [pick(q[0], us[6]), pick(q[1], us[7])]
        new = accept(p, q, guesses, us[:6])
        firsts[new[0]] += 1
        if len(new) > 1:
            seconds[new[1]] += 1
    several = sum(seconds.values())
    for token in range(4):
        for counts, total, share in ((firsts, trials, p[0]), (seconds, several, p[1])):
            expected = float(share[token])
            error = (expected * (1 - expected) / total) ** 0.5
            assert abs(counts[token] / total - expected) <= 4 * error
    overlap = float(torch.minimum(p[0], q[0]).sum())  # the share of guesses that are accepted
    assert abs(several / trials - overlap) < 4 * (overlap * (1 - overlap) / trials) ** 0.5


def test_a_rule_that_always_redraws_from_p_is_caught_by_the_same_numbers():
    """The control: replacing a rejected guess by a draw from p, not max(0, p - q), is wrong."""
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    drawn = Counter()
    for trial in range(20_000):
        u = [uniform("wrong", f"{trial}/{i}") for i in range(3)]
        guess = pick(q, u[0])
        stands = u[1] * q[guess] < p[guess]
        drawn[guess if stands else pick(p, u[2])] += 1
    assert abs(drawn[0] / 20_000 - 0.5) > 4 * 0.5 / 20_000**0.5


def test_sampled_speculation_has_the_targets_distribution():
    """Compare the first two tokens over many seeds with the target's own probabilities."""
    config = SMALL.replace(vocab_size=4, d_model=16, num_layers=1)
    target, draft = model_of(config), model_of(config, seed=1)
    prompt, trials, found = torch.tensor([1, 2]), 3000, Counter()
    for seed in range(trials):
        new = speculate(target, draft, prompt, 2, 2, temperature=1.0, seed=seed).tokens[2:]
        found[tuple(new.tolist())] += 1
    for first in range(4):
        p = forward(target, prompt, Cache(1))[-1].softmax(-1)[first]
        then = forward(target, torch.tensor([1, 2, first]), Cache(1))[-1].softmax(-1)
        for second in range(4):
            expected = float(p * then[second])
            error = (expected * (1 - expected) / trials) ** 0.5
            assert abs(found[first, second] / trials - expected) <= 4 * error + 1e-9


# ---- stages, int8, measures ----------------------------------------------------------------------


@pytest.mark.parametrize("stages, groups", [(1, 1), (4, 1), (4, 2), (4, 4), (2, 6)])
def test_a_pipeline_that_decodes_idles_but_for_as_many_groups_as_stages(stages, groups):
    visits = decode_in_pipeline(stages, groups, 200)
    makespan = max(visit.end for visit in visits)
    busy = len(visits) / (stages * makespan)
    assert abs(busy - min(groups, stages) / stages) < 0.02
    for a, b in zip(visits, visits[1:]):
        if (a.group, a.token) == (b.group, b.token):
            assert b.start >= a.end
    for stage in range(stages):
        spans = sorted((v.start, v.end) for v in visits if v.stage == stage)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:]))


def decode_on_ranks(config, texts, new, group):
    return decode_in_stages(model_of(config), texts, new, group)


@pytest.mark.parametrize(
    "stages, groups, name", [(2, 1, ROTARY), (2, 3, LEARNED), (3, 2, LEARNED), (4, 6, ROTARY)]
)
def test_stages_on_ranks_give_the_same_tokens_and_idle_as_the_list_says(stages, groups, name):
    config = MODELS[name].replace(num_layers=4)
    texts = [torch.arange(3 + i, 8 + 2 * i) for i in range(groups)]
    run = launch(decode_on_ranks, stages, (config, texts, 9))
    expected = [generate(model_of(config), text, 9, temperature=0).tolist() for text in texts]
    assert len({token for text in expected for token in text[-9:]}) > 3
    for rank in (0, -1):
        assert [text.tolist() for text in run.results[rank][0]] == expected
    visits = [visit for _, visits in run.results for visit in visits]
    assert sorted(visits) == sorted(decode_in_pipeline(stages, groups, 9))
    # x [S, D] crosses every border and one token goes back, each with its time.
    rows = sum(len(text) + 9 - 1 for text in texts)
    over_borders = (stages - 1) * (rows * config.d_model * 8 + 9 * groups * 4)
    assert run.ledger.total_bytes() == over_borders + 9 * groups * (8 + 4)


def test_int8_weights_are_off_by_half_a_scale_at_most_and_weigh_a_quarter():
    model = GPT(SMALL.replace(d_model=64))
    small = with_int8_weights(model)
    for (name, linear), (_, theirs) in zip(
        [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)],
        [(n, m) for n, m in small.named_modules() if type(m).__name__ == "Int8Linear"],
        strict=True,
    ):
        back = theirs.weight * theirs.scale[:, None]
        assert bool(((back - linear.weight).abs() <= theirs.scale[:, None] * 0.5001).all()), name
        assert theirs.weight.nbytes * 4 == linear.weight.nbytes
    tokens = torch.arange(20)[None]
    error = (small(tokens) - model(tokens)).norm() / model(tokens).norm()
    assert 1e-4 < error < 0.03
    assert weight_bytes(small) < 0.35 * weight_bytes(model)
    assert all(type(m).__name__ != "Int8Linear" for m in model.modules())


def test_an_engine_serves_int8_weights():
    small = with_int8_weights(model_of(SMALL))
    request = Request("a", (1, 2, 3), 8)
    assert Engine(small, Memory(12, 4), None).serve([request]).texts["a"] == alone(small, request)


def serve_int8_on_ranks(config, requests, group):
    whole = shard_model(model_of(config), GPT_PLAN, group)
    model = with_int8_weights(whole)
    served = Engine(model, Memory(12, 4), group).serve(requests)
    return served.texts, weight_bytes(model) / weight_bytes(whole)


def rounded(weight, parts=1):
    """Round a weight to int8 times a scale, one scale per row of each part."""
    scales = [part.abs().amax(1, keepdim=True) / 127 for part in weight.chunk(parts, 1)]
    pieces = [(part / scale).round() * scale for part, scale in zip(weight.chunk(parts, 1), scales)]
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [LEARNED, ONE_KV_HEAD])
def test_int8_weights_of_several_ranks_are_those_of_the_whole_cut(size, name):
    """Rows and scales are the same, except in o and down, where a rank has part of each row."""
    config = MODELS[name]
    oracle, requests = model_of(config), requests_of(config, 4)
    with torch.no_grad():
        if config.tied_embedding:  # the embedding stays as it was
            oracle.head.out.weight = torch.nn.Parameter(oracle.head.out.weight.clone())
        for path, module in oracle.named_modules():
            if isinstance(module, torch.nn.Linear):
                by_inputs = path.endswith((".o", ".down"))
                module.weight.copy_(rounded(module.weight, size if by_inputs else 1))
    expected = {request.name: alone(oracle, request) for request in requests}
    exact = {request.name: alone(model_of(config), request) for request in requests}
    assert expected != exact
    for texts, share in launch(serve_int8_on_ranks, size, (config, requests)).results:
        assert texts == expected
        assert share < 0.4  # an eighth of the linears, and all of the embedding


def test_a_measure_counts_tokens_and_waste():
    requests = [Request("a", (1, 2, 3), 3)]
    memory = Memory(4, 4)
    result = measure(plan(requests, Scheduler(memory, Policy())), requests, memory)
    assert (result.tokens, result.first_token, result.next_token, result.batch) == (3, 1, 1, 1)
    assert result.wasted == pytest.approx((1 / 4 + 0 + 3 / 8) / 3)

"""Lesson 24: blocks wasted, taken from others or missed; requests waiting in vain; half a cache."""

import sys

import cloudpickle
import pytest

from mini_dist import check, serving
from mini_dist.plan.calculators import from_hugging_face
from mini_dist.plan.calculators.serving import kv_bytes_a_token
from tests.course.exercises import solutions as solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

placed, chosen, counted = Wrong(), Wrong(), Wrong()


def places_of(table, written, new, size):
    return [table[i // size] * size + i % size for i in range(written, written + new)]


# ---- a block table -------------------------------------------------------------------------------


@placed("blocks more than the tokens need")
def a_block_for_every_call(table, free, written, new, block_size):
    count = -(-new // block_size)
    table = table + free[:count]
    return table, places_of(table, written, new, block_size)


@placed("blocks more than the tokens need")
def one_in_reserve(table, free, written, new, block_size):
    needed = (written + new) // block_size + 1
    table = table + free[: max(0, needed - len(table))]
    return table, places_of(table, written, new, block_size)


@placed("Not every new token has a place in its table's blocks")
def one_too_few(table, free, written, new, block_size):
    needed = (written + new) // block_size
    table = table + free[: max(0, needed - len(table))]
    return table, places_of(table * 9, written, new, block_size)


@placed("A block was taken that is in use")
def counts_up(table, free, written, new, block_size):
    needed = -(-(written + new) // block_size)
    while len(table) < needed:
        table = [*table, (table[-1] + 1 if table else 0)]
    return table, places_of(table, written, new, block_size)


@placed("A block was taken that is in use")
def the_first_one_again_and_again(table, free, written, new, block_size):
    needed = -(-(written + new) // block_size)
    table = table + [free[0]] * (needed - len(table))
    return table, places_of(table, written, new, block_size)


@placed("A block was taken that is in use")
def a_new_table(table, free, written, new, block_size):
    table = free[: -(-(written + new) // block_size)]
    return table, places_of(table, written, new, block_size)


@placed("Not every new token has a place in its table's blocks")
def positions_are_places(table, free, written, new, block_size):
    table = table + free[: -(-(written + new) // block_size) - len(table)]
    return table, list(range(written, written + new))


@placed("The texts are wrong")
def backwards_in_its_block(table, free, written, new, block_size):
    table = table + free[: -(-(written + new) // block_size) - len(table)]
    places = places_of(table, written, new, block_size)
    return table, [p // block_size * block_size + block_size - 1 - p % block_size for p in places]


@placed("Not every new token has a place in its table's blocks")
def only_the_last(table, free, written, new, block_size):
    table = table + free[: -(-(written + new) // block_size) - len(table)]
    return table, places_of(table, written, new, block_size)[-1:]


@placed("return two lists")
def only_the_table(table, free, written, new, block_size):
    return table + free[: -(-(written + new) // block_size) - len(table)]


@placed("give a list of whole numbers")
def a_number(table, free, written, new, block_size):
    table = table + free[: -(-(written + new) // block_size) - len(table)]
    return table, table[-1]


@placed("In the places there is a tuple, ")
def block_and_offset(table, free, written, new, block_size):
    table = table + free[: -(-(written + new) // block_size) - len(table)]
    return table, [divmod(i, block_size) for i in range(written, written + new)]


@placed("In the table there is a float, ")
def half_a_block(table, free, written, new, block_size):
    return [*table, *map(float, free[:1])], list(range(new))


@pytest.mark.parametrize("fn, says", placed.answers, ids=placed.names())
def test_a_bad_table_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.place_tokens.judge(fn)
    assert verdict.state == "wrong" and says in verdict.hint, verdict


another_table = Right("place_tokens")


@another_table
def one_by_one(table, free, written, new, block_size):
    table, free, places = list(table), list(free), []
    for position in range(written, written + new):
        if position == len(table) * block_size:
            table.append(free.pop())  # any free one will do
        places.append(table[position // block_size] * block_size + position % block_size)
    return table, places


@another_table
def all_places_and_then_a_slice(table, free, written, new, block_size):
    while len(table) * block_size < written + new:
        table, free = [*table, free[0]], free[1:]
    places = [block * block_size + j for block in table for j in range(block_size)]
    return table, places[written : written + new]


@another_table
def with_tensors(table, free, written, new, block_size):
    import torch

    missing = max(0, -(-(written + new) // block_size) - len(table))
    table = torch.tensor([*table, *free[:missing]])
    position = torch.arange(written, written + new)
    return table, table[position // block_size] * block_size + position % block_size


@another_table
def the_smallest_free_ones(table, free, written, new, block_size):
    total = written + new
    needed, rest = divmod(total, block_size)
    needed += rest > 0
    table = (*table, *sorted(free)[: max(needed - len(table), 0)])
    return table, tuple(
        table[i // block_size] * block_size + i % block_size for i in range(written, total)
    )


# ---- who runs ------------------------------------------------------------------------------------


def missing(text, block_size):
    return -(-text.tokens // block_size) - text.blocks


@chosen("The last to come leaves first".lower())
def the_largest_leaves(running, waiting, free, block_size):
    stay, leave = list(running), []
    while sum(missing(t, block_size) for t in stay) > free:
        worst = max(stay, key=lambda t: t.blocks)
        stay.remove(worst)
        free += worst.blocks
        leave.append(worst.name)
    return leave, []


@chosen("The last to come leaves first".lower())
def the_first_leaves(running, waiting, free, block_size):
    stay, leave = list(running), []
    while sum(missing(t, block_size) for t in stay) > free:
        first = stay.pop(0)
        free += first.blocks
        leave.append(first.name)
    return leave, []


@chosen("There are too few blocks")
def nobody_leaves(running, waiting, free, block_size):
    return [], []


@chosen("More leave than necessary")
def forgets_what_they_give_back(running, waiting, free, block_size):
    stay, leave, come = list(running), [], []
    while sum(missing(t, block_size) for t in stay) > free:
        leave.append(stay.pop().name)
    free -= sum(missing(t, block_size) for t in stay)
    for text in waiting:
        if leave or missing(text, block_size) > free:
            break
        free -= missing(text, block_size)
        come.append(text.name)
    return leave, come


@chosen("A text comes in while another has to leave")
def comes_although_one_left(running, waiting, free, block_size):
    stay, leave, come = list(running), [], []
    while sum(missing(t, block_size) for t in stay) > free:
        last = stay.pop()
        free += last.blocks
        leave.append(last.name)
    free -= sum(missing(t, block_size) for t in stay)
    for text in waiting:
        if missing(text, block_size) > free:
            break
        free -= missing(text, block_size)
        come.append(text.name)
    return leave, come


def let_in(running, waiting, free, block_size, stops):
    leave, _ = solutions.who_runs(running, waiting, free, block_size)
    free -= sum(missing(t, block_size) for t in running)
    come = []
    for text in waiting if not leave else []:
        if missing(text, block_size) <= free:
            free -= missing(text, block_size)
            come.append(text.name)
        elif stops:
            break
    return leave, come


@chosen("A text comes in before another")
def whoever_fits(running, waiting, free, block_size):
    return let_in(running, waiting, free, block_size, stops=False)


@chosen("A text waits although there is room")
def one_at_a_time(running, waiting, free, block_size):
    leave, come = let_in(running, waiting, free, block_size, stops=True)
    return leave, come[:1]


@chosen("More come in than there are blocks")
def forgets_those_that_run(running, waiting, free, block_size):
    leave, _ = solutions.who_runs(running, waiting, free, block_size)
    come = []
    for text in waiting if not leave else []:
        if missing(text, block_size) > free:
            break
        free -= missing(text, block_size)
        come.append(text.name)
    return leave, come


@chosen("There are too few blocks")
def one_block_each(running, waiting, free, block_size):
    stay, leave = list(running), []
    while sum(t.tokens % block_size == 0 for t in stay) > free:
        last = stay.pop()
        free += last.blocks
        leave.append(last.name)
    return leave, []


@chosen("Return two lists of names")
def texts_not_names(running, waiting, free, block_size):
    return [], waiting[:1]


@chosen("Return two lists of names")
def numbers(running, waiting, free, block_size):
    return 0, 1


@chosen("A name is in a list twice")
def each_name_twice(running, waiting, free, block_size):
    leave, come = solutions.who_runs(running, waiting, free, block_size)
    return leave * 2, come


@chosen("A text leaves that does not run")
def who_waits_leaves(running, waiting, free, block_size):
    return [text.name for text in waiting[:1]], []


@pytest.mark.parametrize("fn, says", chosen.answers, ids=chosen.names())
def test_a_bad_choice_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.who_runs.judge(fn)
    assert verdict.state == "wrong" and says in verdict.hint, verdict
    assert "The first such situation: " in verdict.hint


another_choice = Right("who_runs")


@another_choice
def how_many_stay(running, waiting, free, block_size):
    need = [missing(t, block_size) for t in running]
    for stay in range(len(running), -1, -1):
        if sum(need[:stay]) <= free + sum(t.blocks for t in running[stay:]):
            break
    if stay < len(running):
        return [t.name for t in running[stay:]], []
    free -= sum(need)
    count = 0
    while count < len(waiting):
        if sum(missing(t, block_size) for t in waiting[: count + 1]) > free:
            break
        count += 1
    return [], [t.name for t in waiting[:count]]


@another_choice
def in_sets(running, waiting, free, block_size):
    leave, come, names = set(), set(), [t.name for t in running]
    by_name = {t.name: t for t in [*running, *waiting]}
    while True:
        needed = sum(missing(by_name[n], block_size) for n in names if n not in leave)
        back = sum(by_name[n].blocks for n in leave)
        if needed <= free + back:
            break
        leave.add([n for n in names if n not in leave][-1])
    left = free - needed
    for text in waiting if not leave else ():
        left -= missing(text, block_size)
        if left < 0:
            break
        come.add(text.name)
    return leave, come


@another_choice
def by_recursion(running, waiting, free, block_size):
    left = free - sum(missing(t, block_size) for t in running)
    if left < 0:
        *others, last = running
        leave, _ = by_recursion(others, [], free + last.blocks, block_size)
        return (*leave, last.name), ()
    come = []
    for text in waiting:
        left -= missing(text, block_size)
        come += [text.name] if left >= 0 else []
        if left < 0:
            break
    return (), tuple(come)


@another_choice
def all_blocks_counted_anew(running, waiting, free, block_size):
    import math

    total, stay = free + sum(t.blocks for t in running), list(running)

    def whole(texts):
        return sum(math.ceil(t.tokens / block_size) for t in texts)

    while whole(stay) > total:
        stay.pop()
    come = []
    if len(stay) == len(running):
        for text in waiting:
            if whole([*stay, text]) > total:
                break
            stay.append(text)
            come.append(text.name)
    return [t.name for t in running if t not in stay], come


# ---- the cache of a real model -------------------------------------------------------------------


def sizes(config):
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    heads = config.get("num_attention_heads", config.get("n_head"))
    width = config.get("hidden_size", config.get("n_embd"))
    kv = config.get("num_key_value_heads", heads)
    return layers, heads, kv, config.get("head_dim", width // heads)


@counted("This is half of it")
def keys_only(config, tokens, bytes_a_number, tp):
    layers, _, kv, head_dim = sizes(config)
    return layers * max(kv // tp, 1) * head_dim * tokens * bytes_a_number


@counted("4 times too many, which is num_attention_heads")
def all_heads(config, tokens, bytes_a_number, tp):
    layers, heads, _, head_dim = sizes(config)
    return 2 * layers * heads // tp * head_dim * tokens * bytes_a_number


@counted("A head has head_dim=128 numbers")
def width_over_heads(config, tokens, bytes_a_number, tp):
    layers, heads, kv, _ = sizes(config)
    width = config.get("hidden_size", config.get("n_embd"))
    return 2 * layers * max(kv // tp, 1) * (width // heads) * tokens * bytes_a_number


@counted("at least one whole head")
def a_head_is_cut(config, tokens, bytes_a_number, tp):
    layers, _, kv, head_dim = sizes(config)
    return int(2 * layers * kv / tp * head_dim * tokens * bytes_a_number)


@counted("spread over tp=4 devices")
def of_all_devices(config, tokens, bytes_a_number, tp):
    layers, _, kv, head_dim = sizes(config)
    return 2 * layers * kv * head_dim * tokens * bytes_a_number


@counted("need not have every key")
def every_key_is_there(config, tokens, bytes_a_number, tp):
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    kv = config["num_key_value_heads"]
    return 2 * config["num_hidden_layers"] * kv * head_dim * tokens * bytes_a_number


@counted("need not have every key")
def only_gpt2_lacks_kv_heads(config, tokens, bytes_a_number, tp):
    layers, heads, _, head_dim = sizes(config)
    kv = heads if config["model_type"] == "gpt2" else config["num_key_value_heads"]
    return 2 * layers * max(kv // tp, 1) * head_dim * tokens * bytes_a_number


@counted("2 (keys and values) * layers")
def a_head_has_64_or_128(config, tokens, bytes_a_number, tp):
    layers, _, kv, _ = sizes(config)
    head_dim = 64 if config["model_type"] == "gpt2" else 128
    return 2 * layers * max(kv // tp, 1) * head_dim * tokens * bytes_a_number


@counted("2 (keys and values) * layers")
def always_two_bytes(config, tokens, bytes_a_number, tp):
    layers, _, kv, head_dim = sizes(config)
    return 2 * layers * max(kv // tp, 1) * head_dim * tokens * 2


@counted("A NoneType came back")
def nothing(config, tokens, bytes_a_number, tp):
    sizes(config)


@pytest.mark.parametrize("fn, says", counted.answers, ids=counted.names())
def test_a_bad_count_is_refused_with_the_hint_that_names_it(fn, says):
    verdict = check.cache_bytes.judge(fn)
    assert verdict.state == "wrong" and says in verdict.hint, verdict


another_count = Right("cache_bytes")


@another_count
def in_floats(config, tokens, bytes_a_number, tp):
    layers, _, kv, head_dim = sizes(config)
    return 2.0 * layers * max(kv // tp, 1) * head_dim * tokens * bytes_a_number


@another_count
def with_or(config, tokens, bytes_a_number, tp):
    get = config.get
    heads = get("n_head") or get("num_attention_heads")
    of_head = get("head_dim") or (get("n_embd") or get("hidden_size")) // heads
    shared = (get("num_key_value_heads") or heads) // tp
    numbers = (get("n_layer") or get("num_hidden_layers")) * of_head * (shared if shared > 1 else 1)
    return int(numbers * tokens * bytes_a_number) * 2


@another_count
def layer_by_layer(config, tokens, bytes_a_number, tp):
    layers, _, kv, head_dim = sizes(config)
    total = 0
    for _ in range(layers):
        for _ in ("key", "value"):
            total += max(1, kv // tp) * head_dim * bytes_a_number
    return total * tokens


@another_count
def per_family(config, tokens, bytes_a_number, tp):
    if config["model_type"] == "gpt2":
        of_head = config["n_embd"] // config["n_head"]
        numbers = 2 * config["n_layer"] * max(1, config["n_head"] // tp) * of_head
    else:
        heads = config["num_attention_heads"]
        of_head = config.get("head_dim", config["hidden_size"] // heads)
        on_each = config.get("num_key_value_heads", heads) // tp or 1
        numbers = 2 * config["num_hidden_layers"] * on_each * of_head
    return numbers * bytes_a_number * tokens


ANOTHER = (another_table, another_choice, another_count)
OTHERS = [(each.name, fn) for each in ANOTHER for fn in each.answers]


@pytest.mark.parametrize("name, fn", OTHERS, ids=lambda each: getattr(each, "__name__", each))
def test_another_right_answer_is_right(name, fn):
    verdict = getattr(check, name).judge(fn)
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name", ["place_tokens", "who_runs", "cache_bytes"])
def test_the_printed_solution_is_right(name):
    verdict = getattr(check, name).judge(getattr(solutions, name))
    assert verdict.state == "right", verdict


def as_shipped():
    def place_tokens(table, free, written, new, block_size):
        return serving.place_tokens(table, free, written, new, block_size)

    def who_runs(running, waiting, free, block_size):
        return serving.who_runs(running, waiting, free, block_size)

    def cache_bytes(config, tokens, bytes_a_number, tp):
        sizes = from_hugging_face(config, seq_len=config.get("n_positions", 1))
        return int(kv_bytes_a_token(sizes, bytes_a_number, tp).total) * tokens

    return [place_tokens, who_runs, cache_bytes]


@pytest.mark.parametrize("fn", as_shipped(), ids=lambda fn: fn.__name__)
def test_the_librarys_own_is_told_apart(fn):
    assert getattr(check, fn.__name__).judge(fn).state == "still the library's"

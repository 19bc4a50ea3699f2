"""Measure explorers in a web page: from a moved control to the new picture; the bar is 300 ms.

    make site
    python benchmarks/site.py

Chromium opens out/site from the disk. Rows "NAME: CONTROL": a slider moves, to a different value
each time, and the page measures from the event to the frame after the picture appears. "A new
question": another number of GPUs makes the planner search again, for 256 to 8,192 GPUs, each once.
Until the answer arrives the page says "searching ...", and one row measures how soon it does. The
time to load Python is shown without a bar.

For a new question the planner examines only the layouts whose lower bound on time is below the
fastest known layout of the same axes (calculators/planner.py): 210 of 614 for llama3-70b on 1,024
H100, 465 of 2,342 for mixtral-8x7b. When it still examined all of them, it answered in 0.8 to 2 s
and 2 to 5 s. On two cores without other work all bars were met: the five models without experts
took 69 to 181 ms, mixtral-8x7b 252 ms, deepseek-v3 213 ms. With a load of 10 they took 72 to 248,
394 and 362 ms. Listing the layouts and the bytes of the states takes a third of the time;
waterfalls and step times of the examined layouts take the rest.
"""

import itertools
import shutil
import sys
from pathlib import Path

from _form import Case, main

SITE = Path(__file__).resolve().parent.parent / "out/site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BAR = 300  # ms
MOVES = {  # explorer -> (its control, positions of the slider)
    "memory_and_time": ("utilisation", range(20, 60)),
    "memory_waterfall": ("dp", range(11)),
    "rank_grid": ("rank", range(16)),
    "layout_planner": ("pp", range(6)),
    "scaling_curve": ("num_gpus", range(10)),
    "compare_with_published": ("straggler", range(40)),
    "zero_figure": ("ranks", range(13)),
    "requests_fit": ("prompt", range(8)),
    "all_reduces": ("num_bytes", range(20)),
    "pipelines": ("num_micro_batches", range(32)),
}
MOVE = """async (place, [name, value]) => {
    const control = place.querySelector(`[name=${name}]`);
    const answered = new Promise((resolve) => new MutationObserver((_, observer) => {
        observer.disconnect();
        requestAnimationFrame(() => setTimeout(resolve));
    }).observe(place, { attributeFilter: ["data-answers"] }));
    const before = place.querySelector(".picture").innerHTML, began = performance.now();
    control.tagName === "SELECT" ? (control.selectedIndex = value) : (control.value = value);
    control.dispatchEvent(new Event(control.tagName === "SELECT" ? "change" : "input"));
    await answered;
    const took = performance.now() - began;
    if (place.querySelector(".wrong")) throw new Error(place.innerText);
    if (place.querySelector(".picture").innerHTML === before) throw new Error(`${name}: no change`);
    return took;
}"""
SEARCHES = """async (place, [name, value]) => {
    const control = place.querySelector(`[name=${name}]`), status = place.querySelector(".status");
    const answers = () => Number(place.dataset.answers ?? 0), before = answers();
    control.tagName === "SELECT" ? (control.selectedIndex = value) : (control.value = value);
    const began = performance.now();
    control.dispatchEvent(new Event(control.tagName === "SELECT" ? "change" : "input"));
    await new Promise(requestAnimationFrame);
    const said = status.textContent, took = performance.now() - began;
    while (answers() === before) await new Promise((resolve) => setTimeout(resolve, 5));
    if (said !== "searching ...") throw new Error(`it said ${said}`);
    return took;
}"""
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --no-first-run".split()


def mover(place, control, values, until=MOVE):
    """Return a function that moves one control to its next value and returns the milliseconds."""
    following = itertools.cycle(values)
    stands = f"""place => {{ const control = place.querySelector("[name={control}]");
        return control.selectedIndex ?? Number(control.value); }}"""

    def move():
        before = place.evaluate(stands)
        while (value := next(following)) == before:
            pass
        return place.evaluate(until, [control, value])

    return move


def started(page, name):
    """Return (the place of an explorer, the ms until its first answer)."""
    place = page.locator(f"section:has(> h2:text('{name}')) .live-explorer").last
    began = page.evaluate("() => performance.now()")
    place.locator("button").click()
    place.locator("xpath=self::*[@data-state='started']").wait_for(timeout=120_000)
    return place, page.evaluate("() => performance.now()") - began


def cases(long):
    from playwright.sync_api import sync_playwright

    repeats = 51 if long else 15
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.goto((SITE / "site/explorers.html").as_uri())
        first, *others = MOVES
        place, took = started(page, first)
        yield Case("Python and the first explorer", lambda: took, 5000, repeats=1, warmup=0)
        places = {first: place, **{name: started(page, name)[0] for name in others}}
        for name, (control, values) in MOVES.items():
            move = mover(places[name], control, values)
            yield Case(f"{name}: {control}", move, BAR, 1.0, repeats=repeats)
        planner = places["layout_planner"]  # It remembers questions, so each size is asked once.
        said = mover(planner, "num_gpus", range(2, 5), SEARCHES)
        yield Case("a new question: searching ...", said, BAR, 1.0, repeats=3, warmup=0)
        models = planner.locator("[name=model] option").all_inner_texts()
        for number, model in enumerate(models):
            if number != planner.locator("[name=model]").evaluate("list => list.selectedIndex"):
                mover(planner, "model", [number])()
            answer = mover(planner, "num_gpus", range(5, 11))
            yield Case(f"a new question: {model}", answer, BAR, 1.0, repeats=6, warmup=0)
        browser.close()


if __name__ == "__main__":
    sys.exit(main(cases, __doc__))

// Under each result of a search, an excerpt around the words: see site/excerpts.py.

const BEFORE = 60, LONGEST = 240; // characters
const texts = {}; // of each page: a promise of its text, as one page may be found several times
const arrived = {}; // what fulfills it

document.addEventListener("DOMContentLoaded", () => {
  const results = document.getElementById("search-results");
  new MutationObserver((changes) => {
    for (const { addedNodes } of changes)
      for (const node of addedNodes) if (node.nodeName === "LI") request(node);
  }).observe(results, { childList: true, subtree: true });
});

function request(result) {
  const root = document.documentElement.dataset.content_root;
  const page = result.querySelector("a").getAttribute("href").split(".html")[0];
  texts[page] ??= new Promise((resolve) => {
    arrived[page] = resolve;
    const script = document.createElement("script");
    script.src = `${root}_static/texts/${page}.js`;
    document.head.append(script);
  });
  texts[page].then((text) => show(result, text));
}

// Each text is a call of this function.
function textIs(page, text) {
  arrived[page](text);
}

function show(result, text) {
  const query = new URLSearchParams(location.search).get("q").trim().toLowerCase();
  const stemmer = new Stemmer();
  const words = splitQuery(query).map((word) => stemmer.stemWord(word.toLowerCase()));
  const found = excerpt(text, [query, ...words]);
  if (found) result.append(paragraph(...found));
}

// The text around the place with the most of these words: [before, the word, after].
function excerpt(text, words) {
  const lower = text.toLowerCase();
  let best = 0, at = -1, word;
  for (const each of words)
    for (let here = lower.indexOf(each); here >= 0; here = lower.indexOf(each, here + 1)) {
      const near = lower.slice(here, here + LONGEST / 2);
      const number = words.filter((other) => near.includes(other)).length;
      if (number > best) [best, at, word] = [number, here, each];
    }
  if (at < 0) return null;
  const space = text.lastIndexOf(" ", at - BEFORE) + 1;
  const from = at <= BEFORE ? 0 : Math.max(space, at - 2 * BEFORE); // Chinese has few spaces.
  const whole = /^\w*/.exec(lower.slice(at))[0]; // The index has stems of English words.
  const end = at + Math.max(word.length, whole.length);
  const stop = Math.min(from + LONGEST, text.length);
  const dots = [from > 0 ? "… " : "", stop < text.length ? " …" : ""];
  return [dots[0] + text.slice(from, at), text.slice(at, end), text.slice(end, stop) + dots[1]];
}

function paragraph(before, word, after) {
  const place = document.createElement("p"), marked = document.createElement("mark");
  place.className = "excerpt";
  marked.textContent = word;
  place.append(before, marked, after);
  return place;
}

// The explorers of a page: Python starts on a click, its controls are drawn from what it says.
"use strict";

const here = new URL(".", document.currentScript.src).href;

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

function script(name) {
  return new Promise((resolve, reject) => {
    const tag = document.createElement("script");
    Object.assign(tag, { src: here + name, onload: resolve });
    tag.onerror = () => reject(new Error(`${name} could not be loaded`));
    document.head.append(tag);
  });
}

async function startPython() {
  await Promise.all([script("pyodide.js"), script("python.js")]);
  const names = Object.keys(packedPython);
  const parts = await Promise.all(names.map((name) => unpack(packedPython[name])));
  delete globalThis.packedPython;
  const { module, wasm, stdlib, lock, library } = Object.fromEntries(
    names.map((name, i) => [name, parts[i]]));
  const address = (bytes, type) => URL.createObjectURL(new Blob([bytes], { type }));
  // Pyodide asks for its .wasm by fetch, and for nothing else: hand it over.
  const fetchFile = globalThis.fetch;
  globalThis.fetch = (url, options) => String(url.url ?? url).endsWith("pyodide.asm.wasm")
    ? Promise.resolve(new Response(wasm, { headers: { "Content-Type": "application/wasm" } }))
    : fetchFile(url, options);
  try {
    const python = await loadPyodide({
      indexURL: here,
      stdLibURL: address(stdlib, "application/zip"),
      lockFileContents: JSON.parse(new TextDecoder().decode(lock)),
      createPyodideModule: (await import(address(module, "text/javascript"))).default,
    });
    python.unpackArchive(library, "zip");
    return python.pyimport("in_page");
  } finally {
    globalThis.fetch = fetchFile;
  }
}

const AT_ONCE = 300; // ms; an answer that took longer says its time

let python; // a promise of the module in_page, one for the page

function control(each, changed) {
  const label = document.createElement("label");
  const name = each.name.replaceAll("_", " ");
  let input, value;
  if (each.kind === "choice") {
    input = document.createElement("select");
    input.append(...each.values.map((choice) => new Option(choice)));
    input.selectedIndex = each.values.indexOf(each.value);
    value = () => each.values[input.selectedIndex];
  } else if (each.kind === "slider") {
    input = document.createElement("input");
    Object.assign(input, { type: "range", min: 0, max: each.values.length - 1, step: 1 });
    input.value = each.values.indexOf(each.value);
    value = () => each.values[input.value];
  } else {
    input = document.createElement("input");
    input.type = each.kind === "flag" ? "checkbox" : "text";
    input[each.kind === "flag" ? "checked" : "value"] = each.value;
    value = () => (each.kind === "flag" ? input.checked : input.value);
  }
  input.name = each.name;
  const said = document.createElement("output");
  const say = () => { if (each.kind === "slider") said.value = value().toLocaleString("en"); };
  say();
  input.addEventListener(each.kind === "slider" ? "input" : "change", () => { say(); changed(); });
  label.append(name, input, said);
  return { label, name: each.name, value: () => [each.name, value()] };
}

async function start(place, source) {
  place.replaceChildren(document.createElement("progress"), " Python is loading, some seconds ...");
  let answer;
  try {
    python ??= startPython();
    answer = JSON.parse((await python).open_cell(source));
  } catch (error) {
    answer = { error: String(error) };
  }
  if (!answer.controls) {
    place.textContent = answer.error;
    place.dataset.state = "failed";
    return;
  }
  const [controls, status, picture, words] = ["form", "p", "div", "div"].map(
    (tag) => document.createElement(tag));
  controls.className = "controls";
  status.className = "status";
  status.setAttribute("role", "status");
  picture.className = "drawing";
  words.className = "words";
  const show = (said) => {
    for (const each of all) each.label.hidden = !said.shown.includes(each.name);
    if (said.error) {
      words.innerHTML = "<p class='wrong'></p><p>The picture is the last one that could be drawn.</p>";
      words.firstChild.textContent = said.error;
    } else {
      picture.innerHTML = said.picture;
      words.innerHTML = said.html;
    }
  };
  let waits = false;
  const changed = () => {
    if (waits) return; // many moves of a slider become one question
    waits = true;
    status.textContent = "searching ...";
    // Python keeps the page from drawing, so it begins after the frame that shows these words.
    requestAnimationFrame(() => setTimeout(async () => {
      waits = false;
      const values = JSON.stringify(Object.fromEntries(all.map((each) => each.value())));
      const began = performance.now();
      show(JSON.parse((await python).change(answer.number, values)));
      const took = performance.now() - began;
      status.textContent = took > AT_ONCE ? `found in ${(took / 1000).toFixed(1)} s` : "";
      place.dataset.answers = 1 + Number(place.dataset.answers ?? 0);
    }));
  };
  const all = answer.controls.map((each) => control(each, changed));
  controls.append(...all.map((each) => each.label));
  controls.addEventListener("submit", (event) => event.preventDefault());
  const seen = document.createElement("div");
  seen.className = "seen";
  seen.append(picture, words);
  controls.append(status);
  place.replaceChildren(controls, seen);
  if (answer.left_out) {
    const note = document.createElement("p");
    note.textContent = `Left out here: ${answer.left_out.replaceAll("_", " ")}. It needs ranks or `
      + "what a cell above has measured: open this lesson in JupyterLab.";
    place.prepend(note);
  }
  show(answer);
  place.dataset.state = "started";
  widen(place);
  addEventListener("resize", () => widen(place));
}

// Controls and picture need more than the column of the text: they reach to the window's edge.
function widen(place) {
  const left = place.parentElement.getBoundingClientRect().left;
  const room = document.documentElement.clientWidth - left - 24;
  place.style.width = innerWidth < 1200 ? "" : `${Math.min(room, 1080)}px`;
}

document.addEventListener("DOMContentLoaded", () => {
  for (const cell of document.querySelectorAll(".cell.tag_explorer, div.explorer")) {
    const source = cell.querySelector("pre").textContent;
    const place = document.createElement("div");
    place.className = "live-explorer";
    const button = document.createElement("button");
    button.textContent = "Start the explorer in this page";
    button.addEventListener("click", () => {
      for (const still of cell.querySelectorAll(".cell_output")) still.hidden = true;
      start(place, source);
    });
    place.append(button);
    cell.append(place);
  }
});

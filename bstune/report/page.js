// Draws the charts of a page in the colours of its style sheet, sorts its tables and copies its commands.
// Without it, each chart is a picture, and there is no button that does nothing.
"use strict";

// A chart's spec names colours as the style sheet does, --ink, so that one spec serves light and dark.
function coloured(value, key, style) {
  if (typeof value === "string" && value.startsWith("--") && key.toLowerCase().endsWith("color")) {
    return style.getPropertyValue(value).trim();
  }
  if (Array.isArray(value)) return value.map((one) => coloured(one, key, style));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, coloured(one, name, style)]));
}

// The bundle lies in the page packed; once unpacked, it is a script of the page, which names its hash.
async function unpack() {
  const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), (one) => one.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
}

async function draw() {
  const style = getComputedStyle(document.documentElement);
  const fingers = matchMedia("(pointer: coarse)").matches;
  const buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]];
  const config = { responsive: true, displaylogo: false, modeBarButtons: buttons, displayModeBar: fingers ? false : "hover" };
  for (const figure of document.querySelectorAll("figure.chart")) {
    figure.classList.add("drawn"); // the picture makes room
    const plot = figure.querySelector(".plot");
    const { data, layout } = coloured(JSON.parse(figure.querySelector("script").textContent), "", style);
    if (fingers) layout.dragmode = false; // a finger that moves over a chart scrolls the page
    await Plotly.react(plot, data, layout, config);
    // They zoom and pan by the pointer: Tab passes them by.
    for (const one of plot.querySelectorAll("button, a, [tabindex]")) one.tabIndex = -1;
    await new Promise((done) => setTimeout(done));
  }
  // In which plotly measures texts: no picture of anything.
  document.getElementById("js-plotly-tester")?.setAttribute("aria-hidden", "true");
}

function sorted(table, column, sign) {
  const rows = [...table.tBodies[0].rows].map((row) => [row, row.cells[column].dataset.value]);
  rows.sort(([, a], [, b]) => {
    if (a === "" || b === "") return (a === "") - (b === ""); // what is not known comes last, either way
    const order = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
    return sign * order;
  });
  return rows.map(([row]) => row);
}

function button(words, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = words;
  made.addEventListener("click", act);
  return made;
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const sort = button(head.textContent, () => {
      const falls = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      table.tBodies[0].append(...sorted(table, column, falls ? -1 : 1));
    });
    head.replaceChildren(sort);
    // On paper Chromium repeats a table's head on each page only if no control is in it.
    addEventListener("beforeprint", () => head.replaceChildren(sort.textContent));
    addEventListener("afterprint", () => head.replaceChildren(sort));
  });
}

// A page that is opened from a disk may have no clipboard: then the command is selected and copied as by hand.
async function copied(command) {
  try {
    await navigator.clipboard.writeText(command.textContent);
    return true;
  } catch {
    getSelection().selectAllChildren(command);
    return document.execCommand("copy");
  }
}

for (const command of document.querySelectorAll("pre.command")) {
  const copy = button("Copy", async () => {
    copy.textContent = (await copied(command)) ? "Copied" : "Select and copy";
    setTimeout(() => { copy.textContent = "Copy"; }, 2000);
  });
  copy.className = "copy";
  copy.setAttribute("aria-live", "polite");
  command.after(copy);
}

if (document.querySelector("figure.chart")) {
  unpack().then(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

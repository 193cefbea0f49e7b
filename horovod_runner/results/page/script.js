"use strict";
// What the pointer is over is told at once: browsers wait a second with titles.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
for (const title of document.querySelectorAll("svg title")) {
  title.parentElement.setAttribute("aria-label", title.textContent);
  title.parentElement.dataset.tip = title.textContent;
  title.remove();
}
for (const part of document.querySelectorAll("[title]")) {
  part.dataset.tip = part.title;
  part.removeAttribute("title");
}
const digits = (value) => `${Number(value.toPrecision(4))}`;
// The values of a chart where the pointer is: of a line from the vertices of its path.
function values(picture, event) {
  const told = JSON.parse(picture.dataset.told), [left, top, right, bottom] = told.box;
  const svg = picture.querySelector("svg");
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const x = (px) => told.x[0] + (px - left) / (right - left) * (told.x[1] - told.x[0]);
  const y = (py) => told.y[0] + (bottom - py) / (bottom - top) * (told.y[1] - told.y[0]);
  if (at.x < left || at.x > right || at.y < top || at.y > bottom) return "";
  if (told.cells) {
    const row = Math.round(y(at.y)), cells = told.cells[row] || [];
    const cell = cells[Math.floor((at.x - left) / (right - left) * cells.length)] ?? "?";
    return `${told.names[row]}\n${digits(x(at.x))}: ${told.label}\n${cell}% of its time waiting for other ranks`;
  }
  let where = null;
  const lines = [...svg.querySelectorAll(".line > path:first-of-type")].flatMap((path, number) => {
    const vertices = path.getAttribute("d")?.match(/[-\d.]+ [-\d.]+/g);
    if (!vertices) return []; // no value is a number
    const points = vertices.map((text) => text.split(" ").map(Number));
    const near = points.reduce((a, b) => (Math.abs(b[0] - at.x) < Math.abs(a[0] - at.x) ? b : a));
    where ??= near[0];
    return `${told.names[number]} ${digits(y(near[1]))} ${told.unit}`.trim();
  });
  return [`${told.label} ${digits(x(where ?? at.x))}`, ...lines].join("\n");
}
document.addEventListener("pointermove", (event) => {
  const owner = event.target.closest ? event.target.closest("[data-tip], [data-told]") : null;
  tip.textContent = owner ? owner.dataset.tip || values(owner, event) : "";
  tip.hidden = !tip.textContent;
  const { width, height } = tip.getBoundingClientRect();
  const beside = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const below = event.clientY + 16 + height > innerHeight ? event.clientY - 10 - height : event.clientY + 16;
  tip.style.left = `${Math.max(4, beside)}px`;
  tip.style.top = `${Math.max(4, below)}px`;
});
document.addEventListener("scroll", () => { tip.hidden = true; }, true);

// The filter of the logs, which is hidden where there is no script.
const filter = document.getElementById("filter");
if (filter) {
  const lines = [...document.querySelectorAll("#log > div")];
  const said = filter.querySelector("output");
  const apply = () => {
    const rank = filter.elements.rank ? filter.elements.rank.value : "";
    const words = filter.elements.text.value.toLowerCase();
    let shown = 0;
    for (const line of lines) {
      const fits = (!rank || line.dataset.r === rank)
        && (!words || line.lastElementChild.textContent.toLowerCase().includes(words));
      line.hidden = !fits;
      shown += fits;
    }
    said.textContent = rank || words ? `${shown} of ${lines.length} lines` : "";
  };
  filter.hidden = false;
  filter.addEventListener("input", apply);
  filter.addEventListener("submit", (event) => event.preventDefault());
}

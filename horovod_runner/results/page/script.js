"use strict";
// Tooltips that appear at once: browsers wait a second with those of <title>.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
for (const title of document.querySelectorAll("svg title")) {
  const owner = title.parentElement;
  owner.dataset.tip = title.textContent;
  owner.setAttribute("aria-label", title.textContent);
  title.remove();
}
document.addEventListener("pointermove", (event) => {
  const owner = event.target.closest ? event.target.closest("[data-tip]") : null;
  tip.hidden = !owner;
  if (!owner) return;
  tip.textContent = owner.dataset.tip;
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

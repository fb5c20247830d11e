"use strict";
{
  const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const digits = (x) => String(Number(x.toPrecision(3)));
  const bytes = (n) => { const [unit, size] = units.find(([, s]) => n >= s) || units[4]; return `${digits(n / size)} ${unit}`; };
  const seconds = (s) => s >= 1 ? `${digits(s)} s` : s >= 1e-3 ? `${digits(s * 1e3)} ms` : `${digits(s * 1e6)} us`;

  // the moment of a step: a slider, and a line over lanes and memory
  for (const figure of document.querySelectorAll("[data-chart=step]")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const [slider, output] = [figure.querySelector("input"), figure.querySelector("output")];
    const drawings = [figure.querySelector(".lanes"), figure.querySelector(".memory")].filter(Boolean);
    const lines = drawings.map(() => figure.appendChild(Object.assign(document.createElement("span"), { className: "now" })));
    const count = Number(slider.max) + 1;
    const track = () => (figure.querySelector(".lane svg") || figure).getBoundingClientRect();
    const show = () => {
      const at = Number(slider.value), here = figure.getBoundingClientRect();
      drawings.forEach((drawing, n) => {
        const own = drawing.getBoundingClientRect();
        lines[n].style.setProperty("--at", (at + 0.5) / count);
        Object.assign(lines[n].style, { top: `${own.top - here.top}px`, height: `${own.height}px` });
      });
      const busy = Object.entries(data.busy).filter(([, s]) => s[at] >= 0.05).map(([name, s]) => `${name} ${Math.round(100 * s[at])}%`);
      const held = Object.entries(data.held).map(([name, h]) => [name, h[at]]).filter(([, b]) => b > 0).sort((a, b) => b[1] - a[1]);
      const total = held.reduce((sum, [, b]) => sum + b, 0);
      output.textContent = `At ${seconds((at + 0.5) / count * data.seconds)}: ${busy.join(", ") || "idle"}. Holds ${bytes(total)}: ${held.map(([name, b]) => `${name} ${bytes(b)}`).join(", ")}.`;
      slider.setAttribute("aria-valuetext", output.textContent);
    };
    const ask = (event) => {
      const box = track(), share = (event.clientX - box.left) / box.width;
      if (share >= 0 && share <= 1) { slider.value = Math.floor(share * count); show(); }
    };
    drawings.forEach((drawing) => drawing.addEventListener("pointermove", ask));
    slider.addEventListener("input", show);
    addEventListener("resize", show);
    show();
  }

  // the tree of arguments: filtered and ordered
  const tree = document.getElementById("argument-tree"), field = document.getElementById("filter");
  if (tree && field) {
    const order = document.getElementById("order"), output = document.querySelector(".tools output");
    const leaves = [...tree.querySelectorAll(".leaf")], branches = [...tree.querySelectorAll("details")];
    const wasOpen = new Map(branches.map((branch) => [branch, branch.open]));
    const path = (leaf) => {
      const parts = [leaf.firstElementChild.firstChild.textContent];
      for (let at = leaf.parentElement; at !== tree; at = at.parentElement) parts.unshift(at.firstElementChild.firstElementChild.firstChild.textContent);
      return parts.join("");
    };
    const within = (number, run) => { const [first, last] = run.split("-").map(Number); return number >= first && number <= (last === undefined ? first : last); };
    const words = new Map(leaves.map((leaf) => [leaf, `${path(leaf)} ${leaf.textContent}`.toLowerCase()]));
    const matches = (text, wanted) => {
      if (text.includes(wanted)) return true;
      const escaped = wanted.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replace(/\d+/g, "([\\d,-]+)");
      const found = new RegExp(escaped).exec(text), numbers = (wanted.match(/\d+/g) || []).map(Number);
      return Boolean(found && numbers.length && numbers.every((number, n) => found[n + 1].split(",").some((run) => within(number, run))));
    };
    const filter = () => {
      const wanted = field.value.trim().toLowerCase();
      let count = 0;
      for (const leaf of leaves) { leaf.hidden = Boolean(wanted) && !matches(words.get(leaf), wanted); count += !leaf.hidden; leaf.style.display = leaf.hidden ? "none" : ""; }
      for (const branch of branches) {
        const some = [...branch.querySelectorAll(".leaf")].some((leaf) => !leaf.hidden);
        branch.style.display = some ? "" : "none";
        branch.open = wanted ? some : wasOpen.get(branch);
      }
      output.textContent = wanted ? `${count} of ${leaves.length} lines` : "";
    };
    const items = [tree, ...branches].map((parent) => [parent, [...parent.children].filter((child) => child.matches("details, .leaf"))]);
    const name = (item) => item.querySelector("code").textContent;
    const orders = { place: null, bytes: (a, b) => b.dataset.bytes - a.dataset.bytes, name: (a, b) => name(a).localeCompare(name(b), undefined, { numeric: true }) };
    const sort = () => { for (const [parent, own] of items) parent.append(...(orders[order.value] ? [...own].sort(orders[order.value]) : own)); };
    field.addEventListener("input", filter);
    order.addEventListener("change", sort);
    field.form.addEventListener("submit", (event) => event.preventDefault());
  }
}

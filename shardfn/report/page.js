"use strict";
(() => {
  const sections = [...document.querySelectorAll("main>details")].map((details) => ({
    details,
    rows: [...details.querySelectorAll("thead+tbody>tr")],
    count: details.querySelector(".count"),
    all: details.querySelector(".count")?.textContent,
    wasOpen: details.open,
  })).filter((section) => section.count);

  // ---- filter: rows with all words stay; sections with such rows open

  const bar = document.createElement("div");
  bar.className = "filter";
  bar.innerHTML = '<input type="search" aria-label="Filter the rows of all tables" placeholder="Filter rows: a name, a line, a shape"><span role="status"></span>';
  const [input, status] = bar.children;
  if (sections.length) sections[0].details.before(bar);
  let isFiltered = false;
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let total = 0;
    for (const section of sections) {
      if (!isFiltered) section.wasOpen = section.details.open;
      let shown = 0;
      for (const row of section.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      total += shown;
      section.count.textContent = words.length ? `${shown} of ${section.all}` : section.all;
      section.details.open = words.length ? shown > 0 : section.wasOpen;
    }
    isFiltered = words.length > 0;
    status.textContent = isFiltered ? `${total} rows` : "";
  });

  // ---- sorting: numbers by value, with their units; other texts as people count

  const powers = { n: -3, "µ": -2, m: -1, k: 1, K: 1, M: 2, G: 3, T: 4, P: 5 };
  const valueOf = (text) => {
    const found = /^<?([+-]?[\d.]+(?:e[+-]?\d+)?)(?: ?%| ?([nµmkKMGTP]?)i?(B|s|FLOPs))?$/.exec(text.trim().replaceAll(",", ""));
    return found ? found[1] * (found[3] === "B" ? 1024 : 1000) ** (powers[found[2]] ?? 0) : -Infinity;
  };
  for (const head of document.querySelectorAll("thead th[scope=col]")) {
    const body = head.closest("table").tBodies[0];
    if (head.closest(".mesh")) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    const isNumeric = head.classList.contains("n");
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const isDescending = before ? before === "ascending" : isNumeric;
      for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
      const key = (row) => row.cells[head.cellIndex].textContent;
      const order = isNumeric
        ? (a, b) => valueOf(key(a)) - valueOf(key(b)) || 0
        : (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
      body.append(...[...body.rows].sort((a, b) => (isDescending ? order(b, a) : order(a, b))));
    });
  }

  // ---- print: everything unfolded but the names that a row stands for

  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open], .members)")];
    for (const details of folded) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of folded) details.open = false;
  });
})();

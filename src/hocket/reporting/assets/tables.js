// Tables that sort by a click on a heading, and a field that filters the ops.
"use strict";
(() => {
  const key = (cell) => {
    const value = cell.dataset.value;
    return value === undefined ? cell.textContent.trim().toLowerCase() : Number(value);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    table.querySelectorAll("thead th").forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const number = heading.classList.contains("n");
        const now = heading.getAttribute("aria-sort");
        const down = now ? now === "ascending" : number;
        for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [key(row.cells[column]), row]);
        rows.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1));
        body.append(...rows.map(([, row]) => row));
      });
    });
  }
  const filter = document.getElementById("filter");
  if (!filter) return;
  filter.hidden = false;
  const rows = [...document.querySelectorAll("#ops-table tbody tr")];
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
})();

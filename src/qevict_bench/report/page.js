"use strict";
const value = (cell) => {
  if (cell.classList.contains("none")) return null;
  if ("v" in cell.dataset) return Number(cell.dataset.v);
  const text = cell.textContent.trim();
  if (text === "") return null;
  return Number.isNaN(Number(text)) ? text : Number(text);
};
const order = new Intl.Collator("en", { numeric: true }).compare;
const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : order(String(a), String(b)));
for (const table of document.querySelectorAll(".scroll table")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const numeric = [...body.rows].some((row) => row.cells[column].classList.contains("num"));
    head.classList.toggle("right", numeric);
    head.firstElementChild.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const down = now ? now === "ascending" : numeric;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [value(row.cells[column]), row]);
      rows.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        return down ? compare(b, a) : compare(a, b);
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}
const open = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target && target.closest("details");
  if (folded) folded.open = true;
};
addEventListener("hashchange", open);
open();

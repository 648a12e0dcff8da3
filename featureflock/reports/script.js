// Clicking a column header sorts its table. Rows without a number come last in either direction.
for (const header of document.querySelectorAll("th[aria-sort]")) {
  header.firstElementChild.addEventListener("click", () => {
    const body = header.closest("table").tBodies[0], column = header.cellIndex, previous = header.ariaSort;
    const order = previous === "none" ? header.dataset.first : previous === "ascending" ? "descending" : "ascending";
    for (const other of header.parentElement.cells) other.ariaSort = "none";
    header.ariaSort = order;
    const sign = order === "ascending" ? 1 : -1, numeric = header.classList.contains("number");
    const number = cell => cell.dataset.value === undefined ? null : Number(cell.dataset.value);
    const compare = (a, b) => {
      const [x, y] = [a.cells[column], b.cells[column]];
      if (!numeric) return sign * x.textContent.localeCompare(y.textContent, "en", { numeric: true });
      const [p, q] = [number(x), number(y)];
      return p === null || q === null ? (p === null) - (q === null) : p === q ? 0 : sign * (p < q ? -1 : 1);
    };
    body.append(...[...body.rows].sort(compare));
  });
}
// Print with all details open.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(details => details.open = true));

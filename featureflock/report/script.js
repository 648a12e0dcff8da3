// Tables are sorted by their headers; rows without a number go last either way.
for (const header of document.querySelectorAll("th[aria-sort]")) {
  header.firstElementChild.addEventListener("click", () => {
    const body = header.closest("table").tBodies[0], place = header.cellIndex, before = header.ariaSort;
    const order = before === "none" ? header.dataset.first : before === "ascending" ? "descending" : "ascending";
    for (const other of header.parentElement.cells) other.ariaSort = "none";
    header.ariaSort = order;
    const sign = order === "ascending" ? 1 : -1, numeric = header.classList.contains("number");
    const compare = (a, b) => {
      const [x, y] = [a, b].map(row => row.cells[place]);
      if (!numeric) return sign * x.textContent.localeCompare(y.textContent, "en", { numeric: true });
      const [p, q] = [x, y].map(cell => cell.dataset.value === undefined ? null : Number(cell.dataset.value));
      return p === null || q === null ? (p === null) - (q === null) : p === q ? 0 : sign * (p < q ? -1 : 1);
    };
    body.append(...[...body.rows].sort(compare));
  });
}
// On paper everything is open.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(details => details.open = true));

// Filters and sorts the table of weights. Without scripts the table is there all the same, by name.
(() => {
  const table = document.getElementById("weights");
  if (!table) return;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const filter = document.getElementById("filter");
  const told = document.getElementById("told");

  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    told.textContent = `${shown} of ${rows.length} weights`;
  });

  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.sort === undefined ? cell.textContent : Number(cell.dataset.sort);
  };
  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      const head = button.parentElement;
      const column = head.cellIndex;
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const compare = (a, b) => {
        const [left, right] = [key(a, column), key(b, column)];
        return typeof left === "number" ? left - right : left.localeCompare(right, "en", { numeric: true });
      };
      rows.sort((a, b) => (up ? compare(a, b) : compare(b, a)));
      body.append(...rows);
    });
  }
})();

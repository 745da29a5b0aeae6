for (const [column, head] of document.querySelectorAll("#trials th").entries()) {
  head.classList.add("sorts");
  head.onclick = () => {
    const body = document.querySelector("#trials tbody");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const falls = head.dataset.falls !== "true";
    head.dataset.falls = falls;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return falls ? order : -order;
    });
    body.append(...rows);
  };
}

// Shows the families that a model's name, or a `model_type`, may belong to
const box = document.getElementById("family");
const plain = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");
box?.addEventListener("input", () => {
  const name = plain(box.value);
  for (const row of document.querySelectorAll("tbody tr:has(td:nth-child(9))")) {
    row.hidden = !plain(row.textContent).includes(name) && !name.includes(plain(row.cells[0].textContent));
  }
});

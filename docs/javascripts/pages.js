// Small repairs of every page of the site, without requests.

document.addEventListener("DOMContentLoaded", () => {
  keepKeysTogether();
  labelCells();
  if (location.protocol === "file:") explainSearch();
});

/** Lines end at spaces of code, not inside an option or a key; a long key may end one at a dot. */
function keepKeysTogether() {
  const longest = 40;
  for (const code of document.querySelectorAll(".md-typeset :not(pre) > code")) {
    if (code.children.length) continue;
    const parts = code.textContent.split(/(\s+)/);
    code.replaceChildren(...parts.flatMap((text) => {
      if (text.length > longest) return text.split(/(?<=[.=/,:_])/).flatMap((part) => [part, document.createElement("wbr")]);
      return [Object.assign(document.createElement("span"), { className: "together", textContent: text })];
    }));
  }
}

/** A phone shows a table's cells below each other, each with the title of its column. */
function labelCells() {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.children].forEach((cell, i) => {
        cell.dataset.title = titles[i] ?? "";
        if (!cell.textContent.trim()) cell.classList.add("empty");
      });
    }
  }
}

/** A browser gives a page that was opened as a file no other file to search in. */
function explainSearch() {
  const message = "Search needs a server: make docs-serve";
  const input = document.querySelector(".md-search__input");
  input.placeholder = message;
  input.disabled = true;
  input.title = message;
  document.querySelector("label.md-header__button[for=__search]").title = message;
  document.querySelector(".md-search-result__meta").textContent = message;
}

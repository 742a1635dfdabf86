// Search of a site that is opened as files: a browser gives a page of file:// no other file to search in.
if (location.protocol === "file:") {
  document.addEventListener("DOMContentLoaded", () => {
    const message = "Search needs a server: make docs-serve";
    const input = document.querySelector(".md-search__input");
    input.placeholder = message;
    input.disabled = true;
    input.title = message;
    document.querySelector(".md-search__form").style.cursor = "not-allowed";
    // On a phone the field is behind an icon.
    document.querySelector("label.md-header__button[for=__search]").title = message;
    document.querySelector(".md-search-result__meta").textContent = message;
  });
}
